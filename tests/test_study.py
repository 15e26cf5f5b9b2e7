"""What is kept of a sweep's trials, how they are ranked, and which are ended early."""

from __future__ import annotations

import dataclasses

import pytest

from trainer import hptuning, study
from trainer.errors import DataError, UsageError
from trainer.hptuning import HyperparameterSpec, Parameter
from trainer.study import FAILED, RUNNING, STOPPED, SUCCEEDED, Trial

SPEC = HyperparameterSpec(
    'MAXIMIZE',
    'accuracy',
    (
        Parameter('hidden1', hptuning.INTEGER, (40, 400), hptuning.LINEAR),
        Parameter('learning_rate', hptuning.DOUBLE, (0.001, 0.5), hptuning.REVERSE_LOG),
        Parameter('batch_size', hptuning.DISCRETE, (32, 100, 128)),
        Parameter('optimizer', hptuning.CATEGORICAL, ('sgd', 'adam')),
    ),
    max_trials=10,
)


def make_trial(number, state=SUCCEEDED, **reports):
    return Trial(str(number), {}, state, {int(step[1:]): value for step, value in reports.items()}, '', '')


def open_study(tmp_path, spec=SPEC, name='a.sqlite3'):
    return study.Study(str(tmp_path / name), spec, seed=3)


@pytest.mark.parametrize('algorithm', [hptuning.BAYESIAN, hptuning.RANDOM_SEARCH])
def test_trials_are_whole_in_the_file_from_their_start(tmp_path, algorithm):
    spec = dataclasses.replace(SPEC, algorithm=algorithm)
    first, second = [open_study(tmp_path, spec).add_trial() for _ in range(2)]
    assert (first.id, second.id, first.state) == ('1', '2', RUNNING)
    assert list(first.params) == ['hidden1', 'learning_rate', 'batch_size', 'optimizer']
    assert 40 <= first.params['hidden1'] <= 400 and 0.001 <= first.params['learning_rate'] <= 0.5
    assert first.params['batch_size'] in (32, 100, 128) and first.params['optimizer'] in ('sgd', 'adam')
    again = open_study(tmp_path, spec)
    assert again.trials == [first, second]
    again.report('1', {10: 0.5, 20: 0.75})
    again.report('1', {10: 0.5, 20: 0.75, 30: 0.625})
    again.finish('1', SUCCEEDED)
    again.report('2', {10: 0.25})
    again.finish('2', STOPPED)
    again.add_trial()
    again.finish('3', FAILED)
    known = open_study(tmp_path, spec).trials
    assert [(trial.state, trial.objective, trial.step) for trial in known] == [
        (SUCCEEDED, 0.625, 30),
        (STOPPED, 0.25, 10),
        (FAILED, None, None),
    ]


def test_equal_seeds_choose_equal_trials(tmp_path):
    chosen = [open_study(tmp_path, name=name).add_trial().params for name in ('a', 'b')]
    assert chosen[0] == chosen[1]


def test_sweep_that_tunes_something_else_is_told_apart(tmp_path):
    open_study(tmp_path)
    more = dataclasses.replace(SPEC, max_trials=20, max_parallel_trials=2, early_stopping=True)
    assert open_study(tmp_path, more).trials == []
    other = dataclasses.replace(
        SPEC, params=(Parameter('hidden1', hptuning.INTEGER, (40, 500), hptuning.LINEAR), *SPEC.params[1:])
    )
    with pytest.raises(UsageError, match=r'other params than the file: hidden1 INTEGER \[40, 400\] .* before, .*\[40, 500\]'):
        open_study(tmp_path, other)
    with pytest.raises(UsageError, match='other metric_tag than the file: accuracy before, loss now'):
        open_study(tmp_path, dataclasses.replace(SPEC, metric_tag='loss'))


def test_file_that_is_none_is_named(tmp_path):
    (tmp_path / 'a.sqlite3').write_bytes(b'not a database at all, but long enough to be looked at' * 20)
    with pytest.raises(DataError, match=r'a\.sqlite3: not the file of a sweep'):
        open_study(tmp_path)


def test_trials_of_an_earlier_sweep_count_for_the_search_alone(tmp_path):
    earlier = open_study(tmp_path, name='earlier')
    for value in (0.5, 0.75):
        trial = earlier.add_trial()
        earlier.report(trial.id, {10: value})
        earlier.finish(trial.id, SUCCEEDED)
    later = open_study(tmp_path, name='later')
    assert later.add_trials_of(str(tmp_path / 'earlier')) == 2
    assert later.add_trials_of(str(tmp_path / 'earlier')) == 2  # once more, and they are there once
    assert later.trials == []
    trial = later.add_trial()
    assert trial.id == '1' and trial.params != earlier.trials[0].params  # it is the third of the sequence, not the first
    assert len(later._study.get_trials()) == 3
    with pytest.raises(DataError, match='nowhere: no such file, and resumePreviousJobId names'):
        later.add_trials_of(str(tmp_path / 'nowhere'))
    other = open_study(tmp_path, dataclasses.replace(SPEC, params=SPEC.params[:1]), name='other')
    with pytest.raises(UsageError, match='resumePreviousJobId tunes other parameters'):
        other.add_trials_of(str(tmp_path / 'earlier'))


@pytest.mark.parametrize(
    ('reports', 'hopeless'),
    [
        ({}, False),
        ({'s10': 0.4}, True),  # the averages up to step 10 are 0.5, 0.6, 0.7
        ({'s10': 0.6}, False),
        ({'s10': 0.1, 's20': 0.65}, True),  # up to step 20 they are 0.6, 0.7, 0.8; its best so far counts
        ({'s10': 0.75, 's20': 0.1}, False),
    ],
)
def test_median_rule(reports, hopeless):
    others = [make_trial(n, s10=n / 10, s20=(n + 2) / 10) for n in (5, 6, 7)]
    others.append(make_trial(8, STOPPED, s10=0.99))
    trial = make_trial(9, RUNNING, **reports)
    assert study.is_hopeless(trial, others, maximize=True) is hopeless
    assert not study.is_hopeless(trial, others[1:], maximize=True)  # two are too few


def test_median_rule_where_less_is_better():
    others = [make_trial(n, s10=n / 10) for n in (5, 6, 7)]
    assert study.is_hopeless(make_trial(9, RUNNING, s10=0.7), others, maximize=False)
    assert not study.is_hopeless(make_trial(9, RUNNING, s10=0.5), others, maximize=False)


def test_ranking():
    trials = [
        make_trial(1, s10=0.5),
        make_trial(2, FAILED, s10=0.9),
        make_trial(3, STOPPED, s10=0.8),
        make_trial(4, s10=0.7),
        make_trial(5, RUNNING),
        make_trial(6, s10=0.7),
    ]
    assert [trial.id for trial in study.rank(trials, maximize=True)] == ['3', '4', '6', '1', '2', '5']
    assert [trial.id for trial in study.rank(trials, maximize=False)] == ['1', '4', '6', '3', '2', '5']
    assert study.find_best(trials, maximize=True).id == '4'
    assert study.find_best(trials[1:3], maximize=True) is None


def test_importances(tmp_path):
    known = open_study(tmp_path, dataclasses.replace(SPEC, algorithm=hptuning.RANDOM_SEARCH))
    assert known.find_importances() == {}
    for _ in range(20):
        trial = known.add_trial()
        known.report(trial.id, {10: trial.params['learning_rate']})
        known.finish(trial.id, SUCCEEDED)
    importances = known.find_importances()
    assert sum(importances.values()) == pytest.approx(1)
    assert max(importances, key=importances.get) == 'learning_rate'
