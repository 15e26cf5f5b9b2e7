"""Runs of `trainer.task` on a simulated TPU (tests/tpu.py), each a process of its own as a user would start it."""

from __future__ import annotations

import collections
import glob
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import REPOSITORY
from trainer import convert

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(320),
    pytest.mark.skipif(
        not tf.__version__.startswith('2.15.'), reason='the simulator replaces private parts of TensorFlow 2.15'
    ),
]


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp('digits')
    assert convert.main(['mnist', '--output', str(folder)]) == 0
    return folder


def _start(cores, hosts, digits, output, **settings):
    defaults = {'train_data_paths': f'{digits}/train-*', 'eval_data_paths': f'{digits}/eval-*', 'output_path': output}
    small = {'hidden1': 32, 'hidden2': 16, 'batch_size': 100, 'max_steps': 25}
    program = ['tests.tpu_task', str(cores), str(hosts)] if cores else ['trainer.task']
    return subprocess.Popen(
        [sys.executable, '-m', *program, *(f'--{name}={value}' for name, value in {**defaults, **small, **settings}.items())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'},
    )


def _run(*args, code=0, **settings):
    """Steps of each session call, and what was printed."""
    process = _start(*args, **settings)
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, err[-4000:]
    return json.loads(out.splitlines()[-1])['loops'] if args[0] else None, err


def _read_weights(output, step):
    reader = tf.train.load_checkpoint(f'{output}/model.ckpt-{step}')
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def _read_scalars(folder):
    """name -> step -> value"""
    scalars = collections.defaultdict(dict)
    for path in glob.glob(f'{folder}/events.out.tfevents.*'):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                if value.HasField('tensor') and not value.tensor.tensor_shape.dim:
                    scalars[value.tag][event.step] = float(tf.make_ndarray(value.tensor))
    return scalars


def test_cores_learn_what_one_device_learns_from_the_whole_batch(digits, tmp_path):
    settings = {'mode': 'train', 'optimizer': 'momentum', 'clip_norm': 1.0}
    _run(0, 0, digits, tmp_path / 'one', **settings)
    one = _read_weights(tmp_path / 'one', 25)
    for cores, hosts in ((2, 1), (4, 2)):
        output = tmp_path / f'{cores}-{hosts}'
        loops, _ = _run(cores, hosts, digits, output, steps_per_loop=10, save_checkpoints_steps=7, **settings)
        # No call goes past a step to be saved, or the last one.
        assert loops == [7, 7, 7, 4]
        assert {int(path.split('-')[-1][:-6]) for path in glob.glob(f'{output}/*.index')} == {0, 7, 14, 21, 25}
        weights = _read_weights(output, 25)
        assert set(weights) == set(one)
        for name, value in one.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=f'{cores} cores: {name}')


def test_training_pauses_to_evaluate_every_record_on_the_tpu(digits, tmp_path):
    output = tmp_path / 'out'
    settings = {'eval_steps': 20, 'summary_steps': 5, 'steps_per_loop': 10, 'eval_batch_size': 96}
    loops, printed = _run(2, 1, digits, output, max_steps=40, **settings)
    # 1,000 records in steps of 96 are 11.
    assert loops == [10, 10, 11, 10, 10, 11]
    assert 'Strategy tpu (found simulated); global batch 100 = 2 cores x 50, to step 40' in printed
    evals = dict(re.findall(r'Eval, step (\d+): loss: \d\.\d+, accuracy: (\d\.\d+)', printed))
    assert list(evals) == ['20', '40']
    final = json.loads((output / 'final_metrics.json').read_text())
    _, alone = _run(0, 0, digits, output, mode='eval', max_steps=40, eval_batch_size=1000)
    assert f'Eval, step 40: loss: {final["loss"]:.3f}, accuracy: {final["accuracy"]:.3f}' in alone
    assert tf.saved_model.contains_saved_model(final['export'])

    scalars = _read_scalars(output / 'train')
    # One step in five goes through host_call, counted from the start of a call; it is written if a multiple was passed.
    assert sorted(scalars['loss']) == [6, 11, 16, 26, 31, 36]
    assert sorted(scalars['accuracy']) == sorted(scalars['examples_per_sec']) == sorted(scalars['loss'])
    assert scalars['examples_per_sec'][16] > 0

    # What was done is not done again, and the run goes on from there.
    loops, printed = _run(2, 1, digits, output, max_steps=50, **settings)
    assert (loops, 'Resuming from' in printed) == ([10, 11], True)
    loops, printed = _run(2, 1, digits, output, mode='eval', distribution_strategy='tpu', eval_batch_size=96)
    assert (loops, 'Eval, step 50: loss: ' in printed) == ([11], True)


