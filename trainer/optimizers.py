"""Optimizers by name, as a model_fn uses them: `params` in, a training op out.

What `make_optimizer` returns works on the gradient of the whole batch. Where replicas share the batch their gradients are
summed first, then in this order: the norm is clipped, weights decay, the update rule moves them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from trainer.schedules import Schedule


def _decays(variable: Any) -> bool:
    """Whether a variable is one of weights: biases, and gamma and beta of a normalisation, have one axis and neither decay nor
    have a norm that says how far to go."""
    return variable.shape.rank > 1


class LarsOptimizer(tf.compat.v1.train.MomentumOptimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, https://arxiv.org/abs/1708.03888, algorithm 1).

    Each layer's step is in proportion to the norm of its weights, so that large batches train at large rates:
      trust = coefficient * |w| / (|g| + weight_decay * |w|)
      v <- momentum * v + learning_rate * trust * (g + weight_decay * w);  w <- w - v
    Biases, and gamma and beta of normalisations, have trust 1 and no decay, as in MLPerf. Where |w| or |g| is 0, trust is 1.

    Args:
      learning_rate: a number or a [] float32 tensor.
      momentum: in [0, 1).
      coefficient: the trust coefficient.
      weight_decay: of the weights.
    """

    def __init__(self, learning_rate: Any, momentum: float, *, coefficient: float, weight_decay: float) -> None:
        # The rate is part of v, so that a change of it does not rescale the steps of the past.
        super().__init__(1.0, momentum, name='LARS')
        self._rate = learning_rate
        self._coefficient = coefficient
        self._decay = weight_decay

    def _resource_apply_dense(self, grad: tf.Tensor, var: Any) -> Any:
        step = grad
        if _decays(var):
            weight_norm, gradient_norm = tf.norm(var), tf.norm(grad)
            trust = self._coefficient * weight_norm / (gradient_norm + self._decay * weight_norm)
            trust = tf.where((weight_norm > 0) & (gradient_norm > 0), trust, 1.0)
            step = trust * (grad + self._decay * var)
        return super()._resource_apply_dense(self._rate * step, var)

    def _resource_apply_sparse(self, grad: tf.Tensor, var: Any, indices: tf.Tensor) -> Any:
        return self._resource_apply_dense(tf.convert_to_tensor(tf.IndexedSlices(grad, indices, tf.shape(var))), var)


# The class, and which of `params` are which arguments.
OPTIMIZERS: dict[str, tuple[Any, dict[str, str]]] = {
    'sgd': (tf.compat.v1.train.GradientDescentOptimizer, {}),
    'momentum': (tf.compat.v1.train.MomentumOptimizer, {'momentum': 'momentum'}),
    'adagrad': (tf.compat.v1.train.AdagradOptimizer, {}),
    'adam': (tf.compat.v1.train.AdamOptimizer, {'beta1': 'adam_beta1'}),
    'ftrl': (tf.compat.v1.train.FtrlOptimizer, {}),
    'lars': (LarsOptimizer, {'momentum': 'momentum', 'coefficient': 'lars_coefficient', 'weight_decay': 'weight_decay'}),
}


class _Regularizing:
    """Mixed into the class of an optimizer: clips the summed gradients and lets weights decay."""

    clip_norm = 0.0
    weight_decay = 0.0

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        if self.clip_norm and not tf.distribute.has_strategy():
            gradients, variables = zip(*grads_and_vars)
            grads_and_vars = list(zip(tf.clip_by_global_norm(gradients, self.clip_norm)[0], variables))
        return super().apply_gradients(grads_and_vars, global_step, name)  # type: ignore[misc]

    def _distributed_apply(self, distribution: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        if self.clip_norm:
            distribution = _clip_what_is_reduced(distribution, self.clip_norm)
        return super()._distributed_apply(distribution, grads_and_vars, global_step, name)  # type: ignore[misc]

    def _resource_apply_dense(self, grad: tf.Tensor, var: Any) -> Any:
        if self.weight_decay and _decays(var):
            grad = grad + self.weight_decay * var
        return super()._resource_apply_dense(grad, var)  # type: ignore[misc]


def _clip_what_is_reduced(strategy: Any, clip_norm: float) -> Any:
    """A strategy as an optimizer uses it, that clips what it sums: there is no other place between sum and update."""
    extended = strategy.extended

    def reduce_and_clip(reduce_op: Any, grads_and_vars: Any) -> list[Any]:
        sums = [strategy.experimental_local_results(total) for total in extended.batch_reduce_to(reduce_op, grads_and_vars)]
        clipped = []
        for of_device in zip(*sums):
            with tf.device(of_device[0].device):
                clipped.append(tf.clip_by_global_norm(of_device, clip_norm)[0])
        return [distribute_utils.regroup(of_variable) for of_variable in zip(*clipped)]

    used = {name: getattr(extended, name) for name in ('update', 'update_non_slot', 'non_slot_devices')}
    return types.SimpleNamespace(extended=types.SimpleNamespace(**used, batch_reduce_to=reduce_and_clip), group=strategy.group)


@functools.cache
def _regularize(kind: Any) -> Any:
    return type(kind.__name__, (_Regularizing, kind), {})


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
      params: of the model_fn; the settings of `OptimizerConfig`, 'schedule', 'use_tpu', 'sync_replicas' and 'accumulation'
        are read.
      name: in place of `params['optimizer']`.
      learning_rate: a number or a [] float32 tensor; None computes that of the schedule.
    """
    rate = compute_learning_rate(params) if learning_rate is None else learning_rate
    kind, arguments = OPTIMIZERS[name or params['optimizer']]
    optimizer = _regularize(kind)(rate, **{argument: params[setting] for argument, setting in arguments.items()})
    optimizer.clip_norm = params['clip_norm']
    # Where the rule has a decay of its own it must not decay twice.
    optimizer.weight_decay = 0.0 if 'weight_decay' in arguments else params['weight_decay']
    accumulation = params.get('accumulation')
    if params.get('sync_replicas'):
        # One that awaits other workers has to be used, and only the last part's is.
        if accumulation is None or accumulation.is_last:
            optimizer = params['sync_replicas'].wrap(optimizer)
    elif params.get('use_tpu'):
        # On a TPU each core has its own gradients; this averages them.
        optimizer = tf.compat.v1.tpu.CrossShardOptimizer(optimizer)
    return accumulation.wrap(optimizer) if accumulation else optimizer


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
