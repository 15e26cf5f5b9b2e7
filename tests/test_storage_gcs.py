"""gs:// paths on a server of Cloud Storage's API: what TensorFlow's client makes of them, counted, and under faults.

The functions that begin with `do_` run in another process, which has TensorFlow's client on the store.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests import gcs, shards
from tests.gcs import CUT, LOST, Fault
from trainer import data_files, inputs, records, storage
from trainer.config import DataConfig
from trainer.datasets import MNIST
from trainer.errors import DataError

SHARDS = 16
# What reading shards takes: of each its first bytes, its length and its records, and of GZIP the length of the contents; then
# the listing (4), the manifest (3), and the first record. With TensorFlow's cache of 5 s, off here, it is one or two less.
MAX_REQUESTS = {'': 3 * SHARDS + 8, 'GZIP': 4 * SHARDS + 8}
LASTING = {
    403: 'permission denied',
    404: 'not found',
    429: 'too many requests',
    503: 'the service failed',
    CUT: 'the connection',
}


@pytest.fixture(scope='module')
def store() -> Iterator[gcs.Store]:
    with gcs.Store() as store:
        yield store


@pytest.fixture(scope='module')
def remote(store: gcs.Store) -> Iterator[gcs.Remote]:
    # Without its cache TensorFlow asks the same number of times on a fast machine and a slow one. It waits up to a second
    # before a retry, whatever it is told: one is enough to see.
    with store.remote(GCS_STAT_CACHE_MAX_AGE='0', GCS_RETRY_CONFIG_MAX_RETRIES='1') as remote:
        remote.call(do_import, timeout_secs=120)
        yield remote


@pytest.fixture
def bucket(store: gcs.Store) -> Any:
    """A new bucket as google-cloud-storage has it."""
    bucket = store.make_bucket(f'b-{uuid.uuid4().hex[:8]}')
    store.reset()
    return bucket


def put(bucket: Any, **objects: Any) -> None:
    for name, content in objects.items():
        bucket.blob(name.replace('__', '/')).upload_from_string(content)


def names_in(bucket: Any) -> list[str]:
    return sorted(blob.name for blob in bucket.list_blobs())


def do_import() -> str:
    import tensorflow as tf

    return tf.__version__


def do(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of storage, or resolve of data_files."""
    return getattr(data_files if name == 'resolve' else storage, name)(*args, **kwargs)


def message_of(remote: gcs.Remote, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DataError) as raised:
        remote.call(*args, **kwargs)
    assert '\n' not in str(raised.value)
    return str(raised.value)


# Finding files.


def test_files_globs_and_folders_are_resolved(store: gcs.Store, remote: gcs.Remote, bucket: Any) -> None:
    put(bucket, d__train_1='', d__train_0='', d__eval_0='', d__manifest='', d__sub__train_9='', d__s2__train_8='')
    put(bucket, **{'d/manifest.json': '', 'd/.hidden': '', 'd/_SUCCESS': '', 'd/x.tmp': '', 'd/a[1]': '', 'd/a1': '', 'd/': ''})
    path = f'gs://{bucket.name}'
    for spec, expected in {
        'd/train_0': ['d/train_0'],
        'd/train_*': ['d/train_0', 'd/train_1'],
        'd/*_0': ['d/eval_0', 'd/train_0'],
        'd': ['d/a1', 'd/a[1]', 'd/eval_0', 'd/manifest', 'd/train_0', 'd/train_1'],
        'd/': ['d/a1', 'd/a[1]', 'd/eval_0', 'd/manifest', 'd/train_0', 'd/train_1'],
        'd/*/train_?': ['d/s2/train_8', 'd/sub/train_9'],
        'd/s[u]b/*': ['d/sub/train_9'],
        'd/a[1]': ['d/a[1]'],
        '*/train_0': ['d/train_0'],
    }.items():
        found = remote.call(do, 'resolve', f'{path}/{spec}', '--x')
        assert [name.replace('//', '/').replace('gs:/', 'gs://') for name in found] == [f'{path}/{name}' for name in expected]
    assert remote.call(do, 'resolve', f'{path}/d/train_1,{path}/d/train_*', '--x') == [
        f'{path}/d/train_0',
        f'{path}/d/train_1',
    ]


