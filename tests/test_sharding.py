from __future__ import annotations

import subprocess
import sys

import pytest

from trainer import sharding
from trainer.errors import UsageError

GRID = [(files, workers) for files in (0, 1, 2, 3, 7, 16, 17) for workers in (1, 2, 3, 5, 16, 17, 40)]


@pytest.mark.parametrize(('num_files', 'num_workers'), GRID)
def test_workers_read_every_record_once(num_files, num_workers):
    files = [f'f{i}' for i in range(num_files)]
    held = {path: [(path, n) for n in range(11 + i)] for i, path in enumerate(files)}
    read = []
    for worker in range(num_workers):
        shard = sharding.shard_files(files, num_workers, worker)
        records = [record for path in shard.files for record in held[path]]
        mine = records[shard.index :: shard.num_shards]
        assert shard.count(len(records)) == len(mine)
        read += mine
    assert sorted(read) == sorted(record for path in files for record in held[path])


@pytest.mark.parametrize(('num_files', 'num_workers'), [(n, w) for n, w in GRID if n >= w])
def test_files_are_shared_out_evenly(num_files, num_workers):
    shards = [sharding.shard_files([str(i) for i in range(num_files)], num_workers, w) for w in range(num_workers)]
    sizes = [len(shard.files) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert not any(shard.is_by_record for shard in shards)


def test_fewer_files_than_workers_divide_the_records():
    shard = sharding.shard_files(['a', 'b'], 3, 2)
    assert (shard.files, shard.num_shards, shard.index, shard.is_by_record) == (('a', 'b'), 3, 2, True)


@pytest.mark.parametrize('index', [-1, 2])
def test_worker_that_does_not_exist_is_refused(index):
    with pytest.raises(UsageError, match=f'worker_index={index} with num_workers=2; expected 0 to 1'):
        sharding.shard_files(['a'], 2, index)


def test_batches_of_exact_evaluation():
    assert [sharding.count_batches(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_super_batch_is_whole_batches_and_at_least_one():
    assert [sharding.super_batch_size(b, target=1024) for b in (1, 10, 100, 1024, 3000)] == [1024, 1020, 1000, 1024, 3000]


def test_sharding_needs_no_tensorflow():
    code = 'import sys, trainer.sharding; sys.exit("tensorflow" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
