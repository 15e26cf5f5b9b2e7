"""What a tuning job tunes: the `trainingInput.hyperparameters` of `hptuning.yaml`, read as the services read it. Pure Python.

The keys are those of AI Platform's HyperparameterSpec
(https://cloud.google.com/ai-platform/training/docs/reference/rest/v1/projects.jobs#HyperparameterSpec). Every error is a
`UsageError` of one line with file and key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Union

from trainer import schema
from trainer.errors import UsageError

Value = Union[int, float, str]

DOUBLE, INTEGER, CATEGORICAL, DISCRETE = TYPES = ('DOUBLE', 'INTEGER', 'CATEGORICAL', 'DISCRETE')
NONE, LINEAR, LOG, REVERSE_LOG = SCALES = ('NONE', 'UNIT_LINEAR_SCALE', 'UNIT_LOG_SCALE', 'UNIT_REVERSE_LOG_SCALE')
BAYESIAN, GRID_SEARCH, RANDOM_SEARCH = ALGORITHMS = ('ALGORITHM_UNSPECIFIED', 'GRID_SEARCH', 'RANDOM_SEARCH')
GOALS = ('MAXIMIZE', 'MINIMIZE')
SCHEMA = {
    'goal': GOALS,
    'hyperparameterMetricTag': schema.TEXT,
    'maxTrials': schema.COUNT,
    'maxParallelTrials': schema.COUNT,
    'maxFailedTrials': schema.COUNT,
    'enableTrialEarlyStopping': schema.FLAG,
    'algorithm': ALGORITHMS,
    'resumePreviousJobId': schema.TEXT,
    'params': [
        {
            'parameterName': schema.TEXT,
            'type': TYPES,
            'minValue': schema.NUMBER,
            'maxValue': schema.NUMBER,
            'categoricalValues': [schema.TEXT],
            'discreteValues': [schema.NUMBER],
            'scaleType': SCALES,
        }
    ],
}
_KEY = 'trainingInput.hyperparameters'
# What a parameter of each type must have, and all that it may have beside name and type.
_NEEDED = {
    DOUBLE: ('minValue', 'maxValue'),
    INTEGER: ('minValue', 'maxValue'),
    CATEGORICAL: ('categoricalValues',),
    DISCRETE: ('discreteValues',),
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One hyperparameter: a flag of the trainer and the values that it may take."""

    name: str
    type: str
    """One of TYPES."""
    values: tuple[Value, ...]
    """All values of a CATEGORICAL (text) or DISCRETE one (numbers, rising); else the lowest and the highest, inclusive."""
    scale: str = NONE
    """One of SCALES."""


@dataclasses.dataclass(frozen=True)
class HyperparameterSpec:
    """What a tuning job tunes and how."""

    goal: str
    """One of GOALS."""
    metric_tag: str
    params: tuple[Parameter, ...]
    max_trials: int = 1
    max_parallel_trials: int = 1
    max_failed_trials: int = 0
    """Trials that may fail before the job is given up; 0 leaves it to the service."""
    early_stopping: bool = False
    """Whether a trial that does worse than the others did at its step is ended."""
    algorithm: str = BAYESIAN
    """One of ALGORITHMS."""
    resume_job: str = ''
    """Id of an earlier job whose trials count too."""


def load(path: str) -> HyperparameterSpec:
    """The tuning job that a file describes.

    Args:
        path: of the YAML file, local or gs://.

    Raises:
        UsageError: something in it is wrong, or it tunes nothing.
        DataError: it cannot be read.
    """
    section = schema.read_yaml(path).get('trainingInput')
    if not isinstance(section, dict) or 'hyperparameters' not in section:
        raise UsageError(f'{path}: expected {_KEY}, what to tune; there is none')
    return parse(section['hyperparameters'], path)


