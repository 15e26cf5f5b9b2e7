"""Warm start: weights of another run's checkpoint, taken by name and shape, with what does not fit listed."""

from __future__ import annotations

import logging
from typing import Any, Callable

import tensorflow as tf

from trainer import checkpoints, compat, storage
from trainer.errors import DataError

logger = logging.getLogger(__name__)


def wrap_model_fn(model_fn: Callable[..., Any], warm_start_from: str) -> Callable[..., Any]:
    """Returns a model_fn whose weights start from a checkpoint.

    Args:
      model_fn: `(features, labels, mode, params)`.
      warm_start_from: path of a checkpoint, or of a folder whose latest one is taken.

    Raises:
      DataError: there is no checkpoint there, or not one of its weights fits.
    """
    checkpoint = find_checkpoint(warm_start_from)

    def warm_started_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = model_fn(features, labels, mode, params)
        if mode != compat.estimator.ModeKeys.TRAIN:
            return spec
        if not params.get('use_tpu'):
            _initialize_from(checkpoint)
            return spec

        # What is built here is for the TPU; the scaffold is made on the host, which reads checkpoints.
        def make_scaffold() -> Any:
            scaffold = spec.scaffold_fn() if spec.scaffold_fn else tf.compat.v1.train.Scaffold()
            _initialize_from(checkpoint)
            return scaffold

        return spec._replace(scaffold_fn=make_scaffold)

    return warm_started_model_fn


def find_checkpoint(path: str) -> str:
    """Returns the checkpoint that `--warm_start_from` names.

    Raises:
      DataError: there is none.
    """
    found = checkpoints.find_latest(path) if storage.is_dir(path) else path
    if not found or not tf.compat.v1.train.checkpoint_exists(found):
        raise DataError(f'--warm_start_from={path}: no checkpoint there; give model.ckpt-N without its ending, or its folder')
    return found


def _initialize_from(checkpoint: str) -> None:
    shapes = dict(tf.train.list_variables(checkpoint))
    taken, skipped = {}, []
    for variable in _weights():
        name, shape = variable.op.name, variable.shape.as_list()
        if name not in shapes:
            skipped.append(f'{name} (not in the checkpoint)')
        elif shapes[name] != shape:
            skipped.append(f'{name} (here {shape}, there {shapes[name]})')
        else:
            taken[name] = variable
    if not taken:
        raise DataError(f'--warm_start_from: nothing in {checkpoint} fits this model; skipped {"; ".join(skipped)}')
    tf.compat.v1.train.init_from_checkpoint(checkpoint, taken)
    logger.info('Warm start from %s: took %d weights, skipped %s', checkpoint, len(taken), '; '.join(skipped) or 'none')


def _weights() -> list[Any]:
    """Variables of the network: neither the step nor an optimizer's slots, which belong to the run that made them."""
    trained = tuple(variable.op.name + '/' for variable in tf.compat.v1.trainable_variables())
    step = tf.compat.v1.train.get_global_step()
    return [
        variable
        for variable in tf.compat.v1.global_variables()
        if variable is not step and not variable.op.name.startswith(trained)
    ]
