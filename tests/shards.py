"""Small shards on disk and the damage that tests do to them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer import records
from trainer.datasets import MNIST, Dataset


def make_digits(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Digits that tell which they are: the first two pixels hold the number, the label is number % 10."""
    numbers = range(first, first + count)
    return [{'image': np.array([n % 256, n // 256] + [7] * 782, np.uint8), 'label': n % 10} for n in numbers]


def write_digits(folder: pathlib.Path, sizes: Sequence[int], *, compression: str = '') -> list[str]:
    """Writes one shard for each size; digits are numbered on through the shards."""
    return write_examples(folder, MNIST, [make_digits(n, first=sum(sizes[:i])) for i, n in enumerate(sizes)], compression)


def write_examples(folder: pathlib.Path, dataset: Dataset, shards: Sequence[Any], compression: str = '') -> list[str]:
    """Writes one file for each list of examples."""
    paths = [str(folder / f'part-{index:05d}.tfrecord') for index in range(len(shards))]
    for path, examples in zip(paths, shards):
        records.write_file(path, map(dataset.schema.encode, examples), compression=compression)
    return paths


def numbers_of(images: np.ndarray) -> list[int]:
    """Which digits of `make_digits` the images are."""
    return (images[:, 0].astype(int) + 256 * images[:, 1].astype(int)).tolist()


def damage(path: str, offset: int, data: bytes = b'\xff\xff') -> None:
    """Overwrites bytes of a file; a negative offset counts from the end."""
    raw = bytearray(pathlib.Path(path).read_bytes())
    offset %= len(raw)
    raw[offset : offset + len(data)] = data
    pathlib.Path(path).write_bytes(bytes(raw))


def cut(path: str, length: int) -> None:
    """Keeps the first `length` bytes; a negative length leaves out so many at the end."""
    pathlib.Path(path).write_bytes(pathlib.Path(path).read_bytes()[:length])
