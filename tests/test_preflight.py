"""What keeps a run from a TPU is told with no TPU: each fault by a line of its own, and nothing on what is well."""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf

from tests import shards
from trainer import compat, convert, preflight
from trainer.datasets import Dataset
from trainer.errors import UsageError
from trainer.features import Feature, Schema
from trainer.optimizers import make_optimizer, make_train_op


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp('digits')
    assert convert.main(['mnist', '--output', str(folder)]) == 0
    return folder


@pytest.fixture
def fly(digits, capfd, monkeypatch):
    """Runs the pre-flight; returns the exit code and a dictionary of the lines by check."""
    monkeypatch.setattr(logging.getLogger('tensorflow'), 'level', logging.ERROR)

    def fly(*argv):
        data = [f'--train_data_paths={digits}/train-*', f'--eval_data_paths={digits}/eval-*']
        code = preflight.main([*data, '--batch_size=64', '--eval_batch_size=64', '--hidden1=8', '--hidden2=4', *argv])
        lines = [line.split(None, 2) for line in capfd.readouterr().out.splitlines()]
        return code, {words[1]: (words[0], words[2]) for words in lines if words and words[0] in ('ok', 'WRONG', '-')}

    return fly


def make_model_fn(change):
    """A model_fn with one layer, in which `change(net)` does what it should not; it returns a host_call or None."""

    def model_fn(features, labels, mode, params):
        images = tf.cast(features['image'], tf.float32) / 255
        weights = tf.compat.v1.get_variable('weights', [784, 10])
        host_call = change(images)
        logits = images @ weights
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        train_op = make_train_op(loss, make_optimizer(params))
        return compat.estimator.tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op, host_call=host_call)

    return model_fn


def keep(tensor):
    """Has the step depend on a tensor, or it would be pruned."""
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, tf.identity(tensor).op)


def write_a_summary(images):
    tf.compat.v1.summary.scalar('mean', tf.reduce_mean(images))


def write_a_v2_summary(images):
    with tf.summary.create_noop_writer().as_default(0):
        tf.summary.scalar('mean', tf.reduce_mean(images))


def call_python_in_a_branch(images):
    def in_python():
        return tf.compat.v1.py_func(lambda value: value, [tf.reduce_mean(images)], tf.float32)

    keep(tf.cond(tf.reduce_mean(images) > 2, in_python, lambda: 0.0))


def compute_in_int8(images):
    keep(tf.cast(images * 100, tf.int8) + tf.constant(1, tf.int8))


def print_a_value(images):
    keep(tf.compat.v1.Print(tf.reduce_mean(images), [images]))


def send_a_scalar(images):
    return (lambda mean: tf.no_op()), {'mean': tf.reduce_mean(images)}


def mask(images):
    keep(tf.reduce_sum(tf.boolean_mask(images, images[:, 0] > 0)))


with_summary = make_model_fn(write_a_summary)
with_branch = make_model_fn(call_python_in_a_branch)
with_int8 = make_model_fn(compute_in_int8)
with_print = make_model_fn(print_a_value)
with_scalar = make_model_fn(send_a_scalar)
with_mask = make_model_fn(mask)


def without_train_op(features, labels, mode, params):
    return compat.estimator.tpu.TPUEstimatorSpec(mode, loss=tf.reduce_mean(tf.cast(features['image'], tf.float32)))


def without_shard_optimizer(features, labels, mode, params):
    weights = tf.compat.v1.get_variable('weights', [784, 10])
    loss = tf.reduce_mean(tf.cast(features['image'], tf.float32) @ weights)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())
    return compat.estimator.tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)


def test_what_is_well_passes(fly):
    code, lines = fly('--model=mlp', '--batch_size=1024', '--eval_batch_size=1024')
    assert code == 0
    assert {name: mark for name, (mark, _) in lines.items()} == dict.fromkeys(preflight.CHECKS, 'ok')
    assert lines['batch'][1] == '1024 = 1 x 8 cores x 128'
    # 784 bytes of picture and 8 of label each.
    assert lines['input'][1] == 'feature image uint8[128, 784], label int64[128]; 0.81 MB a step to each of 1 host'
    assert lines['xla'][1].startswith('compiled for a batch of 4 and run in')


def test_larger_topology(fly):
    code, lines = fly('--model=mlp', '--batch_size=1024', '--eval_batch_size=32', '--tpu-topology', 'v3-32')
    assert code == 0
    assert lines['batch'][1] == '1024 = 4 x 8 cores x 32'
    assert lines['input'][1].endswith('0.20 MB a step to each of 4 hosts')


