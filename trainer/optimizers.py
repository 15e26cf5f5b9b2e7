"""Optimizers by name, as a model_fn uses them: `params` in, a training op out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import tensorflow as tf

from trainer.schedules import Schedule

OPTIMIZERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    'sgd': lambda rate, params: tf.compat.v1.train.GradientDescentOptimizer(rate),
    'momentum': lambda rate, params: tf.compat.v1.train.MomentumOptimizer(rate, params['momentum']),
    'adagrad': lambda rate, params: tf.compat.v1.train.AdagradOptimizer(rate),
    'adam': lambda rate, params: tf.compat.v1.train.AdamOptimizer(rate, beta1=params['adam_beta1']),
    'ftrl': lambda rate, params: tf.compat.v1.train.FtrlOptimizer(rate),
}


def compute_learning_rate(params: Mapping[str, Any]) -> Any:
    """Returns the learning rate of this step by `params['schedule']`: a float where it is constant, else [] float32.

    To be called once in a model_fn, and handed to `make_optimizer` and to the summaries: a reading of its own might race with
    the update that raises the step, where one that the update waits for cannot.
    """
    schedule = params.get('schedule') or Schedule(params['learning_rate'])
    return schedule.peak if schedule.is_constant else schedule(tf.compat.v1.train.get_or_create_global_step().read_value())


def make_optimizer(params: Mapping[str, Any], *, name: str = '', learning_rate: Any = None) -> Any:
    """Returns the optimizer of `params`.

    Args:
      params: of the model_fn; the settings of `OptimizerConfig`, 'schedule', 'use_tpu' and 'sync_replicas' are read.
      name: in place of `params['optimizer']`.
      learning_rate: a number or a [] float32 tensor; None computes that of the schedule.
    """
    rate = compute_learning_rate(params) if learning_rate is None else learning_rate
    optimizer = OPTIMIZERS[name or params['optimizer']](rate, params)
    if params.get('sync_replicas'):
        return params['sync_replicas'].wrap(optimizer)
    # On a TPU each core has its own gradients; this averages them.
    return tf.compat.v1.tpu.CrossShardOptimizer(optimizer) if params.get('use_tpu') else optimizer


def make_train_op(loss: tf.Tensor, optimizer: Any, *, var_list: Any = None, global_step: Any = None) -> Any:
    """Returns the op that makes one step: the update of the weights and UPDATE_OPS (batch normalisation's averages).

    Args:
      loss: [] float32.
      optimizer: from `make_optimizer`.
      var_list: variables to move; None means all that are trainable.
      global_step: incremented by one; None means the graph's.
    """
    step = tf.compat.v1.train.get_or_create_global_step() if global_step is None else global_step
    update_ops = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    minimize_op = optimizer.minimize(loss, global_step=step, var_list=var_list)
    return tf.group(minimize_op, *update_ops)
