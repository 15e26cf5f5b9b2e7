"""Small pictures for tests, encoded and in shards as the image converter writes them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from trainer import images, manifest, records
from trainer.datasets import Dataset
from trainer.features import Feature, Schema

WIRE = Schema({'image': Feature('bytes'), 'label': Feature('int64'), 'path': Feature('bytes', default='')})


def make_picture(height: int, width: int, number: int = 0) -> np.ndarray:
    """A smooth picture, [height, width, 3] uint8: red rises to the right, green downwards, blue is `number`."""
    rows, columns = np.mgrid[0:height, 0:width]
    blue = np.full((height, width), number % 256)
    return np.stack([columns * 255 // width, rows * 255 // height, blue], axis=-1).astype(np.uint8)


def encode(picture: np.ndarray) -> bytes:
    """As JPEG of quality 95 with full colour resolution."""
    return tf.io.encode_jpeg(picture, quality=95, chroma_downsampling=False).numpy()


def make_dataset(size: int, **decoding) -> Dataset:
    """A dataset of pictures with 10 classes, without a manifest."""
    image = Feature('bytes', (size, size, 3), image=images.Decoding(**decoding))
    return Dataset('images', Schema({'image': image, 'label': Feature('int64')}), 'label', 10, key='path', unread=('path',))


def write_records(
    folder: pathlib.Path,
    split: str,
    sizes: Sequence[tuple[int, int]],
    *,
    classes: Sequence[str] = ('a', 'b'),
    shards: int = 1,
    blue_step: int = 1,
) -> list[str]:
    """Writes pictures of (height, width) with a manifest; picture i has blue i * blue_step, the label i modulo the classes."""
    folder.mkdir(exist_ok=True)
    examples = [
        WIRE.encode(
            {'image': encode(make_picture(*size, number * blue_step)), 'label': number % len(classes), 'path': f'{number}.jpg'}
        )
        for number, size in enumerate(sizes)
    ]
    facts, paths = {}, []
    for index in range(shards):
        name = f'{split}-{index:05d}-of-{shards:05d}.tfrecord'
        paths.append(str(folder / name))
        data = records.write_file(paths[-1], examples[index::shards])
        facts[name] = {'records': len(examples[index::shards]), 'bytes': len(data)}
    sides = [side for size in sizes for side in size]
    content = {
        'dataset': 'images',
        'classes': list(classes),
        'pictures': {'shortest_side': min(sides), 'longest_side': max(sides), 'largest_square': max(map(min, sizes))},
        'splits': {split: {'records': len(examples), 'files': facts}},
    }
    manifest.write(str(folder), content)
    return paths
