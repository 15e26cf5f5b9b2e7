"""Which pipeline reads a worker's records: by their sizes, and the memory that there is; and what the log says of it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import struct
from collections.abc import Mapping

import tensorflow as tf

from trainer import manifest, memory, pipelines, sharding, storage
from trainer.config import DataConfig
from trainer.datasets import Dataset
from trainer.errors import DataError

logger = logging.getLogger(__name__)

# Pipelines whose order of records is a permutation of the whole set, and goes on where a run was stopped.
IN_MEMORY = ('memory', 'encoded')
PARALLEL_FILES = 16
# Up to this size a record is cheaper to parse, and then to move as a row of a tensor, than to move as a string.
_SMALL_RECORD_BYTES = 4096
_FRAME_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the worker's records amount to; estimated from the first record when no manifest counts them."""

    records: int
    record_bytes: int
    """Serialized length of one."""
    parsed_bytes: int
    """All of them, parsed; pictures that training mirrors both ways round."""
    is_counted: bool


def estimate_sizes(
    source: pipelines.Source,
    dataset: Dataset,
    facts: Mapping[str, manifest.FileFacts],
    file_bytes: Mapping[str, int],
    *,
    first_record_bytes: int,
) -> Sizes:
    """What the records of `source` amount to.

    Args:
      source: the worker's records.
      dataset: their schema.
      facts: what manifests state of the files.
      file_bytes: length of each file.
      first_record_bytes: length of the first record, serialized.
    """
    lengths = [file_bytes[path] for path in source.files]
    with concurrent.futures.ThreadPoolExecutor(PARALLEL_FILES) as pool:
        total_bytes = sum(pool.map(_uncompressed_bytes, source.files, source.compressions, lengths))
    is_counted = all(path in facts for path in source.files)
    if is_counted:
        total = sum(facts[path].records for path in source.files)
    else:
        total = max(1, round(total_bytes / (first_record_bytes + _FRAME_BYTES)))
    count = source.shard.count(total)
    serialized_bytes = max(0, total_bytes // total - _FRAME_BYTES) if total else 0
    has_strings = any(feature.decoded_dtype == tf.string for feature in dataset.schema.features.values())
    # The characters of strings are not in the schema's count; no record holds more of them than its length.
    mirrored_bytes = sum(feature.decoded_bytes for feature in dataset.schema.pictures.values() if feature.is_mirrored)
    parsed_bytes = count * (dataset.schema.bytes_per_example + mirrored_bytes + (serialized_bytes if has_strings else 0))
    return Sizes(count, serialized_bytes, parsed_bytes, is_counted)


def _uncompressed_bytes(path: str, compression: str, length: int) -> int:
    """Length of the file as TensorFlow reads it; for GZIP what its last bytes state, modulo 4 GiB."""
    if not compression:
        return length
    with storage.open_read(path) as file:
        file.seek(length - 4)
        stated = struct.unpack('<I', file.read(4))[0]
    return max(length, stated)


def choose(dataset: Dataset, sizes: Sizes, config: DataConfig) -> str:
    """Name of the pipeline that trains on these records.

    Raises:
      DataError: `--cache=memory`, and the set does not fit.
    """
    has_pictures = bool(dataset.schema.pictures)
    streaming = 'records'
    if dataset.schema.has_static_shapes and sizes.record_bytes <= _SMALL_RECORD_BYTES and not has_pictures:
        streaming = 'blocks'
    if config.cache == 'off':
        return streaming
    limit = int(memory.limit_bytes() * config.cache_memory_share)
    encoded_bytes = sizes.records * sizes.record_bytes
    # Each epoch sees other windows of a picture, so that only the file is worth keeping.
    is_cropped = any(feature.image and feature.image.augment == 'crop' for feature in dataset.schema.pictures.values())
    if not dataset.schema.has_static_shapes:
        reason = 'features of variable length without max_length cannot be kept as one tensor'
    elif not is_cropped and sizes.parsed_bytes <= limit:
        return 'memory'
    elif has_pictures and encoded_bytes <= limit:
        return 'encoded'
    else:
        needed = (
            f'{memory.describe(encoded_bytes)} encoded' if has_pictures else f'{memory.describe(sizes.parsed_bytes)} parsed'
        )
        reason = (
            f'{sizes.records:,} records take {needed}, --cache_memory_share={config.cache_memory_share} of '
            f'{memory.describe(memory.limit_bytes())} allows {memory.describe(limit)}'
        )
    if config.cache == 'memory':
        raise DataError(f'--cache=memory: {reason}; use --cache=auto or off to stream the set')
    logger.info('Not kept in memory: %s', reason)
    return streaming


def log(pipeline: str, source: pipelines.Source, sizes: Sizes, *, batch_size: int, config: DataConfig) -> None:
    """Says what is read, and how."""
    shard = source.shard
    part = f'every {shard.num_shards}. record from {shard.index} of' if shard.is_by_record else 'all records of'
    about = '' if sizes.is_counted else 'about '
    logger.info(
        'Reading %s %d files (%d GZIP): %s%s records of %s bytes, batch %d',
        part, len(source.files), sum(map(bool, source.compressions)), about, f'{sizes.records:,}', sizes.record_bytes,
        batch_size,
    )  # fmt: skip
    parsed_record_bytes = sizes.parsed_bytes // max(1, sizes.records)
    buffered = min(config.shuffle_buffer, sizes.records)
    if pipeline == 'memory':
        logger.info(
            'Training from memory: the parsed set takes %s (twice that while it loads); each epoch is a permutation of it',
            memory.describe(sizes.parsed_bytes),
        )
    elif pipeline == 'encoded':
        logger.info(
            'Training from memory: the encoded pictures take %s (twice that while they load) and are decoded each time; each '
            'epoch is a permutation of them',
            memory.describe(sizes.records * sizes.record_bytes),
        )
    elif pipeline == 'blocks':
        logger.info(
            'Training by streaming: chunks of up to %d records are shuffled, then the records of blocks of %d; '
            'the buffers take %s',
            pipelines.CHUNK_RECORDS, max(1, config.shuffle_buffer // 2),
            memory.describe(buffered / 2 * (sizes.record_bytes + 2 * parsed_record_bytes)),
        )  # fmt: skip
    elif pipeline == 'records':
        logger.info(
            'Training by streaming: a buffer of %d records is shuffled; it takes %s',
            config.shuffle_buffer, memory.describe(buffered * sizes.record_bytes),
        )  # fmt: skip
    else:
        logger.info('Evaluating every record once: %s%d batches', about, sharding.count_batches(sizes.records, batch_size))
