"""Files and folders, local or remote: the only module that opens, lists, renames or removes a path.

Local paths need nothing but Python. A path with a scheme (gs://, s3://, hdfs://) goes through tf.io.gfile, imported when
the first one is met. What is written appears whole or not at all. An error of the system is a `DataError` with the
path and the reason; for gs:// it also says bucket, object, account and remedy. `gcs.py` has what is special to gs://.
"""

from __future__ import annotations

import contextlib
import glob as local_glob
import gzip
import json
import os
import posixpath
import shutil
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO, Union, cast

from trainer import gcs
from trainer.errors import DataError

_COPY_BYTES = 1 << 20

# How much TensorFlow's client reads from gs:// at once where the reader asks for less, such as the first 12 bytes of a shard.
# Its default is 64 MB, which each of 16 shards looked at side by side would fetch, and hold in memory. The pipelines ask for
# more than this and get what they ask for. Set here, because TensorFlow looks at it when it is imported, and not later.
os.environ.setdefault('GCS_READ_CACHE_BLOCK_SIZE_MB', '4')


def is_remote(path: str) -> bool:
    """Whether the path has a scheme, such as gs://, and so is TensorFlow's to open."""
    return '://' in path


def join(folder: str, *names: str) -> str:
    """The path of `names` below `folder`; remote paths always take '/'."""
    return (posixpath if is_remote(folder) else os.path).join(folder, *names)


def split(path: str) -> tuple[str, str]:
    """The folder and the name that `join` makes the path from; the folder of a bare local name is '.'."""
    if is_remote(path):
        scheme, rest = path.split('://', 1)
        folder, name = posixpath.split(rest)
        return f'{scheme}://{folder}', name
    folder, name = os.path.split(path)
    return folder or '.', name


def glob(pattern: str, *, files_only: bool = False) -> list[str]:
    """Paths that match, in order, or those of files alone; an empty list when none does."""
    with _reporting('list', pattern):
        if gcs.is_gs(pattern):
            return sorted(gcs.glob(pattern, files_only=files_only))
        paths = sorted(_gfile().glob(pattern) if is_remote(pattern) else local_glob.glob(pattern))
    return [path for path in paths if not (files_only and is_dir(path))]


def exists(path: str) -> bool:
    """Whether there is a file or folder."""
    with _reporting('look for', path):
        return _gfile().exists(path) if is_remote(path) else os.path.exists(path)


def is_dir(path: str) -> bool:
    """Whether there is a folder."""
    with _reporting('look for', path):
        if gcs.is_gs(path):
            return gcs.is_dir(path)
        return _gfile().isdir(path) if is_remote(path) else os.path.isdir(path)


def list_dir(folder: str) -> list[str]:
    """Names in the folder, in order, without the folder and without a closing '/'."""
    with _reporting('list', folder):
        if gcs.is_gs(folder):
            return sorted(gcs.list_dir(folder))
        names = _gfile().listdir(folder) if is_remote(folder) else os.listdir(folder)
    return sorted(name.rstrip('/') for name in names if name.strip('/'))


def list_files(folder: str) -> list[str]:
    """Names of the files in the folder, in order, without those of folders."""
    if gcs.is_gs(folder):
        with _reporting('list', folder):
            return sorted(name for name, is_folder in gcs.list_dir(folder).items() if not is_folder)
    return [name for name in list_dir(folder) if not is_dir(join(folder, name))]


def size(path: str) -> int:
    """Length of the file in bytes."""
    with _reporting('read', path):
        return _gfile().stat(path).length if is_remote(path) else os.path.getsize(path)


def modified_secs(path: str) -> float:
    """When the file was last written, in seconds since 1970."""
    with _reporting('read', path):
        return _gfile().stat(path).mtime_nsec / 1e9 if is_remote(path) else os.path.getmtime(path)


