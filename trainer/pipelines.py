"""The tf.data graphs behind `inputs`: training from memory, training by streaming, exact evaluation.

All parse many records in one call, because an operation's fixed cost is larger than a small record's: super-batches are
parsed and cut into batches afterwards. Slices of a super-batch share its memory, so cutting is nearly free.

Training from memory: parse the whole set into one tensor for each feature; for each epoch draw a permutation; gather.
Training by streaming: shuffle files, interleave, shuffle, repeat, parse, batch, prefetch. Small records of fixed size are
  parsed before they are shuffled, a deviation from the usual order: moving rows of a tensor costs a tenth of moving strings.
Evaluation: files in order, batch, parse, pad, prefetch.

Pictures are shuffled as the strings that they are stored as, and decoded in the batch that they go out in. Which window of a
picture a batch shows depends on the seed and on the picture's position in the order of all records, and on nothing else.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

import tensorflow as tf

from trainer import images, sharding
from trainer.datasets import Dataset
from trainer.storage import is_remote

# Records parsed and gathered in one call. Larger gains nothing more and delays the first batch.
_SUPER_BATCH_RECORDS = 1024
# Records of a chunk: read from one file in a row, parsed in one call, moved as a whole by the first of two shuffles.
CHUNK_RECORDS = 256
# Chunks of a block, at least: with a small buffer chunks shrink, so that a block still draws on many places.
_MIN_CHUNKS = 16
# Records of one call when the whole set is loaded.
_LOAD_RECORDS = 4096
# Files open at once.
_OPEN_FILES = 16
_INT64_MAX = 2**63 - 1
# Pictures decoded in one call, at most: a call holds the operations of each of them.
_UNROLLED_PICTURES = 256
_LOAD_PICTURES = 64
# More than any set holds: `rebatch` then makes one tensor of all of it.
_EVERYTHING = 2**40
# Prime factors that keep the streams of random numbers apart.
_START_STEP_FACTOR = 1_000_003
_SEED_RANGE = 2**31


# Functions given to tf.data hold TensorFlow operations only. Converting their Python all the same takes over a second at the
# first one.
_plain = tf.autograph.experimental.do_not_convert


class Source(NamedTuple):
    """The records of one worker."""

    files: tuple[str, ...]
    compressions: tuple[str, ...]
    """'' or 'GZIP' for each file."""
    shard: sharding.Shard


def read_in_order(source: Source) -> tf.data.Dataset:
    """Serialized records, scalar strings, in the same order every time; from a remote store several files at once."""
    return _read(source, shuffle_seed=None, chunk_records=None)


def _read(source: Source, *, shuffle_seed: Optional[int], chunk_records: Optional[int]) -> tf.data.Dataset:
    """Serialized records, or vectors of up to `chunk_records` of them that come from one file."""
    files = tf.data.Dataset.from_tensor_slices((list(source.files), list(source.compressions)))
    if shuffle_seed is not None and not source.shard.is_by_record:
        files = files.shuffle(len(source.files), seed=shuffle_seed)
    # By record the count must run over the same order on every worker, so files stay in order and chunks come after.
    is_chunk_of_file = chunk_records is not None and not source.shard.is_by_record
    # Reads of a remote store wait, so they go in parallel and in large pieces. Local reads come from the page cache: there
    # threads cost more than they give (a third of the speed with one thread for each file).
    remote = any(is_remote(path) for path in source.files)

    @_plain
    def open_file(path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
        opened = tf.data.TFRecordDataset(path, compression_type=compression, buffer_size=(8 << 20) if remote else (256 << 10))
        return opened.batch(chunk_records) if is_chunk_of_file else opened

    in_order = shuffle_seed is None and not remote
    cycle_length = 1 if in_order else min(_OPEN_FILES, len(source.files))
    opened = files.interleave(
        open_file,
        cycle_length=cycle_length,
        block_length=1 if is_chunk_of_file else 16,
        num_parallel_calls=cycle_length if remote else None,
        deterministic=True if remote else None,  # TensorFlow warns of one given in vain
    )
    if source.shard.is_by_record:
        opened = opened.shard(source.shard.num_shards, source.shard.index)
        return opened.batch(chunk_records) if chunk_records else opened
    return opened


def parse_labelled(
    serialized: tf.Tensor, dataset: Dataset, *, decode_pictures: bool = True
) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Parses [batch] serialized Examples to features and labels, and checks that every label is in range.

    Pictures are their central pixels, or with `decode_pictures=False` still [batch] strings.

    The check looks at a whole super-batch at once. Without it a label out of range gives NaN on some devices and an error
    that names no record on others.
    """
    features = dataset.schema.parse(serialized, decode_pictures=decode_pictures)
    labels = features.pop(dataset.label)
    in_range = tf.reduce_all((labels >= 0) & (labels < dataset.num_classes))
    message = f'label {dataset.label!r} outside 0 to {dataset.num_classes - 1}'
    with tf.control_dependencies([tf.debugging.Assert(in_range, [message])]):
        labels = tf.identity(labels)
    return features, labels