def parse(section: Any, path: str) -> HyperparameterSpec:
    """The tuning job that a `hyperparameters` section describes.

    Args:
        section: as YAML has it.
        path: of the file, for messages.

    Raises:
        UsageError: something in it is wrong.
    """
    schema.check(section, SCHEMA, path, _KEY)
    for key in ('goal', 'hyperparameterMetricTag', 'params'):
        if not section.get(key):
            raise UsageError(f'{path}: {_KEY}.{key}: missing{_EXPECTED[key]}')
    params = tuple(_parse_parameter(param, f'{path}: {_KEY}.params[{index}]') for index, param in enumerate(section['params']))
    spec = HyperparameterSpec(
        goal=section['goal'],
        metric_tag=section['hyperparameterMetricTag'],
        params=params,
        max_trials=section.get('maxTrials', 1),
        max_parallel_trials=section.get('maxParallelTrials', 1),
        max_failed_trials=section.get('maxFailedTrials', 0),
        early_stopping=section.get('enableTrialEarlyStopping', False),
        algorithm=section.get('algorithm', BAYESIAN),
        resume_job=section.get('resumePreviousJobId', ''),
    )
    _check(spec, path)
    return spec


_EXPECTED = {
    'goal': f'; expected {" or ".join(GOALS)}',
    'hyperparameterMetricTag': '; expected the name of a metric, such as accuracy',
    'params': '; expected the parameters to tune',
}


def _check(spec: HyperparameterSpec, path: str) -> None:
    names = [param.name for param in spec.params]
    for index, (name, param) in enumerate(zip(names, spec.params)):
        place = f'{path}: {_KEY}.params[{index}]'
        if name in names[:index]:
            raise UsageError(f'{place}.parameterName: {name} is there twice')
        if spec.algorithm == GRID_SEARCH and param.type == DOUBLE:
            raise UsageError(f'{place}.type: GRID_SEARCH takes no DOUBLE; list the values of {name} as DISCRETE')
    for key, count in (('maxTrials', spec.max_trials), ('maxParallelTrials', spec.max_parallel_trials)):
        if count < 1:
            raise UsageError(f'{path}: {_KEY}.{key}: expected at least 1, it is {count}')


def _parse_parameter(param: Mapping[str, Any], place: str) -> Parameter:
    for key in ('parameterName', 'type'):
        if key not in param:
            raise UsageError(f'{place}.{key}: missing{"; expected one of " + ", ".join(TYPES) if key == "type" else ""}')
    name, kind, scale = param['parameterName'], param['type'], param.get('scaleType', NONE)
    for key in _NEEDED[kind]:
        if param.get(key) in (None, []):
            raise UsageError(f'{place}.{key}: missing, and a parameter of type {kind} needs it ({name})')
    for key in param.keys() - {'parameterName', 'type', 'scaleType', *_NEEDED[kind]}:
        raise UsageError(f'{place}.{key}: a parameter of type {kind} has no {key} ({name})')
    if kind == CATEGORICAL and scale != NONE:
        raise UsageError(f'{place}.scaleType: a parameter of type CATEGORICAL has no scale ({name})')
    values: Sequence[Any] = (
        param[_NEEDED[kind][0]] if kind in (CATEGORICAL, DISCRETE) else [param['minValue'], param['maxValue']]
    )
    _check_values(values, kind, scale, place)
    return Parameter(name, kind, tuple(int(value) for value in values) if kind == INTEGER else tuple(values), scale)


def _check_values(values: Sequence[Any], kind: str, scale: str, place: str) -> None:
    if kind in (CATEGORICAL, DISCRETE):
        key = f'{place}.{_NEEDED[kind][0]}'
        if len(set(values)) < len(values):
            raise UsageError(f'{key}: a value is there twice in {", ".join(map(str, values))}')
        if kind == DISCRETE and list(values) != sorted(values):
            raise UsageError(f'{key}: expected rising numbers, they are {", ".join(map(str, values))}')
    elif values[0] >= values[1]:
        raise UsageError(f'{place}.minValue: expected less than maxValue, {values[1]}, it is {values[0]}')
    if kind == INTEGER and any(value != int(value) for value in values):
        raise UsageError(f'{place}.minValue: expected whole numbers, they are {values[0]} and {values[1]}; or type DOUBLE')
    if kind != CATEGORICAL and scale in (LOG, REVERSE_LOG) and min(values) <= 0:
        raise UsageError(f'{place}.scaleType: {scale} needs values above 0, the lowest is {min(values)}')
