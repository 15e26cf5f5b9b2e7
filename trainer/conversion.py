"""What converters share: shards written by processes, each noted when it is whole, so that the same command goes on after it.

A converter plans its shards, and gives each a job that encodes its records. `write` runs the jobs, with a progress bar, and
ends early when too much is bad. The manifest comes last and marks a conversion as complete; until then the folder `.progress`
holds what the finished shards contain.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Union

import trainer
from trainer import manifest, records, storage
from trainer.errors import DataError, UsageError

# Finished shards, by name; gone when the manifest is there.
_PROGRESS = '.progress'
_POLL_SECS = 0.2


class Encoded(NamedTuple):
    """A record."""

    payload: bytes
    label: int


class Job(Protocol):
    """Makes the records of a shard, in a process of its own: it is pickled on its way there."""

    def encode(self) -> Iterator[Union[Encoded, str]]:
        """The record of each item, or what is wrong with it, beginning with its place."""

    def facts(self) -> dict[str, Any]:
        """What else is to be known of the records, once they are made; ready for JSON."""


class Shard(NamedTuple):
    """A file to be written."""

    path: str
    job: Any
    """A `Job`."""
    num_items: int


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Among how many files the records go, and how many are held out."""

    shards: int = 16
    eval_shards: int = 2
    eval_share: float = 0.1

    def __post_init__(self) -> None:
        for name, (low, high) in {'shards': (1, 99999), 'eval_shards': (1, 99999), 'eval_share': (0, 0.9)}.items():
            check_range(f'--{name}', getattr(self, name), low, high)

    def path(self, folder: str, split: str, index: int) -> str:
        """Of a shard."""
        return storage.join(folder, f'{split}-{index:05d}-of-{self.count(split):05d}.tfrecord')

    def count(self, split: str) -> int:
        """Files of a split, 'train' or 'eval'."""
        return self.shards if split == 'train' else self.eval_shards

    def check_filled(self, split: str, num_items: int, noun: str) -> None:
        """Raises DataError when there are fewer items than files."""
        if num_items < self.count(split):
            flag = '--shards' if split == 'train' else '--eval_shards'
            raise DataError(f'{split}: {num_items} {noun} cannot fill {self.count(split)} shards; ask for fewer ({flag})')


def check_range(flag: str, value: float, low: float, high: float) -> None:
    """Raises UsageError when the value of a flag is out of range."""
    if not low <= value <= high:
        raise UsageError(f'{flag}={value}: expected {low} to {high}')


def digest(name: str) -> bytes:
    """What decides about split and order of the item of this name: new items move no old one between the splits."""
    return hashlib.sha256(name.encode('utf-8', 'surrogateescape')).digest()


