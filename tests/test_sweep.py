"""Sweeps with stand-ins for trials: what each is given, what is kept, early stops, failures, signals, kill -9."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.conftest import REPOSITORY
from trainer import folder_lock, study, sweep, trial_process
from trainer.errors import UsageError

# A trial runs the code of the test's file; `report` adds a line as hypertune does.
FAKE_TRIAL = """
import json, os, pathlib, signal, sys, time

flags = dict(flag[2:].split('=', 1) for flag in sys.argv[1:])
trial, state = os.environ['CLOUD_ML_TRIAL_ID'], pathlib.Path(os.environ['STATE'])
x, folder = float(flags['learning_rate']), pathlib.Path(flags['job_dir'])
folder.mkdir(parents=True, exist_ok=True)


def note(name, text):
    with open(state / name, 'a') as file:
        file.write(f'{text}\\n')


def report(step, value):
    path = os.environ['CLOUD_ML_HP_METRIC_FILE']
    line = json.dumps({'global_step': str(step), os.environ['CLOUD_ML_HP_METRIC_TAG']: str(value), 'trial': trial})
    with open(path, 'a') as file:
        file.write(line + '\\n')


note('starts', f'{trial} {flags["learning_rate"]} {flags["hidden1"]}')
exec((state / 'trial.py').read_text())
note('ends', trial)
"""
DRIVER = """
import sys
from trainer import sweep
original = sweep.make_command
sweep.make_command = lambda job, params, **settings: ['fake_trial', *original(job, params, **settings)[1:]]
sys.exit(sweep.main(sys.argv[1:]))
"""
SETTINGS = {'goal': 'MAXIMIZE', 'hyperparameterMetricTag': 'accuracy', 'maxTrials': 6, 'maxParallelTrials': 2}
ARGS = [f'--train_data_paths={REPOSITORY}/*.md', f'--eval_data_paths={REPOSITORY}/README.md']  # any files
PARAMS = [
    {'parameterName': 'learning_rate', 'type': 'DOUBLE', 'minValue': 0.001, 'maxValue': 0.5, 'scaleType': 'UNIT_LOG_SCALE'},
    {'parameterName': 'hidden1', 'type': 'INTEGER', 'minValue': 4, 'maxValue': 40},
]


class FakeSweep:
    def __init__(self, folder: pathlib.Path, trial: str, **settings):
        self.folder, self.output = folder, folder / 'out'
        (folder / 'fake_trial.py').write_text(FAKE_TRIAL)
        (folder / 'trial.py').write_text(trial)
        self.write_config(**settings)

    def write_config(self, **settings):
        section = {**SETTINGS, 'params': PARAMS, **settings}
        job = {'args': ARGS, 'hyperparameters': section}
        (self.folder / 'hptuning.yaml').write_text(yaml.safe_dump({'trainingInput': job}))

    def start(self, *flags):
        environ = {**os.environ, 'STATE': str(self.folder), 'PYTHONPATH': str(self.folder), 'PYTHONDONTWRITEBYTECODE': '1'}
        command = [
            sys.executable,
            '-c',
            DRIVER,
            f'--config={self.folder}/hptuning.yaml',
            f'--output_path={self.output}',
            *flags,
        ]
        return subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *flags):
        process = self.start(*flags)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def notes(self, name):
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def results(self):
        return json.loads((self.output / 'sweep_results.json').read_text())['trainingOutput']


def test_each_trial_is_given_what_a_service_gives(tmp_path):
    fake = FakeSweep(
        tmp_path, "note('environ', json.dumps(dict(os.environ))); note('argv', json.dumps(sys.argv)); report(10, x)"
    )
    code, out, err = fake.run('--', *ARGS, '--max_steps=10')
    assert code == 0, err
    environs = {json.loads(line)['CLOUD_ML_TRIAL_ID']: json.loads(line) for line in fake.notes('environ')}
    assert sorted(environs, key=int) == ['1', '2', '3', '4', '5', '6']
    second = environs['2']
    assert json.loads(second['TF_CONFIG']) == {'cluster': {}, 'task': {'trial': '2'}, 'environment': 'cloud'}
    assert second['CLOUD_ML_HP_METRIC_TAG'] == 'accuracy'
    assert second['CLOUD_ML_HP_METRIC_FILE'] == f'{fake.output}/2/hypertune.metrics'
    argv = [json.loads(line)[1:] for line in fake.notes('argv')]
    assert all(line[:3] == [*ARGS, '--max_steps=10'] for line in argv)
    assert {line[5] for line in argv} == {f'--job_dir={fake.output}/{trial}' for trial in range(1, 7)}
    # What is printed and written: all trials, the best first.
    results = fake.results()
    values = [trial['finalMetric']['objectiveValue'] for trial in results['trials']]
    assert values == sorted(values, reverse=True) and len(values) == 6
    assert results['completedTrialCount'] == '6'
    assert yaml.safe_load((fake.output / 'sweep_results.yaml').read_text()) == {'trainingOutput': results}
    rows = [line.split() for line in out.splitlines()[1:7]]
    assert rows[0][:3] == ['*', results['trials'][0]['trialId'], 'SUCCEEDED']
    best = results['trials'][0]
    assert f'best: trial {best["trialId"]}, accuracy' in out
    assert f'--learning_rate={best["hyperparameters"]["learning_rate"]} --hidden1={best["hyperparameters"]["hidden1"]}' in out
    # A finished sweep says so again, and runs nothing.
    assert fake.run('--', *ARGS, '--max_steps=10')[:2] == (0, out)
    assert len(fake.notes('starts')) == 6


def test_more_trials_can_be_asked_for_later(tmp_path):
    fake = FakeSweep(tmp_path, 'report(10, x)', maxTrials=2)
    assert fake.run()[0] == 0
    fake.write_config(maxTrials=3)
    code, _, err = fake.run()
    assert code == 0 and '2 of 3 trials are known' in err
    assert [line.split()[0] for line in fake.notes('starts')] == ['1', '2', '3']


def test_grid_ends_when_all_has_been_tried(tmp_path):
    params = [
        {'parameterName': 'learning_rate', 'type': 'DISCRETE', 'discreteValues': [0.01, 0.1]},
        {'parameterName': 'hidden1', 'type': 'INTEGER', 'minValue': 4, 'maxValue': 5},
    ]
    fake = FakeSweep(tmp_path, 'report(10, x)', algorithm='GRID_SEARCH', maxTrials=20, params=params)
    code, _, err = fake.run()
    assert code == 0 and '4 trials are all that there can be (maxTrials is 20)' in err
    assert sorted(line.split()[1:] for line in fake.notes('starts')) == [
        ['0.01', '4'],
        ['0.01', '5'],
        ['0.1', '4'],
        ['0.1', '5'],
    ]


def test_hopeless_trial_is_ended_early(tmp_path):
    trial = """
