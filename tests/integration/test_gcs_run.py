"""Whole runs whose every path is gs://, on a server of Cloud Storage's API: killed, resumed, exported, and under faults."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any, Optional

import pytest

from tests import gcs
from tests.conftest import REPOSITORY
from tests.gcs import CUT, Fault
from trainer import convert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

KILLED_AT, MAX_STEPS = 200, 800


@pytest.fixture(scope='module')
def digits(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('digits')
    convert.convert('mnist', str(folder))
    return folder


@pytest.fixture(scope='module')
def store() -> Iterator[gcs.Store]:
    with gcs.Store() as store:
        yield store


@pytest.fixture(scope='module')
def remote(store: gcs.Store) -> Iterator[gcs.Remote]:
    """A process for several runs, which has TensorFlow imported once and gives up after one retry."""
    with store.remote(GCS_RETRY_CONFIG_MAX_RETRIES='1', TF_CPP_MIN_LOG_LEVEL='3') as remote:
        yield remote


@pytest.fixture
def bucket(store: gcs.Store, digits: pathlib.Path) -> Any:
    """A bucket with the digits under data/."""
    bucket = store.make_bucket(f'b-{uuid.uuid4().hex[:8]}')
    for path in digits.iterdir():
        bucket.blob(f'data/{path.name}').upload_from_filename(str(path))
    store.reset()
    return bucket


def make_flags(bucket: Any, **settings: Any) -> list[str]:
    base = f'gs://{bucket.name}'
    defaults = {
        'train_data_paths': f'{base}/data/train-*',
        'eval_data_paths': f'{base}/data/eval-*',
        'predict_data_paths': f'{base}/data/eval-*',
        'job-dir': f'{base}/out',
        'max_steps': MAX_STEPS,
        'eval_steps': KILLED_AT,
        'hidden1': 32,
        'hidden2': 16,
        'log_secs': 0.2,
    }
    return [f'--{name}={value}' for name, value in {**defaults, **settings}.items()]


def run_here(flags: list[str]) -> tuple[int, str]:
    """Exit code and what was printed on stderr, the log left out."""
    from trainer import task

    with contextlib.redirect_stderr(io.StringIO()) as err:
        return task.main(flags), err.getvalue()


def start(store: gcs.Store, bucket: Any, environ: Optional[dict[str, str]] = None, **settings: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, '-m', 'trainer.task', *make_flags(bucket, **settings)],
        cwd=REPOSITORY,
        env=store.environ(TF_CPP_MIN_LOG_LEVEL='3', **(environ or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout_secs: float = 120) -> tuple[int, list[str]]:
    """Exit code and the lines on stderr."""
    try:
        _, err = process.communicate(timeout=timeout_secs)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f'it took more than {timeout_secs} s:\n{process.communicate()[1]}')
    return process.returncode, [line for line in err.splitlines() if not re.match(r'WARNING: All log|I0000 ', line)]


def read_json(bucket: Any, name: str) -> Any:
    return json.loads(bucket.blob(name).download_as_bytes())


def names_in(bucket: Any, prefix: str) -> list[str]:
    return sorted(blob.name[len(prefix) :] for blob in bucket.list_blobs(prefix=prefix) if not blob.name.endswith('/'))


def predict_with_export(path: str) -> Any:
    import tensorflow as tf

    predict = tf.saved_model.load(path).signatures['serving_default']
    return predict(image=tf.zeros([1, 784], tf.uint8), key=tf.constant(['k']))['probabilities'].numpy().shape


def test_run_on_gs_is_killed_resumes_exports_and_predicts(store: gcs.Store, remote: gcs.Remote, bucket: Any) -> None:
    process = start(store, bucket)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if bucket.blob('out/best.json').exists():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not bucket.blob('out/final_metrics.json').exists()

    code, lines = finish(start(store, bucket))
    assert code == 0, lines
    resumed = [re.fullmatch(rf'Resuming from gs://{bucket.name}/out/model\.ckpt-(\d+)', line) for line in lines]
    (step,) = [int(match.group(1)) for match in resumed if match]
    assert KILLED_AT <= step < MAX_STEPS
    assert f'Exporting prediction graph to gs://{bucket.name}/out/model' in lines

    final = read_json(bucket, 'out/final_metrics.json')
    assert final['global_step'] == MAX_STEPS
    assert final['accuracy'] > 0.9
    assert read_json(bucket, 'out/config.json')['config']['run']['job_dir'] == f'gs://{bucket.name}/out'
    best = read_json(bucket, 'out/best.json')
    export_files = ['saved_model.pb', 'variables/variables.data-00000-of-00001', 'variables/variables.index']
    for path in (best['export'], final['export']):
        assert set(export_files) <= set(names_in(bucket, path.split('/', 3)[3] + '/'))
    assert names_in(bucket, 'out/train/')
    assert names_in(bucket, 'out/eval/')
    left_over = [name for name in names_in(bucket, 'out/') if '.probe' in name or 'temp-export' in name]
    assert left_over == []

    assert remote.call(run_here, make_flags(bucket, mode='predict'), timeout_secs=120)[0] == 0
    predictions = names_in(bucket, f'out/predictions/step-{MAX_STEPS}/')
    assert predictions == [f'eval-0000{index}-of-00002.tfrecord.predictions.jsonl' for index in range(2)]
    text = bucket.blob(f'out/predictions/step-{MAX_STEPS}/{predictions[0]}').download_as_bytes()
    assert len(text.splitlines()) == 500

    assert remote.call(predict_with_export, final['export']) == (1, 10)


def test_run_completes_with_one_request_in_twenty_refused(store: gcs.Store, bucket: Any) -> None:
    with store.failing(Fault(503, rate=0.05, seed=3)):
        code, lines = finish(start(store, bucket, {'GCS_RETRY_CONFIG_MAX_RETRIES': '10'}, max_steps=400))
        refused = [request for request in store.requests if request.status == 503]
        share = len(refused) / len(store.requests)
    assert code == 0, lines
    assert len({request.kind for request in refused}) >= 4
    assert 0.02 < share < 0.1
    assert read_json(bucket, 'out/final_metrics.json')['global_step'] == 400


def test_checkpoint_that_cannot_be_read_is_named(store: gcs.Store, remote: gcs.Remote, bucket: Any) -> None:
    assert remote.call(run_here, make_flags(bucket, max_steps=200), timeout_secs=120)[0] == 0
    for mode in ('train_and_eval', 'eval', 'predict', 'export'):
        with store.failing(Fault(503, kinds=['read'], pattern='model.ckpt-200.data')):
            code, err = remote.call(run_here, make_flags(bucket, max_steps=400, mode=mode))
        assert code == 1
        path = f'gs://{bucket.name}/out/model.ckpt-200.data-00000-of-00001'
        start = f'trainer: error: {path}: the service failed at every retry (HTTP 503'
        assert err.splitlines()[-1].startswith(start), err


@pytest.mark.parametrize(
    ('fault', 'message'),
    [
        (
            Fault(503, kinds=['read'], pattern='train-00007', after=1),
            r'data/train-00007-of-00016.tfrecord: cannot read: the service',
        ),
        (
            Fault(CUT, kinds=['start'], pattern='model.ckpt-200'),
            r'out/model.ckpt-200_temp/part-\S+: the connection failed at every',
        ),
        (Fault(403, kinds=['upload'], pattern='best/'), r'out/best/\d+/\S+: cannot write: permission denied \(HTTP 403'),
        (Fault(403, kinds=['list'], pattern='data/'), r'data/eval-\*: cannot list: permission denied \(HTTP 403'),
    ],
)
def test_run_that_loses_its_store_ends_with_one_line(
    store: gcs.Store, remote: gcs.Remote, bucket: Any, fault: Fault, message: str
) -> None:
    with store.failing(fault):
        code, err = remote.call(run_here, make_flags(bucket, max_steps=400), timeout_secs=120)
    (line,) = err.splitlines()
    assert code == 1
    assert re.match(rf'trainer: error: gs://{bucket.name}/{message}', line), line
    assert f'bucket {bucket.name}, object ' in line