@contextlib.contextmanager
def open_read(path: str) -> Iterator[BinaryIO]:
    """The file opened to read bytes, closed at the end of the block; reading errors become a DataError too."""
    with _reporting('read', path), _open(path, 'rb') as file:
        yield file


def read_bytes(path: str) -> bytes:
    """The whole file."""
    with open_read(path) as file:
        return file.read()


def read_text(path: str) -> str:
    """The whole file, UTF-8."""
    try:
        return read_bytes(path).decode('utf-8')
    except UnicodeDecodeError as error:
        raise DataError(f'{path}: not UTF-8 text: {error.reason} at byte {error.start}') from error


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in a file that a run has left.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f'{path}: not the JSON that a run leaves ({error}); remove the file and run again') from error
    if not isinstance(value, dict):
        raise DataError(f'{path}: expected a JSON object, it is {str(value)[:40]!r}; remove the file and run again')
    return value


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file, plain or GZIP, without their ends, one at a time.

    Raises:
        DataError: the file cannot be read, or its bytes are not UTF-8.
    """
    with open_read(path) as file:
        stream: Any = gzip.GzipFile(fileobj=file) if is_gzip(file) else file
        try:
            for line in stream:
                yield line.decode('utf-8').rstrip('\r\n')
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise DataError(f'{path}: not a whole text file in UTF-8 ({error})') from error


@contextlib.contextmanager
def atomic_path(path: str) -> Iterator[str]:
    """A temporary path beside `path`, for a writer that takes a name; renamed to `path` when the block ends well.

    On an error in the block the temporary file is removed and `path` stays as it was.
    """
    folder, name = split(path)
    if not gcs.is_gs(path):
        make_dirs(folder)
    temporary = join(folder, f'.{name}.{uuid.uuid4().hex[:8]}.tmp')
    try:
        yield temporary
        rename(temporary, path)
    except BaseException:
        with contextlib.suppress(DataError):  # the first error is the one to hear of
            remove(temporary)
        raise


def write_atomic(path: str, data: Union[bytes, str]) -> None:
    """Writes the file so that a reader finds the old contents or the new, never a part; text as UTF-8."""
    data = data.encode('utf-8') if isinstance(data, str) else data
    if is_remote(path):  # an object store shows an object only when all of it has arrived: a rename would add two calls
        with _reporting('write', path), _open(path, 'wb') as file:
            file.write(data)
        return
    with atomic_path(path) as temporary, _reporting('write', path), _open(temporary, 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # else a machine that goes down may leave the new name on an empty file


def open_append(path: str) -> BinaryIO:
    """A local file opened to add bytes at its end, made together with its folder where need be; the caller closes it."""
    folder, _ = split(path)
    make_dirs(folder)
    with _reporting('write', path):
        return _open(path, 'ab')


def make_dirs(folder: str) -> None:
    """Makes the folder and those above it; one that is there already is fine."""
    with _reporting('make the folder', folder):
        if gcs.is_gs(folder):
            gcs.make_dir(folder)
        elif is_remote(folder):
            _gfile().makedirs(folder)
        else:
            os.makedirs(folder, exist_ok=True)


def rename(source: str, target: str) -> None:
    """Moves the file, or on a file system with folders the folder, to `target`, in place of a file that is there."""
    with _reporting('rename to', target):
        if is_remote(target):
            _gfile().rename(source, target, overwrite=True)
        else:
            os.replace(source, target)


def copy(source: str, target: str) -> None:
    """Copies the file, between local and remote as well; `target` appears whole."""
    with open_read(source) as reader, atomic_path(target) as temporary:
        with _reporting('write', target), _open(temporary, 'wb') as writer:
            shutil.copyfileobj(reader, writer, _COPY_BYTES)


def publish_tree(source: str, target: str, *, last: str) -> None:
    """Moves or copies the folder `source` to `target`, for readers that may look there at any time.

    Args:
        source: local, or on the file system of `target`.
        target: not there yet. A local one appears at once; on a remote store files can only appear one by one.
        last: name of a file that appears when all others are whole, so that readers can tell.
    """
    if not is_remote(target):
        rename(source, target)
        return
    _upload_tree(source, target, leave_out=last)
    write_atomic(join(target, last), read_bytes(join(source, last)))


def _upload_tree(source: str, target: str, *, leave_out: str = '') -> None:
    if not gcs.is_gs(target):  # where no folder is needed
        make_dirs(target)
    for name in list_dir(source):
        path = join(source, name)
        if is_dir(path):
            _upload_tree(path, join(target, name))
        elif name != leave_out:
            with open_read(path) as reader, _reporting('write', target), _open(join(target, name), 'wb') as writer:
                shutil.copyfileobj(reader, writer, _COPY_BYTES)


def remove(path: str) -> None:
    """Removes the file."""
    with _reporting('remove', path):
        if is_remote(path):
            _gfile().remove(path)
        else:
            os.remove(path)


def remove_tree(folder: str) -> None:
    """Removes the folder and all in it; none being there is fine."""
    with _reporting('remove', folder):
        if not exists(folder):
            return
        if is_remote(folder):
            _gfile().rmtree(folder)
        else:
            shutil.rmtree(folder)


def is_gzip(file: BinaryIO) -> bool:
    """Whether the file, just opened, is GZIP, by its bytes: names lie. It is left at its start.

    A TFRecord file starts with the length of its first record, which may spell the three bytes that GZIP starts with
    (a record of 559,903 bytes does); but then a checksum of that length follows.
    """
    head = file.read(12)
    file.seek(0)  # opening it once more would be one more request to a remote store
    return head[:3] == b'\x1f\x8b\x08' and not is_record_head(head)


def is_record_head(head: bytes) -> bool:
    """Whether 12 bytes are a TFRecord's head: its length (8 bytes) and the masked CRC-32C of that, both little-endian."""
    import google_crc32c

    crc = google_crc32c.value(head[:8])
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    return len(head) >= 12 and head[8:12] == masked.to_bytes(4, 'little')