report(10, 0.1 if trial == '5' else 0.5)
if trial == '5':
    time.sleep(60)
report(20, 0.9)
"""
    fake = FakeSweep(tmp_path, trial, enableTrialEarlyStopping=True, maxTrials=6)
    started = time.monotonic()
    code, _, err = fake.run()
    assert code == 0 and time.monotonic() - started < 40, err
    by_id = {described['trialId']: described for described in fake.results()['trials']}
    assert by_id['5']['isTrialStoppedEarly'] and by_id['5']['finalMetric'] == {'objectiveValue': 0.1, 'trainingStep': '10'}
    assert not any('isTrialStoppedEarly' in by_id[trial] for trial in '12346')
    assert 'trial 5 STOPPED: accuracy 0.1 at step 10' in err


def test_failed_trials_are_counted_and_say_why(tmp_path):
    trial = "if trial in '23': sys.exit('it hurts')\nreport(10, x)"
    fake = FakeSweep(tmp_path, trial, maxFailedTrials=3)
    code, _, err = fake.run()
    assert code == 0
    assert f'trial 2 ended with code 1: it hurts ({fake.output}/2/trial.log)' in err
    assert [trial['trialId'] for trial in fake.results()['trials'] if trial['state'] == 'FAILED'] == ['2', '3']
    (tmp_path / 'b').mkdir()
    fake = FakeSweep(tmp_path / 'b', trial, maxFailedTrials=2, maxParallelTrials=1)
    code, _, err = fake.run()
    assert code == 1 and 'ended early: 2 trials have failed (maxFailedTrials)' in err
    assert len(fake.notes('starts')) == 3


def test_first_trials_that_fail_in_the_same_way_end_the_sweep(tmp_path):
    fake = FakeSweep(tmp_path, "sys.exit(f'no such file; {folder}/model.ckpt')", maxTrials=20, maxParallelTrials=1)
    code, _, err = fake.run()
    assert code == 1 and 'ended early: the first 3 trials have failed in the same way' in err
    assert len(fake.notes('starts')) == 3
    (tmp_path / 'b').mkdir()
    fake = FakeSweep(tmp_path / 'b', 'sys.exit(f"failure {trial}")', maxTrials=8, maxParallelTrials=1)
    assert fake.run()[0] == 1
    assert len(fake.notes('starts')) == 4  # half of them


def test_trial_without_the_metric_has_failed(tmp_path):
    fake = FakeSweep(tmp_path, "report(10, 'nan')", maxTrials=2)
    code, _, err = fake.run()
    assert code == 1 and 'trial 1 ended with code 0: it reported no accuracy' in err


def test_wrong_flags_of_a_trial_end_the_sweep_at_once(tmp_path):
    fake = FakeSweep(tmp_path, "print('trainer: error: no', file=sys.stderr); sys.exit(2)", maxParallelTrials=1)
    code, _, err = fake.run()
    assert code == 2 and len(fake.notes('starts')) == 1
    assert 'trial 1 ended with code 2: trainer: error: no' in err


def test_trial_that_asks_for_it_is_started_again(tmp_path):
    trial = """
