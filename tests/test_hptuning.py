from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY
from trainer import hptuning
from trainer.errors import UsageError
from trainer.hptuning import HyperparameterSpec, Parameter

GOOD = """
trainingInput:
  hyperparameters:
    goal: MAXIMIZE
    hyperparameterMetricTag: accuracy
    maxTrials: 8
    maxParallelTrials: 2
    maxFailedTrials: 3
    enableTrialEarlyStopping: true
    algorithm: RANDOM_SEARCH
    resumePreviousJobId: earlier
    params:
      - {parameterName: hidden1, type: INTEGER, minValue: 40, maxValue: 400.0, scaleType: UNIT_LINEAR_SCALE}
      - {parameterName: learning_rate, type: DOUBLE, minValue: 1.0e-4, maxValue: 0.5, scaleType: UNIT_LOG_SCALE}
      - {parameterName: momentum, type: DOUBLE, minValue: 0.5, maxValue: 0.99, scaleType: UNIT_REVERSE_LOG_SCALE}
      - {parameterName: optimizer, type: CATEGORICAL, categoricalValues: [sgd, adam]}
      - {parameterName: batch_size, type: DISCRETE, discreteValues: [50, 100, 200], scaleType: NONE}
"""


def write(folder: pathlib.Path, text: str) -> str:
    path = folder / 'hptuning.yaml'
    path.write_text(text)
    return str(path)


def test_every_key_and_type_is_read(tmp_path: pathlib.Path) -> None:
    spec = hptuning.load(write(tmp_path, GOOD))
    assert spec == HyperparameterSpec(
        goal='MAXIMIZE',
        metric_tag='accuracy',
        max_trials=8,
        max_parallel_trials=2,
        max_failed_trials=3,
        early_stopping=True,
        algorithm='RANDOM_SEARCH',
        resume_job='earlier',
        params=(
            Parameter('hidden1', 'INTEGER', (40, 400), 'UNIT_LINEAR_SCALE'),
            Parameter('learning_rate', 'DOUBLE', (0.0001, 0.5), 'UNIT_LOG_SCALE'),
            Parameter('momentum', 'DOUBLE', (0.5, 0.99), 'UNIT_REVERSE_LOG_SCALE'),
            Parameter('optimizer', 'CATEGORICAL', ('sgd', 'adam')),
            Parameter('batch_size', 'DISCRETE', (50, 100, 200)),
        ),
    )
    assert [type(value) for value in spec.params[0].values] == [int, int]


def test_what_is_left_out_is_what_the_service_takes(tmp_path: pathlib.Path) -> None:
    section = yaml.safe_load(GOOD)['trainingInput']['hyperparameters']
    least = {key: section[key] for key in ('goal', 'hyperparameterMetricTag', 'params')}
    spec = hptuning.load(write(tmp_path, yaml.safe_dump({'trainingInput': {'hyperparameters': least}})))
    assert (spec.max_trials, spec.max_parallel_trials, spec.max_failed_trials, spec.early_stopping) == (1, 1, 0, False)
    assert (spec.algorithm, spec.resume_job) == ('ALGORITHM_UNSPECIFIED', '')


def test_the_file_of_the_repository_loads() -> None:
    spec = hptuning.load(str(REPOSITORY / 'hptuning.yaml'))
    assert (spec.max_trials, [param.name for param in spec.params]) == (30, ['hidden1', 'hidden2', 'learning_rate'])