def test_missing_files_are_named_with_what_the_folder_holds(remote: gcs.Remote, bucket: Any) -> None:
    put(bucket, data__train_0='', empty__sub__x='')
    path = f'gs://{bucket.name}'
    for spec, message in {
        'data/eval-*': f'--x: no file matches {path}/data/eval-*; {path}/data holds train_0',
        'data/eval': f'--x: there is no {path}/data/eval; {path}/data holds train_0',
        'nosuch/*': f'--x: no file matches {path}/nosuch/*; there is no folder {path}/nosuch; {path} holds data, empty',
        'empty': f'--x: no data files in the folder {path}/empty; {path}/empty holds sub',
    }.items():
        assert message_of(remote, do, 'resolve', f'{path}/{spec}', '--x') == message
    missing = message_of(remote, do, 'resolve', f'{path}-no/train-*', '--x')
    assert missing.startswith(f'{path}-no/train-*: cannot list: not found (HTTP 404'), missing
    assert f'bucket {bucket.name}-no, object train-*, account: ' in missing


def test_a_glob_asks_for_its_own_folder_only(store: gcs.Store, remote: gcs.Remote, bucket: Any) -> None:
    put(bucket, **{f'd/train-{index:02d}': '' for index in range(SHARDS)}, **{'d/other/x': '', 'd/sub/y': ''})
    store.reset()
    assert len(remote.call(do, 'resolve', f'gs://{bucket.name}/d/train-*', '--x')) == SHARDS
    assert store.tally(bucket.name) == {
        'stat': 1,
        'list': 3,
    }  # one less, and often none but the listing, with TensorFlow's cache of 5 s
    assert store.count('list', pattern='/d/$') == 3


def test_folders(remote: gcs.Remote, bucket: Any) -> None:
    path = f'gs://{bucket.name}/new/folder'
    assert not remote.call(do, 'is_dir', path)
    assert not remote.call(do, 'exists', path)
    for _ in range(2):
        remote.call(do, 'make_dirs', path)
    assert remote.call(do, 'is_dir', path)
    assert remote.call(do, 'exists', path)
    assert remote.call(do, 'list_dir', path) == []
    assert names_in(bucket) == ['new/folder/']
    put(bucket, new__folder__x='1', new__folder__y__z='2')
    assert remote.call(do, 'list_dir', path) == ['x', 'y']
    assert remote.call(do, 'list_files', path) == ['x']
    assert not remote.call(do, 'is_dir', f'{path}/x')
    assert remote.call(do, 'list_dir', f'gs://{bucket.name}') == ['new']
    assert remote.call(do, 'glob', f'{path}/*') == [f'{path}/x', f'{path}/y']
    for _ in range(2):
        remote.call(do, 'remove_tree', path)
    assert names_in(bucket) == []


def test_rights_on_objects_are_enough(store: gcs.Store, remote: gcs.Remote, bucket: Any) -> None:
    """The usual roles for objects do not include a look at the bucket."""
    put(bucket, x='1')
    path = f'gs://{bucket.name}'
    with store.failing(Fault(403, kinds=['bucket'])):
        remote.call(do, 'probe_writable', f'{path}/output', '--job-dir')
        remote.call(do, 'probe_writable', path, '--job-dir')
        assert remote.call(do, 'resolve', path, '--x') == [f'{path}/x']
        assert remote.call(do, 'resolve', f'{path}/*', '--x') == [f'{path}/x']
        assert store.tally().get('bucket', 0) > 0, 'nothing asked for the bucket: the test tests nothing'
    assert names_in(bucket) == ['output/', 'x']


