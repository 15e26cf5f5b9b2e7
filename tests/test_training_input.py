from __future__ import annotations

import pathlib

import pytest

from tests.conftest import REPOSITORY
from trainer import training_input
from trainer.errors import UsageError
from trainer.machines import Machine

GOOD = """
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-8
  masterConfig: {acceleratorConfig: {type: NVIDIA_TESLA_T4, count: 2}}
  workerType: n1-standard-8
  workerCount: 3
  runtimeVersion: '2.11'
  pythonVersion: '3.7'
  region: us-central1
  jobDir: gs://bucket/run
  scheduling: {maxRunningTime: 7200s}
  args:
    - --train_data_paths=gs://bucket/train-*
    - --eval_data_paths=gs://bucket/eval-*
    - --batch-size=50
  hyperparameters:
    goal: MAXIMIZE
    hyperparameterMetricTag: accuracy
    params:
      - {parameterName: hidden1, type: INTEGER, minValue: 40, maxValue: 400}
labels: {team: red}
"""
KEY = 'trainingInput.'
TUNING = f'{KEY}hyperparameters.'


def write(folder: pathlib.Path, text: str) -> str:
    path = folder / 'job.yaml'
    path.write_text(text)
    return str(path)


def test_a_good_file_is_read(tmp_path: pathlib.Path) -> None:
    job = training_input.load(write(tmp_path, GOOD))
    assert (job.tier, job.labels, job.has_image) == ('CUSTOM', {'team': 'red'}, False)
    assert job.machine('master') == Machine('n1-standard-8', 'NVIDIA_TESLA_T4', 2)
    assert [job.count(role) for role in training_input.ROLES] == [1, 3, 0, 0]
    assert job.hyperparameters is not None
    assert job.hyperparameters.metric_tag == 'accuracy'


def test_flags_take_the_place_of_all_args(tmp_path: pathlib.Path) -> None:
    flags = ['--train_data_paths=gs://bucket/a', '--eval_data_paths=gs://bucket/b']
    assert training_input.load(write(tmp_path, GOOD), flags).args == flags
    path = str(tmp_path / 'job.yaml')
    with pytest.raises(UsageError) as error:
        training_input.load(path, ['--max_steps=10'])
    expected = '--train_data_paths is needed by --mode=train_and_eval: give files, globs or folders'
    assert str(error.value) == f'the flags after --: {expected}'


@pytest.mark.parametrize('name', ['config.yaml', 'hptuning.yaml'])
def test_the_files_of_the_repository_need_but_a_bucket(name: str, tmp_path: pathlib.Path) -> None:
    path = str(REPOSITORY / name)
    with pytest.raises(UsageError) as error:
        training_input.load(path)
    assert str(error.value) == (
        f'{path}: {KEY}args: --train_data_paths: BUCKET is no name of a bucket in gs://BUCKET/mnist/train-*: '
        'put the name of your bucket in its place'
    )
    training_input.load(write(tmp_path, (REPOSITORY / name).read_text().replace('gs://BUCKET', 'gs://bucket')))