KEY = 'trainingInput.hyperparameters'
INTEGER = '{parameterName: hidden1, type: INTEGER, minValue: 40, maxValue: 400.0, scaleType: UNIT_LINEAR_SCALE}'
BROKEN = [
    ('goal: MAXIMIZE', 'goal: MAXIMISE',
     f'{KEY}.goal: expected one of MAXIMIZE, MINIMIZE, it is \'MAXIMISE\'; did you mean MAXIMIZE?'),
    ('goal: MAXIMIZE', 'goal: maximize',
     f"{KEY}.goal: expected one of MAXIMIZE, MINIMIZE, it is 'maximize'; did you mean MAXIMIZE?"),
    ('    goal: MAXIMIZE\n', '', f'{KEY}.goal: missing; expected MAXIMIZE or MINIMIZE'),
    ('hyperparameterMetricTag: accuracy', '',
     f'{KEY}.hyperparameterMetricTag: missing; expected the name of a metric, such as accuracy'),
    ('maxTrials: 8', 'maxTrial: 8', f'{KEY}.maxTrial: unknown key; did you mean maxTrials?'),
    ('maxTrials: 8', 'maxTrials: many', f"{KEY}.maxTrials: expected a whole number from 0, it is 'many'"),
    ('maxTrials: 8', 'maxTrials: 0', f'{KEY}.maxTrials: expected at least 1, it is 0'),
    ('maxParallelTrials: 2', 'maxParallelTrials: 0', f'{KEY}.maxParallelTrials: expected at least 1, it is 0'),
    ('enableTrialEarlyStopping: true', 'enableTrialEarlyStopping: 1',
     f'{KEY}.enableTrialEarlyStopping: expected true or false, it is the number 1'),
    ('RANDOM_SEARCH', 'GRID_SEARCH',
     f'{KEY}.params[1].type: GRID_SEARCH takes no DOUBLE; list the values of learning_rate as DISCRETE'),
    (INTEGER, INTEGER.replace('INTEGER', 'INT'),
     f"{KEY}.params[0].type: expected one of DOUBLE, INTEGER, CATEGORICAL, DISCRETE, it is 'INT'; did you mean INTEGER?"),
    (INTEGER, INTEGER.replace('type: INTEGER, ', ''),
     f'{KEY}.params[0].type: missing; expected one of DOUBLE, INTEGER, CATEGORICAL, DISCRETE'),
    (INTEGER, INTEGER.replace('minValue: 40, ', ''),
     f'{KEY}.params[0].minValue: missing, and a parameter of type INTEGER needs it (hidden1)'),
    (INTEGER, INTEGER.replace('40,', '500,'), f'{KEY}.params[0].minValue: expected less than maxValue, 400.0, it is 500'),
    (INTEGER, INTEGER.replace('40,', '40.5,'),
     f'{KEY}.params[0].minValue: expected whole numbers, they are 40.5 and 400.0; or type DOUBLE'),
    (INTEGER, INTEGER.replace('hidden1', 'momentum'), f'{KEY}.params[2].parameterName: momentum is there twice'),
    ('1.0e-4', '1e-4',
     f"{KEY}.params[1].minValue: expected a number, it is '1e-4'; write 0.0001, YAML takes 1e-4 for text"),
    ('1.0e-4', '0', f'{KEY}.params[1].scaleType: UNIT_LOG_SCALE needs values above 0, the lowest is 0'),
    ('[sgd, adam]', '[]',
     f'{KEY}.params[3].categoricalValues: missing, and a parameter of type CATEGORICAL needs it (optimizer)'),
    ('[sgd, adam]', '[sgd, 1]', f'{KEY}.params[3].categoricalValues[1]: expected text, it is the number 1; put it in quotes'),
    ('[sgd, adam]', '[sgd, adam], minValue: 1',
     f'{KEY}.params[3].minValue: a parameter of type CATEGORICAL has no minValue (optimizer)'),
    ('[50, 100, 200]', '[50, 200, 100]', f'{KEY}.params[4].discreteValues: expected rising numbers, they are 50, 200, 100'),
    ('[50, 100, 200]', '50', f'{KEY}.params[4].discreteValues: expected a list, each item after a "-", it is the number 50'),
]  # fmt: skip


@pytest.mark.parametrize(('old', 'new', 'message'), BROKEN, ids=[str(index) for index in range(len(BROKEN))])
def test_a_broken_file_gets_one_clear_line(old: str, new: str, message: str, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    assert GOOD.count(old) == 1
    with pytest.raises(UsageError) as error:
        hptuning.load(path)
    assert str(error.value) == f'{path}: {message}'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', ': expected keys and values, it is empty'),
        ('trainingInput: {scaleTier: BASIC}', f': expected {KEY}, what to tune; there is none'),
        ('trainingInput: [1, 2', ", line 1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ('a: 1\nb: 2\na: 3', ', line 3: not YAML: a is there twice'),
        ('trainingInput: {hyperparameters: {goal: MAXIMIZE, hyperparameterMetricTag: loss, params: []}}',
         f': {KEY}.params: missing; expected the parameters to tune'),
    ],
)  # fmt: skip
def test_a_file_that_is_no_tuning_job_gets_one_clear_line(text: str, message: str, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as error:
        hptuning.load(path)
    assert str(error.value) == path + message


def test_the_keys_are_those_of_the_services_definition() -> None:
    assert set(hptuning.SCHEMA) == {
        'goal', 'hyperparameterMetricTag', 'maxTrials', 'maxParallelTrials', 'maxFailedTrials', 'enableTrialEarlyStopping',
        'algorithm', 'resumePreviousJobId', 'params',
    }  # fmt: skip
    params: Any = hptuning.SCHEMA['params']
    assert set(params[0]) == {
        'parameterName', 'type', 'minValue', 'maxValue', 'categoricalValues', 'discreteValues', 'scaleType',
    }  # fmt: skip