# Reading and writing.


def test_objects_are_shared_with_google_cloud_storage(remote: gcs.Remote, bucket: Any) -> None:
    path = f'gs://{bucket.name}/a/b'
    remote.call(do, 'write_atomic', f'{path}/x', 'grün')
    assert bucket.blob('a/b/x').download_as_bytes() == 'grün'.encode()
    assert names_in(bucket) == ['a/b/x'], 'something else was left'
    bucket.blob('a/b/y', chunk_size=1 << 18).upload_from_file(io.BytesIO(b'y' * 1_000_000))
    assert remote.call(do, 'read_bytes', f'{path}/y') == b'y' * 1_000_000
    assert remote.call(do, 'size', f'{path}/y') == 1_000_000
    remote.call(do, 'copy', f'{path}/y', f'{path}/z')
    remote.call(do, 'rename', f'{path}/y', f'{path}/x')
    assert names_in(bucket) == ['a/b/x', 'a/b/z']
    assert bucket.blob('a/b/z').download_as_bytes() == bucket.blob('a/b/x').download_as_bytes() == b'y' * 1_000_000


def test_google_cloud_storage_retries(store: gcs.Store, bucket: Any) -> None:
    put(bucket, x='1')
    with store.failing(Fault(503, times=1)):
        assert bucket.blob('x').download_as_bytes() == b'1'
        assert [request.status for request in store.requests] == [503, 200]


def test_writing_takes_two_requests_and_reading_two(store: gcs.Store, remote: gcs.Remote, bucket: Any) -> None:
    path = f'gs://{bucket.name}/x'
    store.reset()
    remote.call(do, 'write_atomic', path, 'x' * 1_000_000)
    assert store.tally(bucket.name) == {'start': 1, 'upload': 1}
    store.reset()
    remote.call(do, 'read_bytes', path)
    assert store.tally(bucket.name) == {'stat': 1, 'read': 1}


@pytest.mark.parametrize('status', [408, 429, 500, 503, CUT, LOST])
def test_what_passes_is_retried_and_nothing_is_lost(store: gcs.Store, remote: gcs.Remote, bucket: Any, status: Any) -> None:
    path = f'gs://{bucket.name}/d'
    content = bytes(range(256)) * 8000
    with store.failing(
        *(Fault(status, kinds=[kind], times=1) for kind in ('start', 'upload', 'read', 'list', 'stat', 'delete'))
    ):
        remote.call(do, 'write_atomic', f'{path}/x', content)
        assert remote.call(do, 'read_bytes', f'{path}/x') == content
        assert remote.call(do, 'list_dir', path) == ['x']
        remote.call(do, 'remove', f'{path}/x')
        failed = [request.kind for request in store.requests if request.status == status]
        assert sorted(set(failed)) == ['delete', 'list', 'read', 'start', 'stat', 'upload']
    assert names_in(bucket) == []


@pytest.mark.parametrize('status', LASTING)
@pytest.mark.parametrize(
    ('function', 'args', 'action'),
    [
        ('read_bytes', [], 'read'),
        ('write_atomic', [b'x' * 1000], 'write'),
        ('exists', [], 'look for'),
        ('list_dir', [], 'list'),
        ('remove', [], 'remove'),
        ('make_dirs', [], 'make the folder'),
    ],
)
def test_what_lasts_is_one_line(
    store: gcs.Store, remote: gcs.Remote, bucket: Any, status: Any, function: str, args: list[Any], action: str
) -> None:
    put(bucket, d__x='1', d__y__z='2')
    path = f'gs://{bucket.name}/d/' + ('y' if function == 'list_dir' else 'new' if function == 'make_dirs' else 'x')
    if status == 404 and function in ('exists', 'make_dirs'):
        pytest.skip('that is an answer, not an error')
    with store.failing(Fault(status)):
        message = message_of(remote, do, function, path, *args)
    assert message.startswith(f'{path}: cannot {action}: {LASTING[status]}')
    assert f'bucket {bucket.name}, object {path[len(bucket.name) + 6 :]}, account: that of the token' in message
    if status == 403:
        assert f'roles/storage.objectUser on gs://{bucket.name}' in message
        if function != 'list_dir':
            assert f'{gcs.ACCOUNT} does not have storage.objects.' in message
    if function in ('read_bytes', 'write_atomic') and status not in (403, 404):
        assert len(store.requests) >= 2, 'it was not retried'


