"""Real clusters on this machine: every strategy trains, a killed task of each role comes back, and nothing is lost or left."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import REPOSITORY
from trainer import convert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LIMIT_SECS = 240
WORKERS = ['--workers=1']
SERVERS = ['--workers=1', '--ps=1']


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp('digits')
    assert convert.main(['mnist', '--output', str(folder)]) == 0
    return folder


def make_flags(digits, output, **settings):
    defaults = {
        'train_data_paths': f'{digits}/train-*',
        'eval_data_paths': f'{digits}/eval-*',
        'output_path': output,
        'max_steps': 60,
        'eval_steps': 20,
        'hidden1': 32,
        'hidden2': 16,
        'log_secs': 0,
    }
    return [f'--{name}={value}' for name, value in {**defaults, **settings}.items() if value is not None]


def start(processes, flags, log_dir):
    """The launcher, which writes to a file: one that nobody reads from would in time be full and stop the tasks."""
    command = [sys.executable, '-m', 'trainer.launch', *processes, f'--log_dir={log_dir}', '--', *flags]
    metrics = {'CLOUD_ML_HP_METRIC_FILE': f'{log_dir}/metrics', 'CLOUD_ML_HP_METRIC_TAG': 'accuracy'}
    os.makedirs(log_dir, exist_ok=True)
    with open(f'{log_dir}/launcher.txt', 'w') as output:
        environment = {**os.environ, **metrics, 'TF_CPP_MIN_LOG_LEVEL': '3'}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output)


def finish(launcher, log_dir):
    """The launcher's exit code and output; a launcher that hangs is stopped, with all its tasks."""
    try:
        code = launcher.wait(LIMIT_SECS)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        launcher.wait(60)
        code = None
    with open(f'{log_dir}/launcher.txt') as file:
        output = file.read()
    assert code is not None, f'no end after {LIMIT_SECS} seconds:\n{output[-6000:]}'
    return code, output


def run(processes, flags, log_dir):
    return finish(start(processes, flags, log_dir), log_dir)


def find_tasks(output):
    """Pids by 'role/index' of the tasks that write to this folder."""
    found = {}
    for path in glob.glob('/proc/[0-9]*/cmdline'):
        pid = path.split('/')[2]
        try:
            with open(path, 'rb') as file:
                is_ours = b'trainer.task' in (line := file.read()) and f'--output_path={output}'.encode() in line
            with open(f'/proc/{pid}/environ', 'rb') as file:
                environ = dict(item.split(b'=', 1) for item in file.read().split(b'\0') if b'=' in item)
        except OSError:  # it has just ended
            continue
        if is_ours:
            task = json.loads(environ[b'TF_CONFIG'])['task']
            found[f'{task["type"]}/{task["index"]}'] = int(pid)
    return found


def read_losses(path):
    """The loss of every step that is in a Train line, by step."""
    with open(path) as file:
        lines = re.findall(r'Train \[chief/0\], step (\d+): loss: (\d+\.\d+)', file.read())
    return {int(step): float(loss) for step, loss in lines}


def read_summary(output, tag):
    values = {}
    for path in glob.glob(f'{output}/train/events*'):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                if value.tag == tag:
                    values[event.step] = float(tf.make_ndarray(value.tensor))
    return values


def check_outcome(output, log_dir, *, max_steps=60, spare_steps=0):
    with open(f'{output}/final_metrics.json') as file:
        final = json.load(file)
    assert max_steps <= final['global_step'] <= max_steps + spare_steps
    assert [os.path.basename(final['export'])] == os.listdir(f'{output}/model')
    with open(f'{output}/training_over.json') as file:
        assert json.load(file)['step'] == final['global_step']
    with open(f'{log_dir}/metrics') as file:
        reports = [json.loads(line) for line in file]
    assert [int(report['global_step']) for report in reports].count(final['global_step']) == 1
    assert int(reports[-1]['global_step']) == final['global_step']
    assert find_tasks(output) == {}
    return final


# One of each kind runs on the newer TensorFlow too.
ON_ALL = {'marks': pytest.mark.cluster}


@pytest.mark.parametrize(
    ('processes', 'settings', 'strategy', 'spare_steps'),
    [
        pytest.param([], {'distribution_strategy': 'mirrored', 'num_cpu_replicas': 2}, 'mirrored', 0, **ON_ALL),
        ([], {'distribution_strategy': 'central_storage', 'num_cpu_replicas': 2}, 'central_storage', 0),
        pytest.param(WORKERS, {'model': 'tests.fakes:make_keras_network'}, 'multi_worker_mirrored', 0, **ON_ALL),
        ([*WORKERS, '--evaluator=1'], {}, 'multi_worker_mirrored', 0),
        (SERVERS, {'micro_batches': 2, 'ema_decay': 0.5}, 'parameter_server', 1),
        pytest.param([*SERVERS, '--evaluator=1'], {}, 'parameter_server', 1, **ON_ALL),
        pytest.param(
            ['--workers=2', '--ps=1'],
            {'sync_replicas': True, 'replicas_to_aggregate': 2, 'micro_batches': 2, 'clip_norm': 5},
            'parameter_server',
            1,
            **ON_ALL,
        ),
    ],
    ids=['mirrored', 'central_storage', 'multi_worker', 'multi_worker_evaluator', 'ps', 'ps_evaluator', 'sync_replicas'],
)
def test_strategy_trains_evaluates_exports_and_ends(digits, tmp_path, processes, settings, strategy, spare_steps):
    output, log_dir = tmp_path / 'out', tmp_path / 'logs'
    code, text = run(processes, make_flags(digits, output, **settings), log_dir)
    assert code == 0, text[-6000:]
    assert f'Strategy {strategy} (' in text
    final = check_outcome(output, log_dir, spare_steps=spare_steps)
    assert final['accuracy'] > 0.6