def test_sigterm_ends_with_the_checkpoint_of_the_last_call(digits, tmp_path):
    process = _start(2, 1, digits, tmp_path / 'out', max_steps=100_000, eval_steps=0, steps_per_loop=20, log_secs=0)
    for line in process.stderr:
        if 'Train [chief/0], step 60:' in line:
            break
    process.send_signal(signal.SIGTERM)
    err = process.stderr.read()
    assert process.wait(60) == 143, err
    (step,) = re.findall(r'SIGTERM; the checkpoint of step (\d+) is saved, the same command goes on from it', err)
    assert int(step) >= 60 and int(step) % 20 == 0
    assert _read_weights(tmp_path / 'out', step)['global_step'] == int(step)


def test_warm_start_reads_on_the_host(digits, tmp_path):
    _run(0, 0, digits, tmp_path / 'first', mode='train')
    settings = {'warm_start_from': tmp_path / 'first', 'learning_rate': 1e-30, 'optimizer': 'sgd', 'max_steps': 1}
    _run(2, 1, digits, tmp_path / 'second', mode='train', **settings)
    first, second = _read_weights(tmp_path / 'first', 25), _read_weights(tmp_path / 'second', 1)
    assert second['global_step'] == 1
    np.testing.assert_array_equal(second['hidden1/weights'], first['hidden1/weights'])


@pytest.mark.parametrize(
    ('settings', 'moved'),
    [
        ({'model': 'resnet50', 'optimizer': 'lars', 'max_steps': 1}, 'stage1/block1/conv3_norm/gamma'),
        ({'model': 'dcgan', 'gan_size': 16, 'gan_filters': 4, 'n_disc': 2, 'max_steps': 2}, 'generator_average/up1/weights'),
        ({'model': 'mlp', 'ema_decay': 0.9, 'micro_batches': 2, 'weight_decay': 0.01}, 'average/hidden1/weights'),
    ],
    ids=['resnet50', 'dcgan', 'averages'],
)
def test_large_models_make_steps(digits, tmp_path, settings, moved):
    _run(2, 1, digits, tmp_path / 'out', **{'mode': 'train', 'batch_size': 8, 'eval_batch_size': 8, **settings})
    weights = _read_weights(tmp_path / 'out', settings.get('max_steps', 25))
    assert weights[moved].any() and all(np.isfinite(value).all() for value in weights.values())
    assert not [name for name in weights if 'replica' in name]


@pytest.mark.parametrize(
    ('cores', 'settings', 'code', 'message'),
    [
        (
            8,
            {},
            2,
            '--batch_size=100 does not divide by the 8 replicas of --distribution_strategy=tpu; the nearest that does is 96',
        ),
        (2, {'eval_batch_size': 7}, 2, '--eval_batch_size=7 does not divide by the 2 replicas of --distribution_strategy=tpu'),
        (
            2,
            {'learning_rate': 1e30, 'optimizer': 'sgd', 'steps_per_loop': 5},
            1,
            r'logits/\w+:0 is not finite in the loop after step 0; stopped. The last good checkpoint is \S+model.ckpt-0: lower',
        ),
        (
            2,
            {'train_data_paths': '{damaged}'},
            1,
            r'train-00000-of-00016.tfrecord: record 59 \(byte 49442\): the 822 bytes of the',
        ),
    ],
    ids=['batch', 'eval_batch', 'nan', 'damaged'],
)
def test_mistake_is_one_line(digits, tmp_path, cores, settings, code, message):
    damaged = tmp_path / 'train-00000-of-00016.tfrecord'
    content = bytearray((digits / damaged.name).read_bytes())
    content[50_000] ^= 255
    damaged.write_bytes(content)
    settings = {name: damaged if value == '{damaged}' else value for name, value in settings.items()}
    _, err = _run(cores, 1, digits, tmp_path / 'out', code=code, cache='off', **settings)
    last = err.strip().splitlines()[-1]
    assert last.startswith('trainer: error: ') and re.search(message, last), err[-3000:]
    assert 'Traceback' not in err
