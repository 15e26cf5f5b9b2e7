"""What the networks on pictures share: how a batch becomes [batch, height, width, channels], and convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import tensorflow as tf

from trainer.errors import UsageError
from trainer.models.classifier import get_inputs


def get_images(features: Mapping[str, tf.Tensor], *, model: str) -> tf.Tensor:
    """Returns the pictures of a batch as [batch, height, width, channels], in the dtype that they came in.

    Args:
      features: of the model_fn: one input, [batch, height, width, channels], or [batch, side * side] for grey pictures.
      model: for the message.

    Raises:
      UsageError: the dataset has other inputs.
    """
    inputs = get_inputs(features)
    images = next(iter(inputs.values()))
    if len(inputs) == 1 and images.shape.rank == 4:
        return images
    side = int((images.shape[-1] or 0) ** 0.5) if images.shape.rank == 2 else 0
    if len(inputs) != 1 or not side or side * side != images.shape[-1]:
        shapes = ', '.join(f'{name} {tensor.shape[1:]}' for name, tensor in inputs.items())
        raise UsageError(
            f'--model={model} takes one feature, a picture of (height, width, channels) or of side x side pixels; the dataset '
            f'has {shapes}'
        )
    return tf.reshape(images, [-1, side, side, 1])


def convolve(
    images: tf.Tensor,
    filters: int,
    kernel: int,
    *,
    name: str,
    strides: int = 1,
    padding: str = 'SAME',
    stddev: Optional[float] = None,
    use_bias: bool = True,
) -> tf.Tensor:
    """[batch, height, width, channels] -> [batch, height', width', filters], in the dtype of `images`; weights are float32.

    Args:
      kernel: height and width, in pixels.
      strides: in pixels, both ways.
      padding: 'SAME' or 'VALID'.
      stddev: of the initial weights; None is He et al. 2015, eq. 10: (2 / inputs of an output) ** 0.5.
      use_bias: False where batch normalisation follows, which has one.
    """
    channels = images.shape[-1]
    stddev = (2.0 / (kernel * kernel * channels)) ** 0.5 if stddev is None else stddev
    with tf.compat.v1.variable_scope(name, use_resource=True):
        weights = tf.compat.v1.get_variable(
            'weights',
            [kernel, kernel, channels, filters],
            initializer=tf.compat.v1.truncated_normal_initializer(stddev=stddev),
        )
        net = tf.nn.conv2d(images, tf.cast(weights, images.dtype), strides=strides, padding=padding)
        return add_bias(net) if use_bias else net


def convolve_transposed(images: tf.Tensor, filters: int, kernel: int, *, name: str, stddev: float, use_bias: bool) -> tf.Tensor:
    """[batch, height, width, channels] -> [batch, 2 * height, 2 * width, filters]: the transpose of a convolution of stride 2.

    Args:
      kernel: even, or its steps would overlap unevenly and leave a checkerboard (Odena et al. 2016).
      stddev: of the initial weights.
      use_bias: False where batch normalisation follows.
    """
    batch, height, width, channels = images.shape
    with tf.compat.v1.variable_scope(name, use_resource=True):
        weights = tf.compat.v1.get_variable(
            'weights',
            [kernel, kernel, filters, channels],
            initializer=tf.compat.v1.truncated_normal_initializer(stddev=stddev),
        )
        # The batch is known when training; of an export it is not.
        shape = [tf.shape(images)[0] if batch is None else batch, 2 * height, 2 * width, filters]
        net = tf.nn.conv2d_transpose(images, tf.cast(weights, images.dtype), shape, strides=2, padding='SAME')
        return add_bias(net) if use_bias else net


def add_bias(net: tf.Tensor) -> tf.Tensor:
    """Returns `net` plus the variable `biases`, one for each channel, 0 at first."""
    biases = tf.compat.v1.get_variable('biases', [net.shape[-1]], initializer=tf.compat.v1.zeros_initializer())
    return tf.nn.bias_add(net, tf.cast(biases, net.dtype))
