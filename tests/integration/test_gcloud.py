"""The real gcloud, where it is installed: `ai-platform local train` on the digits, and `local predict` on the export."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from trainer import convert, records
from trainer.datasets import MNIST

pytestmark = [
    pytest.mark.gcloud,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which('gcloud') is None, reason='gcloud is not installed'),
]


def _base64(data):
    """Bytes as a JSON instance holds them."""
    return {'b64': base64.b64encode(data).decode()}


@pytest.fixture
def gcloud(tmp_path):
    environment = {
        **os.environ,
        'CLOUDSDK_CONFIG': str(tmp_path / 'gcloud'),
        'CLOUDSDK_CORE_DISABLE_PROMPTS': '1',
        'CLOUDSDK_CORE_DISABLE_USAGE_REPORTING': 'true',
        'CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK': 'true',
        'CLOUDSDK_ML_ENGINE_LOCAL_PYTHON': sys.executable,
    }

    def run(*arguments):
        return subprocess.run(
            ['gcloud', 'ai-platform', 'local', *arguments],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env=environment,
            timeout=390,
        )

    return run


def test_local_train_then_local_predict_by_every_signature(gcloud, tmp_path):
    digits = tmp_path / 'digits'
    assert convert.main(['mnist', '--output', str(digits)]) == 0
    output = tmp_path / 'output'
    trained = gcloud(
        'train', '--module-name', 'trainer.task', '--package-path', 'trainer', '--job-dir', str(output), '--',
        f'--train_data_paths={digits}/train-*', f'--eval_data_paths={digits}/eval-*',
        '--max_steps=500', '--eval_steps=250',
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert "Original job data: {'job_name': 'trainer.task'" in trained.stderr
    assert json.loads((output / 'final_metrics.json').read_text())['accuracy'] > 0.88
    (export,) = (output / 'model').iterdir()

    first = next(iter(records.scan(str(digits / 'eval-00000-of-00002.tfrecord')))).payload
    image = MNIST.schema.parse([first])['image'].numpy()[0]
    label = int(MNIST.schema.parse([first])['label'].numpy()[0])
    instances = {
        'serving_default': {'image': image.tolist(), 'key': 'first'},
        'image_bytes': {'image_bytes': _base64(image.tobytes()), 'key': 'first'},
        'examples': _base64(first),
    }
    for signature, instance in instances.items():
        path = tmp_path / f'{signature}.json'
        path.write_text(json.dumps(instance) + '\n')
        predicted = gcloud(
            'predict', '--model-dir', str(export), '--json-instances', str(path), '--signature-name', signature,
            '--format', 'json',
        )  # fmt: skip
        assert predicted.returncode == 0, predicted.stderr[-3000:]
        answer = json.loads(predicted.stdout)
        answer = answer['predictions'] if isinstance(answer, dict) else answer
        assert answer[0]['classes'] == label
        assert len(answer[0]['probabilities']) == 10
        if signature != 'examples':
            assert answer[0]['key'] == 'first'


@pytest.mark.timeout(400)
def test_local_train_distributed_ends_with_an_evaluation_and_an_export(gcloud, tmp_path):
    digits = tmp_path / 'digits'
    assert convert.main(['mnist', '--output', str(digits)]) == 0
    output = tmp_path / 'output'
    trained = gcloud(
        'train', '--module-name', 'trainer.task', '--package-path', 'trainer', '--job-dir', str(output), '--distributed',
        '--worker-count', '2', '--parameter-server-count', '1', '--evaluator-count', '1', '--start-port', '27400', '--',
        f'--train_data_paths={digits}/train-*', f'--eval_data_paths={digits}/eval-*', '--max_steps=600', '--eval_steps=200',
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr[-3000:]
    final = json.loads((output / 'final_metrics.json').read_text())
    assert (final['accuracy'] > 0.88, 600 <= final['global_step'] <= 602) == (True, True)
    assert [str(path) for path in (output / 'model').iterdir()] == [final['export']]
