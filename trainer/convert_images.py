"""A folder of pictures in class folders to TFRecord shards: `python -m trainer.convert images`.

Steps: list the files; the folder's name is the class; a hash of class and name decides split and order; `conversion.py` writes
the shards.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Union

from trainer import conversion, examples, picture_files, storage
from trainer.errors import DataError

DATASET = 'images'
BAD_FILES = 'bad_files.txt'
_CONVERTER_VERSION = 1
_ENDINGS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff')


@dataclasses.dataclass(frozen=True)
class Settings(conversion.Sharding):
    """What decides the bytes written."""

    resize: int = 0
    crop: bool = False
    quality: int = 95

    def __post_init__(self) -> None:
        super().__post_init__()
        conversion.check_range('--quality', self.quality, 1, 95)
        conversion.check_range('--resize', self.resize, 0, 65535)


class Source(NamedTuple):
    """A file to be converted."""

    path: str
    name: str
    """Class folder and file name, which identifies the picture in records and predictions."""
    label: int


class PictureJob:
    """Encodes the pictures of one shard."""

    def __init__(self, sources: Sequence[Source], settings: Settings) -> None:
        self._sources = tuple(sources)
        self._settings = settings
        self._sizes: list[tuple[int, int]] = []

    def encode(self) -> Iterator[Union[conversion.Encoded, str]]:
        """The record of each file."""
        settings = self._settings
        for source in self._sources:
            try:
                picture = picture_files.read_picture(
                    storage.read_bytes(source.path), resize=settings.resize, crop=settings.crop, quality=settings.quality
                )
            except DataError as error:
                yield f'{source.path}: {error}'
                continue
            self._sizes.append((picture.width, picture.height))
            example: dict[str, examples.Values] = {
                'image': picture.jpeg, 'label': source.label, 'path': source.name.encode(), 'height': picture.height,
                'width': picture.width,
            }  # fmt: skip
            yield conversion.Encoded(examples.encode_example(example), source.label)

    def facts(self) -> dict[str, Any]:
        """Sides of the pictures, in pixels."""
        return {
            'shortest_side': min(map(min, self._sizes), default=0),
            'longest_side': max(map(max, self._sizes), default=0),
            'largest_square': max(map(min, self._sizes), default=0),
        }


def find_sources(patterns: str) -> tuple[list[Source], list[str]]:
    """The files of the patterns, and the classes: the names of their folders, sorted.

    Args:
      patterns: Comma-separated globs, or folders that hold class folders; local or remote.

    Raises:
      DataError: A pattern matches nothing, all files are in one folder, or two files have the same class and name.
    """
    paths: dict[str, None] = {}
    for pattern in filter(None, (item.strip() for item in patterns.split(','))):
        if storage.is_dir(pattern):
            found = [path for path in storage.glob(storage.join(pattern, '*', '*')) if path.lower().endswith(_ENDINGS)]
        else:
            found = storage.glob(pattern)
        if not found:
            raise DataError(
                f"--input={pattern}: matches no file; expected a glob such as 'photos/*/*.jpg', or a folder of folders"
            )
        paths.update(dict.fromkeys(found))
    classes = sorted({_class_of(path) for path in paths})
    if len(classes) < 2:
        raise DataError(f'--input={patterns}: all {len(paths)} files are in {classes}; expected a folder for each class')
    labels = {name: label for label, name in enumerate(classes)}
    sources = [Source(path, f'{_class_of(path)}/{storage.split(path)[1]}', labels[_class_of(path)]) for path in sorted(paths)]
    by_name: dict[str, str] = {}
    for source in sources:
        if by_name.setdefault(source.name, source.path) != source.path:
            raise DataError(f'--input: {by_name[source.name]} and {source.path} have the same class and name; rename one')
    return sources, classes


def _class_of(path: str) -> str:
    return storage.split(storage.split(path)[0])[1]


def split_by_hash(sources: Sequence[Source], eval_share: float) -> dict[str, list[Source]]:
    """'train' and 'eval' to their files, in the order of a hash of the names; 'eval' only when it has any."""
    splits: dict[str, list[Source]] = {'train': [], 'eval': []}
    for hashed, source in sorted((conversion.digest(source.name), source) for source in sources):
        splits['eval' if conversion.is_held_out(hashed, eval_share) else 'train'].append(source)
    return {name: part for name, part in splits.items() if part}


def convert(patterns: str, folder: str, settings: Settings, *, max_bad: int = 0, workers: int = 0) -> dict[str, Any]:
    """Writes shards of JPEG records and manifest.json; returns the manifest.

    A record has 'image' (JPEG), 'label' (int64), 'path' (class/name), 'height' and 'width' (int64, pixels).

    Args:
      patterns: As for `find_sources`.
      folder: Where the shards go, local or remote; made when missing. A complete conversion of the same files with the same
        settings is left as it is.
      settings: What to write.
      max_bad: Files that may be left out because they cannot be decoded; they are listed in `bad_files.txt`.
      workers: Processes; 0 takes the processors.

    Raises:
      UsageError: A setting is out of range.
      DataError: No files, more than `max_bad` bad ones, too few for the shards, or the folder holds another conversion.
    """
    sources, classes = find_sources(patterns)
    splits = split_by_hash(sources, settings.eval_share)
    for split, part in splits.items():
        settings.check_filled(split, len(part), 'files')
    stated = _describe_conversion(sources, settings)
    run = conversion.Conversion(folder, stated, noun='files', bad_file=BAD_FILES, max_bad=max_bad, workers=workers)
    complete = run.find_complete()
    if complete:
        return complete
    shards = []
    for split, part in splits.items():
        count = settings.count(split)
        for index in range(count):
            own = part[index::count]
            shards.append(conversion.Shard(settings.path(folder, split, index), PictureJob(own, settings), len(own)))
    done = run.write(shards)
    kept = [facts for facts in done.values() if facts['records']]
    if not kept:
        raise DataError('no picture could be decoded')
    facts = {
        'dataset': DATASET,
        'schema': {
            **{name: {'dtype': 'int64', 'shape': []} for name in ('height', 'label', 'width')},
            **{name: {'dtype': 'bytes', 'shape': []} for name in ('image', 'path')},
        },
        'label': 'label',
        'pictures': {
            'shortest_side': min(facts['shortest_side'] for facts in kept),
            'longest_side': max(facts['longest_side'] for facts in kept),
            'largest_square': max(facts['largest_square'] for facts in kept),
        },
    }
    return run.finish(done, classes, facts)


def _describe_conversion(sources: Sequence[Source], settings: Settings) -> dict[str, Any]:
    names = hashlib.sha256('\n'.join(source.name for source in sources).encode()).hexdigest()
    return {
        'dataset': DATASET, 'converter_version': _CONVERTER_VERSION, 'files': len(sources), 'names_sha256': names,
        **dataclasses.asdict(settings),
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    default = Settings()
    parser.add_argument('--input', required=True, help="globs or folders, comma-separated, such as 'photos/*/*.jpg'")
    conversion.add_arguments(parser, noun='files')
    parser.add_argument('--resize', type=int, default=default.resize, help='pixels of the shorter side; 0 leaves it (default)')
    parser.add_argument('--crop', action='store_true', help='cut to the central square')
    parser.add_argument(
        '--quality', type=int, default=default.quality, help='of JPEGs that are written anew (default: %(default)s)'
    )


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Converts as the flags say; returns the manifest."""
    settings = Settings(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(Settings)})
    return convert(flags.input, flags.output, settings, max_bad=flags.max_bad, workers=flags.workers)
