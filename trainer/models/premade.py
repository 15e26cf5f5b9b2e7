"""Linear, deep, and wide-and-deep classifiers on tabular features (Cheng et al. 2016, https://arxiv.org/abs/1606.07792).

The columns follow from the dataset: int64 and float features are numbers, normalised by the dataset's `moments`; bytes
features, and all that have a vocabulary, are categories: one-hot by vocabulary, or hashed when they have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import tensorflow as tf

from trainer.models.classifier import get_inputs, make_classifier_spec
from trainer.models.mlp import dense, drop
from trainer.optimizers import make_optimizer, make_train_op
from trainer.summaries import Summaries

# Categories without a vocabulary share so many buckets.
HASH_BUCKETS = 100
# The wide part learns by FTRL, as in the paper, at the rate of tf.estimator's canned linear model (0.2 at most).
MAX_LINEAR_LEARNING_RATE = 0.2


def linear_model_fn(features: Any, labels: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    """Multinomial logistic regression: logits are linear in the columns."""
    return make_classifier_spec(_linear_logits(features, params), features, labels, mode, params)


def dnn_model_fn(features: Any, labels: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    """A perceptron with two hidden layers of `params['hidden1']` and `params['hidden2']` units on the columns."""
    summaries = Summaries(params.get('summaries'))
    logits = _deep_logits(features, mode, params, summaries)
    return make_classifier_spec(logits, features, labels, mode, params, summaries=summaries)


def wide_deep_model_fn(features: Any, labels: Optional[tf.Tensor], mode: str, params: Mapping[str, Any]) -> Any:
    """The sum of both: FTRL moves the wide part, the optimizer of `params` the deep part, one loss drives them."""
    summaries = Summaries(params.get('summaries'))
    logits = _linear_logits(features, params) + _deep_logits(features, mode, params, summaries)

    def make_joint_train_op(loss: tf.Tensor, learning_rate: Any) -> tf.Operation:
        linear_rate = tf.minimum(learning_rate, MAX_LINEAR_LEARNING_RATE)
        linear_optimizer = make_optimizer(params, name='ftrl', learning_rate=linear_rate)
        wide_variables = tf.compat.v1.trainable_variables('linear/')
        deep_variables = tf.compat.v1.trainable_variables('deep/')
        # Only one of the two updates counts the step.
        wide_op = linear_optimizer.minimize(loss, var_list=wide_variables)
        deep_op = make_train_op(loss, make_optimizer(params, learning_rate=learning_rate), var_list=deep_variables)
        return tf.group(wide_op, deep_op)

    return make_classifier_spec(
        logits, features, labels, mode, params, summaries=summaries, make_train_op_fn=make_joint_train_op
    )


def make_columns(features: Mapping[str, tf.Tensor], params: Mapping[str, Any]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the numbers and the one-hot categories of a batch, in the order of the features' names.

    Args:
      features: [batch] or [batch, width] int64, float32 or string each.
      params: 'vocabularies' and 'moments' of the dataset.

    Returns:
      [batch, width] float32 of mean 0 and deviation 1 each; [batch, categories] float32 of 0 and 1 each (a value outside the
      vocabulary is a row of zeros; several values in a row add up).
    """
    numbers, categories = [], []
    for name, tensor in sorted(get_inputs(features).items()):
        column = tensor[:, tf.newaxis] if tensor.shape.rank == 1 else tf.reshape(tensor, [-1, tensor.shape[1:].num_elements()])
        vocabulary = params['vocabularies'].get(name)
        if vocabulary:
            matches = tf.equal(column[:, :, tf.newaxis], tf.constant(list(vocabulary), column.dtype))
            categories.append(tf.reduce_sum(tf.cast(matches, tf.float32), axis=1))
        elif column.dtype == tf.string:
            buckets = tf.strings.to_hash_bucket_fast(column, HASH_BUCKETS)
            categories.append(tf.reduce_sum(tf.one_hot(buckets, HASH_BUCKETS), axis=1))
        else:
            mean, deviation = params['moments'].get(name, (0.0, 1.0))
            numbers.append((tf.cast(column, tf.float32) - mean) / (deviation or 1.0))
    return numbers, categories


def _linear_logits(features: Any, params: Mapping[str, Any]) -> tf.Tensor:
    numbers, categories = make_columns(features, params)
    with tf.compat.v1.variable_scope('linear', reuse=tf.compat.v1.AUTO_REUSE):
        # Zero, as in a convex problem no symmetry needs breaking.
        return dense(tf.concat([*numbers, *categories], axis=1), params['num_classes'], name='logits', stddev=0.0)


def _deep_logits(features: Any, mode: str, params: Mapping[str, Any], summaries: Summaries) -> tf.Tensor:
    numbers, categories = make_columns(features, params)
    with tf.compat.v1.variable_scope('deep', reuse=tf.compat.v1.AUTO_REUSE):
        # A one-hot row times a matrix is an embedding: the first layer learns it.
        net = tf.concat([*numbers, *categories], axis=1)
        for name in ('hidden1', 'hidden2'):
            net = tf.nn.relu(dense(net, params[name], name=name, stddev=(2.0 / net.shape[-1]) ** 0.5))
            summaries.histogram(name, net)
            net = drop(net, mode, params)
        return dense(net, params['num_classes'], name='logits', stddev=(1.0 / net.shape[-1]) ** 0.5)