def test_unwritable_output_names_the_flag(store: gcs.Store, remote: gcs.Remote, bucket: Any) -> None:
    path = f'gs://{bucket.name}/output'
    with store.failing(Fault(403, kinds=['start'])):
        message = message_of(remote, do, 'probe_writable', path, '--job-dir')
    assert message.startswith(f'--job-dir: the results cannot be written: {path}/.probe.')
    assert 'storage.objects.create' in message
    with store.failing(Fault(403, kinds=['delete'])):
        message = message_of(remote, do, 'probe_writable', path, '--job-dir')
    assert 'cannot remove: permission denied' in message


# Nothing half-written is taken for whole.


@pytest.mark.parametrize('status', [403, 503, CUT])
def test_object_that_could_not_be_written_is_not_there(store: gcs.Store, remote: gcs.Remote, bucket: Any, status: Any) -> None:
    path = f'gs://{bucket.name}/x'
    with store.failing(Fault(status, kinds=['upload'])):
        message_of(remote, do, 'write_atomic', path, b'x' * 3_000_000)
    assert names_in(bucket) == []
    remote.call(do, 'write_atomic', path, b'old')
    with store.failing(Fault(status, kinds=['upload'])):
        message_of(remote, do, 'write_atomic', path, b'x' * 3_000_000)
    assert bucket.blob('x').download_as_bytes() == b'old'


def do_fail_in_the_middle(path: str) -> None:
    with storage.atomic_path(path) as temporary:
        import tensorflow as tf

        with tf.io.gfile.GFile(temporary, 'wb') as file:
            file.write(b'half')
            raise DataError('in the middle')


def test_writer_that_fails_leaves_nothing(remote: gcs.Remote, bucket: Any) -> None:
    assert message_of(remote, do_fail_in_the_middle, f'gs://{bucket.name}/x') == 'in the middle'
    assert names_in(bucket) == []


def test_published_tree_has_its_mark_last(store: gcs.Store, remote: gcs.Remote, bucket: Any, tmp_path: pathlib.Path) -> None:
    for name in ('saved_model.pb', 'variables/variables.index', 'variables/variables.data-00000-of-00001'):
        storage.write_atomic(str(tmp_path / name), name)
    path = f'gs://{bucket.name}/model/17'
    with store.failing(Fault(403, kinds=['upload'], pattern='variables.index')):
        message = message_of(remote, do, 'publish_tree', str(tmp_path), path, last='saved_model.pb')
    assert 'cannot write: permission denied' in message
    assert 'model/17/saved_model.pb' not in names_in(bucket)
    store.reset()
    remote.call(do, 'publish_tree', str(tmp_path), path, last='saved_model.pb')
    # TensorFlow sends what failed once more when it forgets the file, which may be now.
    requests = [request for request in store.requests if request.path.startswith(bucket.name) and 'index' not in request.path]
    uploads = [request.path.split('/')[-1] for request in requests if request.kind == 'upload']
    assert uploads == ['variables.data-00000-of-00001', 'saved_model.pb']
    assert len(requests) == 4
    assert bucket.blob('model/17/variables/variables.index').download_as_bytes() == b'variables/variables.index'


# Checkpoints.


def do_find_latest(folder: str) -> Any:
    from trainer import checkpoints

    return checkpoints.find_latest(folder)