def is_held_out(hashed: bytes, eval_share: float) -> bool:
    """Whether the item of this digest is for evaluation. The first bytes decide about the split, the rest about the order."""
    return int.from_bytes(hashed[:4], 'big') < eval_share * 2**32


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One run of a converter.

    Args:
      folder: where the shards go, local or remote.
      stated: what decides the bytes that are written; ready for JSON.
      noun: of the items, in the plural: 'files'.
      bad_file: name of the list of what is bad.
      max_bad: items that may be left out.
      workers: processes; 0 takes the processors.
    """

    folder: str
    stated: Mapping[str, Any]
    noun: str
    bad_file: str
    max_bad: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        if self.max_bad < 0 or self.workers < 0:
            raise UsageError(f'--max_bad={self.max_bad} --workers={self.workers}: expected 0 or more')

    def find_complete(self) -> dict[str, Any]:
        """The manifest of this very conversion when it is complete; else {}.

        Raises:
          DataError: as `check_bad`.
        """
        old = manifest.read(self.folder)
        is_done = old.get('settings') == self.stated and not self._read_progress() and is_whole(self.folder, old)
        if is_done:
            self.check_bad(old['bad_' + self.noun])
        return old if is_done else {}

    def write(self, shards: Sequence[Shard]) -> dict[str, Any]:
        """Writes the shards that are not finished; returns name to facts of all.

        Raises:
          DataError: too many items are bad, or the folder holds another conversion.
        """
        done = self._read_progress()
        if not storage.exists(self._progress_path('settings')):
            refuse_leftovers(self.folder)
        storage.make_dirs(storage.join(self.folder, _PROGRESS))
        storage.write_atomic(self._progress_path('settings'), json.dumps(self.stated))
        pending = [shard for shard in shards if storage.split(shard.path)[1] not in done]
        done.update(self._run(pending))
        bad = [problem for shard in shards for problem in done[storage.split(shard.path)[1]]['bad']]
        self.list_bad(bad)
        self.check_bad(bad)
        return done

    def finish(
        self, done: Mapping[str, Any], classes: Sequence[str], facts: Mapping[str, Any], bad: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Writes the manifest and returns it.

        Args:
          done: of `write`.
          classes: names in the order of the labels.
          facts: of the converter: dataset, schema, label and the like.
          bad: what was left out before `write`.
        """
        splits: dict[str, Any] = {}
        for split in ('train', 'eval'):
            files = {name: made for name, made in sorted(done.items()) if name.startswith(f'{split}-')}
            if not files:
                continue
            counts: collections.Counter[str] = collections.Counter()
            for made in files.values():
                counts.update({classes[int(label)]: count for label, count in made['labels'].items()})
            splits[split] = {
                'records': sum(made['records'] for made in files.values()),
                'classes': {name: counts[name] for name in classes},
                'files': {name: {key: made[key] for key in ('records', 'bytes', 'sha256')} for name, made in files.items()},
            }
        content = {
            **facts,
            'classes': list(classes),
            'splits': splits,
            f'bad_{self.noun}': [*bad, *(problem for made in done.values() for problem in made['bad'])],
            'settings': dict(self.stated),
            'written_by': f'trainer {trainer.__version__}',
        }
        manifest.write(self.folder, content)
        storage.remove_tree(storage.join(self.folder, _PROGRESS))
        return content

    def list_bad(self, bad: Sequence[str]) -> None:
        """Writes the list of what is bad, when there is any."""
        if bad:
            storage.write_atomic(storage.join(self.folder, self.bad_file), ''.join(f'{line}\n' for line in bad))

    def check_bad(self, bad: Sequence[str]) -> None:
        """Raises DataError when more is bad than may be."""
        if len(bad) > self.max_bad:
            raise DataError(
                f'at least {len(bad)} {self.noun} cannot be read, more than --max_bad={self.max_bad}; '
                f'{storage.join(self.folder, self.bad_file)} lists them; the first: {bad[0]}'
            )

    def _progress_path(self, name: str) -> str:
        return storage.join(self.folder, _PROGRESS, f'{name}.json')

    def _read_progress(self) -> dict[str, Any]:
        """Facts of the shards that an interrupted run of the same conversion has finished."""
        if not storage.exists(self._progress_path('settings')):
            return {}
        if storage.read_json(self._progress_path('settings')) != self.stated:
            raise DataError(
                f'{self.folder}: holds a part of another conversion (other {self.noun} or settings); finish that one, or give '
                'another --output'
            )
        files = [name for name in storage.list_dir(storage.join(self.folder, _PROGRESS)) if name.endswith('.tfrecord.json')]
        facts = {name[: -len('.json')]: storage.read_json(storage.join(self.folder, _PROGRESS, name)) for name in files}
        paths = {name: storage.join(self.folder, name) for name in facts}
        return {
            name: facts[name]
            for name, path in paths.items()
            if storage.exists(path) and storage.size(path) == facts[name]['bytes']
        }

    def _run(self, shards: Sequence[Shard]) -> dict[str, Any]:
        """Writes shards in parallel with a progress bar; stops when too many items are bad. Name to facts."""
        from tqdm import tqdm

        context = multiprocessing.get_context('spawn')  # a fork of a process with threads may hang
        counters = context.Array('q', 2)  # items seen, items bad
        stop = context.Event()
        done: dict[str, Any] = {}
        total = sum(shard.num_items for shard in shards)
        workers = max(1, min(self.workers or multiprocessing.cpu_count(), len(shards)))
        pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(counters, stop))
        try:
            with tqdm(total=total, desc='converting', unit=self.noun.rstrip('s'), disable=None) as bar:
                waiting = {pool.submit(_write_shard, shard) for shard in shards}
                while waiting:
                    finished, waiting = concurrent.futures.wait(
                        waiting, _POLL_SECS, return_when=concurrent.futures.FIRST_COMPLETED
                    )
                    bar.update(counters[0] - bar.n)
                    for future in finished:
                        name, facts = future.result()
                        done[name] = facts
                        if 'records' in facts:
                            storage.write_atomic(self._progress_path(name), json.dumps(facts))
                    if counters[1] > self.max_bad and not stop.is_set():
                        stop.set()  # the shards under way end, and say what was bad
                        for future in waiting:
                            future.cancel()
                        waiting = {future for future in waiting if not future.cancelled()}
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        if counters[1] > self.max_bad:
            bad = [problem for facts in done.values() for problem in facts['bad']]
            self.list_bad(bad)
            self.check_bad(bad)
        return done


