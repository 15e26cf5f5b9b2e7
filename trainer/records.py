"""TFRecord framing in plain Python: write, read, find the damaged record, save the sound ones.

TensorFlow reads the records of a run; this module says what is wrong when that fails, because TensorFlow's error names
neither file nor record. A record on disk is its length (8 bytes), a masked CRC-32C of the length (4), the payload, and a
masked CRC-32C of the payload (4), all little-endian; a file may be GZIP as a whole.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gzip
import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Optional, Protocol, cast

import google_crc32c

from trainer import storage
from trainer.errors import DataError

_HEAD = struct.Struct('<QI')
_CRC = struct.Struct('<I')
# Files looked at side by side: on a remote store nearly all of the time is waiting.
_PARALLEL_FILES = 16
_READ_BYTES = 1 << 20
_MAX_READ_BYTES = 64 << 20
# First bytes of what users take for TFRecords.
_OTHER_FORMATS = (
    (b'\x78\x01', 'ZLIB'), (b'\x78\x9c', 'ZLIB'), (b'\x78\xda', 'ZLIB'), (b'BZh', 'bzip2'), (b'\x28\xb5\x2f\xfd', 'zstd'),
    (b'PK\x03\x04', 'a zip archive'), (b'\xfd7zXZ', 'xz'), (b'\x89PNG', 'a PNG image'), (b'\xff\xd8\xff', 'a JPEG image'),
    (b'\x00\x00\x08', 'MNIST idx'), (b'\x93NUMPY', 'a numpy array'), (b'\x1f\x8b', 'GZIP'),
)  # fmt: skip


class Checker(Protocol):
    """What judges one record: a `Schema` or a `Dataset`."""

    def check(self, serialized: bytes) -> None:
        """Raises DataError when the record is not what it should be."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One record as found on disk."""

    index: int
    """Position in its file, from 0."""
    offset: int
    """Where it starts, in bytes of the uncompressed file."""
    payload: bytes
    """The serialized Example; empty when `problem` ends the file."""
    problem: str = ''
    """What is wrong with it; empty when it is sound."""
    ends_file: bool = False
    """Whether nothing after it can be read."""


@dataclasses.dataclass(frozen=True)
class Salvage:
    """What could be read of a damaged file."""

    path: str
    good: int
    """Sound records."""
    corrupt: int
    """Records known to be lost."""
    first_problem: str
    """The first fault, with file and record."""
    is_count_exact: bool
    """False when the rest of the file is lost and no manifest says how many records it held."""


