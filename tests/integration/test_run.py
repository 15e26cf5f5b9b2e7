"""Whole runs of trainer.task on the real digits: lines, files, restarts, modes, and every mistake a user can make."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from tests.conftest import REPOSITORY
from trainer import convert, records, task
from trainer.datasets import MNIST

TRAIN_LINE = re.compile(
    r'Train \[chief/0\], step (\d+): loss: \d+\.\d{3}, accuracy: \d\.\d{3} \(\d+\.\d{3} sec\) '
    r'\d+\.\d global steps/s, \d+\.\d local steps/s'
)


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp('digits')
    assert convert.main(['mnist', '--output', str(folder)]) == 0
    return folder


def _flags(digits, output, **settings):
    defaults = {
        'train_data_paths': f'{digits}/train-*',
        'eval_data_paths': f'{digits}/eval-*',
        'output_path': output,
        'max_steps': 40,
        'eval_steps': 20,
        'hidden1': 32,
        'hidden2': 16,
    }
    return [f'--{name}={value}' for name, value in {**defaults, **settings}.items() if value is not None]


def _start(flags, **environment):
    return subprocess.Popen(
        [sys.executable, '-m', 'trainer.task', *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
    )


def _run(flags, **environment):
    process = _start(flags, **environment)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def _read_json(path):
    return json.loads(path.read_text())


def test_run_prints_its_lines_leaves_its_files_and_is_finished(digits, tmp_path):
    output = tmp_path / 'output'
    flags = _flags(digits, output, max_steps=600, eval_steps=300, log_secs=0.2)
    code, out, err = _run(flags)
    assert code == 0, err
    lines = err.splitlines()
    assert out == ''
    # TensorFlow 2.21 has a word on missing GPUs before ours that nothing silences.
    assert 'Original job data: {}' in lines
    steps = [int(TRAIN_LINE.fullmatch(line).group(1)) for line in lines if line.startswith('Train [')]
    assert steps == sorted(steps) and steps[0] == 1 and steps[-1] == 600
    evals = [line for line in lines if line.startswith('Eval, ')]
    assert [re.fullmatch(r'Eval, step (\d+): loss: \d\.\d{3}, accuracy: 0\.\d{3}', line).group(1) for line in evals] == [
        '300',
        '600',
    ]
    assert f'Exporting prediction graph to {output}/model' in lines
    assert re.fullmatch(r'Final metrics after 600 steps, loss: \d\.\d{3}, accuracy: 0\.9\d\d', lines[-1])

    config = _read_json(output / 'config.json')
    assert config['config']['loop']['max_steps'] == 600 and config['versions']['tensorflow'][0] == '2'
    final = _read_json(output / 'final_metrics.json')
    assert final['global_step'] == 600 and final['accuracy'] > 0.88 and not final['stopped_early']
    (export,) = (output / 'model').iterdir()
    assert final['export'] == str(export) and (export / 'saved_model.pb').exists()
    assert sorted(fakes.read_events(output / 'train')['accuracy']) == [100, 200, 300, 400, 500, 600]
    assert fakes.read_events(output / 'train')['examples_per_sec'][600] > 1000
    assert sorted(fakes.read_events(output / 'eval')['accuracy']) == [300, 600]
    assert _read_json(output / 'best.json')['step'] in (300, 600)

    before = sorted((str(path), path.stat().st_mtime_ns) for path in output.rglob('*') if path.name != 'config.json')
    code, _, err = _run(flags)
    assert code == 0 and f'Already trained to step 600 and exported to {export}; nothing to do' in err
    assert before == sorted((str(path), path.stat().st_mtime_ns) for path in output.rglob('*') if path.name != 'config.json')


def test_killed_run_resumes_and_ends_with_the_same_weights(digits, tmp_path):
    flags = {'max_steps': 3000, 'eval_steps': 500, 'log_secs': 0.2, 'export_best': 'false'}
    process = _start(_flags(digits, tmp_path / 'killed', **flags))
    deadline = time.monotonic() + 120
    while not list((tmp_path / 'killed').glob('model.ckpt-1000.index')) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / 'killed' / 'final_metrics.json').exists()
    code, _, err = _run(_flags(digits, tmp_path / 'killed', **flags))
    assert code == 0, err
    resumed = re.search(r'Resuming from .*model\.ckpt-(\d+)$', err, re.MULTILINE)
    assert 500 <= int(resumed.group(1)) < 3000
    assert int(re.findall(r'Eval, step (\d+)', err)[0]) == int(resumed.group(1)) + 500
    assert _read_json(tmp_path / 'killed' / 'final_metrics.json')['global_step'] == 3000

    # From memory the batches go on where they were, so the whole run is that of one that was never killed.
    code, _, err = _run(_flags(digits, tmp_path / 'whole', **flags))
    assert code == 0, err
    killed, whole = (_read_json(tmp_path / name / 'final_metrics.json') for name in ('killed', 'whole'))
    assert killed['accuracy'] == whole['accuracy']
    np.testing.assert_allclose(killed['loss'], whole['loss'], rtol=1e-6)


@pytest.fixture
def run(capsys, caplog):
    """Runs trainer.task in this process; returns exit code, lines on stderr, log lines."""
    import logging

    caplog.set_level(logging.INFO)

    def run_task(flags):
        caplog.clear()
        capsys.readouterr()
        code = task.main([str(flag) for flag in flags])
        return code, capsys.readouterr().err.splitlines(), caplog.messages

    return run_task


def test_losses_are_the_same_on_every_tensorflow(digits, tmp_path, run):
    # Of TensorFlow 2.15.1 on Python 3.11 and 2.21.0 on Python 3.13, which agree to the last bit on one machine.
    settings = {'max_steps': 100, 'eval_steps': 100, 'summary_steps': 1, 'hidden1': 300, 'hidden2': 100}
    assert run(_flags(digits, tmp_path, **settings))[0] == 0
    losses = fakes.read_events(tmp_path / 'train')['loss']
    expected = {1: 2.3564420, 2: 2.2876351, 50: 0.78120154, 100: 0.47005349}
    for step, loss in expected.items():
        assert losses[step] == pytest.approx(loss, rel=1e-5)


def test_raising_max_steps_trains_on_and_reached_max_steps_still_evaluates_and_exports(digits, tmp_path, run):
    assert run(_flags(digits, tmp_path))[0] == 0
    code, _, log = run(_flags(digits, tmp_path, max_steps=60))
    assert code == 0 and _read_json(tmp_path / 'final_metrics.json')['global_step'] == 60
    # As if killed between the last checkpoint and the end.
    (tmp_path / 'final_metrics.json').unlink()
    code, _, log = run(_flags(digits, tmp_path, max_steps=60))
    assert code == 0 and 'Already trained to step 60; evaluating and exporting what is there' in log
    assert [line for line in log if line.startswith('Eval, step 60: ')]
    assert _read_json(tmp_path / 'final_metrics.json')['accuracy'] > 0


def test_trial_id_is_appended_to_output_path_and_not_to_job_dir(digits, tmp_path, run, monkeypatch):
    monkeypatch.setenv('TF_CONFIG', json.dumps({'task': {'type': 'chief', 'index': '0', 'trial': '3'}}))
    monkeypatch.setenv('CLOUD_ML_HP_METRIC_TAG', 'accuracy')
    monkeypatch.setenv('CLOUD_ML_HP_METRIC_FILE', str(tmp_path / 'hp' / 'metrics'))
    assert run(_flags(digits, tmp_path / 'sweep'))[0] == 0
    assert (tmp_path / 'sweep' / '3' / 'final_metrics.json').exists()
    reports = [json.loads(line) for line in (tmp_path / 'hp' / 'metrics').read_text().splitlines()]
    assert [(report['trial'], report['global_step']) for report in reports] == [('3', '20'), ('3', '40')]
    final = _read_json(tmp_path / 'sweep' / '3' / 'final_metrics.json')
    assert float(reports[-1]['accuracy']) == pytest.approx(final['accuracy'], rel=1e-6)
    assert run([*_flags(digits, None), f'--job-dir={tmp_path}/job/3'])[0] == 0
    assert (tmp_path / 'job' / '3' / 'final_metrics.json').exists()


def test_unknown_metric_tag_lists_the_metrics(digits, tmp_path, run):
    code, err, _ = run(_flags(digits, tmp_path, metric_tag='acuracy'))
    assert (code, len(err)) == (2, 1)
    assert '--metric_tag=acuracy' in err[0] and 'accuracy, loss' in err[0] and 'did you mean accuracy' in err[0]


def test_early_stopping_ends_the_run_which_is_then_finished(digits, tmp_path, run):
    # At a rate of next to nothing the second evaluation equals the first.
    settings = {'max_steps': 500, 'eval_steps': 10, 'early_stopping_steps': 30, 'learning_rate': 1e-12}
    code, _, log = run(_flags(digits, tmp_path, **settings))
    assert code == 0
    assert [line for line in log if line.startswith('Early stopping at step 40: accuracy has not improved')]
    final = _read_json(tmp_path / 'final_metrics.json')
    assert final['global_step'] == 40 and final['stopped_early']
    code, _, log = run(_flags(digits, tmp_path, **settings))
    assert code == 0 and [line for line in log if line.startswith('Already trained to step 40')]
    assert 'raise --early_stopping_steps (now 30, the best is of step 10), or set it to 0' in log[-1]
    code, _, log = run(_flags(digits, tmp_path, **{**settings, 'early_stopping_steps': 0, 'max_steps': 60}))
    assert code == 0 and _read_json(tmp_path / 'final_metrics.json')['global_step'] == 60


def test_loss_that_is_not_finite_ends_the_run_with_step_and_checkpoint(digits, tmp_path, run):
    code, err, _ = run(_flags(digits, tmp_path, learning_rate=1e30, max_steps=100))
    assert (code, len(err)) == (1, 1)
    assert re.search(r'the loss became (nan|inf) at step \d+; stopped\. The last good checkpoint is .*model\.ckpt-0', err[0])
    assert 'lower --learning_rate' in err[0]


def test_modes_after_training(digits, tmp_path, run):
    assert run(_flags(digits, tmp_path, mode='train', max_steps=200))[0] == 0
    assert 'accuracy' not in _read_json(tmp_path / 'final_metrics.json')
    code, _, log = run(_flags(digits, tmp_path, mode='eval'))
    assert code == 0 and [line for line in log if line.startswith('Eval, step 200: ')]
    code, _, log = run(_flags(digits, tmp_path, mode='continuous_eval'))
    assert code == 0 and log[-1] == 'Evaluation ends: training is done at step 200'
    shutil.rmtree(tmp_path / 'model')
    assert run(_flags(digits, tmp_path, mode='export'))[0] == 0
    assert len(list((tmp_path / 'model').iterdir())) == 1
    code, _, log = run(_flags(digits, tmp_path, mode='predict', predict_data_paths=f'{digits}/eval-*'))
    assert code == 0
    outputs = sorted((tmp_path / 'predictions' / 'step-200').iterdir())
    assert [path.name for path in outputs] == [f'eval-0000{i}-of-00002.tfrecord.predictions.jsonl' for i in range(2)]
    predicted = [json.loads(line)['class'] for path in outputs for line in path.read_text().splitlines()]
    labels = []
    for path in sorted(digits.glob('eval-*')):
        for record in records.scan(str(path)):
            labels.append(MNIST.schema.parse([record.payload])['label'].numpy()[0])
    assert len(predicted) == 1000
    assert (np.array(predicted) == np.array(labels)).mean() > 0.8


def test_evaluator_keeps_what_it_evaluates_while_training_goes_on(digits, tmp_path, run, monkeypatch):
    assert run(_flags(digits, tmp_path, mode='train', max_steps=200, save_checkpoints_steps=100))[0] == 0
    found = [('model.ckpt-50', 50), ('model.ckpt-100', 200)]
    monkeypatch.setattr(
        'trainer.experiment.Experiment.find_checkpoint', lambda self: (f'{tmp_path}/{found[0][0]}', found.pop(0)[1])
    )
    (tmp_path / 'final_metrics.json').unlink()
    (tmp_path / 'training_over.json').unlink()
    code, err, log = run(_flags(digits, tmp_path, mode='continuous_eval'))
    assert (code, err) == (0, [])
    assert f'{tmp_path}/model.ckpt-50 has been removed meanwhile (--keep_checkpoint_max); taking a later one' in log
    (best,) = (tmp_path / 'best').iterdir()
    assert tf.train.load_checkpoint(f'{best}/variables/variables').get_tensor('global_step') == 100


def test_continuous_eval_ends_when_no_checkpoint_comes(digits, tmp_path, run):
    flags = _flags(digits, tmp_path, mode='continuous_eval', continuous_eval_timeout_secs=0.5)
    code, _, log = run(flags)
    assert code == 0 and log[-1].startswith('Evaluation ends: no new checkpoint in')


@pytest.mark.parametrize('mode', ['eval', 'predict', 'export'])
def test_modes_that_need_a_checkpoint_say_so(digits, tmp_path, run, mode):
    code, err, _ = run(_flags(digits, tmp_path, mode=mode, predict_data_paths=f'{digits}/eval-*'))
    assert (code, err) == (
        1,
        [f'trainer: error: no checkpoint in {tmp_path}: train first, or give the folder of a run that has one'],
    )


def test_warm_start_takes_the_weights_of_another_run(digits, tmp_path, run):
    assert run(_flags(digits, tmp_path / 'first', max_steps=200, eval_steps=200))[0] == 0
    code, _, log = run(
        _flags(digits, tmp_path / 'second', max_steps=1, learning_rate=1e-12, warm_start_from=tmp_path / 'first')
    )
    assert code == 0 and [line for line in log if line.startswith('Warm start from') and 'took 6 weights' in line]
    first, second = (_read_json(tmp_path / name / 'final_metrics.json') for name in ('first', 'second'))
    assert first['accuracy'] == second['accuracy']


def test_wide_and_deep_on_real_cars(tmp_path, run):
    assert convert.main(['autompg', '--output', str(tmp_path / 'cars')]) == 0
    code, _, _ = run(
        _flags(
            tmp_path / 'cars',
            tmp_path / 'out',
            model='wide_deep',
            dataset='autompg',
            max_steps=300,
            eval_steps=300,
            batch_size=32,
        )
    )
    assert code == 0
    assert _read_json(tmp_path / 'out' / 'final_metrics.json')['accuracy'] > 0.7


def _truncate(path, size):
    with open(path, 'r+b') as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ('damage', 'resumed'),
    [
        (lambda folder: (folder / 'checkpoint').unlink(), 30),
        (lambda folder: _truncate(folder / 'checkpoint', 0), 30),
        (lambda folder: _truncate(folder / 'model.ckpt-30.index', 50), 20),
        (lambda folder: _truncate(folder / 'model.ckpt-30.data-00000-of-00001', 100), 20),
        (lambda folder: (folder / 'model.ckpt-30.index').unlink(), 20),
    ],
)
def test_lost_or_half_written_checkpoint_falls_back_to_the_one_before(digits, tmp_path, run, damage, resumed):
    settings = {'eval_steps': 10, 'export_best': 'false'}
    assert run(_flags(digits, tmp_path, max_steps=30, **settings))[0] == 0
    damage(tmp_path)
    code, err, log = run(_flags(digits, tmp_path, max_steps=40, **settings))
    assert code == 0, err
    assert f'Resuming from {tmp_path}/model.ckpt-{resumed}' in log
    assert [line.split(':')[0] for line in log if line.startswith('Eval, ')] == [
        f'Eval, step {step}' for step in range(resumed + 10, 50, 10)
    ]


def test_no_whole_checkpoint_is_an_error_and_nothing_is_overwritten(digits, tmp_path, run):
    assert run(_flags(digits, tmp_path, max_steps=20, eval_steps=10, export_best='false'))[0] == 0
    for path in tmp_path.glob('model.ckpt-*.index'):
        _truncate(path, 50)
    code, err, _ = run(_flags(digits, tmp_path, max_steps=40))
    assert (code, len(err)) == (1, 1) and f'no checkpoint in {tmp_path} is whole' in err[0]
    code, err, _ = run(_flags(digits, tmp_path, mode='export'))
    assert (code, len(err)) == (1, 1) and 'model.ckpt-20 is damaged or incomplete' in err[0]


@pytest.mark.parametrize('name', ['final_metrics.json', 'best.json'])
@pytest.mark.parametrize('text', ['{bad', '', '[1]'])
def test_damaged_file_of_an_earlier_run_is_named(digits, tmp_path, run, name, text):
    (tmp_path / name).write_text(text)
    code, err, _ = run(_flags(digits, tmp_path))
    assert (code, len(err)) == (1, 1) and f'{tmp_path}/{name}: ' in err[0] and 'remove the file' in err[0]


def test_model_of_one_feature_on_a_dataset_of_several_is_named(tmp_path, run):
    assert convert.main(['autompg', '--output', str(tmp_path / 'cars')]) == 0
    code, err, _ = run(_flags(tmp_path / 'cars', tmp_path / 'out', dataset='autompg', batch_size=32))
    assert (code, len(err)) == (2, 1) and '--model=mlp takes one feature, the dataset has 8' in err[0]


# Mistakes. Each is one line that names the culprit and the remedy.


@pytest.fixture
def copy_of_digits(digits, tmp_path):
    folder = tmp_path / 'copy'
    shutil.copytree(digits, folder)
    return folder


def _corrupt(path):
    """Flips a byte in the last record."""
    data = bytearray(path.read_bytes())
    data[-300] ^= 0xFF
    path.write_bytes(data)


def test_corrupt_record_is_named_with_file_and_position(copy_of_digits, tmp_path, run):
    path = copy_of_digits / 'train-00007-of-00016.tfrecord'
    _corrupt(path)
    code, err, _ = run(_flags(copy_of_digits, tmp_path / 'out'))
    assert (code, len(err)) == (1, 1)
    assert f'{path}: record 249 ' in err[0] and 'fail their checksum' in err[0] and '--max_corrupt_records' in err[0]


def test_corrupt_record_is_skipped_and_counted_within_the_budget(copy_of_digits, tmp_path, run):
    _corrupt(copy_of_digits / 'train-00007-of-00016.tfrecord')
    _corrupt(copy_of_digits / 'train-00002-of-00016.tfrecord')
    code, _, log = run(_flags(copy_of_digits, tmp_path / 'out', max_corrupt_records=5, max_steps=100))
    assert code == 0
    assert [line for line in log if 'train-00007' in line and 'record 249' in line]
    assert fakes.read_events(tmp_path / 'out' / 'train')['corrupt_records'] == {100: 2.0}
    code, err, _ = run(_flags(copy_of_digits, tmp_path / 'out2', max_corrupt_records=1))
    assert (code, len(err)) == (1, 1) and '--max_corrupt_records=1' in err[0]


def test_truncated_gzip_is_named(digits, tmp_path, run):
    assert convert.main(['mnist', '--output', str(tmp_path / 'gz'), '--gzip']) == 0
    path = sorted((tmp_path / 'gz').glob('train-*'))[3]
    path.write_bytes(path.read_bytes()[:-5000])
    code, err, _ = run(_flags(tmp_path / 'gz', tmp_path / 'out'))
    assert (code, len(err)) == (1, 1) and str(path) in err[0] and 'cut' in err[0]


def _write(path, examples):
    records.write_file(str(path), examples)


def _example(**features):
    import tensorflow as tf

    def feature(value):
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    values = {name: feature(value) for name, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=values)).SerializeToString()


@pytest.mark.parametrize('position', [0, 150])
@pytest.mark.parametrize(
    ('features', 'message'),
    [
        ({'label': 1}, "feature 'image' is missing"),
        ({'image': bytes(700), 'label': 1}, "feature 'image' has 700 bytes, the schema expects 784"),
        ({'image': bytes(784), 'label': 12}, "label 'label' is 12, dataset 'mnist' has 10 classes"),
        ({'image': 3, 'label': 1}, "feature 'image' holds int64_list"),
    ],
)
def test_bad_record_is_named_wherever_it_stands(digits, tmp_path, run, features, message, position):
    good = [_example(image=bytes(784), label=1)] * 200
    good[position] = _example(**features)
    _write(tmp_path / 'train-0', good)
    code, err, _ = run(_flags(digits, tmp_path / 'out', train_data_paths=tmp_path / 'train-0'))
    assert (code, len(err)) == (1, 1), err
    assert f'{tmp_path}/train-0: record {position} ' in err[0] and message in err[0]


def test_record_that_is_no_example_is_named(digits, tmp_path, run):
    _write(tmp_path / 'train-0', [_example(image=bytes(784), label=1)] * 150 + [b'\xff\xfe\x00not an example'])
    code, err, _ = run(_flags(digits, tmp_path / 'out', train_data_paths=tmp_path / 'train-0'))
    assert (code, len(err)) == (1, 1), err
    assert 'train-0: record 150 ' in err[0] and 'is not a tf.train.Example' in err[0]


def test_bad_record_among_those_of_evaluation_is_named(digits, tmp_path, run):
    _write(tmp_path / 'eval-0', [_example(image=bytes(784), label=1)] * 20 + [_example(image=bytes(784), label=-1)])
    code, err, _ = run(_flags(digits, tmp_path / 'out', eval_data_paths=tmp_path / 'eval-0'))
    assert (code, len(err)) == (1, 1), err
    assert 'eval-0: record 20 ' in err[0] and "label 'label' is -1" in err[0]


def test_file_that_is_no_tfrecord_is_named(digits, tmp_path, run):
    (tmp_path / 'train-0').write_text('label,image\n1,0\n')
    code, err, _ = run(_flags(digits, tmp_path / 'out', train_data_paths=tmp_path / 'train-0'))
    assert (code, len(err)) == (1, 1) and f'{tmp_path}/train-0' in err[0] and 'not a TFRecord file' in err[0]


def test_wrong_name_of_compression_does_not_matter(digits, tmp_path, run):
    source = digits / 'train-00000-of-00016.tfrecord'
    (tmp_path / 'train-0.tfrecord').write_bytes(gzip.compress(source.read_bytes()))
    shutil.copy(source, tmp_path / 'train-1.gz')
    code, _, log = run(_flags(digits, tmp_path / 'out', train_data_paths=f'{tmp_path}/train-*'))
    assert code == 0 and [line for line in log if '2 files (1 GZIP)' in line]


def test_other_compression_is_named(digits, tmp_path, run):
    import zlib

    source = digits / 'train-00000-of-00016.tfrecord'
    (tmp_path / 'train-0').write_bytes(zlib.compress(source.read_bytes()))
    code, err, _ = run(_flags(digits, tmp_path / 'out', train_data_paths=tmp_path / 'train-0'))
    assert (code, len(err)) == (1, 1) and 'ZLIB' in err[0] and 'plain or GZIP' in err[0]


def test_empty_glob_names_pattern_and_what_the_folder_holds(digits, tmp_path, run):
    code, err, _ = run(_flags(digits, tmp_path / 'out', train_data_paths=f'{digits}/trian-*'))
    assert (code, len(err)) == (1, 1)
    assert f'--train_data_paths: no file matches {digits}/trian-*' in err[0] and 'train-00000-of-00016.tfrecord' in err[0]


def test_output_that_cannot_be_written_names_the_flag(digits, tmp_path, run):
    (tmp_path / 'file').write_text('')
    code, err, _ = run(_flags(digits, tmp_path / 'file' / 'out'))
    assert (code, len(err)) == (1, 1) and '--output_path: the results cannot be written' in err[0]


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--batch_size=0'], '--batch_size=0: '),
        (['--model=nosuch'], '--model=nosuch: expected one of mlp, convnet, resnet50, dcgan, linear, dnn, wide_deep'),
        (['--dataset=nosuch'], '--dataset=nosuch: expected one of mnist, autompg, images'),
        (['--learning_rat=1'], 'did you mean --learning_rate'),
        (['--max_steps=ten'], '--max_steps'),
        (['--best_metric=f1'], '--best_metric=f1: expected a metric of the model: accuracy, loss'),
        (['--model_params=batch_size=3'], '--model_params: batch_size is set by the trainer'),
    ],
)
def test_wrong_flag_is_named(digits, tmp_path, run, flags, message):
    code, err, _ = run([*_flags(digits, tmp_path / 'out'), *flags])
    assert (code, len(err)) == (2, 1), err
    assert err[0].startswith('trainer: error: ') and message in err[0]


@pytest.mark.parametrize('mode', ['train_and_eval', 'eval', 'export'])
def test_checkpoint_of_another_model_is_named(digits, tmp_path, run, mode):
    assert run(_flags(digits, tmp_path, max_steps=2, eval_steps=2))[0] == 0
    code, err, _ = run(_flags(digits, tmp_path, max_steps=4, eval_steps=2, hidden2=9, mode=mode))
    assert (code, len(err)) == (1, 1), err
    assert f'{tmp_path}/model.ckpt-2 does not fit the model: hidden2/' in err[0] and 'is [32, 9] here, [32, 16] there' in err[0]


def test_invalid_tf_config_is_named(digits, tmp_path, run, monkeypatch):
    monkeypatch.setenv('TF_CONFIG', '{"cluster": ')
    code, err, _ = run(_flags(digits, tmp_path / 'out'))
    assert (code, len(err)) == (2, 1) and 'TF_CONFIG' in err[0] and 'JSON' in err[0]


@pytest.mark.slow
def test_memory_does_not_grow_over_cycles_of_training_and_evaluation(digits, tmp_path):
    """30 cycles after the first five, which fill caches: resident memory grows by less than 5 %."""
    script = """
import logging, os, sys
from trainer import evaluation, task
sizes = []
original = evaluation.Evaluator.evaluate
def evaluate(self, *arguments):
    metrics = original(self, *arguments)
    pages = int(open('/proc/self/statm').read().split()[1])
    sizes.append(pages * os.sysconf('SC_PAGE_SIZE') / 2**20)
    return metrics
evaluation.Evaluator.evaluate = evaluate
code = task.main(sys.argv[1:])
print(code, *[f'{size:.1f}' for size in sizes])
"""
    flags = _flags(digits, tmp_path / 'out', max_steps=700, eval_steps=20, export_best='false')
    child = subprocess.run([sys.executable, '-c', script, *flags], capture_output=True, text=True, cwd=REPOSITORY, timeout=400)
    code, *sizes = child.stdout.split()
    sizes = [float(size) for size in sizes]
    assert code == '0' and len(sizes) == 35, child.stderr[-2000:]
    assert sizes[-1] < 1.05 * sizes[4], sizes