@pytest.mark.parametrize(
    ('flags', 'check', 'message'),
    [
        (['--batch_size=100'], 'batch', '--batch_size=100 does not divide by the 8 cores of v3-8; the nearest that does is 96'),
        (
            ['--eval_batch_size=3'],
            'batch',
            '--eval_batch_size=3 does not divide by the 8 cores of v3-8; the nearest that does is 8',
        ),
        (['--model=tests.test_preflight:with_summary'], 'operations', 'tf.summary in the model_fn, which a TPU cannot write'),
        (['--model=tests.test_preflight:with_branch'], 'operations', 'not for a TPU: PyFunc'),
        (['--model=tests.test_preflight:with_int8'], 'operations', 'computes in int8; use int32 or bfloat16'),
        (['--model=tests.test_preflight:with_print'], 'operations', 'tf.print in a model_fn: send the value through host_call'),
        (['--model=tests.test_preflight:with_scalar'], 'host_call', 'host_call tensor mean has the shape (), expected a batch'),
        (['--model=tests.test_preflight:without_train_op'], 'graph', 'TPUEstimator refuses it: Missing train_op'),
        (['--model=tests.test_preflight:without_shard_optimizer'], 'graph', 'CrossShardOptimizer must be used'),
    ],
)
def test_fault_is_named(fly, flags, check, message):
    code, lines = fly(*flags)
    assert code == 1
    mark, text = lines[check]
    assert mark == 'WRONG' and message in text, lines


def test_shape_by_value_is_noted(digits, fly, capfd):
    data = [f'--train_data_paths={digits}/train-*', f'--eval_data_paths={digits}/eval-*', '--batch_size=64']
    preflight.main([*data, '--eval_batch_size=64', '--model=tests.test_preflight:with_mask'])
    assert '(Where) has a shape that depends on values; a TPU needs fixed ones' in capfd.readouterr().out


def make_rows(**features):
    return Dataset(name='rows', label='label', schema=Schema({**features, 'label': Feature('int64')}), num_classes=2)


WORDS = make_rows(word=Feature('bytes'))
LISTS = make_rows(list=Feature('int64', shape=None))


@pytest.mark.parametrize(
    ('name', 'value', 'message'),
    [
        ('WORDS', b'a', 'feature word is a string, and a TPU has none'),
        ('LISTS', [1, 2], 'feature list has the shape (8, None), expected one that is known beforehand'),
    ],
)
def test_feature_that_no_tpu_takes_is_named(fly, tmp_path, name, value, message):
    dataset = globals()[name]
    feature = next(name for name in dataset.schema.features if name != 'label')
    (path,) = shards.write_examples(tmp_path, dataset, [[{feature: value, 'label': 1}] * 64])
    code, lines = fly(f'--train_data_paths={path}', f'--eval_data_paths={path}', f'--dataset=tests.test_preflight:{name}')
    assert code == 1
    assert lines['input'][0] == 'WRONG' and message in lines['input'][1]


@pytest.mark.parametrize(
    ('tensor', 'message'),
    [
        (tf.TensorSpec([8], tf.string), 'feature a is a string, and a TPU has none: look words up or decode pictures'),
        (tf.TensorSpec([8], tf.int8), 'feature a is int8, expected one of float32, bfloat16'),
        (tf.TensorSpec([8, None], tf.int64), r'feature a has the shape \(8, None\), expected one that is known beforehand'),
        (tf.TensorSpec([None, 4], tf.float32), r'feature a has the shape \(None, 4\), expected one that is known beforehand'),
    ],
)
def test_tensor_that_no_tpu_takes_is_named(tensor, message):
    with pytest.raises(UsageError, match=message):
        preflight._check_tensor('feature a', tensor)


@pytest.mark.parametrize('name', ['v3', 'v3-12', 'v5-8', 'v3-0', 'v3-4'])
def test_topology_that_is_none_is_named(capsys, name):
    assert preflight.main([f'--tpu_topology={name}']) == 2
    err = capsys.readouterr().err
    assert f'--tpu_topology={name}: expected v2 or v3 and its cores' in err and len(err.splitlines()) == 1


def test_wrong_flag_is_named(capsys):
    assert preflight.main(['--hiden1=3', '--mode=train']) == 2
    assert 'unknown flag --hiden1; did you mean --hidden1?' in capsys.readouterr().err
