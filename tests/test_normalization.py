"""Batch normalisation: its formula, its averages, and that replicas share the statistics of the whole batch."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import REPOSITORY
from trainer.normalization import batch_norm

INPUTS = np.random.RandomState(0).normal(2.0, 3.0, (6, 4, 4, 2)).astype(np.float32)


def _run(inputs, **settings):
    """Output and averages of one training step."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        net = batch_norm(tf.constant(inputs), **{'is_training': True, 'name': 'norm', **settings})
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        session.run(tf.compat.v1.global_variables_initializer())
        output, _ = session.run([net, updates])
        return output, session.run({v.op.name: v for v in tf.compat.v1.global_variables()})


@pytest.mark.parametrize('inputs', [INPUTS, INPUTS.reshape(-1, 2)])
def test_it_normalises_each_channel_and_averages_its_statistics(inputs):
    output, variables = _run(inputs, momentum=0.8)
    flat = inputs.reshape(-1, 2).astype(np.float64)
    expected = (flat - flat.mean(axis=0)) / np.sqrt(flat.var(axis=0) + 1e-5)
    np.testing.assert_allclose(output.reshape(-1, 2), expected, atol=1e-4)
    np.testing.assert_allclose(variables['norm/moving_mean'], 0.2 * flat.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(variables['norm/moving_variance'], 0.8 + 0.2 * flat.var(axis=0), rtol=1e-4)


def test_evaluation_takes_the_averages_and_moves_nothing():
    output, variables = _run(INPUTS, is_training=False)
    np.testing.assert_allclose(output, INPUTS / np.sqrt(1 + 1e-5), rtol=1e-5)
    np.testing.assert_array_equal(variables['norm/moving_mean'], [0, 0])


def test_gamma_may_start_at_zero():
    output, _ = _run(INPUTS, gamma_initializer=tf.compat.v1.zeros_initializer())
    assert not output.any()


PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf
from trainer import compat
from trainer.cluster import Cluster
from trainer.config import DistributionConfig
from trainer.distribute import make_distribution
from trainer.normalization import batch_norm

strategy, replica_count = sys.argv[1], int(sys.argv[2])
if strategy != 'tpu':
    settings = DistributionConfig(distribution_strategy=strategy, num_cpu_replicas=replica_count)
    distribution = make_distribution(settings, Cluster(), {})
random = np.random.RandomState(0)
# The two halves of each batch differ much.
batches = random.normal(size=(12, 8, 6, 6, 3)).astype(np.float32) + np.linspace(-3, 3, 8).reshape(1, 8, 1, 1, 1)
losses = []

def model_fn(features, labels, mode, params):
    net = features
    for number in range(2):
        with tf.compat.v1.variable_scope(f'layer{number}', use_resource=True):
            weights = tf.compat.v1.get_variable('weights', [3, 3, 3, 3], initializer=tf.compat.v1.ones_initializer())
        net = tf.nn.conv2d(net, weights * tf.constant([1.0, -0.5, 0.3]), 1, 'SAME')
        net = tf.nn.relu(batch_norm(net, is_training=mode == 'train', name=f'norm{number}') + tf.constant([0.1, 0.2, 0.3]))
    loss = tf.reduce_mean((net - tf.reduce_mean(features, axis=[1, 2, 3], keepdims=True)) ** 2)
    updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    step = tf.compat.v1.train.get_global_step()
    optimizer = tf.compat.v1.train.MomentumOptimizer(0.05, 0.9)
    if strategy == 'tpu':
        optimizer = tf.compat.v1.tpu.CrossShardOptimizer(optimizer)
    train_op = tf.group(optimizer.minimize(loss, global_step=step), *updates)
    if strategy == 'tpu':
        return compat.estimator.tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)
    return compat.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

size = 8 // replica_count
images = batches.astype(np.float32).reshape(96, 6, 6, 3)
data = lambda params: tf.data.Dataset.from_tensor_slices(images).batch(size, drop_remainder=True)
if strategy == 'tpu':
    from tests.tpu import Simulator
    from trainer import tpu
    run_settings = {'model_dir': sys.argv[3], 'tf_random_seed': 1}
    settings = {'params': {}, 'run_settings': run_settings, 'batch_size': 8, 'eval_batch_size': 8, 'summary_steps': 0}
    estimator = tpu.make_estimator(model_fn, name='', **settings)
    with Simulator(replica_count).running(), compat.control_flow(in_functions=False):
        estimator.train(data, max_steps=12)
else:
    config = compat.estimator.RunConfig(model_dir=sys.argv[3], tf_random_seed=1, train_distribute=distribution.strategy)
    estimator = compat.estimator.Estimator(model_fn, config=config, params={})
    estimator.train(data, max_steps=12)
print(json.dumps({name: estimator.get_variable_value(name).tolist() for name in estimator.get_variable_names()}))
"""


def _train(strategy, replica_count, folder):
    program = subprocess.run(
        [sys.executable, '-c', PROGRAM, strategy, str(replica_count), str(folder)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=200,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    values = json.loads(program.stdout.strip().splitlines()[-1])
    # A mirrored variable's copies are saved once, under its own name.
    return {name: np.array(value) for name, value in values.items() if name.startswith(('layer', 'norm'))}


@pytest.mark.slow
def test_replicas_learn_what_one_device_learns_from_the_whole_batch(tmp_path):
    one = _train('mirrored', 1, tmp_path / 'one')
    # TPU is simulated, which only this version of TensorFlow allows.
    strategies = ['mirrored', 'central_storage', *(['tpu'] if tf.__version__.startswith('2.15.') else [])]
    for strategy in strategies:
        two = _train(strategy, 2, tmp_path / strategy)
        assert set(two) == set(one)
        for name, value in one.items():
            np.testing.assert_allclose(two[name], value, rtol=1e-3, atol=1e-4, err_msg=f'{strategy}: {name}')