def _parse_all(serialized: tf.Tensor, dataset: Dataset) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    features, labels = parse_labelled(serialized, dataset)
    return (dataset.features_fn(features) if dataset.features_fn else features), labels


def _augment(features: dict[str, tf.Tensor], dataset: Dataset, *, positions: tf.Tensor, seed: int) -> dict[str, tf.Tensor]:
    """Decodes what are still strings of pictures to random windows, and applies the dataset's `features_fn`."""
    for name, feature in dataset.schema.pictures.items():
        if feature.image and features[name].dtype == tf.string:
            pixels = images.decode_random(features[name], feature.size_of_picture, feature.image, positions, seed)
            features = {**features, name: pixels}
    return dataset.features_fn(features) if dataset.features_fn else features


def train_from_memory(
    source: Source,
    dataset: Dataset,
    *,
    batch_size: int,
    step_records: int,
    part: tuple[int, int],
    seed: int,
    start_step: int,
    keeps_encoded: bool = False,
) -> tf.data.Dataset:
    """Endless batches from the set parsed once into memory.

    Every epoch is an exact permutation of the whole set, drawn from (seed, epoch) alone, and batches run on from one epoch
    into the next. So the records of a step depend on nothing but the seed: starting at `start_step` goes on as if there had
    been no stop, and workers that each take their part of the same order make together the batch that one would make alone.

    Args:
      source: The whole set, or this worker's part of it.
      dataset: Schema and label.
      batch_size: Records of a batch; several of them may make a step.
      step_records: Records that this order gives a step.
      part: This worker's index and the number of workers that share each step; (0, 1) for the only one.
      seed: Same seed, same batches.
      start_step: Steps done already.
      keeps_encoded: Pictures stay encoded in memory and are decoded each time; else they are kept as pixels, and where
        training mirrors them, both ways round: reversing a picture costs as much as copying it four times.
    """
    has_pictures = bool(dataset.schema.pictures)
    load_records, super_batch = _LOAD_RECORDS, sharding.super_batch_size(batch_size, target=_SUPER_BATCH_RECORDS)
    if has_pictures:
        load_records, super_batch = _LOAD_PICTURES, _picture_batch(batch_size)
    mirrored = [] if keeps_encoded else [name for name, feature in dataset.schema.pictures.items() if feature.is_mirrored]

    @_plain
    def load(serialized: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        features, labels = parse_labelled(serialized, dataset, decode_pictures=not keeps_encoded)
        both = {name: tf.stack([features[name], tf.reverse(features[name], [2])], axis=1) for name in mirrored}
        return {**features, **both}, labels

    chunks = read_in_order(source).batch(load_records).map(load, num_parallel_calls=_cores() if has_pictures else None)
    whole = chunks.rebatch(_EVERYTHING)

    @_plain
    def make_batches(features: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.data.Dataset:
        # `whole` has one element. Its tensors are captured here, not copied, and live as long as the iterator.
        num_records = tf.shape(labels, tf.int64)[0]
        flat = {name: tf.reshape(features[name], [-1, *features[name].shape[2:]]) for name in mirrored}
        start = tf.constant(start_step, tf.int64) * step_records
        first_epoch, first_position = start // num_records, start % num_records

        @_plain
        def permute(epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            order = tf.random.experimental.stateless_shuffle(tf.range(num_records), tf.stack([tf.cast(seed, tf.int64), epoch]))
            positions = epoch * num_records + tf.range(num_records)
            first = tf.where(epoch == first_epoch, first_position, 0)
            return order[first:], positions[first:]

        @_plain
        def gather(rows: tf.Tensor, positions: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            batch = {name: tf.gather(tensor, rows) for name, tensor in features.items() if name not in mirrored}
            for name in mirrored:
                sides = tf.cast(images.draw_mirrored(positions, seed), tf.int64)
                batch[name] = tf.gather(flat[name], 2 * rows + sides)
            return _augment(batch, dataset, positions=positions, seed=seed), tf.gather(labels, rows)

        rows = tf.data.Dataset.range(first_epoch, _INT64_MAX).map(permute)
        index, num_parts = part
        if num_parts > 1:
            share = step_records // num_parts
            rows = rows.rebatch(step_records, drop_remainder=True)
            part_of_step = slice(index * share, (index + 1) * share)
            rows = rows.map(_plain(lambda step, positions: (step[part_of_step], positions[part_of_step])))
        gathered = rows.rebatch(super_batch, drop_remainder=True).map(gather, num_parallel_calls=2 if keeps_encoded else None)
        return _cut(gathered, super_batch, batch_size)

    return _finish(whole.flat_map(make_batches), dataset)


def train_by_streaming(
    source: Source, dataset: Dataset, *, batch_size: int, seed: int, start_step: int, shuffle_buffer: int, by_block: bool
) -> tf.data.Dataset:
    """Endless batches read from the files again each epoch; every epoch holds each record once.

    Args:
      source: The worker's records.
      dataset: Schema and label.
      batch_size: Records of a batch.
      seed: Same seed and start, same batches.
      start_step: Enters the seed, so that a resumed run does not see the start of the first one again.
      shuffle_buffer: Records held for shuffling.
      by_block: Shuffle chunks of up to `CHUNK_RECORDS` and then the records within blocks, for records of fixed size; else a
        buffer of single records.
    """
    seed = (seed + _START_STEP_FACTOR * start_step) % _SEED_RANGE
    make = _stream_blocks if by_block else _stream_records
    return _finish(make(source, dataset, batch_size=batch_size, seed=seed, shuffle_buffer=shuffle_buffer), dataset)


def _stream_blocks(source: Source, dataset: Dataset, *, batch_size: int, seed: int, shuffle_buffer: int) -> tf.data.Dataset:
    # Half of the buffer holds chunks, which carry records far; the other half is a block that mixes those of many chunks.
    block_records = max(1, shuffle_buffer // 2)
    chunk_records = max(1, min(CHUNK_RECORDS, block_records // _MIN_CHUNKS))
    chunks = _read(source, shuffle_seed=seed, chunk_records=chunk_records)
    chunks = chunks.shuffle(max(1, block_records // chunk_records), seed=seed + 1)
    chunks = chunks.map(_plain(lambda serialized: parse_labelled(serialized, dataset)), num_parallel_calls=_parallel_calls())

    @_plain
    def shuffle_block(number: tf.Tensor, block: tuple[dict[str, tf.Tensor], tf.Tensor]) -> tuple:
        features, labels = block
        order = tf.random.experimental.stateless_shuffle(
            tf.range(tf.shape(labels, tf.int64)[0]), tf.stack([tf.cast(seed, tf.int64), number])
        )
        features = {name: tf.gather(tensor, order) for name, tensor in features.items()}
        return (dataset.features_fn(features) if dataset.features_fn else features), tf.gather(labels, order)

    # Blocks are numbered after `repeat`, so that the same records are mixed anew in the next epoch.
    blocks = chunks.rebatch(block_records).repeat().enumerate().map(shuffle_block)
    return blocks.rebatch(batch_size, drop_remainder=True)


def _stream_records(source: Source, dataset: Dataset, *, batch_size: int, seed: int, shuffle_buffer: int) -> tf.data.Dataset:
    super_batch = batch_size
    has_pictures = bool(dataset.schema.pictures)
    if has_pictures:
        super_batch = _picture_batch(batch_size)
    elif dataset.schema.has_static_shapes:  # else each batch is as wide as its longest record
        super_batch = sharding.super_batch_size(batch_size, target=_SUPER_BATCH_RECORDS)
    records = _read(source, shuffle_seed=seed, chunk_records=None).shuffle(shuffle_buffer, seed=seed + 1).repeat()

    @_plain
    def parse(number: tf.Tensor, serialized: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        features, labels = parse_labelled(serialized, dataset, decode_pictures=False)
        positions = number * super_batch + tf.range(super_batch, dtype=tf.int64)
        return _augment(features, dataset, positions=positions, seed=seed), labels

    batches = records.batch(super_batch, drop_remainder=True).enumerate()
    return _cut(batches.map(parse, num_parallel_calls=_decoding_calls(has_pictures)), super_batch, batch_size)


def evaluate_exactly(source: Source, dataset: Dataset, *, batch_size: int, weights: str) -> tf.data.Dataset:
    """Every record once, in order; the last batch is padded.

    Args:
      source: The records.
      dataset: Schema and label.
      batch_size: Records of a batch, padding included; may exceed the set.
      weights: Name of the added feature, [batch] float32: 1 for a record, 0 for padding. Padding is 0 or ''.
    """
    super_batch = batch_size
    if dataset.schema.has_static_shapes and not dataset.schema.pictures:
        super_batch = sharding.super_batch_size(batch_size, target=_SUPER_BATCH_RECORDS)

    @_plain
    def parse_and_pad(serialized: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        features, labels = _parse_all(serialized, dataset)
        missing = -tf.shape(labels)[0] % batch_size

        def pad(tensor: tf.Tensor) -> tf.Tensor:
            paddings = tf.concat([[[0, missing]], tf.zeros([tensor.shape.rank - 1, 2], tf.int32)], axis=0)
            padded = tf.pad(tensor, paddings, constant_values='' if tensor.dtype == tf.string else tf.zeros([], tensor.dtype))
            return tf.ensure_shape(padded, [None, *tensor.shape[1:]])

        features = {name: pad(tensor) for name, tensor in features.items()}
        return {**features, weights: pad(tf.ones_like(labels, tf.float32))}, pad(labels)

    batches = read_in_order(source).batch(super_batch)
    parsed = batches.map(parse_and_pad, num_parallel_calls=_decoding_calls(bool(dataset.schema.pictures)))
    # It also makes the batch static. Tensors of two widths could not be joined, but then a call makes one batch.
    return _finish(parsed.rebatch(batch_size, drop_remainder=True), dataset)


def _cut(super_batches: tf.data.Dataset, super_batch: int, batch_size: int) -> tf.data.Dataset:
    return super_batches if super_batch == batch_size else super_batches.rebatch(batch_size, drop_remainder=True)


def _parallel_calls() -> Optional[int]:
    """Threads for parsing; None runs it in the reading thread, which the prefetching one already separates from training.

    Not AUTOTUNE: with 2 cores it settles on more threads than there is work for, and parsing is then several times slower.
    """
    cores = _cores()
    return min(8, cores // 2) if cores >= 4 else None


def _decoding_calls(has_pictures: bool) -> Optional[int]:
    """Batches made at once. All threads decode one of pictures; the second fills the gap while it is put together."""
    return 2 if has_pictures else _parallel_calls()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _picture_batch(batch_size: int) -> int:
    """Pictures decoded in one call: a batch, or of a large one the largest part that divides it."""
    return max(size for size in range(1, min(batch_size, _UNROLLED_PICTURES) + 1) if batch_size % size == 0)


def _finish(batches: tf.data.Dataset, dataset: Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    if dataset.schema.pictures:
        # Decoding takes all processors, whatever threads the session has for a step that may be small.
        options.threading.private_threadpool_size = _cores()
    options.deterministic = True
    # Nothing is left to tune, and the tuner's thread costs as much as the pipeline. The default rewrites would put AUTOTUNE
    # into maps that have no thread on purpose.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    # The files of this worker are chosen already.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return batches.prefetch(2).with_options(options)