BROKEN = [
    ('trainingInput:\n', 'trainingInputs:\n', 'trainingInputs: unknown key; did you mean trainingInput?'),
    ('labels:', 'region: us-east1\nlabels:', 'region: unknown key; it belongs under trainingInput'),
    ('scaleTier: CUSTOM', 'scaleTyer: CUSTOM', f'{KEY}scaleTyer: unknown key; did you mean scaleTier?'),
    ('scaleTier: CUSTOM', 'scaleTier: STANDARD',
     f"{KEY}scaleTier: expected one of BASIC, STANDARD_1, PREMIUM_1, BASIC_GPU, BASIC_TPU, CUSTOM, it is 'STANDARD'; "
     'did you mean STANDARD_1?'),
    ('scaleTier: CUSTOM', 'scaleTier: BASIC',
     f'{KEY}masterType: scaleTier BASIC has machines of its own; leave it out, or set CUSTOM'),
    ('  masterType: n1-standard-8\n', '',
     f'{KEY}masterType: missing, and scaleTier CUSTOM needs it; add one such as n1-standard-8'),
    ('masterType: n1-standard-8', 'masterType: n1-standart-8',
     f'{KEY}masterType: unknown machine type n1-standart-8; did you mean n1-standard-8?'),
    (', count: 2', '', f'{KEY}masterConfig.acceleratorConfig.count: missing'),
    ('type: NVIDIA_TESLA_T4, count: 2}}', 'typ: x}}',
     f'{KEY}masterConfig.acceleratorConfig.typ: unknown key; did you mean type?'),
    ('  workerCount: 3\n', '', f'{KEY}workerType: workerCount is missing or 0; set it, or leave out workerType'),
    ('  workerType: n1-standard-8\n', '', f'{KEY}workerType: missing, and workerCount is 3; add one such as n1-standard-8'),
    ('workerType: n1-standard-8', 'workerType: complex_model_m',
     f"{KEY}workerType: complex_model_m beside masterType n1-standard-8; expected all of them to be AI Platform's own names, "
     'or none'),
    ('workerCount: 3', 'workerCount: three', f"{KEY}workerCount: expected a whole number from 0, it is 'three'"),
    ("'2.11'", '2.11', f'{KEY}runtimeVersion: expected text, it is the number 2.11; put it in quotes'),
    ("'3.7'", '3.7', f'{KEY}pythonVersion: expected text, it is the number 3.7; put it in quotes'),
    ("'2.11'", 'latest', f"{KEY}runtimeVersion: expected a version such as '2.11', it is 'latest'"),
    ('{acceleratorConfig', '{imageUri: gcr.io/p/i, acceleratorConfig',
     f'{KEY}runtimeVersion: an image has its own; leave out this, or masterConfig.imageUri'),
    ('7200s', '7200', f'{KEY}scheduling.maxRunningTime: expected seconds such as 3600s, it is the number 7200; write 7200s'),
    ('gs://bucket/run', '/tmp/run', f'{KEY}jobDir: expected a path that starts with gs://, got /tmp/run'),
    ('--batch-size=50', '--batch_sise=50', f'{KEY}args: unknown flag --batch_sise; did you mean --batch_size?'),
    ('--batch-size=50', '--batch_size=0', f'{KEY}args: --batch_size=0: expected at least 1'),
    ('--batch-size=50', '--batch_size: 50', f'{KEY}args[2]: expected text, it is keys and values '
     "{'--batch_size': 50}; write --batch_size=50"),
    ('--batch-size=50', '50', f'{KEY}args[2]: expected text, it is the number 50; put it in quotes'),
    ('--batch-size=50', '--output-path=gs://bucket/o', f'{KEY}args: leave out --output_path; the results go to jobDir'),
    ('--batch-size=50', '--model=mine:model_fn',
     f'{KEY}args: --model=mine:model_fn: not in the package that is sent; name one that has it in packageUris, or an image in '
     'masterConfig.imageUri'),
    ('gs://bucket/train-*', 'data/train-*',
     f'{KEY}args: --train_data_paths: expected a path that starts with gs://, got data/train-*'),
    ('Tag: accuracy', 'Tag: accurracy',
     f'{TUNING}hyperparameterMetricTag: expected a metric of --model=mlp: accuracy, average_loss, loss, got accurracy; '
     'did you mean accuracy?'),
    ('--batch-size=50', '--model=dcgan',
     f'{TUNING}hyperparameterMetricTag: expected a metric of --model=dcgan: average_loss, discriminator_loss, '
     'frechet_distance, generator_loss, loss, got accuracy'),
    ('--batch-size=50', '--mode=train',
     f'{TUNING}hyperparameterMetricTag: with --mode=train no trial reports accuracy; expected --mode=train_and_eval'),
    ('--batch-size=50', '--model=mpl', f'{KEY}args: --model=mpl: unknown model; did you mean mlp?'),
    ('--batch-size=50', '--dataset=cifar',
     f'{KEY}args: --dataset=cifar: unknown dataset; expected one of mnist, autompg, images, csv, or package.module:NAME of '
     'your own'),
    ('--batch-size=50', '--metric_tag=loss',
     f'{TUNING}hyperparameterMetricTag: accuracy, and args have --metric_tag=loss; leave the flag out'),
    ('parameterName: hidden1', 'parameterName: hiden1',
     f'{TUNING}params[0].parameterName: unknown flag --hiden1; did you mean --hidden1?'),
    ('type: INTEGER, ', 'type: DOUBLE, ',
     f"{TUNING}params[0].parameterName: --hidden1: expected a whole number, got '40.0'"),
    ('minValue: 40', 'minValue: 0', f'{TUNING}params[0].parameterName: --hidden1=0: expected at least 1'),
    ('--batch-size=50', '--hidden1=50',
     f'{TUNING}params[0].parameterName: hidden1 is tuned, and args set --hidden1 too; leave it out of one of them'),
    ('goal: MAXIMIZE', 'goal: MAX', f"{TUNING}goal: expected one of MAXIMIZE, MINIMIZE, it is 'MAX'"),
    ('team: red', 'team: Red', "labels.team: expected at most 63 of a-z, 0-9, _ and -, got 'Red'"),
]  # fmt: skip


@pytest.mark.parametrize(('old', 'new', 'message'), BROKEN, ids=[str(index) for index in range(len(BROKEN))])
def test_a_broken_file_gets_one_clear_line(old: str, new: str, message: str, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, GOOD.replace(old, new, 1))
    assert old in GOOD
    with pytest.raises(UsageError) as error:
        training_input.load(path)
    assert str(error.value) == f'{path}: {message}'


def test_names_and_metrics_are_those_of_models_and_datasets() -> None:
    import tensorflow as tf

    from trainer import datasets, models
    from trainer.models import classifier, dcgan

    assert (training_input.METRICS.keys(), training_input.DATASETS) == (models.MODELS.keys(), datasets.NAMES)
    with tf.Graph().as_default():
        ones, rows = tf.ones([4]), tf.ones([4, 2])
        of_classifiers = classifier._metric_fn(tf.zeros([4], tf.int64), rows, ones, ones)
        of_gans = dcgan._metric_fn(ones, ones, rows, rows, ones)
    for name, metrics in training_input.METRICS.items():
        assert tuple(sorted([*(of_gans if name == 'dcgan' else of_classifiers), 'loss'])) == metrics


def test_a_program_in_an_image_may_read_anything(tmp_path: pathlib.Path) -> None:
    text = GOOD.replace('{acceleratorConfig', '{imageUri: gcr.io/p/i, acceleratorConfig').replace(
        'gs://bucket/train-*', '/data/t'
    )
    text = text.replace("  runtimeVersion: '2.11'\n  pythonVersion: '3.7'\n", '')
    job = training_input.load(write(tmp_path, text))
    assert job.has_image
    assert job.config('worker') == {'imageUri': 'gcr.io/p/i'}