def do_find_latest_as_tensorflow_does(folder: str) -> Any:
    import tensorflow as tf

    try:
        return tf.train.latest_checkpoint(folder)
    except tf.errors.OpError:
        return 'an error'


@pytest.fixture
def run(bucket: Any) -> str:
    """The folder of a run that has been trained to step 7."""
    put(bucket, out__checkpoint='model_checkpoint_path: "model.ckpt-7"\nall_model_checkpoint_paths: "model.ckpt-7"\n')
    put(bucket, **{'out/model.ckpt-7.index': '', 'out/model.ckpt-7.data-00000-of-00001': '', 'out/model.ckpt-7.meta': ''})
    return f'gs://{bucket.name}/out'


def test_latest_checkpoint_is_found(remote: gcs.Remote, bucket: Any, run: str) -> None:
    assert remote.call(do_find_latest, run) == f'{run}/model.ckpt-7'
    assert remote.call(do_find_latest, f'gs://{bucket.name}/none') is None
    put(bucket, empty__config='')
    assert remote.call(do_find_latest, f'gs://{bucket.name}/empty') is None


@pytest.mark.parametrize('status', [403, 503, CUT])
@pytest.mark.parametrize(
    ('fault', 'tensorflow_says'),
    [({}, None), ({'kinds': ['list']}, 'an error'), ({'pattern': 'out/checkpoint$'}, None), ({'kinds': ['read']}, None)],
)
def test_run_whose_checkpoint_cannot_be_looked_up_does_not_start_anew(
    store: gcs.Store, remote: gcs.Remote, bucket: Any, run: str, status: Any, fault: dict[str, Any], tensorflow_says: Any
) -> None:
    with store.failing(Fault(status, **fault)):
        # If this fails, TensorFlow has learnt to tell an empty folder from one that cannot be read.
        assert remote.call(do_find_latest_as_tensorflow_does, run) == tensorflow_says
        message = message_of(remote, do_find_latest, run)
    assert f': {LASTING[status]}' in message
    assert f'bucket {bucket.name}, object out' in message
    assert remote.call(do_find_latest, run) == f'{run}/model.ckpt-7'


# Records.


