"""What every classifier shares: loss, metrics, summaries, predictions, and the TPUEstimatorSpec that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import compat
from trainer.optimizers import compute_learning_rate, make_optimizer, make_train_op
from trainer.summaries import Summaries

# Features of these names are not the network's input.
WEIGHTS, KEY = 'weights', 'key'


def make_classifier_spec(
    logits: tf.Tensor,
    features: Mapping[str, tf.Tensor],
    labels: Optional[tf.Tensor],
    mode: str,
    params: Mapping[str, Any],
    *,
    summaries: Optional[Summaries] = None,
    make_train_op_fn: Optional[Callable[[tf.Tensor, Any], Any]] = None,
) -> Any:
    """Returns the TPUEstimatorSpec of a classifier.

    Args:
      logits: [batch, num_classes], float32 or bfloat16.
      features: of the model_fn; 'weights' [batch] float32 (0 takes a row out) and 'key' [batch] are optional.
      labels: [batch] or [batch, 1] int64 in [0, num_classes); None to predict.
      mode: a ModeKeys value.
      params: of the model_fn.
      summaries: what the network has collected; loss, accuracy and learning rate are added to it.
      make_train_op_fn: from loss and learning rate to the training op, in place of the optimizer of `params`.
    """
    modes = compat.estimator.ModeKeys
    logits = tf.cast(logits, tf.float32)
    if mode == modes.PREDICT:
        return _make_predict_spec(logits, features, mode)
    labels = tf.reshape(labels, [-1])
    weights = features.get(WEIGHTS)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if mode == modes.TRAIN and params['label_smoothing']:
        # Szegedy et al. 2016 (https://arxiv.org/abs/1512.00567, section 7). What is evaluated stays comparable.
        even = tf.reduce_logsumexp(logits, axis=1) - tf.reduce_mean(logits, axis=1)
        losses += params['label_smoothing'] * (even - losses)
    loss = (
        tf.reduce_mean(losses)
        if weights is None
        else tf.math.divide_no_nan(tf.reduce_sum(losses * weights), tf.reduce_sum(weights))
    )
    if mode == modes.EVAL:
        weights = tf.ones_like(losses) if weights is None else weights
        eval_metrics = (_metric_fn, {'labels': labels, 'logits': logits, 'losses': losses, 'weights': weights})
        return compat.estimator.tpu.TPUEstimatorSpec(mode=mode, loss=loss, eval_metrics=eval_metrics)
    learning_rate = compute_learning_rate(params)
    if make_train_op_fn:
        train_op = make_train_op_fn(loss, learning_rate)
    else:
        train_op = make_train_op(loss, make_optimizer(params, learning_rate=learning_rate))
    summaries = summaries or Summaries(params.get('summaries'))
    is_right = tf.equal(tf.argmax(logits, axis=1, output_type=labels.dtype), labels)
    summaries.scalar('loss', loss)
    summaries.scalar('accuracy', tf.reduce_mean(tf.cast(is_right, tf.float32)))
    summaries.scalar('learning_rate', learning_rate)
    return compat.estimator.tpu.TPUEstimatorSpec(
        mode=mode, loss=loss, train_op=train_op, host_call=summaries.host_call(train_op)
    )


def _metric_fn(labels: tf.Tensor, logits: tf.Tensor, losses: tf.Tensor, weights: tf.Tensor) -> dict[str, Any]:
    """Metrics over the whole evaluation set, exact whatever the batch: padded rows have weight 0."""
    classes = tf.argmax(logits, axis=1, output_type=labels.dtype)
    return {
        'accuracy': tf.compat.v1.metrics.accuracy(labels, classes, weights=weights),
        'average_loss': tf.compat.v1.metrics.mean(losses, weights=weights),
    }


def _make_predict_spec(logits: tf.Tensor, features: Mapping[str, tf.Tensor], mode: str) -> Any:
    predictions = {'classes': tf.argmax(logits, axis=1), 'probabilities': tf.nn.softmax(logits)}
    if KEY in features:
        predictions[KEY] = tf.identity(features[KEY])
    output = compat.estimator.export.PredictOutput(predictions)
    return compat.estimator.tpu.TPUEstimatorSpec(mode=mode, predictions=predictions, export_outputs={'serving_default': output})


def get_inputs(features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the features that are the network's input: all but weights and key."""
    return {name: tensor for name, tensor in features.items() if name not in (WEIGHTS, KEY)}
