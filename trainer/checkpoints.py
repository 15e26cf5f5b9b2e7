"""The latest checkpoint of a folder, and whether it fits a model, said before TensorFlow says it in a page of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import storage
from trainer.errors import DataError

# Names the checkpoints of its folder; TensorFlow writes it after each.
STATE_FILE = 'checkpoint'


def find_latest(directory: str) -> Optional[str]:
    """Returns the path of the latest checkpoint, without an ending; None when the folder has none.

    TensorFlow takes a folder that it may not or cannot read for an empty one, and a run would begin anew over the old one.

    Raises:
      DataError: the folder cannot be listed, or its file `checkpoint` cannot be read.
    """
    if not storage.is_dir(directory) or STATE_FILE not in storage.list_dir(directory):
        return None
    path = tf.train.latest_checkpoint(directory)
    if path is None:
        storage.read_bytes(storage.join(directory, STATE_FILE))  # says why it cannot be read
        path = tf.train.latest_checkpoint(directory)  # it was replaced between two looks
    return path


def check_fit(path: str, variables: Mapping[str, Sequence[int]]) -> None:
    """Compares a checkpoint with the variables that are to be restored from it.

    Args:
      path: of the checkpoint, without an ending.
      variables: name to shape.

    Raises:
      DataError: a variable is missing there or has another shape; or the checkpoint cannot be read.
    """
    try:
        with storage.reporting_remote_errors():
            found = dict(tf.train.list_variables(path))
    except DataError:
        raise
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        message = str(error).splitlines()[0]
        raise DataError(f'{path} cannot be read ({message}); remove its files to go on from the one before') from error
    # The names and shapes are in the index. TensorFlow would try the values for ever while a remote store fails.
    for values in storage.glob(f'{path}.data-*'):
        with storage.open_read(values) as file:
            file.read(1)
    for name, shape in variables.items():
        if found.get(name) != list(shape):
            there = f'{found[name]} there' if name in found else 'not there'
            raise DataError(
                f'{path} does not fit the model: {name} is {list(shape)} here, {there}; give the flags of the run that wrote '
                'it, or another --output_path, with --warm_start_from to take what fits'
            )


def wrap_model_fn(model_fn: Callable[..., Any], directory: str) -> Callable[..., Any]:
    """Returns a model_fn that raises DataError when the latest checkpoint of `directory`, if any, does not fit it."""

    def checked_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = model_fn(features, labels, mode, params)
        path = find_latest(directory)
        if path:
            check_fit(path, get_shapes())
        return spec

    return checked_model_fn


def get_shapes() -> dict[str, list[int]]:
    """Returns name and shape of every variable of the graph that a checkpoint holds."""
    return {variable.op.name: variable.shape.as_list() for variable in tf.compat.v1.global_variables()}
