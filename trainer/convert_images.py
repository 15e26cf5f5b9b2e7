"""A folder of pictures in class folders to TFRecord shards: `python -m trainer.convert images`.

Steps: list the files; the folder's name is the class; a hash of class and name decides split and order, so that new
files move no old one from training to evaluation; processes write a shard each; manifest.json comes last. What a shard holds
is noted when it is whole: the same command goes on after the last whole shard.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import trainer
from trainer import examples, manifest, picture_files, records, storage
from trainer.errors import DataError, UsageError

DATASET = 'images'
BAD_FILES = 'bad_files.txt'
# Finished shards, by name; gone when the manifest is there.
_PROGRESS = '.progress'
_CONVERTER_VERSION = 1
_POLL_SECS = 0.2
_ENDINGS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff')


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the bytes written."""

    shards: int = 16
    eval_shards: int = 2
    eval_share: float = 0.1
    resize: int = 0
    crop: bool = False
    quality: int = 95

    def __post_init__(self) -> None:
        limits = {
            'shards': (1, 99999),
            'eval_shards': (1, 99999),
            'eval_share': (0, 0.9),
            'quality': (1, 95),
            'resize': (0, 65535),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise UsageError(f'--{name}={getattr(self, name)}: expected {low} to {high}')


class Source(NamedTuple):
    """A file to be converted."""

    path: str
    name: str
    """Class folder and file name, which identifies the picture in records and predictions."""
    label: int


class _Shard(NamedTuple):
    path: str
    sources: tuple[Source, ...]
    settings: Settings


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
    hashed = sorted((hashlib.sha256(source.name.encode()).digest(), source) for source in sources)
    # The first bytes decide the split, the rest the order.
    is_eval = [int.from_bytes(digest[:4], 'big') < eval_share * 2**32 for digest, _ in hashed]
    splits = {
        'train': [source for (_, source), held_out in zip(hashed, is_eval) if not held_out],
        'eval': [source for (_, source), held_out in zip(hashed, is_eval) if held_out],
    }
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
    if max_bad < 0 or workers < 0:
        raise UsageError(f'--max_bad={max_bad} --workers={workers}: expected 0 or more')
    sources, classes = find_sources(patterns)
    splits = split_by_hash(sources, settings.eval_share)
    shards = _plan_shards(splits, folder, settings)
    stated = _describe_conversion(sources, settings)
    done = _read_progress(folder, stated)
    old = manifest.read(folder)
    if old.get('settings') == stated and not done and _is_whole(folder, old):
        _check_bad(old['bad_files'], max_bad, folder)
        return old
    _refuse_leftovers(folder)
    storage.make_dirs(storage.join(folder, _PROGRESS))
    storage.write_atomic(storage.join(folder, _PROGRESS, 'settings.json'), json.dumps(stated))
    pending = [shard for shard in shards if storage.split(shard.path)[1] not in done]
    done.update(_write_shards(pending, folder, max_bad=max_bad, workers=workers or multiprocessing.cpu_count()))
    bad = [problem for shard in shards for problem in done[storage.split(shard.path)[1]]['bad']]
    if bad:
        storage.write_atomic(storage.join(folder, BAD_FILES), ''.join(f'{line}\n' for line in bad))
    _check_bad(bad, max_bad, folder)
    content = _make_manifest(splits, classes, done, bad, stated)
    manifest.write(folder, content)
    storage.remove_tree(storage.join(folder, _PROGRESS))
    return content


def _plan_shards(splits: dict[str, list[Source]], folder: str, settings: Settings) -> list[_Shard]:
    shards = []
    for split, part in splits.items():
        count = settings.shards if split == 'train' else settings.eval_shards
        if len(part) < count:
            flag = '--shards' if split == 'train' else '--eval_shards'
            raise DataError(f'{split}: {len(part)} files cannot fill {count} shards; ask for fewer ({flag})')
        for index in range(count):
            path = storage.join(folder, f'{split}-{index:05d}-of-{count:05d}.tfrecord')
            shards.append(_Shard(path, tuple(part[index::count]), settings))
    return shards


def _describe_conversion(sources: Sequence[Source], settings: Settings) -> dict[str, Any]:
    names = hashlib.sha256('\n'.join(source.name for source in sources).encode()).hexdigest()
    return {
        'dataset': DATASET, 'converter_version': _CONVERTER_VERSION, 'files': len(sources), 'names_sha256': names,
        **dataclasses.asdict(settings),
    }  # fmt: skip


def _read_progress(folder: str, stated: dict[str, Any]) -> dict[str, Any]:
    """Facts of the shards that an interrupted run of the same conversion has finished."""
    progress = storage.join(folder, _PROGRESS)
    if not storage.exists(storage.join(progress, 'settings.json')):
        return {}
    if storage.read_json(storage.join(progress, 'settings.json')) != stated:
        raise DataError(
            f'{folder}: holds a part of another conversion (other files or settings); finish that one, or give another --output'
        )
    names = [name for name in storage.list_dir(progress) if name != 'settings.json' and name.endswith('.json')]
    facts = {name[: -len('.json')]: storage.read_json(storage.join(progress, name)) for name in names}
    sizes = {name: storage.join(folder, name) for name in facts}
    return {
        name: facts[name] for name, path in sizes.items() if storage.exists(path) and storage.size(path) == facts[name]['bytes']
    }


def _is_whole(folder: str, content: dict[str, Any]) -> bool:
    files = {storage.join(folder, name): facts.bytes for name, facts in manifest.file_facts(content).items()}
    return all(storage.exists(path) and storage.size(path) == size for path, size in files.items())


def _refuse_leftovers(folder: str) -> None:
    """Other shards in the folder would be read along with the new ones by any glob or folder path."""
    if not storage.exists(folder) or storage.exists(storage.join(folder, _PROGRESS, 'settings.json')):
        return
    others = [name for name in storage.list_dir(folder) if '.tfrecord' in name and name[0] != '.']
    if others:
        raise DataError(
            f'{folder}: holds other records ({others[0]} and {len(others) - 1} more), made of other files or with other '
            'settings; give another --output or delete them'
        )


def _write_shards(shards: Sequence[_Shard], folder: str, *, max_bad: int, workers: int) -> dict[str, Any]:
    """Writes shards in parallel with a progress bar; stops when too many files are bad. Name to facts."""
    from tqdm import tqdm

    context = multiprocessing.get_context('spawn')  # a fork of a process with threads may hang
    counters = context.Array('q', 2)  # files seen, files bad
    stop = context.Event()
    done: dict[str, Any] = {}
    total = sum(len(shard.sources) for shard in shards)
    pool = concurrent.futures.ProcessPoolExecutor(
        max(1, min(workers, len(shards))), context, initializer=_start_worker, initargs=(counters, stop)
    )
    try:
        with tqdm(total=total, desc='converting', unit='file', disable=None) as bar:
            waiting = {pool.submit(_write_shard, shard) for shard in shards}
            while waiting:
                finished, waiting = concurrent.futures.wait(waiting, _POLL_SECS, return_when=concurrent.futures.FIRST_COMPLETED)
                bar.update(counters[0] - bar.n)
                for future in finished:
                    name, facts = future.result()
                    done[name] = facts
                    if 'records' not in facts:
                        continue
                    storage.write_atomic(storage.join(folder, _PROGRESS, f'{name}.json'), json.dumps(facts))
                if counters[1] > max_bad and not stop.is_set():
                    stop.set()  # the shards under way end, and say which files were bad
                    for future in waiting:
                        future.cancel()
                    waiting = {future for future in waiting if not future.cancelled()}
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    if counters[1] > max_bad:
        bad = [problem for facts in done.values() for problem in facts['bad']]
        storage.write_atomic(storage.join(folder, BAD_FILES), ''.join(f'{line}\n' for line in bad))
        _check_bad(bad, max_bad, folder)
    return done


class _Stopped(Exception):
    """The run ends: the shard under way is not to be written."""


_counters: Any = None
_stop: Any = None


def _start_worker(counters: Any, stop: Any) -> None:
    global _counters, _stop
    _counters, _stop = counters, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the others


def _write_shard(shard: _Shard) -> tuple[str, dict[str, Any]]:
    """Converts the files of one shard; returns its name and what it holds."""
    bad: list[str] = []
    sizes: list[tuple[int, int]] = []
    counts: collections.Counter[int] = collections.Counter()

    def read() -> Iterator[bytes]:
        settings = shard.settings
        for source in shard.sources:
            if _stop.is_set():
                raise _Stopped
            try:
                picture = picture_files.read_picture(
                    storage.read_bytes(source.path), resize=settings.resize, crop=settings.crop, quality=settings.quality
                )
            except DataError as error:
                bad.append(f'{source.path}: {error}')
            else:
                sizes.append((picture.width, picture.height))
                counts[source.label] += 1
                yield examples.encode_example(
                    {
                        'image': picture.jpeg, 'label': source.label, 'path': source.name.encode(),
                        'height': picture.height, 'width': picture.width,
                    }
                )  # fmt: skip
            with _counters.get_lock():
                _counters[0] += 1
                _counters[1] = _counters[1] + 1 if bad and bad[-1].startswith(f'{source.path}: ') else _counters[1]

    try:
        data = records.write_file(shard.path, read())
    except _Stopped:
        return storage.split(shard.path)[1], {'bad': bad}
    return storage.split(shard.path)[1], {
        'records': sum(counts.values()), 'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest(), 'bad': bad,
        'shortest_side': min(map(min, sizes), default=0), 'longest_side': max(map(max, sizes), default=0),
        'largest_square': max(map(min, sizes), default=0),
        'labels': {str(label): count for label, count in sorted(counts.items())},
    }  # fmt: skip


def _check_bad(bad: Sequence[str], max_bad: int, folder: str) -> None:
    if len(bad) > max_bad:
        raise DataError(
            f'at least {len(bad)} files cannot be decoded, more than --max_bad={max_bad}; {storage.join(folder, BAD_FILES)} '
            f'lists them; the first: {bad[0]}'
        )


def _make_manifest(
    splits: dict[str, list[Source]], classes: Sequence[str], done: dict[str, Any], bad: list[str], stated: dict[str, Any]
) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for split in splits:
        files = {name: facts for name, facts in sorted(done.items()) if name.startswith(f'{split}-')}
        counts: collections.Counter[str] = collections.Counter()
        for facts in files.values():
            counts.update({classes[int(label)]: count for label, count in facts['labels'].items()})
        written[split] = {
            'records': sum(facts['records'] for facts in files.values()),
            'classes': {name: counts[name] for name in classes},
            'files': {name: {key: facts[key] for key in ('records', 'bytes', 'sha256')} for name, facts in files.items()},
        }
    kept = [facts for facts in done.values() if facts['records']]
    if not kept:
        raise DataError('no picture could be decoded')
    return {
        'dataset': DATASET,
        'schema': {
            **{name: {'dtype': 'int64', 'shape': []} for name in ('height', 'label', 'width')},
            **{name: {'dtype': 'bytes', 'shape': []} for name in ('image', 'path')},
        },
        'label': 'label',
        'classes': list(classes),
        'pictures': {
            'shortest_side': min(facts['shortest_side'] for facts in kept),
            'longest_side': max(facts['longest_side'] for facts in kept),
            'largest_square': max(facts['largest_square'] for facts in kept),
        },
        'splits': written,
        'bad_files': bad,
        'settings': stated,
        'written_by': f'trainer {trainer.__version__}',
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    default = Settings()
    parser.add_argument('--input', required=True, help="globs or folders, comma-separated, such as 'photos/*/*.jpg'")
    parser.add_argument('--output', required=True, help='folder for the shards')
    parser.add_argument('--shards', type=int, default=default.shards, help='training files (default: %(default)s)')
    parser.add_argument('--eval_shards', type=int, default=default.eval_shards, help='evaluation files (default: %(default)s)')
    parser.add_argument(
        '--eval_share',
        type=float,
        default=default.eval_share,
        help='part held out for evaluation, 0 to 0.9 (default: %(default)s)',
    )
    parser.add_argument('--resize', type=int, default=default.resize, help='pixels of the shorter side; 0 leaves it (default)')
    parser.add_argument('--crop', action='store_true', help='cut to the central square')
    parser.add_argument(
        '--quality', type=int, default=default.quality, help='of JPEGs that are written anew (default: %(default)s)'
    )
    parser.add_argument('--max_bad', type=int, default=0, help='files left out before the run fails (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=0, help='processes; 0 takes the processors (default)')


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Converts as the flags say; returns the manifest."""
    settings = Settings(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(Settings)})
    return convert(flags.input, flags.output, settings, max_bad=flags.max_bad, workers=flags.workers)
