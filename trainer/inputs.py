"""The input_fn of training and evaluation: checks the files, chooses a pipeline, says in the log what runs.

Steps of `make_input_fn`: look at the first bytes of every file; compare with the manifest; give this worker its part; skip
what is corrupt, when that is allowed, or check the first record; estimate sizes; choose.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import tensorflow as tf

from trainer import manifest, pipeline_choice, pipelines, records, sharding, storage
from trainer.config import DataConfig
from trainer.datasets import Dataset
from trainer.errors import DataError

logger = logging.getLogger(__name__)

# The feature that tells records (1) from the padding (0) of an evaluation batch.
WEIGHTS = 'weights'
_MIN_GZIP_BYTES = 20


@dataclasses.dataclass(frozen=True)
class InputFn:
    """An input_fn for Estimator and TPUEstimator; `make_input_fn` makes it."""

    files: tuple[str, ...]
    """The files that it reads: this worker's, with sound copies in place of damaged ones."""
    corrupt_records: int
    """Records left out because they are damaged or not as the schema says."""
    dataset: Dataset
    pipeline: str
    """'memory', 'encoded' (pictures in memory, not decoded), 'blocks', 'records' or 'exact': which one runs."""
    batch_size: int
    """Records of a batch, unless params has one."""
    step_records: int
    """Records that the order of `source` gives a step, over all batches that make it."""
    part: tuple[int, int]
    """This worker's index and the number of workers that share every step of one order."""
    source: pipelines.Source
    seed: int
    start_step: int
    shuffle_buffer: int

    def __call__(self, params: Optional[Mapping[str, Any]] = None) -> tf.data.Dataset:
        """Builds the pipeline in the current graph.

        Args:
          params: `params['batch_size']`, which TPUEstimator sets, beats the batch of `make_input_fn`; `None` has none.

        Returns:
          Dataset of (features, labels): name to [batch, ...] tensor, and [batch] int64 in [0, num_classes). The batch is
          static. Training never ends; evaluation adds the feature 'weights', [batch] float32 of 1 (record) or 0 (padding).
        """
        batch_size = (params or {}).get('batch_size') or self.batch_size
        if self.pipeline == 'exact':
            return pipelines.evaluate_exactly(self.source, self.dataset, batch_size=batch_size, weights=WEIGHTS)
        if self.pipeline in pipeline_choice.IN_MEMORY:
            return pipelines.train_from_memory(
                self.source,
                self.dataset,
                batch_size=batch_size,
                step_records=self.step_records,
                part=self.part,
                seed=self.seed,
                start_step=self.start_step,
                keeps_encoded=self.pipeline == 'encoded',
            )
        return pipelines.train_by_streaming(
            self.source,
            self.dataset,
            batch_size=batch_size,
            seed=self.seed,
            start_step=self.start_step,
            shuffle_buffer=self.shuffle_buffer,
            by_block=self.pipeline == 'blocks',
        )

    def starting_at(self, step: int) -> InputFn:
        """The same input_fn from another step on; the files are not looked at again."""
        return dataclasses.replace(self, start_step=step)


def make_input_fn(
    files: Sequence[str],
    dataset: Dataset,
    *,
    training: bool,
    global_batch_size: int,
    seed: int,
    config: DataConfig,
    batch_size: int = 0,
    num_workers: int = 1,
    worker_index: int = 0,
    is_lockstep: bool = False,
    start_step: int = 0,
) -> InputFn:
    """Makes the input_fn of one worker.

    Args:
      files: All shards, the same list on every worker; plain or GZIP, found from the bytes.
      dataset: Schema and label.
      training: Endless and shuffled; else every record once, in order, the last batch padded.
      global_batch_size: Records of a step over all replicas that make it.
      seed: Same seed, same batches.
      config: `cache`, `cache_memory_share`, `shuffle_buffer`, `max_corrupt_records`.
      batch_size: Records of a batch, one replica's; 0 takes the global batch.
      num_workers: Workers that share the records.
      worker_index: From 0, another one on every worker.
      is_lockstep: The workers make every step together. From memory each then holds the whole set and takes its part of
        each step, so that a step has the same records on any number of workers; streaming, each has its own shards.
      start_step: Steps done already: from memory the order of records goes on there, streaming shuffles anew.

    Returns:
      The input_fn, with `files` and `corrupt_records` for diagnosis and summaries.

    Raises:
      DataError: A file is empty, cut or no TFRecord file; the first record does not fit the schema; more records are
        corrupt than `max_corrupt_records`; `cache='memory'` and the set does not fit.
    """
    settings: dict[str, Any] = {'training': training, 'global_batch_size': global_batch_size, 'seed': seed, 'config': config}
    if is_lockstep and num_workers > 1 and config.cache != 'off':
        whole = make_input_fn(files, dataset, batch_size=batch_size, start_step=start_step, **settings)
        if whole.pipeline in pipeline_choice.IN_MEMORY:
            logger.info('Every step is divided among %d workers; this one takes part %d', num_workers, worker_index)
            return dataclasses.replace(whole, part=(worker_index, num_workers))
    batch_size = batch_size or global_batch_size
    shard = sharding.shard_files(files, num_workers, worker_index)
    facts = manifest.facts_of(shard.files)
    if config.max_corrupt_records:
        source, corrupt = _leave_out_corrupt(shard, dataset, facts, limit=config.max_corrupt_records)
    else:
        source, corrupt = pipelines.Source(shard.files, tuple(records.find_compressions(shard.files)), shard), 0
    file_bytes = _measure_files(source.files)
    if not config.max_corrupt_records:
        _compare_with_manifest(source, facts, file_bytes)
    first = _read_first(source, dataset, file_bytes)
    _check_enough_records(source)
    sizes = pipeline_choice.estimate_sizes(source, dataset, facts, file_bytes, first_record_bytes=len(first))
    pipeline = pipeline_choice.choose(dataset, sizes, config) if training else 'exact'
    pipeline_choice.log(pipeline, source, sizes, batch_size=batch_size, config=config)
    return InputFn(
        files=source.files,
        corrupt_records=corrupt,
        dataset=dataset,
        pipeline=pipeline,
        batch_size=batch_size,
        step_records=global_batch_size // num_workers,
        part=(0, 1),
        source=source,
        seed=seed,
        start_step=start_step,
        shuffle_buffer=config.shuffle_buffer,
    )


