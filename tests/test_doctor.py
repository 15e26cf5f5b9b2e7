"""The doctor finds planted faults, each by its own line, and nothing on a good set-up."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests import shards
from tests.integration.test_run import _example, _flags
from trainer import doctor, records, task


@pytest.fixture
def digits(tmp_path):
    folder = tmp_path / 'digits'
    folder.mkdir()
    for name, path in zip(('train-0', 'eval-0'), shards.write_digits(folder, [300, 40])):
        os.rename(path, folder / name)
    return folder


@pytest.fixture
def examine(capsys):
    def run(flags, environ=None):
        capsys.readouterr()
        code = doctor.main([str(flag) for flag in flags], environ or {})
        lines = capsys.readouterr().out.splitlines()
        return code, [line for line in lines if line.startswith('WRONG')], lines

    return run


def test_good_set_up_has_no_problem_and_nothing_is_left_in_the_output(digits, tmp_path, examine):
    code, wrong, lines = examine(_flags(digits, tmp_path / 'out'))
    assert (code, wrong) == (0, [])
    assert lines[-1] == '0 problems: a run would start'
    marks = {line[6:22].strip(): line[:6].strip() for line in lines[:-2]}
    assert marks == dict.fromkeys(doctor.CHECKS, 'ok')
    report = '\n'.join(lines)
    assert 'mlp: 25,818 weights in 6 variables' in report  # 784 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10
    assert 'image uint8[batch, 784], key string[batch] -> ' in report
    assert 'probabilities float32[batch, 10]' in report
    assert list((tmp_path / 'out').iterdir()) == []


def test_good_checkpoint_is_no_problem(digits, tmp_path, examine):
    flags = _flags(digits, tmp_path / 'out', max_steps=2, eval_steps=2)
    assert task.main(flags) == 0
    code, wrong, lines = examine(flags)
    assert (code, wrong) == (0, [])
    assert any('model.ckpt-2 fits the model' in line for line in lines)


def _plant_unknown_flag(digits, tmp_path):
    return [*_flags(digits, tmp_path / 'out'), '--hiden1=3'], {}, 'flags', 'did you mean --hidden1'


def _plant_bad_tf_config(digits, tmp_path):
    return _flags(digits, tmp_path / 'out'), {'TF_CONFIG': '{"task": '}, 'cluster', 'TF_CONFIG'


def _plant_unwritable_output(digits, tmp_path):
    (tmp_path / 'file').write_text('')
    return _flags(digits, tmp_path / 'file' / 'out'), {}, 'output', '--output_path: the results cannot be written'


def _plant_no_output(digits, tmp_path):
    return _flags(digits, None), {}, 'output', 'give --output_path=FOLDER'


def _plant_full_disk(digits, tmp_path):
    return _flags(digits, tmp_path / 'out'), {'free': '5'}, 'output', '5 MB free; a run needs 200 MB'


def _plant_wrong_clock(digits, tmp_path):
    (tmp_path / 'out').mkdir()
    path = tmp_path / 'out' / 'model.ckpt-3.index'
    path.write_text('')
    os.utime(path, (time.time() + 7200, time.time() + 7200))
    return _flags(digits, tmp_path / 'out'), {}, 'clock', 's in the future'


def _plant_unknown_dataset(digits, tmp_path):
    return _flags(digits, tmp_path / 'out', dataset='nosuch'), {}, 'dataset', 'expected one of mnist, autompg'


def _plant_missing_feature(digits, tmp_path):
    records.write_file(str(digits / 'train-0'), [_example(label=1)] * 200)
    return _flags(digits, tmp_path / 'out'), {}, 'training data', "record 0 (byte 0): feature 'image' is missing"


def _plant_empty_glob(digits, tmp_path):
    return _flags(digits, tmp_path / 'out', eval_data_paths=f'{digits}/test-*'), {}, 'evaluation data', 'no file matches'


def _plant_unknown_model(digits, tmp_path):
    return _flags(digits, tmp_path / 'out', model='nosuch'), {}, 'model', '--model=nosuch: expected one of'


def _plant_model_that_raises(digits, tmp_path):
    return _flags(digits, tmp_path / 'out', model='tests.test_doctor:broken_model_fn'), {}, 'model', "KeyError: 'depth'"


def _plant_other_checkpoint(digits, tmp_path):
    assert task.main(_flags(digits, tmp_path / 'out', max_steps=2, eval_steps=2)) == 0
    flags = _flags(digits, tmp_path / 'out', hidden1=64)
    return flags, {}, 'checkpoint', 'hidden1/weights is [784, 64] here, [784, 32] there'


def _plant_two_tags(digits, tmp_path):
    environ = {'CLOUD_ML_HP_METRIC_TAG': 'accuracy', 'CLOUD_ML_HP_METRIC_FILE': str(tmp_path / 'hp' / 'metrics')}
    flags = _flags(digits, tmp_path / 'out', metric_tag='loss')
    return flags, environ, 'metric', '--metric_tag=loss: the tuning job optimizes accuracy'


def broken_model_fn(features, labels, mode, params):
    return params['depth']


@pytest.mark.parametrize('plant', [value for name, value in list(globals().items()) if name.startswith('_plant_')])
def test_planted_fault_is_found(digits, tmp_path, examine, monkeypatch, plant):
    flags, environ, check, message = plant(digits, tmp_path)
    if 'free' in environ:
        usage = type(doctor.shutil.disk_usage(tmp_path))(10**9, 10**9, int(environ['free']) * 2**20)
        monkeypatch.setattr(doctor.shutil, 'disk_usage', lambda path: usage)
    code, wrong, lines = examine(flags, environ)
    assert code == 1
    assert wrong, lines
    assert wrong[0][6:22].strip() == check and message in wrong[0], wrong
    assert lines[-1].endswith('a run would not start')


def test_versions_that_do_not_go_together_are_found(digits, tmp_path, examine, monkeypatch):
    from trainer import compat
    from trainer.errors import UsageError

    class _Missing:
        @property
        def Estimator(self):
            raise UsageError('TensorFlow 2.30 is not supported; use TensorFlow 2.15')

    monkeypatch.setattr(compat, 'estimator', _Missing())
    code, wrong, _ = examine(_flags(digits, tmp_path / 'out'))
    assert code == 1 and 'TensorFlow 2.30 is not supported' in wrong[0]


def test_driver_without_a_gpu_in_tensorflow_is_found(digits, tmp_path, examine, monkeypatch):
    monkeypatch.setattr(doctor, 'NVIDIA_DRIVER', str(digits))
    code, wrong, _ = examine(_flags(digits, tmp_path / 'out'))
    assert code == 1 and 'TensorFlow sees no GPU' in wrong[0]
    assert examine(_flags(digits, tmp_path / 'out'), {'CUDA_VISIBLE_DEVICES': ''})[0] == 0


def test_report_of_a_tuning_trial(digits, tmp_path, examine):
    environ = {'TF_CONFIG': json.dumps({'task': {'type': 'chief', 'index': '0', 'trial': '4'}})}
    code, _, lines = examine(_flags(digits, tmp_path / 'out'), environ)
    assert code == 0
    assert any('chief/0 of 1 that train, trial 4' in line for line in lines)
    assert any(f'{tmp_path}/out/4 can be written' in line for line in lines)
