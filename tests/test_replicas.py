"""A model_fn on replicas: averages, one writer of summaries, votes that every worker sees."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import REPOSITORY

PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf
from tests import fakes
from trainer import accumulation, averages, compat, loop, replicas, summaries
from trainer.cluster import Cluster
from trainer.config import DistributionConfig
from trainer.distribute import make_distribution
from trainer.models import mlp

strategy, replica_count, runs = sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
settings = DistributionConfig(distribution_strategy=strategy, num_cpu_replicas=replica_count)
distribution = make_distribution(settings, Cluster(), {})

def train(folder, params, num_parts, decay):
    state = loop.LoopState()
    wrapping = {'state': state, 'distribution': distribution, 'is_chief': True, 'constants': {'constant': 3}}
    model_fn = averages.wrap_model_fn(accumulation.wrap_model_fn(mlp.model_fn, num_parts), decay)
    model_fn = replicas.wrap_model_fn(model_fn, **wrapping)
    seen = {'losses': [], 'steps': [], 'votes': []}

    class Recorder(tf.compat.v1.train.SessionRunHook):
        def before_run(self, run_context):
            result = state.result
            vote = [0, 1] if len(seen['steps']) == 3 else [0, 0]
            fetches = [result.loss, result.step, result.votes, result.scalars['accuracy']]
            return tf.compat.v1.train.SessionRunArgs(fetches, feed_dict={result.vote: vote})

        def after_run(self, run_context, run_values):
            loss, step, votes, accuracy = run_values.results
            seen['losses'].append(float(loss)), seen['steps'].append(int(step))
            seen['votes'].append([bool(v > 0) for v in votes])

    params = fakes.make_params(summaries=summaries.SummaryParams(folder + '/train', 2), **params)
    config = compat.estimator.RunConfig(model_dir=folder, tf_random_seed=1, train_distribute=distribution.strategy)
    estimator = compat.estimator.Estimator(model_fn, config=config, params=params)

    def input_fn():
        features, labels = fakes.make_blobs(512)
        dataset = tf.data.Dataset.from_tensor_slices(({'image': features}, labels))
        return dataset.repeat().batch(16 // replica_count, drop_remainder=True)

    estimator.train(input_fn, max_steps=6, hooks=[Recorder()])
    tags = {tag: sorted(values) for tag, values in fakes.read_events(folder + '/train').items()}
    names = [name for name in estimator.get_variable_names() if name.endswith(('weights', 'biases'))]
    weights = {name: estimator.get_variable_value(name).tolist() for name in names}
    return {**seen, 'tags': tags, 'weights': weights}

print(json.dumps([train(f'{sys.argv[1]}/{number}', *run) for number, run in enumerate(runs)]))
"""


def run(folder, strategy, replica_count, *runs):
    """What each of the runs (params, micro-batches, decay of averages) has seen and learnt."""
    program = subprocess.run(
        [sys.executable, '-c', PROGRAM, str(folder), strategy, str(replica_count), json.dumps(runs)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=200,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    return json.loads(program.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_two_replicas_make_the_steps_of_one_and_write_once(tmp_path):
    (one,), (two,) = run(tmp_path / 'one', 'mirrored', 1, ({}, 1, 0)), run(tmp_path / 'two', 'mirrored', 2, ({}, 1, 0))
    assert two['steps'] == [1, 2, 3, 4, 5, 6]
    assert two['losses'] == pytest.approx(one['losses'], rel=1e-5)
    assert two['votes'] == [[False, False]] * 3 + [[False, True]] + [[False, False]] * 2
    assert two['tags']['accuracy'] == [2, 4, 6]
    assert two['tags']['constant'] == [2, 4, 6]
    assert two['tags']['loss'] == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['mirrored', 'central_storage'])
def test_optimizers_move_the_weights_of_replicas_as_those_of_one(tmp_path, strategy):
    regularized = {'optimizer': 'momentum', 'clip_norm': 0.3, 'weight_decay': 0.01, 'label_smoothing': 0.1}
    runs = [
        (regularized, 1, 0),
        ({**regularized, 'optimizer': 'lars', 'learning_rate': 2.0}, 1, 0.5),
    ]
    expected = run(tmp_path / 'one', 'mirrored', 1, *runs)
    found = run(tmp_path / 'two', strategy, 2, *runs, (regularized, 2, 0))
    # In two micro-batches each, the first again.
    expected.append(expected[0])
    for one, two in zip(expected, found):
        assert two['losses'] == pytest.approx(one['losses'], rel=1e-5)
        assert set(two['weights']) == set(one['weights']) and len(one['weights']) >= 6
        for name, value in one['weights'].items():
            np.testing.assert_allclose(two['weights'][name], value, rtol=1e-4, atol=1e-6, err_msg=f'{strategy}: {name}')