def is_whole(folder: str, content: Mapping[str, Any]) -> bool:
    """Whether every file of a manifest is there in its length."""
    files = {storage.join(folder, name): facts.bytes for name, facts in manifest.file_facts(content).items()}
    return all(storage.exists(path) and storage.size(path) == size for path, size in files.items())


def refuse_leftovers(folder: str, own: Iterable[str] = ()) -> None:
    """Raises DataError when the folder has other shards than the `own` ones: a glob would read them along with these."""
    if not storage.exists(folder):
        return
    others = [name for name in storage.list_dir(folder) if '.tfrecord' in name and name[0] != '.' and name not in set(own)]
    if others:
        raise DataError(
            f'{folder}: holds other records ({others[0]} and {len(others) - 1} more), made of other files or with other '
            'settings, which would be read along with the new ones; give another --output or delete them'
        )


class _Stopped(Exception):
    """The run ends: the shard under way is not to be written."""


_counters: Any = None
_stop: Any = None


def _start_worker(counters: Any, stop: Any) -> None:
    global _counters, _stop
    _counters, _stop = counters, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the others


def _write_shard(shard: Shard) -> tuple[str, dict[str, Any]]:
    """Writes one shard; returns its name and what it holds."""
    bad: list[str] = []
    counts: collections.Counter[int] = collections.Counter()

    def payloads() -> Iterator[bytes]:
        for made in shard.job.encode():
            if _stop.is_set():
                raise _Stopped
            with _counters.get_lock():
                _counters[0] += 1
                _counters[1] += isinstance(made, str)
            if isinstance(made, str):
                bad.append(made)
            else:
                counts[made.label] += 1
                yield made.payload

    name = storage.split(shard.path)[1]
    try:
        data = records.write_file(shard.path, payloads())
    except _Stopped:
        return name, {'bad': bad}
    labels = {str(label): count for label, count in sorted(counts.items())}
    written = {'records': sum(counts.values()), 'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}
    return name, {**written, 'bad': bad, 'labels': labels, **shard.job.facts()}


def add_arguments(parser: Any, *, noun: str) -> None:
    """Declares the flags that the converters share."""
    default = Sharding()
    parser.add_argument('--output', required=True, help='folder for the shards')
    parser.add_argument('--shards', type=int, default=default.shards, help='training files (default: %(default)s)')
    parser.add_argument('--eval_shards', type=int, default=default.eval_shards, help='evaluation files (default: %(default)s)')
    parser.add_argument(
        '--eval_share',
        type=float,
        default=default.eval_share,
        help='part held out for evaluation, 0 to 0.9 (default: %(default)s)',
    )
    parser.add_argument('--max_bad', type=int, default=0, help=f'{noun} left out before the run fails (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=0, help='processes; 0 takes the processors (default)')
