"""ResNet-50 v1.5: its size, where its strides are, what it starts as."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer.models import resnet


@pytest.fixture
def small(monkeypatch):
    """The same network with one block in each of two narrow stages."""
    monkeypatch.setattr(resnet, 'STAGES', ((8, 1), (16, 1)))


def _build(images, mode, **settings):
    labels = tf.zeros([images.shape[0]], tf.int64)
    params = fakes.make_params(**{'precision': 'float32', 'num_classes': 1000, **settings})
    return resnet.model_fn({'image': images}, labels, mode, params)


@pytest.fixture(scope='module')
def graph():
    """The evaluation graph at 224 pixels and 1,000 classes."""
    with tf.Graph().as_default() as built:
        _build(tf.zeros([2, 224, 224, 3], tf.uint8), 'eval')
    return built


def test_it_has_the_published_number_of_weights(graph):
    with graph.as_default():
        assert sum(variable.shape.num_elements() for variable in tf.compat.v1.trainable_variables()) == 25_557_032


def test_it_has_53_convolutions_and_the_stride_in_those_of_3_by_3(graph):
    convolutions = [op for op in graph.get_operations() if op.type == 'Conv2D']
    assert len(convolutions) == 53
    strided = {op.name: tuple(op.get_attr('strides'))[1:3] for op in convolutions if op.get_attr('strides')[1] > 1}
    kernels = sorted(name.rsplit('/', 2)[-2] for name in strided)
    assert kernels == ['conv2'] * 3 + ['shortcut'] * 3 + ['stem'] and set(strided.values()) == {(2, 2)}
    (features,) = [op for op in graph.get_operations() if op.name.endswith('stage4/block3/Relu_2')]
    assert features.outputs[0].shape == [2, 7, 7, 2048]


def test_blocks_are_the_identity_at_first(small):
    with tf.Graph().as_default():
        _build(tf.zeros([2, 32, 32, 3], tf.uint8), 'eval', num_classes=3)
        variables = {variable.op.name: variable for variable in tf.compat.v1.global_variables()}
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            gammas = session.run({name: v for name, v in variables.items() if name.endswith('gamma')})
    assert len(gammas) == 9
    zero = [name for name, value in gammas.items() if not value.any()]
    assert len(zero) == 2 and all('/conv3_norm/' in name for name in zero)
    assert all((value == 1).all() for name, value in gammas.items() if name not in zero)


@pytest.mark.parametrize('shape', [(784,), (32, 48, 3)])
def test_it_takes_flat_digits_and_pictures_of_any_shape(small, shape):
    with tf.Graph().as_default():
        spec = _build(tf.zeros([2, *shape], tf.uint8), 'infer', num_classes=10)
        assert spec.predictions['probabilities'].shape == [2, 10]


def test_colours_are_normalised_by_the_statistics_of_imagenet():
    images = np.array([[[[124, 116, 104], [255, 0, 0]]]], np.uint8)
    normalised = resnet._normalize(tf.constant(images), tf.float32).numpy()[0, 0]
    np.testing.assert_allclose(normalised[0], 0, atol=0.02)
    np.testing.assert_allclose(normalised[1], [2.249, -2.036, -1.804], atol=1e-3)


def test_bfloat16_is_for_training_only(small):
    for mode, count in (('train', 9), ('eval', 0)):
        with tf.Graph().as_default() as graph:
            _build(tf.zeros([2, 32, 32, 3], tf.uint8), mode, num_classes=3, precision='bfloat16')
            kinds = [op.outputs[0].dtype for op in graph.get_operations() if op.type == 'Conv2D']
            assert len([kind for kind in kinds if kind == tf.bfloat16]) == count
            assert {v.dtype.base_dtype for v in tf.compat.v1.trainable_variables()} == {tf.float32}


def test_it_learns_trains_in_the_loop_and_evaluates_as_it_was_trained(small, tmp_path):
    params = fakes.make_params(precision='float32', optimizer='momentum', learning_rate=0.05)
    estimator, seen = fakes.train_looped(
        *(resnet.model_fn, tmp_path),
        max_steps=60,
        steps_per_loop=20,
        batch_size=32,
        params=params,
        input_fn=fakes.make_blobs_input_fn(32, width=64),
    )
    assert [step for step, _ in seen] == [20, 40, 60]
    # By the averages that training has left: evaluation has no statistics of its batch.
    metrics = estimator.evaluate(fakes.make_blobs_input_fn(32, width=64), steps=10)
    assert metrics['accuracy'] > 0.95 and metrics['average_loss'] < 0.3, metrics
