"""Summaries that a model_fn collects and `host_call` writes: the same on a TPU, a GPU and a CPU.

A TPU cannot write files, so a model_fn hands tensors to the host through `host_call` and a function there writes them.
`Summaries` is that hand-over. Each tensor gets a key 'kind/name', and `write_fn` needs nothing but the keys to know what to
write; so whoever holds the dictionary may add a tensor to it (the training loop adds examples per second).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import storage

STEP_KEY = 'step'
SEEN_STEP_KEY = 'seen_step'
SCALAR, IMAGE, HISTOGRAM = 'scalar', 'image', 'histogram'
# TensorBoard shows nothing of what still sits in the writer's queue; its own default is two minutes.
FLUSH_MILLIS = 10_000
# A remote file is written anew, whole, at each flush, and by default there is one after every ten values.
REMOTE_FLUSH_MILLIS, REMOTE_QUEUE_VALUES = 60_000, 10_000


@dataclasses.dataclass(frozen=True)
class SummaryParams:
    """Where and how often summaries are written: `params['summaries']` of every model_fn.

    Args:
      directory: folder of the event files.
      every_steps: write when the global step is a multiple of this; 0 never writes.
    """

    directory: str = ''
    every_steps: int = 0


class Summaries:
    """Collects the tensors of one training step.

    Args:
      params: `params['summaries']`; None collects but writes nothing.
    """

    def __init__(self, params: Optional[SummaryParams] = None) -> None:
        self._params = params or SummaryParams()
        self._tensors: dict[str, tf.Tensor] = {}

    def scalar(self, name: str, value: Any) -> None:
        """Collects a [] number; over several replicas the host writes the mean."""
        self._add(SCALAR, name, tf.reshape(tf.cast(value, tf.float32), [1]))

    def image(self, name: str, images: Any, max_images: int = 4) -> None:
        """Collects the first `max_images` of [batch, height, width, 1, 3 or 4] images, uint8 or float32 in [0, 1].

        They are cut and turned into uint8 on the device, for all that is collected travels to the host.
        """
        self._add(IMAGE, name, _to_bytes(images[:max_images]))

    def grid(self, name: str, images: Any, side: int) -> None:
        """Collects the first `side * side` images as one picture, `tile`; uint8 or float32 in [0, 1], of a static shape."""
        self._add(IMAGE, name, tile(_to_bytes(images), side))

    def histogram(self, name: str, values: Any) -> None:
        """Collects the distribution of a tensor of any shape."""
        self._add(HISTOGRAM, name, tf.reshape(tf.cast(values, tf.float32), [1, -1]))

    def host_call(self, train_op: Any) -> Optional[tuple[Callable[..., Any], dict[str, tf.Tensor]]]:
        """Returns the `host_call` of a TPUEstimatorSpec, or None when summaries are off.

        Args:
          train_op: the step is read after it, or it would race with the update and be off by one now and then.
        """
        if not self._params.every_steps or not self._params.directory:
            return None
        with tf.control_dependencies([train_op]):
            step = tf.compat.v1.train.get_or_create_global_step().read_value()
        return make_write_fn(self._params), {STEP_KEY: tf.reshape(step, [1]), **self._tensors}

    def _add(self, kind: str, name: str, tensor: tf.Tensor) -> None:
        key = f'{kind}/{name}'
        if key in self._tensors:
            raise ValueError(f'the model_fn collects the {kind} summary {name!r} twice; give each its own name')
        self._tensors[key] = tensor


def tile(images: tf.Tensor, side: int) -> tf.Tensor:
    """Returns the first `side * side` of [batch, height, width, channels] as rows and columns of one picture.

    Args:
      images: of any dtype and a batch known beforehand.
      side: columns, and the most rows; a row that would not be whole is left out.

    Returns:
      [1, rows * height, columns * width, channels].
    """
    batch, height, width, channels = images.shape
    columns = min(side, batch)
    rows = min(side, batch // columns)
    net = tf.reshape(images[: rows * columns], [rows, columns, height, width, channels])
    return tf.reshape(tf.transpose(net, [0, 2, 1, 3, 4]), [1, rows * height, columns * width, channels])


def _to_bytes(images: tf.Tensor) -> tf.Tensor:
    return images if images.dtype == tf.uint8 else tf.image.convert_image_dtype(images, tf.uint8, saturate=True)


def make_write_fn(params: SummaryParams) -> Callable[..., Any]:
    """Returns the host function that writes tensors named 'kind/name' when their step is a multiple of `every_steps`, or, where
    other workers raise the step too, when a multiple has been passed since the step seen before."""

    def write_fn(**tensors: tf.Tensor) -> Any:
        step = tf.cast(tensors.pop(STEP_KEY)[0], tf.int64)
        seen = tensors.pop(SEEN_STEP_KEY, None)
        every = params.every_steps
        is_due = tf.equal(step % every, 0) if seen is None else step // every > seen[0] // every
        if storage.is_remote(params.directory):
            writer = tf.summary.create_file_writer(
                params.directory, max_queue=REMOTE_QUEUE_VALUES, flush_millis=REMOTE_FLUSH_MILLIS
            )
        else:
            writer = tf.summary.create_file_writer(params.directory, flush_millis=FLUSH_MILLIS)
        with writer.as_default(step), tf.summary.record_if(is_due):
            return [_write(key, tensor) for key, tensor in tensors.items()]

    return write_fn


def _write(key: str, tensor: tf.Tensor) -> tf.Tensor:
    kind, name = key.split('/', 1)
    if kind == SCALAR:
        return tf.summary.scalar(name, tf.reduce_mean(tensor))
    if kind == IMAGE:
        return tf.summary.image(name, tensor, max_outputs=64)
    return tf.summary.histogram(name, tensor)


def get_scalars(host_call: Any) -> dict[str, tf.Tensor]:
    """Returns the scalars of a `host_call` that `Summaries` made, by name; nothing for a host_call of another make."""
    if not is_ours(host_call):
        return {}
    prefix = SCALAR + '/'
    return {key[len(prefix) :]: tensor for key, tensor in host_call[1].items() if key.startswith(prefix)}


def add_scalar(host_call: Any, name: str, value: Any) -> None:
    """Adds a number or a [1] tensor to a `host_call` that `Summaries` made."""
    host_call[1][f'{SCALAR}/{name}'] = tf.reshape(tf.cast(value, tf.float32), [1])


def add_seen_step(host_call: Any, step: tf.Tensor) -> None:
    """Adds to a `host_call` that `Summaries` made the step of the session call before, [1] int64: the step may make leaps."""
    host_call[1][SEEN_STEP_KEY] = step


def is_ours(host_call: Any) -> bool:
    """Says whether `Summaries` made this `host_call`."""
    return host_call is not None and isinstance(host_call[1], dict) and STEP_KEY in host_call[1]
