"""Averages of weights over the steps (`--ema_decay`): they move with each update, and are what evaluates and is exported.

The average of the last weights is nearer to a minimum than any of them (Polyak and Juditsky 1992). Each averaged variable has a
second one in the checkpoint, `average/<name>`; training goes on from the weights themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Callable

import tensorflow as tf

from trainer import checkpoints, compat

_PREFIX = 'average/'


def move_averages(variables: Iterable[Any], decay: float, rename: Callable[[str], str]) -> Any:
    """Returns the op that moves the average of each variable towards it; to be run after each update.

    Args:
      variables: float32.
      decay: kept of the averages in a step, of 1; less at first, when the weights move far.
      rename: from the name of a variable to that of its average.
    """
    step = tf.cast(tf.compat.v1.train.get_global_step().read_value(), tf.float32)
    # The first average is the weights after the first step.
    decay = tf.minimum(decay, (step - 1.0) / (step + 9.0))
    updates = []
    for variable in variables:
        average = tf.compat.v1.get_variable(
            rename(_get_name(variable)),
            variable.shape,
            initializer=tf.compat.v1.zeros_initializer(),
            trainable=False,
            use_resource=True,
            # Each replica writes its own: all have the same weights.
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        updates.append(average.assign_sub((average.read_value() - variable.read_value()) * (1.0 - decay)).op)
    return tf.group(*updates)


def _get_name(variable: Any) -> str:
    """The name of a variable in a checkpoint; in the second replica a mirrored one answers by the name of its second copy."""
    return re.sub(r'/replica_\d+$', '', variable.op.name)


def are_in(checkpoint: str) -> bool:
    """Says whether a checkpoint holds averages of weights; where it cannot be read, whoever restores it will say so."""
    try:
        return any(name.startswith(_PREFIX) for name, _ in tf.train.list_variables(checkpoint))
    except (tf.errors.OpError, ValueError, RuntimeError):
        return False


def is_averaged(variable: Any) -> bool:
    """Says whether a variable is a weight, or a statistic of batch normalisation, which belongs to the weights."""
    name = _get_name(variable)
    return not name.startswith(_PREFIX) and (variable.trainable or name.endswith(('/moving_mean', '/moving_variance')))


def wrap_model_fn(model_fn: Callable[..., Any], decay: float) -> Callable[..., Any]:
    """Returns a model_fn that averages its weights in training and takes the averages for all else; itself where `decay` is 0.

    Args:
      model_fn: `(features, labels, mode, params) -> TPUEstimatorSpec`.
      decay: as for `move_averages`.
    """
    if not decay:
        return model_fn

    def averaging_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = model_fn(features, labels, mode, params)
        variables = tf.compat.v1.global_variables()
        if mode == compat.estimator.ModeKeys.TRAIN:
            with tf.control_dependencies([spec.train_op]):
                moved = move_averages(filter(is_averaged, variables), decay, lambda name: _PREFIX + name)
            return spec._replace(train_op=tf.group(spec.train_op, moved))
        sources = {_PREFIX * is_averaged(variable) + variable.op.name: variable for variable in variables}
        checkpoints.expect({name: variable.shape.as_list() for name, variable in sources.items()})
        return spec._replace(scaffold_fn=lambda: _make_scaffold(sources))

    return averaging_model_fn


def _make_scaffold(sources: dict[str, Any]) -> Any:
    """What restores each variable from the name that it has in the checkpoint."""
    return tf.compat.v1.train.Scaffold(saver=tf.compat.v1.train.Saver(sources, sharded=True))