def probe_writable(folder: str, flag: str) -> None:
    """Makes the folder and writes a file into it, so that a wrong output is known before hours of work.

    Raises:
        DataError: it cannot be; the message names the flag or variable that the folder came from.
    """
    probe = join(folder, f'.probe.{uuid.uuid4().hex[:8]}.tmp')
    try:
        make_dirs(folder)
        write_atomic(probe, b'')
        remove(probe)
    except DataError as error:
        raise DataError(f'{flag}: the results cannot be written: {error}; give a folder that can be written to') from error


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


def _open(path: str, mode: str) -> BinaryIO:
    return cast(BinaryIO, _gfile().GFile(path, mode) if is_remote(path) else open(path, mode))


@contextlib.contextmanager
def reporting_remote_errors() -> Iterator[None]:
    """Turns an error of TensorFlow in the block, if it is of a request to gs://, into a DataError."""
    try:
        yield
    except Exception as error:
        path = gcs.find_failed_path(str(error)) if _is_tensorflow_error(error) else None
        if path is None:
            raise
        raise DataError(f'{path}: {_explain(error, path)}') from error


@contextlib.contextmanager
def _reporting(action: str, path: str) -> Iterator[None]:
    """Turns an error of the system in the block into a DataError: path, action and reason on one line."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f'{path}: cannot {action}: {reason}') from error
    except Exception as error:
        if not _is_tensorflow_error(error):
            raise
        raise DataError(f'{path}: cannot {action}: {_explain(error, path)}') from error


def _is_tensorflow_error(error: Exception) -> bool:
    return hasattr(error, 'error_code')  # what tells a tf.errors.OpError, without importing TensorFlow


def _explain(error: Any, path: str) -> str:
    message = str(getattr(error, 'message', error))
    if not gcs.is_gs(path):
        return ' '.join(message.split())[:300]
    return gcs.explain(message, error.error_code, path)
