from __future__ import annotations

import os

import pytest

from tests import pictures, shards
from tests.integration.test_run import _flags
from trainer import input_speed


@pytest.fixture
def digits(tmp_path):
    folder = tmp_path / 'digits'
    folder.mkdir()
    for name, path in zip(('train-0', 'eval-0'), shards.write_digits(folder, [300, 40])):
        os.rename(path, folder / name)
    return folder


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(input_speed, 'MEASURE_SECS', 0.1)


def make_report(**changes):
    stages = {'read': (1e-6, 2e-6), 'parse': (0.0, 1e-6), 'decode': (500e-6, 900e-6)}
    values = {
        'pipeline': 'records', 'alone': input_speed.Speed(1000, 2.0, 4.0), 'stages': stages, 'load_secs': 0.5,
        'step_secs': 0.010, 'bare_step_secs': 0.008,
    }  # fmt: skip
    return input_speed.Report(**{**values, **changes})


def test_report_names_the_slowest_stage_and_the_share_of_waiting():
    assert make_report().describe() == [
        "input alone    500 examples/s, 250 per CPU-second (pipeline 'records'; first batch after 0.5 s)",
        '  read                         1.00 us an example,       2.00 us of CPU',
        '  parse                        0.00 us an example,       1.00 us of CPU',
        '  decode                     500.00 us an example,     900.00 us of CPU  <- slowest',
        'training step  10.000 ms with this input, 8.000 ms with a batch that is there: 20% of the step is waiting for input',
    ]
    assert make_report(bare_step_secs=0.011).waiting == 0


@pytest.mark.parametrize(
    ('flags', 'pipeline', 'stages'),
    [
        ({'cache': 'off'}, 'blocks', ['read', 'parse', 'shuffle']),
        ({'cache': 'memory'}, 'memory', ['gather']),
    ],
)
def test_a_run_is_measured_as_its_flags_say_and_writes_nothing(digits, tmp_path, capsys, flags, pipeline, stages):
    argv = [*map(str, _flags(digits, tmp_path / 'out', **flags)), '--measure']
    assert input_speed.main(argv, {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f'(pipeline {pipeline!r}; ' in lines[0]
    assert [line.split(' us ')[0].split()[0] for line in lines[1:-1]] == stages
    assert lines[-1].startswith('training step ') and lines[-1].endswith('% of the step is waiting for input')
    assert not (tmp_path / 'out').exists()


def test_pictures_have_a_stage_for_decoding(tmp_path, capsys):
    files = pictures.write_records(tmp_path / 'pictures', 'train', [(24, 32)] * 12)
    argv = [
        '--mode=train', '--dataset=images', '--image_size=16', '--batch_size=4', '--cache=off',
        f'--train_data_paths={files[0]}', f'--output_path={tmp_path}/out', '--model=tests.test_input_speed:mean_model_fn',
        '--measure',
    ]  # fmt: skip
    assert input_speed.main(argv, {}) == 0
    assert '  decode ' in capsys.readouterr().out


def mean_model_fn(features, labels, mode, params):
    import tensorflow as tf

    from trainer import compat

    weight = tf.compat.v1.get_variable('weight', [], tf.float32)
    loss = tf.reduce_mean(tf.square(weight - tf.reduce_mean(tf.cast(features['image'], tf.float32))))
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
    return compat.estimator.tpu.TPUEstimatorSpec(mode=mode, loss=loss, train_op=train_op)


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ([], 'give --measure and the flags of a run'),
        (['--measure', '--batch_sise=3'], 'did you mean --batch_size'),
        (['--measure', '--mode=train', '--output_path=x', '--train_data_paths=/nowhere/*'], '/nowhere'),
    ],
)
def test_wrong_flags_are_one_line(argv, message, capsys):
    assert input_speed.main(argv, {}) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.startswith('trainer.inputs: ') and error.count('\n') == 1
