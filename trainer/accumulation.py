"""Micro-batches: the batch of an update worked on in parts, one after the other, for less memory (`--micro_batches`).

A replica's batch is cut into parts. The model_fn is called on each in turn, under control dependencies, so that the activations
of one are gone before the next begins; the optimizers that it makes add up the gradients, and those of the last part make the
update of their mean. A step of the trainer is such an update: `global_step`, summaries, checkpoints and `--batch_size` mean
what they do without. The parts are unrolled rather than looped over, for an all-reduce in a loop fails under most strategies.

What is equal to the whole batch is what is a mean over examples. Batch normalisation takes the statistics of each part, and its
averages move once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import compat, summaries
from trainer.errors import UsageError


class Accumulation:
    """`params['accumulation']`: the gradients of the parts of one step.

    Args:
      num_parts: of the step.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._part = -1
        self._sums: list[list[Any]] = []
        self._num_calls = 0
        self._shared: Optional[Any] = None

    def start_part(self) -> None:
        """Begins the next part."""
        self._part += 1
        self._num_calls = 0

    @property
    def is_last(self) -> bool:
        """Whether this part is the one that updates."""
        return self._part == self._num_parts - 1

    @property
    def is_used(self) -> bool:
        """Whether the model_fn, in this part, has made an update by way of `wrap`."""
        return self._num_calls > 0

    def share(self, make: Callable[[], Any]) -> Any:
        """Returns what `make` has returned in the first part, for that which makes variables of its own."""
        if self._shared is None:
            self._shared = make()
        return self._shared

    def wrap(self, optimizer: Any) -> Any:
        """Returns the optimizer that updates in the last part, by the mean of the gradients of all."""
        return _Accumulating(optimizer, self)

    def add(self, gradients: Sequence[Any]) -> list[Any]:
        """Adds the gradients of the next update of this part to those of the same one of the parts before; returns the sums."""
        if self._part == 0:
            self._sums.append([None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients])
        else:
            before = self._sums[self._num_calls]
            self._sums[self._num_calls] = [total if new is None else total + new for total, new in zip(before, gradients)]
        self._num_calls += 1
        return self._sums[self._num_calls - 1]

    def mean(self, total: tf.Tensor) -> tf.Tensor:
        """Returns the mean over the parts, of their sum."""
        return total / self._num_parts


class _Accumulating:
    def __init__(self, optimizer: Any, accumulation: Accumulation) -> None:
        self._optimizer = optimizer
        self._accumulation = accumulation

    def minimize(self, loss: tf.Tensor, global_step: Any = None, var_list: Any = None) -> Any:
        """Adds the gradients of the loss; in the last part updates."""
        gradients, variables = zip(*self._optimizer.compute_gradients(loss, var_list))
        sums = self._accumulation.add(gradients)
        if not self._accumulation.is_last:
            return tf.group(*(total for total in sums if total is not None))
        means = [None if total is None else self._accumulation.mean(total) for total in sums]
        return self._optimizer.apply_gradients(list(zip(means, variables)), global_step)


def wrap_model_fn(model_fn: Callable[..., Any], num_parts: int) -> Callable[..., Any]:
    """Returns a model_fn that trains on a batch in `num_parts` parts; `model_fn` itself where that is 1.

    Args:
      model_fn: `(features, labels, mode, params) -> TPUEstimatorSpec`, which makes its optimizers by `make_optimizer`.
      num_parts: divides the examples of a replica.
    """
    if num_parts == 1:
        return model_fn

    def accumulating_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        if mode != compat.estimator.ModeKeys.TRAIN:
            return model_fn(features, labels, mode, params)
        accumulation = Accumulation(num_parts)
        specs: list[Any] = []
        for part_features, part_labels in zip(_split(features, num_parts), _split(labels, num_parts)):
            accumulation.start_part()
            scope = tf.compat.v1.variable_scope(
                tf.compat.v1.get_variable_scope(), reuse=tf.compat.v1.AUTO_REUSE, auxiliary_name_scope=False
            )
            with tf.control_dependencies([spec.train_op for spec in specs[-1:]]), scope:
                specs.append(model_fn(part_features, part_labels, mode, {**params, 'accumulation': accumulation}))
            if not accumulation.is_used:
                raise UsageError(
                    f'--micro_batches={num_parts}: --model makes an optimizer of its own, whose gradients are not seen; '
                    'expected one of trainer.optimizers.make_optimizer(params), or 1'
                )
        last = specs[-1]
        if summaries.is_ours(last.host_call):
            scalars = [summaries.get_scalars(spec.host_call) for spec in specs]
            for name in scalars[-1]:
                summaries.add_scalar(last.host_call, name, tf.add_n([values[name] for values in scalars]) / num_parts)
        return compat.estimator.tpu.TPUEstimatorSpec(
            mode=mode,
            loss=tf.add_n([spec.loss for spec in specs]) / num_parts,
            train_op=last.train_op,
            host_call=last.host_call,
            scaffold_fn=last.scaffold_fn,
            training_hooks=last.training_hooks,
        )

    return accumulating_model_fn


def _split(batch: Any, num_parts: int) -> list[Any]:
    """The parts of a structure of [batch, ...] tensors."""
    columns = []
    for tensor in tf.nest.flatten(batch):
        if tensor is None:
            columns.append([None] * num_parts)
            continue
        if not tf.is_tensor(tensor) or not isinstance(tensor, tf.Tensor) or not tensor.shape.rank or tensor.shape[0] is None:
            raise UsageError(f'--micro_batches={num_parts}: expected dense features of a batch known beforehand, got {tensor}')
        if tensor.shape[0] % num_parts:
            raise UsageError(
                f'--micro_batches={num_parts} does not divide the {tensor.shape[0]} examples that a replica has of '
                '--batch_size; expected a divisor'
            )
        columns.append(tf.split(tensor, num_parts))
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*columns)]
