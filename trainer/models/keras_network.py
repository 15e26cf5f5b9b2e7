"""A Keras model as the network of a classifier: Keras builds the layers, the Estimator trains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import compat
from trainer.errors import UsageError
from trainer.models.classifier import get_inputs, make_classifier_spec


def model_fn(
    make_model: Callable[[Mapping[str, Any]], Any],
    features: Mapping[str, tf.Tensor],
    labels: Optional[tf.Tensor],
    mode: str,
    params: Mapping[str, Any],
) -> Any:
    """Classifies with the Keras model that `make_model(params)` returns.

    Args:
      make_model: makes a model from features to logits. It gets the dataset's one input as a tensor, several as a dictionary.
      features: [batch, ...] each.
      labels: [batch] int64.
      mode: a ModeKeys value.
      params: of the model_fn.

    Raises:
      UsageError: the model's output is not [batch, num_classes].
    """
    seed = tf.compat.v1.get_default_graph().seed
    if seed is not None:
        # Keras draws the seeds of its initializers from a generator of its own, which knows nothing of the graph's.
        compat.keras.utils.set_random_seed(seed)
    accumulation = params.get('accumulation')
    model = accumulation.share(lambda: make_model(params)) if accumulation else make_model(params)
    inputs = get_inputs(features)
    network_input = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    training = mode == compat.estimator.ModeKeys.TRAIN
    # A model that knows its inputs has been called on placeholders by Keras; those updates are not ours to run.
    others = {id(update) for update in model.updates}
    logits = model(network_input, training=training)
    expected = params['num_classes']
    if logits.shape.rank != 2 or logits.shape[-1] != expected:
        raise UsageError(f'--model: the Keras model returns {logits.shape}; expected logits [batch, {expected}]')
    if training:
        for update in [update for update in model.updates if id(update) not in others]:
            tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update)
    return make_classifier_spec(logits, features, labels, mode, params)