@pytest.fixture(params=['', 'GZIP'])
def compression(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def digits(compression: str, bucket: Any, tmp_path: pathlib.Path) -> str:
    """Sixteen shards of ten digits, in names that do not tell how they are compressed, and a manifest."""
    facts = {}
    for index, path in enumerate(shards.write_digits(tmp_path, [10] * SHARDS, compression=compression)):
        name = f'train-{index:05d}-of-{SHARDS:05d}'
        bucket.blob(f'data/{name}').upload_from_filename(path)
        facts[name] = {'records': 10, 'bytes': pathlib.Path(path).stat().st_size, 'sha256': ''}
    from trainer import manifest

    manifest.write(str(tmp_path), {'splits': {'train': {'files': facts}}})
    bucket.blob('data/manifest.json').upload_from_filename(str(tmp_path / 'manifest.json'))
    return f'gs://{bucket.name}/data/train-*'


def do_read(spec: str, batches: int, **settings: Any) -> list[int]:
    """The numbers of the digits in that many batches of sixteen; None reads for an evaluation, to the end."""
    import tensorflow as tf

    files = data_files.resolve(spec, '--train_data_paths')
    config = DataConfig(train_data_paths=spec, shuffle_buffer=64, **settings)
    input_fn = inputs.make_input_fn(
        files, MNIST, training=batches > 0, global_batch_size=16, seed=1, config=config, num_workers=1, worker_index=0
    )
    found = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        iterator = tf.compat.v1.data.make_initializable_iterator(input_fn())
        session.run(iterator.initializer)
        features, labels = iterator.get_next()
        with contextlib.suppress(tf.errors.OutOfRangeError):
            for _ in range(batches or 10**6):
                images, _ = session.run([features['image'], labels])
                found += shards.numbers_of(images)
    return found


@pytest.mark.parametrize('cache', ['memory', 'off', 'evaluation'])
def test_sixteen_shards_take_few_requests(
    store: gcs.Store, remote: gcs.Remote, bucket: Any, digits: str, compression: str, cache: str
) -> None:
    store.reset()
    batches = 0 if cache == 'evaluation' else 10
    found = remote.call(do_read, digits, batches, cache='auto' if cache == 'evaluation' else cache)
    assert sorted(found) == list(range(10 * SHARDS))
    next_epoch = SHARDS if cache == 'off' else 0  # training by streaming reads ahead
    assert store.count(pattern=bucket.name) <= MAX_REQUESTS[compression] + next_epoch, store.tally()


@pytest.mark.parametrize('compression', [''])
def test_shards_are_read_whole_under_faults(store: gcs.Store, remote: gcs.Remote, digits: str) -> None:
    with store.failing(*(Fault(status, rate=0.03, seed=seed) for seed, status in enumerate((429, 503, CUT)))):
        found = remote.call(do_read, digits, 0)
        assert sum(request.status in (429, 503, CUT) for request in store.requests) >= 3
    assert sorted(found) == list(range(10 * SHARDS))


def do_count(path: str) -> int:
    from trainer import pipelines, sharding

    shard = sharding.shard_files([path], 1, 0)
    dataset = pipelines.read_in_order(pipelines.Source((path,), ('',), shard))
    return sum(1 for _ in dataset)


def do_look(path: str) -> str:
    return records.find_compression(path)


def test_large_shard_takes_few_large_requests_and_a_look_at_it_little(
    store: gcs.Store, remote: gcs.Remote, bucket: Any
) -> None:
    payload = bytes(1_000_000)
    put(bucket, shard=b''.join(records.frame(payload) for _ in range(20)))
    path = f'gs://{bucket.name}/shard'
    store.reset()
    assert remote.call(do_look, path) == ''
    (look,) = [request for request in store.requests if request.path == f'{bucket.name}/shard']
    assert look.kind == 'read'
    assert look.num_bytes <= 4 << 20
    store.reset()
    assert remote.call(do_count, path) == 20
    reads = [request.num_bytes for request in store.requests if request.path == f'{bucket.name}/shard']
    assert reads == [8 << 20, 8 << 20, 20_000_320 - (16 << 20)]


@pytest.mark.parametrize('compression', [''])
def test_damage_is_found_on_gs(remote: gcs.Remote, bucket: Any, digits: str) -> None:
    blob = bucket.blob(f'data/train-00003-of-{SHARDS:05d}')
    content = bytearray(blob.download_as_bytes())
    content[-1] ^= 1
    blob.upload_from_string(bytes(content))
    path = f'gs://{bucket.name}/data/train-00003-of-{SHARDS:05d}'
    found = remote.call(do_diagnose, [path])
    assert re.fullmatch(rf'{path}: record 9 \(byte \d+\): the \d+ bytes of the record fail their checksum; .*', found)
    blob.upload_from_string(bytes(content[:-40]))
    assert f'{path}: record 9 ' in message_of(remote, do_read, digits, 0)
    blob.upload_from_string(b'')
    assert message_of(remote, do_read, digits, 0).startswith(f'{path}: the file is empty')


@pytest.mark.parametrize('compression', [''])
def test_manifest_and_shards_that_may_not_be_read_are_named(store: gcs.Store, remote: gcs.Remote, digits: str) -> None:
    for name in ('manifest.json', 'train-00007-of-00016'):
        with store.failing(Fault(403, kinds=['read'], pattern=f'data/{name}')):
            message = message_of(remote, do_read, digits, 1)
        assert message.startswith(f'{digits.rsplit("/", 1)[0]}/{name}: cannot read: permission denied (HTTP 403: ')


def do_diagnose(paths: list[str]) -> Any:
    return records.diagnose(paths, MNIST)
