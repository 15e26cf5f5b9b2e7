"""A small convolutional network for small pictures, such as digits: two convolutions, one hidden layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import tensorflow as tf

from trainer.models.classifier import make_classifier_spec
from trainer.models.layers import convolve, get_images
from trainer.models.mlp import dense, drop
from trainer.summaries import Summaries

_FILTERS = (32, 64)
_KERNEL = 5


def model_fn(features: Mapping[str, tf.Tensor], labels: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    """Classifies pictures.

    Args:
      features: 'image' [batch, side * side] (grey) or [batch, height, width, channels] uint8, or float32 in [0, 1].
      labels: [batch] int64.
      mode: a ModeKeys value.
      params: 'hidden1' (units after the convolutions), 'dropout', 'num_classes', and what the classifier reads.
    """
    net = images = get_images(features, model='convnet')
    summaries = Summaries(params.get('summaries'))
    summaries.image('images', net)
    net = tf.cast(net, tf.float32) / 255.0 if images.dtype == tf.uint8 else net
    for number, filters in enumerate(_FILTERS, start=1):
        net = tf.nn.relu(convolve(net, filters, _KERNEL, name=f'conv{number}'))
        net = tf.nn.max_pool2d(net, 2, 2, 'SAME')
    net = tf.reshape(net, [-1, net.shape[1] * net.shape[2] * net.shape[3]])
    net = tf.nn.relu(dense(net, params['hidden1'], name='hidden1', stddev=(2.0 / net.shape[-1]) ** 0.5))
    summaries.histogram('hidden1', net)
    net = drop(net, mode, params)
    logits = dense(net, params['num_classes'], name='logits', stddev=(1.0 / net.shape[-1]) ** 0.5)
    return make_classifier_spec(logits, features, labels, mode, params, summaries=summaries)