def masked_crc(data: bytes) -> int:
    """The CRC-32C of the data as TFRecords store it."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """The bytes of one record on disk."""
    length = struct.pack('<Q', len(payload))
    return b''.join((length, _CRC.pack(masked_crc(length)), payload, _CRC.pack(masked_crc(payload))))


def write_file(path: str, payloads: Iterable[bytes], *, compression: str = '') -> bytes:
    """Writes a TFRecord file that appears whole or not at all.

    Args:
      path: The file, local or remote.
      payloads: Serialized Examples.
      compression: '' or 'GZIP'.

    Returns:
      The bytes written; the same for the same payloads.
    """
    data = b''.join(map(frame, payloads))
    if compression == 'GZIP':
        data = gzip.compress(data, mtime=0)  # without a time stamp equal records give equal files
    storage.write_atomic(path, data)
    return data


def scan(path: str) -> Iterator[Record]:
    """Reads the file record by record and goes on after a damaged payload.

    Yields:
      `Record`s in order. After a damaged length or a cut file the last one has `ends_file`.
    """
    with storage.open_read(path) as file, _uncompressed(file) as stream:
        index, offset = 0, 0
        while True:
            record = _read_record(stream, index, offset)
            if record is None:
                return
            yield record
            if record.ends_file:
                return
            index, offset = index + 1, offset + _HEAD.size + len(record.payload) + _CRC.size


def _read_record(stream: BinaryIO, index: int, offset: int) -> Optional[Record]:
    """The next record, or None at the end of the file."""

    def ending(problem: str) -> Record:
        return Record(index, offset, b'', problem, ends_file=True)

    try:
        head = stream.read(_HEAD.size)
        if not head:
            return None
        if len(head) < _HEAD.size:
            return ending('the file is cut within the length of the record')
        length, length_crc = _HEAD.unpack(head)
        if masked_crc(head[:8]) != length_crc:
            return ending('the length of the record fails its checksum')
        payload = _read_exactly(stream, length)
        crc = stream.read(_CRC.size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return ending(f'the GZIP file is cut or damaged here ({error})')
    if len(payload) < length or len(crc) < _CRC.size:
        return ending(f'the file is cut within a record of {length} bytes')
    if masked_crc(payload) != _CRC.unpack(crc)[0]:
        return Record(index, offset, payload, f'the {length} bytes of the record fail their checksum')
    return Record(index, offset, payload)


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    """Reads in pieces: of a cut file the length may be far more than there is, or than fits in memory."""
    pieces = []
    while length > 0:
        piece = stream.read(min(length, _MAX_READ_BYTES))
        if not piece:
            break
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b''.join(pieces)


@contextlib.contextmanager
def _uncompressed(file: BinaryIO) -> Iterator[BinaryIO]:
    if storage.is_gzip(file):
        with gzip.GzipFile(fileobj=file) as stream:
            yield cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream), _READ_BYTES))
    else:
        yield file


def find_compressions(paths: Sequence[str]) -> list[str]:
    """Looks at the first bytes of every file; names do not matter.

    Returns:
      '' or 'GZIP' for each path.

    Raises:
      DataError: A file is empty, or does not begin as a TFRecord or GZIP file does.
    """
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        return list(pool.map(find_compression, paths))


def find_compression(path: str) -> str:
    """Looks at the first bytes of a file: '' or 'GZIP', or a DataError as `find_compressions` raises it."""
    with storage.open_read(path) as file:
        head = file.read(_HEAD.size)
    if not head:
        raise DataError(f'{path}: the file is empty; write it again or leave it out of the data paths')
    if storage.is_record_head(head):
        return ''
    if head.startswith(b'\x1f\x8b\x08'):
        return 'GZIP'
    for magic, name in _OTHER_FORMATS:
        if head.startswith(magic):
            raise DataError(f'{path}: not a TFRecord file but {name}; expected TFRecords, plain or GZIP')
    raise DataError(
        f'{path}: record 0: not a TFRecord file, or its first record is damaged: it begins with {head!r}; '
        'expected TFRecords, plain or GZIP'
    )


def check_first(path: str, checker: Checker) -> bytes:
    """Reads and checks the first record of a file, so that a wrong schema is known before the graph runs.

    Returns:
      The serialized Example.

    Raises:
      DataError: The file holds no record, or the first is damaged or not as `checker` expects.
    """
    record = next(scan(path), None)
    if record is None:
        raise DataError(f'{path}: the file holds no record; write it again or leave it out of the data paths')
    problem = find_problem(record, checker)
    if problem:
        raise DataError(describe(path, record, problem))
    return record.payload


def find_problem(record: Record, checker: Checker) -> str:
    """What is wrong with the record; empty when it is sound and as the schema says."""
    if record.problem:
        return record.problem
    try:
        checker.check(record.payload)
    except DataError as error:
        return str(error)
    return ''


def describe(path: str, record: Record, problem: str) -> str:
    """One line that names the file, the record and the remedy."""
    if record.problem:
        remedy = 'write the file again, or skip it with --max_corrupt_records'
    else:
        remedy = 'mend the schema (--dataset) or the converter'
    return f'{path}: record {record.index} (byte {record.offset}): {problem}; {remedy}'


def diagnose(paths: Iterable[str], checker: Checker) -> Optional[str]:
    """Finds the record that made TensorFlow's input fail, after it has failed; reads every file up to the first fault.

    Args:
      paths: Files of the run, in any order.
      checker: The `Dataset` or `Schema` of the run.

    Returns:
      One line naming file, record and remedy; None when every record is sound.
    """
    for path in paths:
        try:
            find_compression(path)
        except DataError as error:
            return str(error)
        for record in scan(path):
            problem = find_problem(record, checker)
            if problem:
                return describe(path, record, problem)
    return None


def salvage(path: str, checker: Checker, target: str, *, expected: Optional[int] = None) -> Optional[Salvage]:
    """Copies the sound records of a damaged file to another file; the damaged one stays as it is.

    Args:
      path: The file to look at.
      checker: Records that it refuses count as corrupt.
      target: Local file for the sound records, plain TFRecords; written only when the file is damaged.
      expected: Number of records that the manifest states; None when there is none.

    Returns:
      What was found, or None when the file is sound.
    """
    first_problem = ''
    corrupt = good = 0
    is_exact = True
    for record in scan(path):
        problem = find_problem(record, checker)
        if not problem:
            good += 1
            continue
        first_problem = first_problem or describe(path, record, problem)
        corrupt += 1
        if record.ends_file:
            is_exact = expected is not None
    lost = (expected or 0) - good - corrupt
    if lost > 0:
        first_problem = first_problem or f'{path}: record {good}: the file ends here, the manifest states {expected} records'
        corrupt += lost
    if not first_problem:
        return None
    write_file(target, (record.payload for record in scan(path) if not find_problem(record, checker)))
    return Salvage(path, good, corrupt, first_problem, is_exact)
