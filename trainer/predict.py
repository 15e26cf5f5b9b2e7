"""Batch prediction: shards of TFRecords or JSON lines in, shards of JSON lines out, in the order of the input.

The output of a shard appears when it is whole, under the shard's own name; a run that was killed does the missing ones.
"""

from __future__ import annotations

import collections
import json
import logging
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tqdm

from trainer import records, storage
from trainer.datasets import Dataset
from trainer.errors import DataError, UsageError
from trainer.models.classifier import KEY

logger = logging.getLogger(__name__)

JSON_ENDINGS = ('.jsonl', '.json', '.ndjson', '.jsonl.gz', '.json.gz', '.ndjson.gz')


def predict_shards(
    estimator: Any, dataset: Dataset, files: Sequence[str], *, output_dir: str, batch_size: int, checkpoint: str
) -> list[str]:
    """Writes `<output_dir>/<name of the shard>.predictions.jsonl` for every shard that has none yet.

    A line holds the key (the record's own, or its file and position), the class, the probabilities, and whatever else the
    model predicts.

    Args:
      estimator: an Estimator or TPUEstimator.
      dataset: its schema says how to read TFRecords and what a JSON instance holds.
      files: the shards; what ends in .jsonl, .json or .ndjson (.gz) is JSON lines, everything else TFRecords.
      output_dir: made when missing.
      batch_size: examples of a batch.
      checkpoint: path of the one to predict with.

    Returns:
      The paths of all outputs, in the order of `files`.

    Raises:
      DataError: a record or a line is not what the schema says.
      UsageError: two shards have the same name.
    """
    targets = {path: storage.join(output_dir, posixpath.basename(path) + '.predictions.jsonl') for path in files}
    shared = [name for name, count in collections.Counter(targets.values()).items() if count > 1]
    if shared:
        raise UsageError(f'--predict_data_paths: several shards would be written to {shared[0]}; predict them in two runs')
    storage.make_dirs(output_dir)
    present = {storage.join(output_dir, name) for name in storage.list_dir(output_dir)}
    missing = [path for path in files if targets[path] not in present]
    logger.info('Predicting %d shards into %s; %d are done already', len(missing), output_dir, len(files) - len(missing))
    if not missing:
        return list(targets.values())
    reader = _ShardReader(missing, dataset)
    predictions = estimator.predict(
        _make_input_fn(reader, dataset, batch_size), checkpoint_path=checkpoint, yield_single_examples=True
    )
    lines: list[str] = []
    done = 0
    with tqdm.tqdm(total=len(missing), unit='shard', disable=None) as bar:

        def finish_shard() -> None:
            nonlocal done
            storage.write_atomic(targets[missing[done]], ''.join(line + '\n' for line in lines))
            lines.clear()
            done += 1
            bar.update()

        for prediction in predictions:
            # The reader has counted a shard by the time that it yields a record of a later one. A shard may be empty.
            while done < len(reader.counts) and len(lines) == reader.counts[done]:
                finish_shard()
            lines.append(json.dumps(_to_json(prediction), allow_nan=False))
        while done < len(reader.counts):
            finish_shard()
    if reader.error:
        raise reader.error
    return list(targets.values())


class _ShardReader:
    """Reads shards one after the other and knows how many records each held."""

    def __init__(self, files: Sequence[str], dataset: Dataset) -> None:
        self._files = files
        self._dataset = dataset
        self._schema = dataset.features_schema
        self.counts: list[int] = []  # records of each shard that has been read to its end
        self.error: Optional[DataError] = None

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields (serialized Example, key) of every record, up to the first bad one, which is then `error`."""
        for path in self._files:
            is_json = path.lower().endswith(JSON_ENDINGS)
            count = 0
            try:
                for serialized, key in self._read_json(path) if is_json else self._read_records(path):
                    yield serialized, key or f'{posixpath.basename(path)}:{count}'.encode()
                    count += 1
            except DataError as error:
                # Raised through TensorFlow it would come out as a page of its own; the shards before are whole.
                self.error = error
                return
            self.counts.append(count)

    def _read_records(self, path: str) -> Iterator[tuple[bytes, bytes]]:
        for record in records.scan(path):
            problem = record.problem
            if not problem:
                try:
                    self._schema.check(record.payload)
                except DataError as error:
                    problem = str(error)
            if problem:
                raise DataError(records.describe(path, record, problem))
            yield record.payload, _get_key(record.payload, self._dataset.key)

    def _read_json(self, path: str) -> Iterator[tuple[bytes, bytes]]:
        for number, line in enumerate(storage.read_lines(path), 1):
            if not line.strip():
                continue
            try:
                instance = json.loads(line)
                if not isinstance(instance, dict):
                    raise DataError(f'expected a JSON object with {", ".join(self._schema.features)}, it is {line[:60]!r}')
                key = str(instance.pop(KEY, '')) if KEY not in self._schema else ''
                instance.pop(self._dataset.label, None)
                serialized = self._schema.encode(instance)
            except ValueError as error:
                raise DataError(f'{path}: line {number}: {error}; mend the line or take it out') from error
            yield serialized, key.encode() or _get_key(serialized, self._dataset.key)


def _get_key(serialized: bytes, name: Any) -> bytes:
    """The value of the dataset's key feature as text; empty when there is none."""
    if not name:
        return b''
    feature = tf.train.Example.FromString(serialized).features.feature[name]
    values = getattr(feature, feature.WhichOneof('kind') or 'bytes_list').value
    value = values[0] if values else b''
    return value if isinstance(value, bytes) else str(value).encode()


def _make_input_fn(reader: _ShardReader, dataset: Dataset, batch_size: int) -> Any:
    schema = dataset.features_schema

    def parse(serialized: tf.Tensor, keys: tf.Tensor) -> dict[str, tf.Tensor]:
        features = schema.parse(serialized)
        features = dataset.features_fn(features) if dataset.features_fn else features
        return {**features, KEY: keys}

    def input_fn(params: Any) -> tf.data.Dataset:
        del params  # The batch is the caller's: nothing is padded, for each prediction belongs to a record.
        spec = tf.TensorSpec([], tf.string)
        records_dataset = tf.data.Dataset.from_generator(reader.read, output_signature=(spec, spec))
        return records_dataset.batch(batch_size).map(parse).prefetch(2)

    return input_fn


def _to_json(prediction: dict[str, Any]) -> dict[str, Any]:
    """One line: the key first, 'classes' as 'class', float32 in as few digits as give the same number back."""
    values = dict(prediction)
    line: dict[str, Any] = {KEY: _to_plain(values.pop(KEY))}
    if 'classes' in values:
        line['class'] = _to_plain(values.pop('classes'))
    line.update((name, _to_plain(values[name])) for name in sorted(values))
    return line


def _to_plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode('utf-8', 'backslashreplace')
    if isinstance(value, np.floating):
        return float(str(value))
    if isinstance(value, np.ndarray):
        return [_to_plain(item) for item in value] if value.dtype != object else [_to_plain(item) for item in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value
