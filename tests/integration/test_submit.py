"""Jobs sent by the real gcloud to a server on loopback: the request holds what the files say, and nothing goes unchecked."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading

import pytest
import yaml

from tests import gcs
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.gcloud,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which('gcloud') is None, reason='gcloud is not installed'),
]

DATA = ['--train_data_paths=gs://bucket-a/train', '--eval_data_paths=gs://bucket-a/eval']
JOB = {
    'scaleTier': 'CUSTOM',
    'masterType': 'n1-standard-8',
    'masterConfig': {'acceleratorConfig': {'type': 'NVIDIA_TESLA_T4', 'count': 1}},
    'workerType': 'n1-standard-4',
    'workerCount': 2,
    'enableWebAccess': True,
    'args': DATA,
}


class Service(http.server.ThreadingHTTPServer):
    """Keeps every request that creates a job, and answers as the services do."""

    def __init__(self):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.requests = []
        self.url = f'http://127.0.0.1:{self.server_address[1]}/'


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.requests.append((self.path.partition('?')[0], body))
        kind = self.path.partition('?')[0].rsplit('/', 1)[1]
        state = {'state': 'QUEUED'} if kind == 'jobs' else {'state': 'JOB_STATE_PENDING'}
        answer = json.dumps({**body, **state, 'name': f'projects/1/locations/us-central1/{kind}/77'}).encode()
        self.send_response(200)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *unused):
        pass


@pytest.fixture
def cloud(tmp_path):
    """Runs a submit script against servers on loopback; returns code, output, errors."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(gcs.Store())
        bucket = store.make_bucket('bucket-a')
        store.reset()
        service = Service()
        stack.callback(service.server_close)
        thread = threading.Thread(target=service.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True)
        thread.start()
        stack.callback(thread.join, 5)
        stack.callback(service.shutdown)
        environ = {
            **os.environ,
            'CLOUDSDK_CONFIG': str(tmp_path / 'gcloud'),
            'CLOUDSDK_CORE_DISABLE_PROMPTS': '1',
            'CLOUDSDK_CORE_DISABLE_USAGE_REPORTING': 'true',
            'CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK': 'true',
            'CLOUDSDK_AUTH_DISABLE_CREDENTIALS': 'True',
            'CLOUDSDK_CORE_PROJECT': 'project-a',
            'CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE': f'{store.host}/storage/v1/',
            'CLOUDSDK_API_ENDPOINT_OVERRIDES_ML': service.url,
            'CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM': service.url,
        }

        def submit(script, job, *flags):
            (tmp_path / 'config.yaml').write_text(yaml.safe_dump({'trainingInput': job, 'labels': {'team': 'a'}}))
            common = [f'--config={tmp_path}/config.yaml', '--name=digits_1', '--staging_bucket=gs://bucket-a/staging']
            command = [sys.executable, f'{REPOSITORY}/scripts/{script}', *common, '--job_dir=gs://bucket-a/out', *flags]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
            return done.returncode, done.stdout, done.stderr

        submit.service, submit.store, submit.bucket = service, store, bucket
        yield submit


TUNING = {
    'goal': 'MAXIMIZE',
    'hyperparameterMetricTag': 'accuracy',
    'maxTrials': 9,
    'maxParallelTrials': 3,
    'params': [{'parameterName': 'learning_rate', 'type': 'DOUBLE', 'minValue': 0.001, 'maxValue': 0.5}],
}


@pytest.mark.parametrize(
    ('script', 'job', 'path'),
    [
        ('submit_ai_platform', JOB, '/v1/projects/project-a/jobs'),
        ('submit_ai_platform', {**JOB, 'hyperparameters': TUNING}, '/v1/projects/project-a/jobs'),
        ('submit_vertex', JOB, '/v1/projects/project-a/locations/us-central1/customJobs'),
        (
            'submit_vertex',
            {**JOB, 'hyperparameters': TUNING},
            '/v1/projects/project-a/locations/us-central1/hyperparameterTuningJobs',
        ),
    ],
    ids=['ai_platform', 'ai_platform_tuning', 'vertex', 'vertex_tuning'],
)
def test_request_is_what_the_dry_run_prints(cloud, tmp_path, script, job, path):
    code, printed, err = cloud(script, job, '--dry_run')
    assert code == 0, err
    assert (cloud.service.requests, cloud.store.requests) == ([], [])
    code, out, err = cloud(script, job)
    assert code == 0, err
    ((sent_to, sent),) = cloud.service.requests
    assert sent_to.replace('/v1beta1/', '/v1/') == path
    assert sent == json.loads(printed)
    # What was staged is the package that the request names, and holds the trainer.
    text = json.dumps(sent)
    uri = text[text.index('gs://bucket-a/staging/') :].split('"')[0]
    cloud.bucket.blob(uri.split('/', 3)[3]).download_to_filename(str(tmp_path / 'package.tar.gz'))
    with tarfile.open(tmp_path / 'package.tar.gz') as package:
        assert 'trainer-0.1.0/trainer/task.py' in package.getnames()
    assert f'staged {uri}' in out and 'sent digits_1' in out
    assert 'describe' in out


def test_what_is_wrong_is_found_before_the_upload(cloud):
    code, out, err = cloud('submit_vertex', {**JOB, 'workerCuont': 2})
    assert (code, out) == (2, '')
    assert 'trainingInput.workerCuont: unknown key; did you mean workerCount?' in err
    assert (cloud.service.requests, cloud.store.requests) == ([], [])


def test_bucket_that_is_not_there_is_named(cloud):
    code, _, err = cloud('submit_vertex', JOB, '--staging_bucket=gs://bucket-b')
    assert code == 1 and err.startswith('trainer.submit: error: gcloud storage cp --no-clobber failed: ERROR:')
    assert 'bucket-b not found' in err
    assert cloud.service.requests == []
