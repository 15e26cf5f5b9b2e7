"""Batch normalisation over the global batch, whatever devices and processes it is divided among."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.tpu import tpu_function


def batch_norm(
    inputs: tf.Tensor,
    *,
    is_training: bool,
    name: str,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    gamma_initializer: Any = None,
) -> tf.Tensor:
    """Returns `inputs` with mean `beta` and deviation `gamma` in each channel (Ioffe and Szegedy 2015, algorithm 1).

    In training the statistics are those of the batch over all replicas that make a step together: over the cores of a TPU, and
    over the replicas of a strategy. Their moving averages, with which all else is normalised, are updated by UPDATE_OPS.

    Args:
      inputs: [batch, ..., channels] float32 or bfloat16; the statistics are float32 in any case.
      is_training: whether to use, and to average, the statistics of the batch.
      name: of the variables gamma, beta, moving_mean and moving_variance.
      momentum: kept of the moving averages in a step, of 1.
      epsilon: added to the variance.
      gamma_initializer: None is 1.
    """
    channels = inputs.shape[-1]
    zeros, ones = tf.compat.v1.zeros_initializer(), tf.compat.v1.ones_initializer()
    with tf.compat.v1.variable_scope(name, use_resource=True):
        gamma = tf.compat.v1.get_variable('gamma', [channels], initializer=gamma_initializer or ones)
        beta = tf.compat.v1.get_variable('beta', [channels], initializer=zeros)
        # Each replica writes its own, and as all have the same statistics none has to be sent.
        moving = [
            tf.compat.v1.get_variable(
                moment,
                [channels],
                initializer=initializer,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            )
            for moment, initializer in (('moving_mean', zeros), ('moving_variance', ones))
        ]
        # The fused kernels want two axes between batch and channels.
        pictures = inputs if inputs.shape.rank == 4 else tf.reshape(inputs, [-1, 1, 1, channels])
        if not is_training:
            net = _fuse(pictures, gamma, beta, moving, epsilon, is_training=False)[0]
            return tf.reshape(net, tf.shape(inputs)) if inputs.shape.rank != 4 else net
        if _count_replicas() == 1:
            net, mean, variance, *_ = _fuse(pictures, gamma, beta, [[], []], epsilon, is_training=True)
            # The kernel gives the estimate for the population, n / (n - 1) times the variance of the batch.
            count = tf.cast(tf.size(pictures) // channels, tf.float32)
            variance *= (count - 1.0) / count
        else:
            net = tf.cast(pictures, tf.float32)
            moments = tf.stack([tf.reduce_mean(net, axis=[0, 1, 2]), tf.reduce_mean(net * net, axis=[0, 1, 2])])
            mean, squares = tf.unstack(replica_mean(moments))
            variance = tf.maximum(squares - mean * mean, 0.0)
            scale = gamma * tf.math.rsqrt(variance + epsilon)
            net = tf.cast(net * scale + (beta - mean * scale), inputs.dtype)
        for variable, value in zip(moving, (mean, variance)):
            # v <- momentum * v + (1 - momentum) * value
            update = variable.assign_sub((variable.read_value() - value) * (1.0 - momentum))
            tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update.op)
        return tf.reshape(net, tf.shape(inputs)) if inputs.shape.rank != 4 else net


def replica_mean(values: tf.Tensor) -> tf.Tensor:
    """Returns the mean of a tensor over all replicas that make a step together, on each of them; differentiable."""
    if _count_replicas() == 1:
        return values
    shards = tpu_function.get_tpu_context().number_of_shards
    if shards:
        return tf.compat.v1.tpu.cross_replica_sum(values) / shards
    mean_op = tf.distribute.ReduceOp.MEAN
    context = tf.distribute.get_replica_context()

    @tf.custom_gradient
    def attach_gradient(local: tf.Tensor, mean: tf.Tensor) -> Any:
        # An own gradient: for that of its all-reduce TensorFlow would look up the variables behind all replicas' values.
        del local
        return tf.identity(mean), lambda gradient: (context.all_reduce(mean_op, tf.stop_gradient(gradient)), None)

    return attach_gradient(values, context.all_reduce(mean_op, tf.stop_gradient(values)))


def _count_replicas() -> int:
    context = tf.distribute.get_replica_context()
    return tpu_function.get_tpu_context().number_of_shards or (context.num_replicas_in_sync if context else 1)


def _fuse(pictures: tf.Tensor, gamma: Any, beta: Any, moments: Any, epsilon: float, *, is_training: bool) -> Any:
    return tf.raw_ops.FusedBatchNormV3(
        x=pictures, scale=gamma, offset=beta, mean=moments[0], variance=moments[1], epsilon=epsilon, is_training=is_training
    )