# All that an optimizer may have, as each has to hold for the gradient of the whole batch.
OPTIMIZER = {
    'optimizer': 'momentum',
    'clip_norm': 0.5,
    'weight_decay': 0.001,
    'learning_rate_schedule': 'cosine',
    'warmup_steps': 5,
}


PARTS = {'micro_batches': 2, 'ema_decay': 0.9}


@pytest.mark.parametrize(
    ('processes', 'settings', 'only_several'),
    [
        ([], {'distribution_strategy': 'mirrored', 'num_cpu_replicas': 2}, PARTS),
        (WORKERS, {'distribution_strategy': 'multi_worker_mirrored'}, PARTS),
        # Its statistics are those of the whole batch on all workers, but not on micro-batches.
        (WORKERS, {'distribution_strategy': 'multi_worker_mirrored', 'model': 'tests.fakes:normalized_model_fn'}, {}),
    ],
    ids=['mirrored', 'multi_worker', 'multi_worker_batch_norm'],
)
def test_synchronous_replicas_give_the_losses_of_one_device(digits, tmp_path, processes, settings, only_several):
    settings = {**settings, **OPTIMIZER, 'max_steps': 50, 'eval_steps': 0, 'summary_steps': 1}
    one = tmp_path / 'one'
    code, text = run([], make_flags(digits, one, **{**settings, 'distribution_strategy': 'off', 'num_cpu_replicas': 0}), one)
    assert code == 0, text[-4000:]
    several = tmp_path / 'several'
    code, text = run(processes, make_flags(digits, several, **settings, **only_several), several)
    assert code == 0, text[-4000:]
    expected, losses = read_summary(one, 'loss'), read_summary(several, 'loss')
    assert sorted(losses) == list(range(1, 51))
    np.testing.assert_allclose([losses[step] for step in range(1, 51)], [expected[step] for step in range(1, 51)], rtol=1e-4)


# Steps with parameter servers are quick: enough of them that the kill comes before the last.
ASYNC = {'max_steps': 1200}
SYNC = {'sync_replicas': True, 'replicas_to_aggregate': 2}
MIRRORED = {'distribution_strategy': 'mirrored', 'num_cpu_replicas': 2}
KILLS = [
    ('mirrored-chief', [], 'chief/0', MIRRORED),
    ('multi_worker-chief', WORKERS, 'chief/0', {}),
    ('multi_worker-worker', WORKERS, 'worker/0', {}),
    ('multi_worker-evaluator', [*WORKERS, '--evaluator=1'], 'evaluator/0', {}),
    ('ps-chief', SERVERS, 'chief/0', ASYNC),
    ('ps-worker', SERVERS, 'worker/0', ASYNC),
    ('ps-ps', SERVERS, 'ps/0', ASYNC),
    ('ps-evaluator', [*SERVERS, '--evaluator=1'], 'evaluator/0', ASYNC),
    ('sync-chief', ['--workers=2', '--ps=1'], 'chief/0', SYNC),
    ('sync-worker', ['--workers=2', '--ps=1'], 'worker/1', SYNC),
    ('sync-ps', ['--workers=2', '--ps=1'], 'ps/0', SYNC),
]


def wait_for(condition, secs=120):
    """What the condition gives as soon as it is true of it."""
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f'nothing of what was waited for within {secs} seconds')


@pytest.mark.parametrize(('name', 'processes', 'victim', 'settings'), KILLS, ids=[kill[0] for kill in KILLS])
def test_killed_task_comes_back_and_the_job_completes(digits, tmp_path, name, processes, victim, settings):
    output, log_dir = tmp_path / 'out', tmp_path / 'logs'
    settings = {'max_steps': 500, 'eval_steps': 250, 'save_checkpoints_steps': 50, 'step_timeout_secs': 60, **settings}
    max_steps = settings['max_steps']
    launcher = start(processes, make_flags(digits, output, **settings), log_dir)
    try:
        wait_for(lambda: glob.glob(f'{output}/model.ckpt-[1-9]*.index'))
        killed = wait_for(lambda: find_tasks(output).get(victim))
        before = max(read_losses(log_dir / 'chief-0.log'))
        assert before < max_steps, 'killed too late to say anything'
        os.kill(killed, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for(lambda: max(read_losses(log_dir / 'chief-0.log')) > before + 1)
        recovery_secs = time.monotonic() - killed_at
    except BaseException:
        launcher.terminate()
        raise
    code, text = finish(launcher, log_dir)
    assert code == 0, text[-8000:]
    print(f'{name}: killed at step {before}, a later step came after {recovery_secs:.1f} seconds')
    check_outcome(output, log_dir, max_steps=max_steps, spare_steps=2)
