"""The latest checkpoint of a folder, and whether it fits a model, said before TensorFlow says it in a page of its own."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import storage
from trainer.errors import DataError

logger = logging.getLogger(__name__)

# Names the checkpoints of its folder; TensorFlow writes it after each.
STATE_FILE = 'checkpoint'
_EXPECTED = 'trainer/expected'


def find_latest(directory: str) -> Optional[str]:
    """Returns the path of the latest checkpoint, without an ending; None when the folder has none.

    TensorFlow takes a folder that it may not or cannot read, or whose file `checkpoint` is lost, for an empty one, and a run
    would begin anew over the old one. Where that file does not help, the newest checkpoint on disk is the latest.

    Raises:
      DataError: the folder cannot be listed, or its file `checkpoint` cannot be read.
    """
    if not storage.is_dir(directory):
        return None
    names = storage.list_dir(directory)
    path = None
    if STATE_FILE in names:
        path = _read_state(directory)
        if path is None:
            storage.read_bytes(storage.join(directory, STATE_FILE))  # says why it cannot be read
            path = _read_state(directory)  # it was replaced between two looks
    return path or next(iter(_list_on_disk(directory, names)), None)


def recover(directory: str) -> None:
    """Makes the newest whole checkpoint the latest, where a machine went down while one was written, or files were lost.

    Raises:
      DataError: there are checkpoints, but none of them is whole.
    """
    latest = find_latest(directory)
    if latest is None:
        return
    on_disk = _list_on_disk(directory, storage.list_dir(directory))
    older = on_disk[on_disk.index(latest) + 1 :] if latest in on_disk else on_disk
    problems = []
    for path in (latest, *older):
        problem = find_damage(path)
        if not problem:
            break
        problems.append(problem)
        logger.warning('%s; trying the one before', problem)
    else:
        raise DataError(f'no checkpoint in {directory} is whole: {problems[0]}; give another --output_path to start anew')
    if path != _read_state(directory):
        kept = on_disk[on_disk.index(path) :][::-1]
        # As TensorFlow writes it: a CheckpointState as text, with names relative to the folder.
        lines = [f'model_checkpoint_path: {json.dumps(storage.split(path)[1])}']
        lines += [f'all_model_checkpoint_paths: {json.dumps(storage.split(other)[1])}' for other in kept]
        storage.write_atomic(storage.join(directory, STATE_FILE), '\n'.join(lines) + '\n')


def need_latest(directory: str) -> str:
    """Returns the path of the latest checkpoint.

    Raises:
      DataError: there is none, or it is damaged.
    """
    checkpoint = find_latest(directory)
    if checkpoint is None:
        raise DataError(f'no checkpoint in {directory}: train first, or give the folder of a run that has one')
    damage = find_damage(checkpoint)
    if damage:
        raise DataError(f'{damage}; run --mode=train_and_eval again, which goes on from the one before')
    return checkpoint


def find_damage(path: str) -> str:
    """Reads a checkpoint to its end; returns what is wrong with it, '' when it is whole."""
    try:
        with storage.reporting_remote_errors():
            reader = tf.train.load_checkpoint(path)
            for name in reader.get_variable_to_shape_map():
                reader.get_tensor(name)
    except DataError:
        raise
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
        return f'{path} is damaged or incomplete ({str(error).splitlines()[0]})'
    return ''


def _read_state(directory: str) -> Optional[str]:
    """What the file `checkpoint` names, when it is there and names a checkpoint that is there."""
    try:
        return tf.train.latest_checkpoint(directory)
    except ValueError:  # the file is empty or no state
        return None


def _list_on_disk(directory: str, names: Iterable[str]) -> list[str]:
    """The checkpoints of a listing, newest first."""
    found = [match for match in map(re.compile(r'(.+-(\d+))\.index').fullmatch, names) if match]
    found.sort(key=lambda match: int(match.group(2)), reverse=True)
    return [storage.join(directory, match.group(1)) for match in found]


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
        raise DataError(f'{path} is damaged or incomplete ({message}); training goes on from the one before') from error
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
            check_fit(path, {**get_shapes(), **dict(tf.compat.v1.get_collection(_EXPECTED))})
        return spec

    return checked_model_fn


def expect(variables: Mapping[str, Sequence[int]]) -> None:
    """Has `wrap_model_fn` look for more than the graph's variables in the checkpoint: name to shape."""
    for name_and_shape in variables.items():
        tf.compat.v1.add_to_collection(_EXPECTED, name_and_shape)


def get_shapes() -> dict[str, list[int]]:
    """Returns name and shape of every variable of the graph that a checkpoint holds.

    A mirrored variable is saved once, under the name of its first replica.
    """
    variables = {variable.op.name: variable.shape.as_list() for variable in tf.compat.v1.global_variables()}
    return {name: shape for name, shape in variables.items() if not re.search(r'/replica_\d+$', name)}
