"""Which worker reads what, and how many batches that makes: integer arithmetic, no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainer.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one worker reads."""

    files: tuple[str, ...]
    """The files that it opens."""
    num_shards: int
    """Of the records of `files`, in file order, it keeps each `num_shards`-th; 1 keeps all."""
    index: int
    """The first record that it keeps, from 0; below `num_shards`."""

    @property
    def is_by_record(self) -> bool:
        """Whether workers share files and divide the records."""
        return self.num_shards > 1

    def count(self, num_records: int) -> int:
        """How many of `num_records` records in `files` the worker keeps."""
        return len(range(self.index, num_records, self.num_shards))


def shard_files(files: Sequence[str], num_workers: int, worker_index: int) -> Shard:
    """Gives each worker its own files; when there are too few, all files and its own records.

    Args:
      files: All files, in the same order on every worker.
      num_workers: How many read at the same time.
      worker_index: From 0; another one on every worker.

    Returns:
      The worker's part: over all workers every record once.

    Raises:
      UsageError: `worker_index` is no worker of `num_workers`.
    """
    if not 0 <= worker_index < num_workers:
        raise UsageError(f'worker_index={worker_index} with num_workers={num_workers}; expected 0 to {num_workers - 1}')
    if len(files) < num_workers:
        return Shard(tuple(files), num_workers, worker_index)
    return Shard(tuple(files[worker_index::num_workers]), 1, 0)


def count_batches(num_records: int, batch_size: int) -> int:
    """Batches of an exact evaluation: the last one is padded, none is dropped."""
    return -(-num_records // batch_size)


def super_batch_size(batch_size: int, *, target: int) -> int:
    """Records to handle in one go: the largest whole number of batches within `target`, at least one batch."""
    return batch_size * max(1, target // batch_size)
