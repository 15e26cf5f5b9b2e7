"""DCGAN (Radford et al. 2016, https://arxiv.org/abs/1511.06434): a generator learns to make pictures like those of the dataset.

One training step, in this order:
  1. The batch is cut into `n_disc` parts. For each part in turn the generator makes as many fakes, and the discriminator
     makes one update on both.
  2. The generator makes one update on the fakes of the last part, judged by the discriminator as it has become.
The updates are unrolled and ordered by control dependencies: a TPU has no tf.cond that could choose between them, and to set a
loss to zero instead would still move the weights by the momentum of Adam. Every pass that is built reads the weights anew.

With `gan_shift` the discriminator sees real pictures and fakes shifted at random (Zhao et al. 2020, DiffAugment,
https://arxiv.org/abs/2006.10738): of a few thousand pictures it would else learn each one by heart, and the generator nothing.

What evaluates, predicts and is exported is the average of the generator's weights over the last steps (Yazici et al. 2019,
https://arxiv.org/abs/1806.04498): the two networks circle around a balance, and each single step is beside it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Optional

import tensorflow as tf

from trainer import compat
from trainer.averages import is_averaged, move_averages
from trainer.datasets import Dataset
from trainer.errors import UsageError
from trainer.features import Feature, Schema
from trainer.models import layers
from trainer.models.classifier import KEY, WEIGHTS
from trainer.models.mlp import dense
from trainer.normalization import batch_norm
from trainer.optimizers import compute_learning_rate, make_optimizer
from trainer.summaries import Summaries

NOISE = 'noise'
NOISE_SIZE = 100
# As in the paper; a kernel of 4 where the paper has 5, for it divides by the stride.
_STDDEV, _LEAK, _KERNEL = 0.02, 0.2, 4
_FIRST_SIDE = 4
# The evaluation compares pictures of so many pixels a side.
_COARSE_SIDE = 8
_GRID_SIDE = 8
_GENERATOR, _AVERAGE = 'generator', 'generator_average'
# Kept of the average in a step.
_AVERAGE_DECAY = 0.999


def model_fn(features: Mapping[str, tf.Tensor], labels: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    """Learns to make pictures; the labels are not used.

    Args:
      features: [batch, height, width, channels] or [batch, side * side] uint8, or float32 in [0, 1]; to predict, 'noise'
        [batch, 100] float32 of a standard normal distribution.
      labels: not used.
      mode: a ModeKeys value.
      params: 'gan_size' (pixels a side of the pictures made), 'gan_filters', 'gan_shift', 'n_disc', 'precision', 'schema' (of
        the dataset's features), and what the optimizer reads.
    """
    modes = compat.estimator.ModeKeys
    if mode == modes.PREDICT:
        return _make_predict_spec(features, mode, params)
    images = _prepare(layers.get_images(features, model='dcgan'), params['gan_size'])
    if mode == modes.EVAL:
        return _make_eval_spec(images, features.get(WEIGHTS), mode, params)
    return _make_train_spec(images, mode, params)


def make_serving_dataset(dataset: Dataset) -> Dataset:
    """Returns what an export is given, and what `--mode=predict` reads: noise, a point of the generator's input."""
    schema = Schema({NOISE: Feature('float', (NOISE_SIZE,)), dataset.label: dataset.schema[dataset.label]})
    return dataclasses.replace(dataset, schema=schema, key=None, features_fn=None, vocabularies={}, moments={})


def generate(noise: tf.Tensor, params: Mapping[str, Any], *, is_training: bool) -> tf.Tensor:
    """Returns pictures [batch, gan_size, gan_size, channels] float32 in [-1, 1] from noise [batch, 100] float32."""
    # What is evaluated is what is served, and not every processor that serves has fast bfloat16.
    dtype = tf.as_dtype(params['precision'] if is_training else 'float32')
    num_stages = (params['gan_size'] // _FIRST_SIDE).bit_length() - 1
    with tf.compat.v1.variable_scope(_GENERATOR if is_training else _AVERAGE, reuse=tf.compat.v1.AUTO_REUSE):
        filters = params['gan_filters'] * 2 ** (num_stages - 1)
        net = dense(noise, _FIRST_SIDE * _FIRST_SIDE * filters, name='project', stddev=_STDDEV)
        net = tf.reshape(tf.cast(net, dtype), [-1, _FIRST_SIDE, _FIRST_SIDE, filters])
        net = tf.ensure_shape(net, [noise.shape[0], *net.shape[1:]])
        net = tf.nn.relu(batch_norm(net, is_training=is_training, name='project_norm'))
        for stage in range(1, num_stages):
            filters //= 2
            net = layers.convolve_transposed(net, filters, _KERNEL, name=f'up{stage}', stddev=_STDDEV, use_bias=False)
            net = tf.nn.relu(batch_norm(net, is_training=is_training, name=f'up{stage}_norm'))
        channels = _count_channels(params['schema'])
        net = layers.convolve_transposed(net, channels, _KERNEL, name='picture', stddev=_STDDEV, use_bias=True)
        return tf.tanh(tf.cast(net, tf.float32))


def discriminate(images: tf.Tensor, params: Mapping[str, Any], *, is_training: bool) -> tf.Tensor:
    """Returns logits [batch] float32, above 0 for a picture held for real, from [batch, size, size, channels] in [-1, 1]."""
    num_stages = (params['gan_size'] // _FIRST_SIDE).bit_length() - 1
    net = tf.cast(images, params['precision'] if is_training else 'float32')
    with tf.compat.v1.variable_scope('discriminator', reuse=tf.compat.v1.AUTO_REUSE):
        for stage in range(num_stages):
            # The first sees the pictures as they are, brightness included: no normalisation.
            net = layers.convolve(
                *(net, params['gan_filters'] * 2**stage, _KERNEL),
                name=f'down{stage}',
                strides=2,
                stddev=_STDDEV,
                use_bias=stage == 0,
            )
            if stage:
                net = batch_norm(net, is_training=is_training, name=f'down{stage}_norm')
            net = tf.nn.leaky_relu(net, _LEAK)
        net = tf.reshape(tf.cast(net, tf.float32), [-1, net.shape[1] * net.shape[2] * net.shape[3]])
        return tf.reshape(dense(net, 1, name='logits', stddev=_STDDEV), [-1])


def shift(images: tf.Tensor, share: float) -> tf.Tensor:
    """Shifts each picture by whole pixels at random, up and down and sideways; what comes in is -1, black.

    Args:
      images: [batch, side, side, channels] in [-1, 1], of a static shape; differentiable.
      share: largest shift, of the side; 0 gives the pictures back.
    """
    batch, side = images.shape[:2]
    most = round(side * share)
    if not most:
        return images
    net = tf.pad(images, [[0, 0], [most, most], [most, most], [0, 0]], constant_values=tf.constant(-1, images.dtype))
    for axis in (1, 2):
        offsets = tf.random.uniform([batch, 1], 0, 2 * most + 1, tf.int32)
        net = tf.gather(net, offsets + tf.range(side), axis=axis, batch_dims=1)
    return net


def _count_channels(schema: Schema) -> int:
    """Channels of the pictures of a dataset: 1 where they come flat."""
    picture, *others = schema.features.values()
    if others:
        raise UsageError(f'--model=dcgan takes one feature, a picture; the dataset has {", ".join(schema.features)}')
    return 1 if len(picture.static_shape) == 1 else picture.static_shape[-1] or 1


def _prepare(images: tf.Tensor, size: int) -> tf.Tensor:
    """[batch, height, width, channels] uint8, or float32 in [0, 1] -> [batch, size, size, channels] float32 in [-1, 1]."""
    net = tf.cast(images, tf.float32) / (127.5 if images.dtype == tf.uint8 else 0.5) - 1.0
    return net if net.shape[1:3] == [size, size] else tf.image.resize(net, [size, size])


def _make_train_spec(images: tf.Tensor, mode: str, params: Mapping[str, Any]) -> Any:
    batch, n_disc = images.shape[0], params['n_disc']
    if batch % n_disc:
        raise UsageError(
            f'--n_disc={n_disc}: the discriminator makes so many updates of a step, each on a part of the batch; the '
            f'{batch} examples of a replica do not divide by it. Expected a --batch_size that does'
        )
    if params.get('sync_replicas'):
        raise UsageError('--sync_replicas awaits the gradients of one update a step, --model=dcgan makes several; leave it out')
    most = params['gan_shift']
    learning_rate = compute_learning_rate(params)
    discriminator_optimizer, generator_optimizer = (make_optimizer(params, learning_rate=learning_rate) for _ in range(2))
    update: Any = tf.no_op()
    for part in range(n_disc):
        with tf.control_dependencies([update]), tf.name_scope(f'discriminator_update{part}'):
            real = images[part * batch // n_disc : (part + 1) * batch // n_disc]
            with tf.name_scope('make') as make_scope:
                fake = generate(tf.random.normal([batch // n_disc, NOISE_SIZE]), params, is_training=True)
            with tf.name_scope('judge_real') as real_scope:
                real_logits = discriminate(shift(real, most), params, is_training=True)
            # Both passes move the same averages: at once they would now and then undo each other.
            real_updates = _get_update_ops(real_scope)
            with tf.control_dependencies(real_updates), tf.name_scope('judge_fake') as fake_scope:
                fake_logits = discriminate(shift(tf.stop_gradient(fake), most), params, is_training=True)
            discriminator_loss = tf.reduce_mean(_discriminator_losses(real_logits, fake_logits))
            variables = tf.compat.v1.trainable_variables('discriminator/')
            minimize = discriminator_optimizer.minimize(discriminator_loss, var_list=variables)
            update = tf.group(minimize, *real_updates, *_get_update_ops(fake_scope))
    with tf.control_dependencies([update]), tf.name_scope('generator_update'):
        generator_loss = tf.reduce_mean(_generator_losses(discriminate(shift(fake, most), params, is_training=True)))
        variables = tf.compat.v1.trainable_variables('generator/')
        step = tf.compat.v1.train.get_or_create_global_step()
        minimize = generator_optimizer.minimize(generator_loss, var_list=variables, global_step=step)
        # The averages of the fakes that this update is made of; those of other passes are never run.
        made = tf.group(minimize, *_get_update_ops(make_scope))
    with tf.control_dependencies([made]):
        train_op = _average_generator()
    loss = discriminator_loss + generator_loss
    summaries = Summaries(params.get('summaries'))
    summaries.scalar('loss', loss)
    summaries.scalar('discriminator_loss', discriminator_loss)
    summaries.scalar('generator_loss', generator_loss)
    summaries.scalar('learning_rate', learning_rate)
    summaries.grid('samples', (fake + 1.0) / 2.0, _GRID_SIDE)
    return compat.estimator.tpu.TPUEstimatorSpec(
        mode=mode, loss=loss, train_op=train_op, host_call=summaries.host_call(train_op)
    )


def _average_generator() -> Any:
    """Returns the op that moves the average of the generator's weights, and of its batch statistics, towards them."""
    variables = filter(is_averaged, tf.compat.v1.global_variables(f'{_GENERATOR}/'))
    return move_averages(variables, _AVERAGE_DECAY, lambda name: name.replace(_GENERATOR, _AVERAGE, 1))


def _discriminator_losses(real_logits: tf.Tensor, fake_logits: tf.Tensor) -> tf.Tensor:
    """Minus the objective of the discriminator, Goodfellow et al. 2014, eq. 1; [batch] each."""
    # -log sigmoid(x) = softplus(-x)
    return tf.nn.softplus(-real_logits) + tf.nn.softplus(fake_logits)


def _generator_losses(fake_logits: tf.Tensor) -> tf.Tensor:
    """-log D(G(z)), which keeps a gradient where the discriminator is sure (Goodfellow et al. 2014, section 3); [batch]."""
    return tf.nn.softplus(-fake_logits)


def _get_update_ops(scope: str) -> list[Any]:
    """Updates of moving averages that passes inside of a name scope have made."""
    return tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, scope=re.escape(scope))


def _make_eval_spec(images: tf.Tensor, weights: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    batch = tf.shape(images)[0] if images.shape[0] is None else images.shape[0]
    # The graph's seed makes it the same at each evaluation; else chance would choose the best export.
    noise = tf.ensure_shape(tf.random.normal([batch, NOISE_SIZE]), [images.shape[0], NOISE_SIZE])
    fake = generate(noise, params, is_training=False)
    real_logits = discriminate(images, params, is_training=False)
    fake_logits = discriminate(fake, params, is_training=False)
    tensors = {
        'real_logits': real_logits,
        'fake_logits': fake_logits,
        'real': _coarsen(images),
        'fake': _coarsen(fake),
        'weights': tf.ones_like(real_logits) if weights is None else weights,
    }
    loss = tf.reduce_mean(_discriminator_losses(real_logits, fake_logits) + _generator_losses(fake_logits))
    return compat.estimator.tpu.TPUEstimatorSpec(mode=mode, loss=loss, eval_metrics=(_metric_fn, tensors))


def _coarsen(images: tf.Tensor) -> tf.Tensor:
    """[batch, size, size, channels] -> [batch, 8 * 8 * channels]: averages of square areas."""
    factor = images.shape[1] // _COARSE_SIDE
    net = tf.nn.avg_pool2d(images, factor, factor, 'VALID')
    return tf.reshape(net, [-1, _COARSE_SIDE * _COARSE_SIDE * images.shape[-1]])


def _metric_fn(
    real_logits: tf.Tensor, fake_logits: tf.Tensor, real: tf.Tensor, fake: tf.Tensor, weights: tf.Tensor
) -> dict[str, Any]:
    """Metrics over the whole evaluation set; padded rows have weight 0."""
    mean = tf.compat.v1.metrics.mean
    discriminator_losses = _discriminator_losses(real_logits, fake_logits)
    generator_losses = _generator_losses(fake_logits)
    return {
        'average_loss': mean(discriminator_losses + generator_losses, weights=weights),
        'discriminator_loss': mean(discriminator_losses, weights=weights),
        'generator_loss': mean(generator_losses, weights=weights),
        'frechet_distance': _frechet_metric(real, fake, weights),
    }


def _frechet_metric(real: tf.Tensor, fake: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """The distance of two sets of pictures: 0 where their means and covariances agree.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) (Dowson and Landau 1982), which Heusel et al. 2017 take of the features of a
    trained network; here it is of the coarse pixels, which need none. It grows both when samples get worse and when they get
    all alike, and neither loss of a GAN says that.

    Args:
      real: [batch, pixels] float32.
      fake: [batch, pixels] float32.
      weights: [batch] float32.

    Returns:
      The distance, [] float64, and the op that takes in one batch.
    """
    total = tf.reduce_sum(weights)
    moments, updates = [], []
    for pixels in (real, fake):
        weighted = pixels * weights[:, tf.newaxis]
        sums = tf.concat([tf.reduce_sum(weighted, axis=0)[tf.newaxis], tf.matmul(weighted, pixels, transpose_a=True)], axis=0)
        moment, update = tf.compat.v1.metrics.mean_tensor(tf.math.divide_no_nan(sums, total), weights=total)
        moments.append(moment)
        updates.append(update)
    return compute_frechet_distance(*moments), tf.group(*updates)


def compute_frechet_distance(real: tf.Tensor, fake: tf.Tensor) -> tf.Tensor:
    """Returns the distance, [] float64, from two stacks [1 + pixels, pixels]: E(x) above E(x x^T)."""
    means, covariances = [], []
    for moment in (real, fake):
        moment = tf.cast(moment, tf.float64)
        means.append(moment[0])
        covariances.append(moment[1:] - moment[:1] * moment[0][:, tf.newaxis])
    values, vectors = tf.linalg.eigh(covariances[0])
    # (C1 C2)^(1/2) has the trace of (C1^(1/2) C2 C1^(1/2))^(1/2), which is symmetric.
    root = tf.matmul(vectors * tf.sqrt(tf.maximum(values, 0)), vectors, transpose_b=True)
    product = tf.linalg.eigvalsh(root @ covariances[1] @ root)
    trace = tf.linalg.trace(covariances[0] + covariances[1]) - 2 * tf.reduce_sum(tf.sqrt(tf.maximum(product, 0)))
    return tf.reduce_sum((means[0] - means[1]) ** 2) + trace


def _make_predict_spec(features: Mapping[str, tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    pictures = generate(features[NOISE], params, is_training=False)
    predictions = {'image': tf.cast(tf.round((pictures + 1.0) * 127.5), tf.uint8)}
    if KEY in features:
        predictions[KEY] = tf.identity(features[KEY])
    output = compat.estimator.export.PredictOutput(predictions)
    return compat.estimator.tpu.TPUEstimatorSpec(mode=mode, predictions=predictions, export_outputs={'serving_default': output})