if (state / f'{trial}.seen').exists():
    report(20, x)
else:
    (state / f'{trial}.seen').touch()
    report(10, 0)
    if trial == '1': os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(75)
"""
    fake = FakeSweep(tmp_path, trial, maxTrials=2)
    code, _, err = fake.run()
    assert code == 0, err
    assert sorted(line.split()[0] for line in fake.notes('starts')) == ['1', '1', '2', '2']
    assert [trial['finalMetric']['trainingStep'] for trial in fake.results()['trials']] == ['20', '20']


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_trials_prints_the_table_and_the_sweep_goes_on(tmp_path, number):
    trial = """
def save(*_):
    note('saved', trial)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
report(10, x)
if trial in '34' and not (state / 'saved').exists():
    note('waiting', trial)
    time.sleep(60)
report(20, x)
"""
    fake = FakeSweep(tmp_path, trial)
    process = fake.start()
    deadline = time.monotonic() + 30
    while len(fake.notes('waiting')) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert sorted(fake.notes('saved')) == ['3', '4']
    assert [line.split()[2 if line.startswith('*') else 1] for line in out.splitlines()[1:5]].count('RUNNING') == 2
    starts = fake.notes('starts')
    code, _, err = fake.run()
    assert code == 0 and '4 of 6 trials are known; going on with 3, 4' in err
    assert sorted(fake.notes('starts')[len(starts) :])[:2] == [line for line in starts if line[0] in '34']
    assert sorted(trial['trialId'] for trial in fake.results()['trials']) == list('123456')


@pytest.mark.slow
def test_sweep_killed_at_any_moment_goes_on(tmp_path):
    trial = """
for step in range(1, 6):
    time.sleep(0.1)
    report(step, x)
