from __future__ import annotations

import gzip
import os
import stat
import struct
import threading
from pathlib import Path

import pytest

from trainer import data_files, storage
from trainer.errors import DataError, UsageError


def message_of(function, *args, error=DataError) -> str:
    with pytest.raises(error) as raised:
        function(*args)
    assert '\n' not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a converter leaves it, and the current one is above it."""
    monkeypatch.chdir(tmp_path)
    for name in ('sub', 'empty', 'void'):
        (tmp_path / 'data' / name).mkdir(parents=True)
    for name in (
        'train-1',
        'train-0',
        'eval-0',
        'manifest.json',
        '.hidden',
        'train-2.tmp',
        'train-0~',
        '_SUCCESS',
        'sub/train-9',
        'empty/.x',
    ):
        (tmp_path / 'data' / name).write_text(name)
    return tmp_path / 'data'


@pytest.mark.parametrize(
    ('spec', 'expected'),
    [
        ('data/train-0', ['data/train-0']),
        ('data/train-*', ['data/train-0', 'data/train-1']),
        ('data', ['data/eval-0', 'data/train-0', 'data/train-1']),
        ('data/', ['data/eval-0', 'data/train-0', 'data/train-1']),
        ('data/*', ['data/eval-0', 'data/train-0', 'data/train-1']),
        ('data/train-1, data/train-0 ,', ['data/train-0', 'data/train-1']),
        ('data/train-*,./data/train-0,data//train-1', ['data/train-0', 'data/train-1']),
        ('data/train-[1-9],data/eval-?', ['data/eval-0', 'data/train-1']),
        ('data/*/train-9', ['data/sub/train-9']),
        ('data/.hidden', ['data/.hidden']),
    ],
)
def test_files_globs_and_folders_are_resolved_in_order_and_once(folder: Path, spec: str, expected: list[str]) -> None:
    assert data_files.resolve(spec, '--train_data_paths') == expected


def test_name_with_glob_characters_is_taken_as_it_is(folder: Path) -> None:
    (folder / 'a[1]').write_text('')
    assert data_files.resolve('data/a[1]', '--x') == ['data/a[1]']


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        (
            'data/trian-*',
            '--x: no file matches data/trian-*; data holds .hidden, _SUCCESS, empty, eval-0, manifest.json and 6 more',
        ),
        ('data/train-7', '--x: there is no data/train-7; data holds .hidden,'),
        ('data/train-0,data/train-7', '--x: there is no data/train-7; data holds'),
        ('nosuch/a/train-*', '--x: no file matches nosuch/a/train-*; there is no folder nosuch/a; . holds data'),
        ('data/empty', '--x: no data files in the folder data/empty; data/empty holds .x'),
        ('data/void', '--x: no data files in the folder data/void; data/void holds nothing'),
        ('data/train-0/x', '--x: there is no data/train-0/x; there is no folder data/train-0; data holds'),
    ],
)
def test_missing_files_are_named_with_what_the_folder_holds(folder: Path, spec: str, message: str) -> None:
    assert message_of(data_files.resolve, spec, '--x').startswith(message)


@pytest.mark.parametrize('spec', ['', ' ', ',', ' , '])
def test_empty_spec_is_a_usage_error(spec: str) -> None:
    message = message_of(data_files.resolve, spec, '--eval_data_paths', error=UsageError)
    assert message == '--eval_data_paths is empty: give files, globs or folders'


def test_write_atomic_makes_the_folder_and_replaces_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / 'a' / 'b' / 'file')
    storage.write_atomic(path, 'grün')
    assert storage.read_bytes(path) == 'grün'.encode()
    storage.write_atomic(path, b'\xff')
    assert storage.read_bytes(path) == b'\xff'
    assert storage.list_dir(str(tmp_path / 'a' / 'b')) == ['file'], 'a temporary file was left'
    assert message_of(storage.read_text, path) == f'{path}: not UTF-8 text: invalid start byte at byte 0'


def test_bare_file_name_is_written_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage.write_atomic('file', 'x')
    assert (tmp_path / 'file').read_text() == 'x'


def test_reader_finds_old_or_new_contents_never_a_part(tmp_path: Path) -> None:
    path, seen, done = str(tmp_path / 'file'), set(), threading.Event()
    contents = {str(digit) * 200_000 for digit in range(5)}
    storage.write_atomic(path, '0' * 200_000)

    def read_on() -> None:
        while not done.is_set():
            seen.add(storage.read_text(path))

    thread = threading.Thread(target=read_on)
    thread.start()
    for _ in range(3):
        for text in sorted(contents):
            storage.write_atomic(path, text)
    done.set()
    thread.join()
    assert seen, 'nothing was read'
    assert seen <= contents


def test_failed_block_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = str(tmp_path / 'file')
    storage.write_atomic(path, 'old')
    with pytest.raises(KeyError), storage.atomic_path(path) as temporary:
        Path(temporary).write_text('half')
        raise KeyError
    assert storage.read_text(path) == 'old'
    assert storage.list_dir(str(tmp_path)) == ['file']


def test_temporary_name_is_never_taken_for_data(tmp_path: Path) -> None:
    (tmp_path / 'shard-0').write_text('')
    with storage.atomic_path(str(tmp_path / 'shard-1')) as temporary:
        Path(temporary).write_text('half')
        assert data_files.resolve(f'{tmp_path}/*', '--x') == [str(tmp_path / 'shard-0')]
        assert data_files.resolve(str(tmp_path), '--x') == [str(tmp_path / 'shard-0')]
    assert len(data_files.resolve(str(tmp_path), '--x')) == 2


def test_errors_name_the_path_and_the_reason(tmp_path: Path) -> None:
    path = str(tmp_path / 'nosuch')
    assert message_of(storage.read_bytes, path) == f'{path}: cannot read: No such file or directory'
    assert message_of(storage.list_dir, path) == f'{path}: cannot list: No such file or directory'
    assert message_of(storage.remove, path) == f'{path}: cannot remove: No such file or directory'
    assert message_of(storage.size, path) == f'{path}: cannot read: No such file or directory'
    assert message_of(storage.read_bytes, str(tmp_path)) == f'{tmp_path}: cannot read: Is a directory'


def test_probe_leaves_nothing_and_makes_the_folder(tmp_path: Path) -> None:
    storage.probe_writable(str(tmp_path / 'a' / 'b'), '--output_path')
    assert storage.list_dir(str(tmp_path / 'a' / 'b')) == []


def test_unwritable_output_names_the_flag_the_path_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    folder = str(tmp_path / 'file' / 'output')
    assert message_of(storage.probe_writable, folder, '--job-dir') == (
        f'--job-dir: the results cannot be written: {folder}: cannot make the folder: Not a directory;'
        ' give a folder that can be written to'
    )


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_folder_without_permission_is_unwritable(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert 'Permission denied' in message_of(storage.probe_writable, str(tmp_path), '--output_path')


def test_copy_rename_and_remove(tmp_path: Path) -> None:
    source, target = str(tmp_path / 'source'), str(tmp_path / 'to' / 'target')
    storage.write_atomic(source, b'x' * 3_000_000)
    storage.copy(source, target)
    assert storage.size(target) == 3_000_000
    assert storage.read_bytes(target) == storage.read_bytes(source)
    storage.make_dirs(str(tmp_path / 'there' / 'deep'))
    storage.rename(target, source)
    assert not storage.exists(target)
    storage.remove_tree(str(tmp_path / 'there'))
    storage.remove_tree(str(tmp_path / 'there'))
    assert storage.list_dir(str(tmp_path)) == ['source', 'to']
    assert abs(storage.modified_secs(source) - os.stat(source).st_mtime) < 1e-3


def test_appended_bytes_follow_what_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / 'logs' / 'task.log')
    for text in (b'one\n', b'two\n'):
        with storage.open_append(path) as file:
            file.write(text)
    assert storage.read_bytes(path) == b'one\ntwo\n'
    assert message_of(storage.open_append, f'{path}/x').startswith(f'{path}: cannot make the folder')


def test_tree_is_published_whole(tmp_path: Path) -> None:
    storage.write_atomic(str(tmp_path / 'source' / 'deep' / 'file'), 'x')
    storage.write_atomic(str(tmp_path / 'source' / 'mark'), 'y')
    storage.publish_tree(str(tmp_path / 'source'), str(tmp_path / 'target'), last='mark')
    assert storage.list_dir(str(tmp_path)) == ['target']
    assert storage.list_dir(str(tmp_path / 'target')) == ['deep', 'mark']


def is_gzip(path: str) -> bool:
    with storage.open_read(path) as file:
        result = storage.is_gzip(file)
        assert file.tell() == 0
        return result


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    named, unnamed, plain, empty = (str(tmp_path / name) for name in ('a.gz', 'b', 'c.gz', 'd'))
    Path(named).write_bytes(gzip.compress(b'x'))
    Path(unnamed).write_bytes(gzip.compress(b''))
    Path(plain).write_bytes(b'plain text')
    Path(empty).write_bytes(b'')
    assert [is_gzip(path) for path in (named, unnamed, plain, empty)] == [True, True, False, False]


def test_record_whose_length_looks_like_gzip_is_not(tmp_path: Path) -> None:
    import google_crc32c

    length = struct.pack('<Q', 0x088B1F)
    assert length[:3] == gzip.compress(b'')[:3]
    crc = google_crc32c.value(length)
    head = length + struct.pack('<I', (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
    (tmp_path / 'records').write_bytes(head + b'x' * 100)
    assert storage.is_record_head(head)
    assert not is_gzip(str(tmp_path / 'records'))


@pytest.mark.parametrize(
    ('path', 'folder', 'name'),
    [
        ('a/b', 'a', 'b'),
        ('a', '.', 'a'),
        ('/a', '/', 'a'),
        ('gs://bucket/a/b', 'gs://bucket/a', 'b'),
        ('gs://bucket/a', 'gs://bucket', 'a'),
    ],
)
def test_split_is_the_inverse_of_join(path: str, folder: str, name: str) -> None:
    assert storage.split(path) == (folder, name)
    assert os.path.normpath(storage.join(folder, name)) == os.path.normpath(path)


# TensorFlow's own file system in memory stands for a remote one: the same tf.io.gfile calls, with no network.


@pytest.fixture
def remote() -> str:
    folder = f'ram://storage-{os.getpid()}'
    storage.make_dirs(folder)
    return folder


def test_remote_paths_go_through_tensorflow(remote: str, tmp_path: Path) -> None:
    path = storage.join(remote, 'data', 'train-0')
    storage.make_dirs(storage.join(remote, 'data'))
    storage.write_atomic(path, 'remote')
    assert storage.read_text(path) == 'remote'
    assert storage.size(path) == 6
    assert storage.list_dir(storage.join(remote, 'data')) == ['train-0']
    assert storage.is_dir(storage.join(remote, 'data'))
    assert data_files.resolve(f'{remote}/data/*,{path}', '--x') == [path]
    storage.copy(path, str(tmp_path / 'local'))
    assert (tmp_path / 'local').read_text() == 'remote'
    storage.copy(str(tmp_path / 'local'), storage.join(remote, 'data', 'train-1'))
    assert storage.list_dir(storage.join(remote, 'data')) == ['train-0', 'train-1']
    storage.probe_writable(storage.join(remote, 'output'), '--job-dir')
    storage.remove_tree(storage.join(remote, 'data'))
    assert not storage.exists(path)


def test_remote_tree_is_published_with_its_mark_last(remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('deep/file', 'a_mark', 'other'):
        storage.write_atomic(str(tmp_path / name), name)
    target = storage.join(remote, 'published')
    before = []
    write_atomic = storage.write_atomic
    monkeypatch.setattr(storage, 'write_atomic', lambda *args: (before.extend(storage.list_dir(target)), write_atomic(*args)))
    storage.publish_tree(str(tmp_path), target, last='a_mark')
    assert before == ['deep', 'other']
    assert [storage.read_text(f'{target}/{name}') for name in ('a_mark', 'deep/file')] == ['a_mark', 'deep/file']


def test_remote_errors_name_the_path_and_the_reason(remote: str) -> None:
    path = storage.join(remote, 'nosuch')
    assert message_of(storage.read_bytes, path).startswith(f'{path}: cannot read: ')
    assert message_of(data_files.resolve, path, '--x').startswith(f'--x: there is no {path}; {remote} holds')
