"""ResNet-50 v1.5 (He et al. 2016, https://arxiv.org/abs/1512.03385): bottleneck blocks, the stride in their 3 x 3 convolution.

Version 1 of the paper has the stride in the first 1 x 1 convolution; v1.5, with which most figures since are stated, gains
half a point of accuracy for a few percent of time. At 1,000 classes it has 25,557,032 weights.

The last normalisation of each block starts with gamma 0: a block is the identity at first, and large batches train (Goyal et
al. 2017, https://arxiv.org/abs/1706.02677, section 5.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import tensorflow as tf

from trainer import compat
from trainer.images import normalize
from trainer.models.classifier import make_classifier_spec
from trainer.models.layers import convolve, get_images
from trainer.models.mlp import dense
from trainer.normalization import batch_norm
from trainer.summaries import Summaries

# Channels inside of the blocks of a stage, and their number; a block puts out four times as many.
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
_EXPANSION = 4


def model_fn(features: Mapping[str, tf.Tensor], labels: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    """Classifies pictures.

    Args:
      features: 'image' [batch, height, width, channels] or [batch, side * side] (grey) uint8, or float32 in [0, 1].
      labels: [batch] int64.
      mode: a ModeKeys value.
      params: 'precision', 'num_classes', and what the classifier reads.
    """
    images = get_images(features, model='resnet50')
    summaries = Summaries(params.get('summaries'))
    summaries.image('images', images)
    is_training = mode == compat.estimator.ModeKeys.TRAIN
    # What is evaluated is what is served, and not every processor that serves has fast bfloat16.
    dtype = tf.as_dtype(params['precision'] if is_training else 'float32')
    net = compute_features(_normalize(images, dtype), is_training=is_training)
    net = tf.cast(tf.reduce_mean(net, axis=[1, 2]), tf.float32)
    summaries.histogram('features', net)
    logits = dense(net, params['num_classes'], name='logits', stddev=0.01)
    return make_classifier_spec(logits, features, labels, mode, params, summaries=summaries)


def compute_features(images: tf.Tensor, *, is_training: bool) -> tf.Tensor:
    """[batch, height, width, channels] of mean 0 -> [batch, ceil(height / 32), ceil(width / 32), 2048], float32 or bfloat16."""
    net = _convolve_and_norm(images, 64, 7, name='stem', strides=2, is_training=is_training)
    # Zeros are the least that comes out of a ReLU, so that padding by them never wins.
    net = tf.nn.max_pool2d(_pad(tf.nn.relu(net), 3), 3, 2, 'VALID')
    for stage, (filters, num_blocks) in enumerate(STAGES, start=1):
        for block in range(num_blocks):
            strides = 2 if stage > 1 and block == 0 else 1
            net = _add_block(net, filters, strides, name=f'stage{stage}/block{block + 1}', is_training=is_training)
    return net


def _add_block(net: tf.Tensor, filters: int, strides: int, *, name: str, is_training: bool) -> tf.Tensor:
    with tf.compat.v1.variable_scope(name):
        shortcut = net
        if strides > 1 or net.shape[-1] != _EXPANSION * filters:
            shortcut = _convolve_and_norm(
                net, _EXPANSION * filters, 1, name='shortcut', strides=strides, is_training=is_training
            )
        net = tf.nn.relu(_convolve_and_norm(net, filters, 1, name='conv1', is_training=is_training))
        net = tf.nn.relu(_convolve_and_norm(net, filters, 3, name='conv2', strides=strides, is_training=is_training))
        net = _convolve_and_norm(
            *(net, _EXPANSION * filters, 1),
            name='conv3',
            is_training=is_training,
            gamma_initializer=tf.compat.v1.zeros_initializer(),
        )
        return tf.nn.relu(net + shortcut)


def _convolve_and_norm(
    net: tf.Tensor,
    filters: int,
    kernel: int,
    *,
    name: str,
    is_training: bool,
    strides: int = 1,
    gamma_initializer: Any = None,
) -> tf.Tensor:
    if strides > 1 and kernel > 1:
        net = _pad(net, kernel)
    padding = 'SAME' if strides == 1 else 'VALID'
    net = convolve(net, filters, kernel, name=name, strides=strides, padding=padding, use_bias=False)
    return batch_norm(net, is_training=is_training, name=f'{name}_norm', gamma_initializer=gamma_initializer)


def _pad(net: tf.Tensor, kernel: int) -> tf.Tensor:
    """As much on each side: 'SAME' would pad even sizes on the right and at the bottom only, and shift the picture."""
    return tf.pad(net, [[0, 0], [kernel // 2, kernel // 2], [kernel // 2, kernel // 2], [0, 0]])


def _normalize(images: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if images.shape[-1] == 3 and images.dtype == tf.uint8:
        return normalize(images, dtype=dtype)
    net = tf.cast(images, tf.float32) / 255.0 if images.dtype == tf.uint8 else images
    return tf.cast(net - 0.5, dtype)
