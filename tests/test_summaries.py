"""Summaries reach the event files through host_call, at the steps and with the values that the model_fn had."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer import compat, summaries
from trainer.models import mlp


def _model_fn(features, labels, mode, params):
    collected = summaries.Summaries(params['summaries'])
    step = tf.compat.v1.train.get_or_create_global_step()
    weight = tf.compat.v1.get_variable('weight', [], use_resource=True, initializer=tf.compat.v1.zeros_initializer())
    with tf.control_dependencies([tf.identity(step.read_value())]):
        train_op = tf.group(weight.assign_add(2.0))
    with tf.control_dependencies([train_op]):
        train_op = tf.group(tf.compat.v1.assign_add(step, 1))
    collected.scalar('inside', weight.read_value() * 0 + 4.5)
    collected.image('pictures', tf.reshape(features['image'], [-1, 4, 4, 1]), max_images=2)
    collected.histogram('pixels', features['image'])
    loss = tf.reduce_mean(tf.cast(features['image'], tf.float32))
    return compat.estimator.tpu.TPUEstimatorSpec(
        mode=mode, loss=loss, train_op=train_op, host_call=collected.host_call(train_op)
    )


@pytest.mark.parametrize('steps_per_loop', [1, 4])
def test_scalars_images_and_histograms_are_written_every_n_steps(tmp_path, steps_per_loop):
    fakes.train_looped(_model_fn, tmp_path, max_steps=10, steps_per_loop=steps_per_loop, summary_steps=5)
    events = fakes.read_events(tmp_path / 'train')
    assert events['inside'] == {5: 4.5, 10: 4.5}
    assert sorted(events['pixels']) == [5, 10]
    assert events['pixels'][5].shape[1] == 3 and events['pixels'][5][:, 2].sum() == 8 * 16
    size_and_pictures = events['pictures'][10]
    assert size_and_pictures[:2].tolist() == [b'4', b'4'] and len(size_and_pictures) == 4
    assert all(png.startswith(b'\x89PNG') for png in size_and_pictures[2:])


def test_where_the_step_leaps_the_first_past_a_multiple_is_written(tmp_path):
    write_fn = summaries.make_write_fn(summaries.SummaryParams(str(tmp_path), 10))
    steps = [0, 1, 9, 11, 12, 20, 35, 38]
    for seen, step in zip(steps, steps[1:]):
        host_call = (write_fn, {summaries.STEP_KEY: tf.constant([step], tf.int64)})
        summaries.add_scalar(host_call, 'loss', step)
        summaries.add_seen_step(host_call, tf.constant([seen], tf.int64))
        write_fn(**host_call[1])
    assert fakes.read_events(tmp_path)['loss'] == {11: 11, 20: 20, 35: 35}


def test_host_call_runs_under_plain_estimator_too(tmp_path):
    params = {'summaries': summaries.SummaryParams(str(tmp_path / 'train'), 3)}
    estimator = compat.estimator.Estimator(
        lambda features, labels, mode, params: _model_fn(features, labels, mode, params).as_estimator_spec(),
        params=params,
        model_dir=str(tmp_path),
    )
    estimator.train(fakes.make_blobs_input_fn(8), max_steps=7)
    assert fakes.read_events(tmp_path / 'train')['inside'] == {3: 4.5, 6: 4.5}


def test_no_host_call_when_summaries_are_off():
    with tf.Graph().as_default():
        collected = summaries.Summaries(summaries.SummaryParams('somewhere', 0))
        collected.scalar('loss', 1.0)
        assert collected.host_call(tf.no_op()) is None
        assert summaries.Summaries(None).host_call(tf.no_op()) is None


def test_mlp_writes_loss_accuracy_learning_rate_and_examples_per_sec(tmp_path):
    fakes.train_looped(mlp.model_fn, tmp_path, max_steps=20, steps_per_loop=5, summary_steps=10)
    events = fakes.read_events(tmp_path / 'train')
    scalars = {tag for tag, values in events.items() if np.ndim(next(iter(values.values()))) == 0}
    assert scalars == {'loss', 'accuracy', 'learning_rate', 'examples_per_sec'}
    assert events['learning_rate'] == {10: np.float32(0.1), 20: np.float32(0.1)}
    assert {'images', 'hidden1', 'hidden2'} <= set(events)


def test_tensors_for_the_host_have_a_batch_dimension():
    # A TPU concatenates what its cores send along the first dimension.
    with tf.Graph().as_default():
        collected = summaries.Summaries(summaries.SummaryParams('somewhere', 10))
        collected.scalar('loss', tf.constant(1.0))
        collected.histogram('weights', tf.zeros([3, 4]))
        collected.image('pictures', tf.zeros([8, 2, 2, 3]), max_images=3)
        _, tensors = collected.host_call(tf.no_op())
        assert {key: tensor.shape.as_list() for key, tensor in tensors.items()} == {
            'step': [1],
            'scalar/loss': [1],
            'histogram/weights': [1, 12],
            'image/pictures': [3, 2, 2, 3],
        }
        assert tensors['image/pictures'].dtype == tf.uint8


def test_a_name_used_twice_is_an_error():
    with tf.Graph().as_default():
        collected = summaries.Summaries()
        collected.scalar('loss', 1.0)
        with pytest.raises(ValueError, match="scalar summary 'loss' twice"):
            collected.scalar('loss', 2.0)


def test_tile_lays_out_whole_rows():
    images = np.arange(7 * 2 * 3).reshape(7, 2, 3, 1)
    tiled = summaries.tile(tf.constant(images), 3).numpy()
    assert tiled.shape == (1, 4, 9, 1)
    np.testing.assert_array_equal(tiled[0, 2:, 3:6], images[4])
    assert summaries.tile(tf.constant(images), 2).shape == (1, 4, 6, 1)
    np.testing.assert_array_equal(summaries.tile(tf.constant(images[:2]), 8)[0], np.concatenate(images[:2], axis=1))
