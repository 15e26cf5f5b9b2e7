"""One job file as the requests of the services, field by field; what is refused before anything is sent."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from trainer import jobs, submit, training_input
from trainer.errors import UsageError

DATA = ['--train_data_paths=gs://bucket-a/train', '--eval_data_paths=gs://bucket-a/eval']
PLACE = {
    'name': 'digits_1',
    'region': 'us-central1',
    'job_dir': 'gs://bucket-a/out',
    'package': 'gs://bucket-a/p/trainer.tar.gz',
}
PARAMS = [
    {'parameterName': 'hidden1', 'type': 'INTEGER', 'minValue': 40, 'maxValue': 400, 'scaleType': 'UNIT_LINEAR_SCALE'},
    {
        'parameterName': 'learning_rate',
        'type': 'DOUBLE',
        'minValue': 0.001,
        'maxValue': 0.5,
        'scaleType': 'UNIT_REVERSE_LOG_SCALE',
    },
    {'parameterName': 'batch_size', 'type': 'DISCRETE', 'discreteValues': [32, 100]},
    {'parameterName': 'optimizer', 'type': 'CATEGORICAL', 'categoricalValues': ['sgd', 'adam']},
]
TUNING = {'goal': 'MAXIMIZE', 'hyperparameterMetricTag': 'accuracy', 'maxTrials': 9, 'maxParallelTrials': 3, 'params': PARAMS}


@pytest.fixture
def load(tmp_path):
    def load(values, labels=None):
        document = {'trainingInput': {'args': DATA, **values}, **({'labels': labels} if labels else {})}
        (tmp_path / 'config.yaml').write_text(yaml.safe_dump(document))
        return training_input.load(str(tmp_path / 'config.yaml'))

    return load


def test_ai_platform_job(load):
    job = load({'scaleTier': 'BASIC', 'runtimeVersion': '2.11', 'pythonVersion': '3.7'}, {'team': 'a'})
    assert jobs.make_ai_platform_job(job, **PLACE) == {
        'jobId': 'digits_1',
        'labels': {'team': 'a'},
        'trainingInput': {
            'scaleTier': 'BASIC',
            'runtimeVersion': '2.11',
            'pythonVersion': '3.7',
            'enableWebAccess': False,
            'args': DATA,
            'region': 'us-central1',
            'jobDir': 'gs://bucket-a/out',
            'packageUris': ['gs://bucket-a/p/trainer.tar.gz'],
            'pythonModule': 'trainer.task',
        },
    }


def test_custom_job_of_a_cluster(load):
    job = load(
        {
            'scaleTier': 'CUSTOM',
            'masterType': 'n1-standard-8',
            'masterConfig': {
                'acceleratorConfig': {'type': 'NVIDIA_TESLA_V100', 'count': 2},
                'diskConfig': {'bootDiskType': 'pd-ssd', 'bootDiskSizeGb': 200},
            },
            'parameterServerType': 'n1-highmem-8',
            'parameterServerCount': 2,
            'scheduling': {'maxRunningTime': '3600s'},
            'serviceAccount': 'a@b.iam.gserviceaccount.com',
            'enableWebAccess': True,
            'encryptionConfig': {'kmsKeyName': 'projects/p/key'},
        },
        {'team': 'a'},
    )
    package = {'packageUris': ['gs://bucket-a/p/trainer.tar.gz'], 'pythonModule': 'trainer.task', 'args': DATA}
    image = 'europe-docker.pkg.dev/vertex-ai/training/tf-{}.2-15.py310:latest'
    assert jobs.make_custom_job(job, **{**PLACE, 'region': 'europe-west4'}) == {
        'displayName': 'digits_1',
        'labels': {'team': 'a'},
        'encryptionSpec': {'kmsKeyName': 'projects/p/key'},
        'jobSpec': {
            'workerPoolSpecs': [
                {
                    'machineSpec': {
                        'machineType': 'n1-standard-8',
                        'acceleratorType': 'NVIDIA_TESLA_V100',
                        'acceleratorCount': 2,
                    },
                    'replicaCount': '1',
                    'diskSpec': {'bootDiskType': 'pd-ssd', 'bootDiskSizeGb': 200},
                    'pythonPackageSpec': {'executorImageUri': image.format('gpu'), **package},
                },
                {},  # no workers: the place of the pool is its role
                {
                    'machineSpec': {'machineType': 'n1-highmem-8'},
                    'replicaCount': '2',
                    'pythonPackageSpec': {'executorImageUri': image.format('cpu'), **package},
                },
            ],
            'scheduling': {'timeout': '3600s'},
            'serviceAccount': 'a@b.iam.gserviceaccount.com',
            'enableWebAccess': True,
            'baseOutputDirectory': {'outputUriPrefix': 'gs://bucket-a/out'},
        },
    }


def test_scale_tier_as_machines(load):
    spec = jobs.make_custom_job(load({'scaleTier': 'STANDARD_1'}), **PLACE)['jobSpec']
    assert [(pool['machineSpec']['machineType'], pool['replicaCount']) for pool in spec['workerPoolSpecs']] == [
        ('n1-highcpu-8', '1'),
        ('n1-highcpu-8', '4'),
        ('n1-standard-4', '3'),
    ]


def test_image_of_ones_own(load):
    config = {'imageUri': 'gcr.io/p/i', 'containerCommand': ['run'], 'containerArgs': ['--', 'first']}
    job = load(
        {
            'scaleTier': 'CUSTOM',
            'masterType': 'n1-standard-4',
            'masterConfig': config,
            'workerType': 'n1-standard-4',
            'workerCount': 1,
        }
    )
    master, worker = jobs.make_custom_job(job, **{**PLACE, 'package': ''})['jobSpec']['workerPoolSpecs']
    assert master['containerSpec'] == {'imageUri': 'gcr.io/p/i', 'command': ['run'], 'args': ['--', 'first', *DATA]}
    assert worker['containerSpec'] == {'imageUri': 'gcr.io/p/i', 'args': DATA}
    assert 'pythonPackageSpec' not in master
    training = jobs.make_ai_platform_job(job, **{**PLACE, 'package': ''})['trainingInput']
    assert 'packageUris' not in training and 'pythonModule' not in training


def test_tuning_job(load):
    tuning = {**TUNING, 'maxFailedTrials': 2, 'enableTrialEarlyStopping': True, 'algorithm': 'RANDOM_SEARCH'}
    body = jobs.make_tuning_job(load({'hyperparameters': tuning}), **PLACE)
    assert body.pop('trialJobSpec')['baseOutputDirectory'] == {'outputUriPrefix': 'gs://bucket-a/out'}
    assert body == {
        'displayName': 'digits_1',
        'maxTrialCount': 9,
        'parallelTrialCount': 3,
        'maxFailedTrialCount': 2,
        'studySpec': {
            'metrics': [{'metricId': 'accuracy', 'goal': 'MAXIMIZE'}],
            'algorithm': 'RANDOM_SEARCH',
            'medianAutomatedStoppingSpec': {'useElapsedDuration': False},
            'parameters': [
                {
                    'parameterId': 'hidden1',
                    'scaleType': 'UNIT_LINEAR_SCALE',
                    'integerValueSpec': {'minValue': '40', 'maxValue': '400'},
                },
                {
                    'parameterId': 'learning_rate',
                    'scaleType': 'UNIT_REVERSE_LOG_SCALE',
                    'doubleValueSpec': {'minValue': 0.001, 'maxValue': 0.5},
                },
                {'parameterId': 'batch_size', 'discreteValueSpec': {'values': [32, 100]}},
                {'parameterId': 'optimizer', 'categoricalValueSpec': {'values': ['sgd', 'adam']}},
            ],
        },
    }


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'scheduling': {'priority': 3}}, 'trainingInput.scheduling.priority: Vertex AI has no priorities; leave it out'),
        (
            {'hyperparameters': {**TUNING, 'resumePreviousJobId': 'digits_0'}},
            'hyperparameters.resumePreviousJobId: Vertex AI cannot go on from another tuning job; leave it out',
        ),
    ],
)
def test_what_vertex_has_not_is_refused(load, values, message):
    job = load(values)
    make = jobs.make_tuning_job if job.hyperparameters else jobs.make_custom_job
    with pytest.raises(UsageError, match=message):
        make(job, **PLACE)


@pytest.fixture
def no_gcloud(monkeypatch):
    """Fails the test when anything is started: gcloud, or the build of the package."""

    def run(command, **settings):
        pytest.fail(f'started {command}')

    monkeypatch.setattr(subprocess, 'run', run)


FLAGS = ['--name=digits_1', '--staging_bucket=gs://bucket-a', '--job_dir=gs://bucket-a/out']


@pytest.mark.parametrize(
    ('flags', 'values', 'message'),
    [
        (FLAGS[1:], {}, '--name: missing; expected the name of the job, such as digits_1'),
        ([*FLAGS, '--name=1 2', '--service=ai_platform'], {}, '--name=1 2: expected at most 128 letters'),
        ([FLAGS[0], FLAGS[2]], {}, '--staging_bucket: expected a path that starts with gs://, got nothing'),
        (FLAGS[:2], {}, '--job_dir: missing'),
        ([*FLAGS, '--region=mars'], {}, '--region=mars: expected one such as us-central1'),
        ([*FLAGS, '--service=spark'], {}, "--service: invalid choice: 'spark'"),
        ([*FLAGS, '--dryrun'], {}, 'unknown flag --dryrun; did you mean --dry_run?'),
        ([*FLAGS, '--max_steps=5'], {}, '--max_steps is a flag of the trainer; they come after --'),
        ([*FLAGS, '--', *DATA, '--hiden1=5'], {}, 'the flags after --: unknown flag --hiden1; did you mean --hidden1?'),
        (FLAGS, {'scaleTeir': 'BASIC'}, 'trainingInput.scaleTeir: unknown key; did you mean scaleTier?'),
        (FLAGS, {'scaleTier': 'basic'}, 'scaleTier: expected one of BASIC'),
        (FLAGS, {'runtimeVersion': 2.11}, 'runtimeVersion: expected text'),
        (FLAGS, {'hyperparameters': {**TUNING, 'hyperparameterMetricTag': 'acuracy'}}, 'did you mean accuracy?'),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_sent(tmp_path, capsys, no_gcloud, flags, values, message):
    (tmp_path / 'config.yaml').write_text(yaml.safe_dump({'trainingInput': {'args': DATA, **values}}))
    assert submit.main([f'--config={tmp_path}/config.yaml', *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_dry_run_prints_the_request(tmp_path, capsys):
    (tmp_path / 'config.yaml').write_text(yaml.safe_dump({'trainingInput': {'args': DATA}}))
    assert submit.main([f'--config={tmp_path}/config.yaml', *FLAGS, '--dry-run']) == 0
    request = json.loads(capsys.readouterr().out)
    package = request['jobSpec']['workerPoolSpecs'][0]['pythonPackageSpec']
    (uri,) = package.pop('packageUris')
    assert uri.startswith('gs://bucket-a/packages/') and uri.endswith('/trainer-0.1.0.tar.gz')
    assert package['args'] == DATA