"""
    fake = FakeSweep(tmp_path, trial, maxTrials=24, maxParallelTrials=3)
    chance = random.Random(1)
    finished: list[str] = []
    starts_then = 0
    for _ in range(10):
        process = fake.start()
        time.sleep(1 + 2 * chance.random())
        process.kill()
        process.communicate(timeout=30)
        # What was finished before this start was not started again.
        assert not {line.split()[0] for line in fake.notes('starts')[starts_then:]} & set(finished)
        with folder_lock.lock(str(fake.output), ''):  # the last trials have ended
            starts_then = len(fake.notes('starts'))
            spec = sweep.load(f'{tmp_path}/hptuning.yaml', []).hyperparameters
            known = study.Study(f'{fake.output}/sweep.sqlite3', spec, seed=1)
            assert set(finished) <= {trial.id for trial in known.trials if trial.state == study.SUCCEEDED}
            finished = [trial.id for trial in known.trials if trial.state == study.SUCCEEDED]
    code, _, err = fake.run()
    assert code == 0, err
    starts = [line.split() for line in fake.notes('starts')]
    assert sorted({int(start[0]) for start in starts}) == list(range(1, 25))
    for number in range(1, 25):  # however often it was started, a trial had the same parameters
        assert len({tuple(start) for start in starts if start[0] == str(number)}) == 1
    results = fake.results()
    assert sorted(int(trial['trialId']) for trial in results['trials']) == list(range(1, 25))
    assert {trial['state'] for trial in results['trials']} == {'SUCCEEDED'}
    assert len({trial['finalMetric']['trainingStep'] for trial in results['trials']}) == 1


def test_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(self):
        raise study.StorageError('An exception is raised during the commit.') from OSError('database or disk is full')

    fake = FakeSweep(tmp_path, '')
    monkeypatch.setattr(study.Study, 'add_trial', fail)
    assert sweep.main([f'--config={tmp_path}/hptuning.yaml', f'--output_path={fake.output}']) == 1
    assert capsys.readouterr().err == (
        f'trainer.sweep: error: {fake.output}/sweep.sqlite3: cannot be read or written any more (database or disk is full); '
        'what it has is kept: mend that and run the same command again\n'
    )


def test_two_sweeps_do_not_share_a_folder(tmp_path, monkeypatch, capsys):
    fake = FakeSweep(tmp_path, '')
    monkeypatch.setattr(folder_lock, '_WAIT_SECS', 0.1)
    with folder_lock.lock(str(fake.output), ''):
        assert sweep.main([f'--config={tmp_path}/hptuning.yaml', f'--output_path={fake.output}']) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f'trainer.sweep: error: {fake.output}: another sweep runs in this folder; end it, or take another --output_path'
    )


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ([], '--output_path: missing'),
        (['--output_path=a', '--max_steps=3'], '--max_steps is a flag of the trainer; they come after --'),
        (['--output_path=a', '--sed=3'], 'unknown flag --sed; did you mean --seed?'),
        (['--output_path=a', '--seed=x'], '--seed: invalid int value'),
        (['--output_path=a', '--seed=-1'], '--seed=-1: expected 0 or more'),
        (['--output_path=gs://bucket/a'], '--sweep_dir: missing'),
        (['--output_path=a', '--sweep_dir=gs://bucket/a'], '--sweep_dir=gs://bucket/a: expected a local folder'),
        (['--output_path=a', '--config=nowhere.yaml'], 'nowhere.yaml'),
        (['--output_path=a', '--', '--job-dir=b'], "the flags after --: leave out --job_dir; the sweep's own goes before --"),
        (['--output_path=a', '--', '--hiden1=5'], 'the flags after --: unknown flag --hiden1; did you mean --hidden1?'),
        (
            ['--output_path=a', '--', '--train_data_paths=nowhere/*', ARGS[1]],
            '--train_data_paths: no file matches nowhere/*; there is no folder nowhere',
        ),
        (['--output_path=a'], '--train_data_paths: BUCKET is no name of a bucket in gs://BUCKET/mnist/train-*'),
        (['--output_path=a', '--', *ARGS, '--hidden1=5'], 'hidden1 is tuned, and args set --hidden1 too'),
    ],
)
def test_wrong_flag_is_named(capsys, flags, message):
    flags = flags if '--config=nowhere.yaml' in flags else [f'--config={REPOSITORY}/hptuning.yaml', *flags]
    assert sweep.main(flags) in (1, 2)
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_file_that_tunes_nothing_is_named(tmp_path):
    (tmp_path / 'config.yaml').write_text(yaml.safe_dump({'trainingInput': {'args': ARGS}}))
    with pytest.raises(UsageError, match=r'config\.yaml: expected trainingInput\.hyperparameters'):
        sweep.load(str(tmp_path / 'config.yaml'), [])


@pytest.mark.parametrize(
    ('job', 'expected'),
    [
        ({}, ['trainer.task', *ARGS, '--hidden1=5', '--job_dir=o/1']),
        (
            {
                'scaleTier': 'CUSTOM',
                'masterType': 'standard',
                'workerType': 'standard',
                'workerCount': 1,
                'evaluatorType': 'standard',
            }
            | {'evaluatorCount': 1},
            [
                *('trainer.launch', '--workers=1', '--ps=0', '--evaluator=1', '--log_dir=logs', '--'),
                *(*ARGS, '--hidden1=5', '--job_dir=o/1'),
            ],
        ),
        (
            {'scaleTier': 'STANDARD_1'},
            [
                *('trainer.launch', '--workers=4', '--ps=3', '--evaluator=0', '--log_dir=logs', '--'),
                *(*ARGS, '--hidden1=5', '--job_dir=o/1'),
            ],
        ),
    ],
)
def test_command_of_a_trial(tmp_path, job, expected):
    document = {'trainingInput': {**job, 'hyperparameters': {**SETTINGS, 'params': PARAMS}}}
    (tmp_path / 'hptuning.yaml').write_text(yaml.safe_dump(document))
    loaded = sweep.load(str(tmp_path / 'hptuning.yaml'), ARGS)
    assert sweep.make_command(loaded, {'hidden1': 5}, job_dir='o/1', log_dir='logs', threads=0) == expected


def test_machine_is_divided(monkeypatch):
    monkeypatch.setattr(trial_process.os, 'sched_getaffinity', lambda pid: {0, 1, 2, 3, 4, 5, 6, 7})
    shares = trial_process.divide_machine(3, {'CUDA_VISIBLE_DEVICES': '4,5'})
    assert [(list(share.cores), share.threads, share.gpus) for share in shares] == [
        ([0, 1], 2, '4'),
        ([2, 3, 4], 2, '5'),
        ([5, 6, 7], 2, '4'),
    ]
    assert trial_process.divide_machine(1, {}) == [((), 8, '')]


def test_metric_file_of_another_program(tmp_path):
    (tmp_path / 'metrics').write_text(
        '{"global_step": "5", "a": "0.5"}\nhalf a l\n{"global_step": "6", "a": "nan"}\n{"b": 1}\n'
    )
    assert trial_process.read_metric_file(str(tmp_path / 'metrics'), 'a') == {5: 0.5}
