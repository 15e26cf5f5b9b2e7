"""Files in the manner of those that circulate: every type and scale, and the habits of their authors."""

from __future__ import annotations

import pytest

from trainer import hptuning, search, training_input
from trainer.hptuning import Parameter

# Wide and deep on census data: dashes in names, layer sizes, a scale factor.
CENSUS = """
trainingInput:
  scaleTier: STANDARD_1
  hyperparameters:
    goal: MAXIMIZE
    hyperparameterMetricTag: accuracy
    maxTrials: 4
    maxParallelTrials: 2
    params:
      - parameterName: hidden1
        type: INTEGER
        minValue: 50
        maxValue: 500
        scaleType: UNIT_LINEAR_SCALE
      - parameterName: learning-rate
        type: DOUBLE
        minValue: 0.1
        maxValue: 1
        scaleType: UNIT_LINEAR_SCALE
"""
# Digits: numbers as scientists write them, with the point without which YAML takes them for text.
DIGITS = """
trainingInput:
  scaleTier: BASIC_GPU
  runtimeVersion: "2.1"
  pythonVersion: "3.7"
  hyperparameters:
    goal: MINIMIZE
    hyperparameterMetricTag: "loss"
    maxTrials: 30
    maxParallelTrials: 1
    enableTrialEarlyStopping: True
    params:
    - parameterName: learning_rate
      type: DOUBLE
      minValue: 1.0e-4
      maxValue: 5.0e-1
      scaleType: UNIT_LOG_SCALE
    - parameterName: dropout
      type: DOUBLE
      minValue: 0.1
      maxValue: 0.9
      scaleType: UNIT_REVERSE_LOG_SCALE
"""
# Text classification: choices and numbers in lists, in both of YAML's ways to write them.
TEXT = """
# Hyperparameters
trainingInput:
  hyperparameters:
    goal: MAXIMIZE
    maxTrials: 20
    maxParallelTrials: 5
    maxFailedTrials: 3
    hyperparameterMetricTag: accuracy
    params:
    - parameterName: batch_size
      type: DISCRETE
      discreteValues:
      - 16
      - 32
      - 64
      - 128
    - parameterName: optimizer
      type: CATEGORICAL
      categoricalValues: ["sgd", "momentum", 'adam']
"""
# A grid.
GRID = """
trainingInput:
  scaleTier: CUSTOM
  masterType: standard_gpu
  hyperparameters:
    algorithm: GRID_SEARCH
    goal: MAXIMIZE
    hyperparameterMetricTag: accuracy
    maxTrials: 12
    params:
      - {parameterName: hidden2, type: INTEGER, minValue: 2, maxValue: 4, scaleType: NONE}
      - {parameterName: hidden1, type: DISCRETE, discreteValues: [64, 128], scaleType: UNIT_LOG_SCALE}
      - {parameterName: cache, type: CATEGORICAL, categoricalValues: ['auto', 'off']}
"""
# Goes on from another job, at random.
RESUMED = """
trainingInput:
  region: us-central1
  args: ["--train_data_paths", "gs://bucket-a/train", "--eval_data_paths", "gs://bucket-a/eval"]
  hyperparameters:
    resumePreviousJobId: digits_20201017
    algorithm: RANDOM_SEARCH
    goal: MAXIMIZE
    hyperparameterMetricTag: accuracy
    maxTrials: 100
    maxParallelTrials: 10
    params:
      - parameterName: adam_beta1
        type: DOUBLE
        minValue: 0
        maxValue: 0.95
        scaleType: NONE
      - parameterName: hidden1
        type: INTEGER
        minValue: 1
        maxValue: 1024
        scaleType: UNIT_LOG_SCALE
"""
EXPECTED = {
    CENSUS: (
        Parameter('hidden1', 'INTEGER', (50, 500), 'UNIT_LINEAR_SCALE'),
        Parameter('learning-rate', 'DOUBLE', (0.1, 1), 'UNIT_LINEAR_SCALE'),
    ),
    DIGITS: (
        Parameter('learning_rate', 'DOUBLE', (0.0001, 0.5), 'UNIT_LOG_SCALE'),
        Parameter('dropout', 'DOUBLE', (0.1, 0.9), 'UNIT_REVERSE_LOG_SCALE'),
    ),
    TEXT: (
        Parameter('batch_size', 'DISCRETE', (16, 32, 64, 128)),
        Parameter('optimizer', 'CATEGORICAL', ('sgd', 'momentum', 'adam')),
    ),
    GRID: (
        Parameter('hidden2', 'INTEGER', (2, 4)),
        Parameter('hidden1', 'DISCRETE', (64, 128), 'UNIT_LOG_SCALE'),
        Parameter('cache', 'CATEGORICAL', ('auto', 'off')),
    ),
    RESUMED: (
        Parameter('adam_beta1', 'DOUBLE', (0, 0.95)),
        Parameter('hidden1', 'INTEGER', (1, 1024), 'UNIT_LOG_SCALE'),
    ),
}
DATA = ['--train_data_paths=gs://bucket-a/train', '--eval_data_paths=gs://bucket-a/eval']


@pytest.mark.parametrize('text', EXPECTED, ids=['census', 'digits', 'text', 'grid', 'resumed'])
@pytest.mark.parametrize('is_local', [True, False])
def test_sample_loads_and_is_searched(tmp_path, text, is_local):
    path = tmp_path / 'hptuning.yaml'
    path.write_text(text)
    job = training_input.load(str(path), () if text == RESUMED else DATA, is_local=is_local)
    spec = job.hyperparameters
    assert spec.params == EXPECTED[text]
    for param, distribution in zip(spec.params, search.make_distributions(spec.params).values()):
        ends = distribution.choices if param.type == hptuning.CATEGORICAL else (distribution.low, distribution.high)
        values = [search.to_value(param, end) for end in ends]
        assert {values[0], values[-1]} == {param.values[0], param.values[-1]}
