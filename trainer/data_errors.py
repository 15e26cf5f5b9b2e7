"""Errors of TensorFlow that a bad record causes, in words that name the record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from trainer import records
from trainer.datasets import Dataset
from trainer.errors import DataError


@contextlib.contextmanager
def translate_errors(dataset: Dataset, files: Sequence[str]) -> Iterator[None]:
    """Turns an error of TensorFlow that a bad record causes into a DataError that names the file and the record."""
    try:
        with _errors_as_raised():
            yield
    # UnicodeDecodeError: TensorFlow quotes the bytes of a record that does not parse, which Python takes for text.
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, UnicodeDecodeError) as error:
        culprit = records.diagnose(files, dataset)
        if culprit is None:
            raise
        raise DataError(culprit) from error


@contextlib.contextmanager
def _errors_as_raised() -> Iterator[None]:
    """Gives back what a model_fn raised: under a strategy TensorFlow converts it and raises a StagingError in its place."""
    try:
        yield
    except Exception as error:
        original: BaseException = error
        while original.__suppress_context__ and hasattr(original.__context__, 'ag_error_metadata'):
            original = original.__context__  # type: ignore[assignment]
        if original is error:
            raise
        raise original from original.__cause__
