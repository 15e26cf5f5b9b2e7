"""A perceptron with two hidden layers: the network of the Cloud ML MNIST sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import tensorflow as tf

from trainer import compat
from trainer.errors import UsageError
from trainer.models.classifier import get_inputs, make_classifier_spec
from trainer.summaries import Summaries


def model_fn(features: Mapping[str, tf.Tensor], labels: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    """Classifies flat pictures.

    Args:
      features: 'image' [batch, pixels] uint8, or float32 in [0, 1].
      labels: [batch] int64.
      mode: a ModeKeys value.
      params: 'hidden1', 'hidden2' (units), 'dropout', 'num_classes', and what the classifier reads.
    """
    inputs = get_inputs(features)
    if len(inputs) != 1:
        raise UsageError(
            f'--model=mlp takes one feature, the dataset has {len(inputs)} ({", ".join(inputs)}); '
            'expected --model=linear, dnn or wide_deep, or one of your own'
        )
    (images,) = inputs.values()
    pixels = images.shape[-1]
    summaries = Summaries(params.get('summaries'))
    side = int(pixels**0.5)
    if side * side == pixels:
        summaries.image('images', tf.reshape(images, [-1, side, side, 1]))
    # Bytes travel to the device and become numbers in [0, 1] there: a quarter of the traffic.
    net = tf.cast(images, tf.float32) / 255.0 if images.dtype == tf.uint8 else images
    for name, units in (('hidden1', params['hidden1']), ('hidden2', params['hidden2'])):
        net = tf.nn.relu(dense(net, units, name=name, stddev=(2.0 / net.shape[-1]) ** 0.5))
        summaries.histogram(name, net)
        net = drop(net, mode, params)
    logits = dense(net, params['num_classes'], name='logits', stddev=(1.0 / net.shape[-1]) ** 0.5)
    return make_classifier_spec(logits, features, labels, mode, params, summaries=summaries)


def drop(net: tf.Tensor, mode: str, params: Mapping[str, Any]) -> tf.Tensor:
    """Returns `net` with a share `params['dropout']` of its units at 0 when training (Srivastava et al. 2014)."""
    rate = params['dropout'] if mode == compat.estimator.ModeKeys.TRAIN else 0.0
    return tf.nn.dropout(net, rate=rate) if rate else net


def dense(inputs: tf.Tensor, units: int, *, name: str, stddev: float) -> tf.Tensor:
    """Returns `inputs @ weights + biases`, [batch, inputs] float32 -> [batch, units].

    Args:
      stddev: of the initial weights; (2 / inputs) ** 0.5 before a ReLU (He et al. 2015, eq. 10).
    """
    with tf.compat.v1.variable_scope(name, use_resource=True):
        shape = [inputs.shape[-1], units]
        weights = tf.compat.v1.get_variable(
            'weights', shape, initializer=tf.compat.v1.truncated_normal_initializer(stddev=stddev)
        )
        biases = tf.compat.v1.get_variable('biases', [units], initializer=tf.compat.v1.zeros_initializer())
    return tf.matmul(inputs, weights) + biases