def _measure_files(paths: Sequence[str]) -> dict[str, int]:
    """Length of each file in bytes, asked for once: on a remote store each is a request."""
    with concurrent.futures.ThreadPoolExecutor(pipeline_choice.PARALLEL_FILES) as pool:
        return dict(zip(paths, pool.map(storage.size, paths)))


def _compare_with_manifest(
    source: pipelines.Source, facts: Mapping[str, manifest.FileFacts], file_bytes: Mapping[str, int]
) -> None:
    """Finds files that were cut: TensorFlow reads one that ends between two records, or a cut GZIP file, without a word."""
    for path, compression in zip(source.files, source.compressions):
        if compression and file_bytes[path] < _MIN_GZIP_BYTES:
            raise DataError(f'{path}: the GZIP file is cut: it has {file_bytes[path]} bytes; write it again')
        if path in facts and file_bytes[path] != facts[path].bytes:
            _explain_difference(path, facts[path], num_bytes=file_bytes[path])


def _explain_difference(path: str, facts: manifest.FileFacts, *, num_bytes: int) -> None:
    count = 0
    for record in records.scan(path):
        if record.problem:
            raise DataError(records.describe(path, record, record.problem))
        count += 1
    if count != facts.records:
        folder = storage.split(path)[0]
        raise DataError(
            f'{path}: record {count}: the file ends here with {num_bytes} bytes, {storage.join(folder, manifest.NAME)} states '
            f'{facts.records} records and {facts.bytes} bytes; write the file again, or delete the manifest if it is outdated'
        )


def _leave_out_corrupt(
    shard: sharding.Shard, dataset: Dataset, facts: Mapping[str, manifest.FileFacts], *, limit: int
) -> tuple[pipelines.Source, int]:
    """Replaces damaged files by copies of their sound records; reads every file once."""
    folder = tempfile.mkdtemp(prefix='trainer-sound-records-')
    atexit.register(storage.remove_tree, folder)
    files, compressions = [], []
    found: list[records.Salvage] = []
    for index, path in enumerate(shard.files):
        compression = _find_compression_or_damage(path, facts)
        target = storage.join(folder, f'{index:05d}-{storage.split(path)[1]}')
        expected = facts[path].records if path in facts else None
        salvage = records.salvage(path, dataset, target, expected=expected)
        files.append(target if salvage else path)
        compressions.append('' if salvage else compression)
        if salvage is None:
            continue
        found.append(salvage)
        at_least = '' if salvage.is_count_exact else ' or more (the rest of the file is lost, and no manifest counts it)'
        logger.warning(
            '%s: %d corrupt records%s left out, %d sound ones kept; the first: %s',
            path, salvage.corrupt, at_least, salvage.good, salvage.first_problem,
        )  # fmt: skip
        corrupt = sum(item.corrupt for item in found)
        if corrupt > limit:
            raise DataError(
                f'{corrupt} corrupt records, more than --max_corrupt_records={limit}; the first: {found[0].first_problem}'
            )
    corrupt = sum(item.corrupt for item in found)
    logger.info('%d corrupt records left out of %d files (--max_corrupt_records=%d)', corrupt, len(files), limit)
    return pipelines.Source(tuple(files), tuple(compressions), shard), corrupt


def _find_compression_or_damage(path: str, facts: Mapping[str, manifest.FileFacts]) -> str:
    """As `records.find_compression`, but a file that the manifest counts may be lost from its first byte on."""
    try:
        return records.find_compression(path)
    except DataError:
        if path not in facts:  # a wrong file, as like as not
            raise
        return ''


def _read_first(source: pipelines.Source, dataset: Dataset, file_bytes: Mapping[str, int]) -> bytes:
    """The first record, checked."""
    # A copy without its corrupt records may have none left.
    for path in source.files:
        if file_bytes[path]:
            return records.check_first(path, dataset)
    raise DataError(
        f'{source.files[0]}: no sound record in it nor in the {len(source.files) - 1} other files; write them again'
    )


def _check_enough_records(source: pipelines.Source) -> None:
    """When workers share files, each must get a record, or it would wait for data for ever."""
    if not source.shard.is_by_record:
        return
    found = 0
    for path in source.files:
        for _ in records.scan(path):
            found += 1
            if found == source.shard.num_shards:
                return
    raise DataError(
        f'{", ".join(source.files)}: {found} records for {source.shard.num_shards} workers; use fewer workers or more data'
    )


if __name__ == '__main__':
    from trainer import input_speed

    sys.exit(input_speed.main(sys.argv[1:]))
