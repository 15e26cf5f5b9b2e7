"""One job file as the request of each service: AI Platform's training job, Vertex AI's custom and tuning jobs. Pure Python.

Requests are those of the REST APIs, as dictionaries:
  AI Platform: https://cloud.google.com/ai-platform/training/docs/reference/rest/v1/projects.jobs
  custom job: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.customJobs
  tuning job: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.hyperparameterTuningJobs
What Vertex AI does otherwise: no scale tiers and no legacy machine types (`machines.py`); results go to a base folder that
reaches the program as AIP_* variables, not as `--job-dir`; images in place of runtime versions.
"""

from __future__ import annotations

from typing import Any

from trainer import hptuning, machines
from trainer.errors import UsageError
from trainer.hptuning import HyperparameterSpec, Parameter
from trainer.machines import Machine
from trainer.training_input import EVALUATOR, MASTER, MODULE, PARAMETER_SERVER, ROLES, WORKER, TrainingInput

# The newest that have an Estimator: https://cloud.google.com/vertex-ai/docs/training/pre-built-containers
_IMAGE = '{place}-docker.pkg.dev/vertex-ai/training/tf-{kind}.2-15.py310:latest'
_PLACES = {'europe': 'europe', 'asia': 'asia'}
_NO_COUNTERPART = {
    'hyperparameters.resumePreviousJobId': 'Vertex AI cannot go on from another tuning job',
    'scheduling.priority': 'Vertex AI has no priorities',
}


def make_ai_platform_job(job: TrainingInput, *, name: str, region: str, job_dir: str, package: str) -> dict[str, Any]:
    """The body of projects.jobs.create.

    Args:
        job: the checked job file.
        name: of the job.
        region: such as 'us-central1'.
        job_dir: gs:// folder for the results; '' leaves what the file says.
        package: gs:// path of the sdist; '' where the job runs an image.
    """
    values = {'enableWebAccess': False, **job.values, 'region': region, 'args': list(job.args)}  # gcloud sends it always
    for role in ROLES:  # 64-bit numbers are text in JSON
        if f'{role}Count' in values:
            values[f'{role}Count'] = str(values[f'{role}Count'])
        config = values.get(f'{role}Config', {})
        if 'acceleratorConfig' in config:
            accelerator = config['acceleratorConfig']
            values[f'{role}Config'] = {**config, 'acceleratorConfig': {**accelerator, 'count': str(accelerator['count'])}}
    if package:
        values['packageUris'] = [*job.values.get('packageUris', ()), package]
        values['pythonModule'] = MODULE
    if job_dir:
        values['jobDir'] = job_dir
    body: dict[str, Any] = {'jobId': name, 'trainingInput': values}
    return {**body, 'labels': dict(job.labels)} if job.labels else body


def make_custom_job(job: TrainingInput, *, name: str, region: str, job_dir: str, package: str) -> dict[str, Any]:
    """The body of customJobs.create; arguments as of `make_ai_platform_job`.

    Raises:
        UsageError: the file asks for what Vertex AI does not have.
    """
    return {'displayName': name, 'jobSpec': _make_job_spec(job, region, job_dir, package), **_extras(job)}


def make_tuning_job(job: TrainingInput, *, name: str, region: str, job_dir: str, package: str) -> dict[str, Any]:
    """The body of hyperparameterTuningJobs.create; arguments as of `make_ai_platform_job`.

    Raises:
        UsageError: the file tunes nothing, or asks for what Vertex AI does not have.
    """
    spec = job.hyperparameters
    if spec is None:
        raise UsageError(f'{job.path}: expected trainingInput.hyperparameters, what to tune; there is none')
    body: dict[str, Any] = {
        'displayName': name,
        'studySpec': _make_study_spec(spec),
        'maxTrialCount': spec.max_trials,
        'parallelTrialCount': spec.max_parallel_trials,
        'trialJobSpec': _make_job_spec(job, region, job_dir, package),
    }
    if spec.max_failed_trials:
        body['maxFailedTrialCount'] = spec.max_failed_trials
    return {**body, **_extras(job)}


def _extras(job: TrainingInput) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if job.labels:
        extras['labels'] = dict(job.labels)
    if 'encryptionConfig' in job.values:
        extras['encryptionSpec'] = dict(job.values['encryptionConfig'])
    return extras


def _make_job_spec(job: TrainingInput, region: str, job_dir: str, package: str) -> dict[str, Any]:
    for key, why in _NO_COUNTERPART.items():
        outer, inner = key.split('.')
        if job.values.get(outer, {}).get(inner):
            raise UsageError(f'{job.where(key)}: {why}; leave it out')
    spec: dict[str, Any] = {'workerPoolSpecs': _make_pools(job, region, package)}
    scheduling = job.values.get('scheduling', {})
    if scheduling:
        spec['scheduling'] = {
            theirs: scheduling[ours]
            for ours, theirs in (('maxRunningTime', 'timeout'), ('maxWaitTime', 'maxWaitDuration'), ('strategy', 'strategy'))
            if ours in scheduling
        }
    for key in ('serviceAccount', 'network', 'enableWebAccess'):
        if key in job.values:
            spec[key] = job.values[key]
    folder = job_dir or job.values.get('jobDir', '')
    if folder:
        spec['baseOutputDirectory'] = {'outputUriPrefix': folder}
    return spec


def _make_pools(job: TrainingInput, region: str, package: str) -> list[dict[str, Any]]:
    """Pool 0 has the chief, 1 the workers, 2 the parameter servers, 3 the evaluator; one that is empty keeps its place."""
    tier = machines.TIERS.get(job.tier)
    if tier:
        replicas = {
            MASTER: (tier.master, 1),
            WORKER: (tier.worker, tier.workers),
            PARAMETER_SERVER: (tier.parameter_server, tier.parameter_servers),
            EVALUATOR: (Machine(''), 0),
        }
    else:
        replicas = {role: (job.machine(role), job.count(role)) for role in ROLES}
    pools = [
        _make_pool(job, role, machines.to_compute_engine(machine), count, region, package) if count else {}
        for role, (machine, count) in replicas.items()
    ]
    while not pools[-1]:
        pools.pop()
    return pools


def _make_pool(job: TrainingInput, role: str, machine: Machine, count: int, region: str, package: str) -> dict[str, Any]:
    config = job.config(role)
    machine_spec: dict[str, Any] = {'machineType': machine.type}
    if machine.accelerators:
        machine_spec.update(acceleratorType=machine.accelerator, acceleratorCount=machine.accelerators)
    pool: dict[str, Any] = {'machineSpec': machine_spec, 'replicaCount': str(count)}
    if 'diskConfig' in config:
        pool['diskSpec'] = dict(config['diskConfig'])
    if config.get('imageUri'):
        container: dict[str, Any] = {'imageUri': config['imageUri']}
        if 'containerCommand' in config:
            container['command'] = list(config['containerCommand'])
        container['args'] = [*config.get('containerArgs', ()), *job.args]
        return {**pool, 'containerSpec': container}
    image = _IMAGE.format(place=_PLACES.get(region.split('-')[0], 'us'), kind='gpu' if machine.accelerators else 'cpu')
    return {
        **pool,
        'pythonPackageSpec': {
            'executorImageUri': image,
            'packageUris': [*job.values.get('packageUris', ()), package],
            'pythonModule': MODULE,
            'args': list(job.args),
        },
    }


def _make_study_spec(spec: HyperparameterSpec) -> dict[str, Any]:
    study: dict[str, Any] = {
        'metrics': [{'metricId': spec.metric_tag, 'goal': spec.goal}],
        'parameters': [_make_parameter(param) for param in spec.params],
    }
    if spec.algorithm != hptuning.BAYESIAN:
        study['algorithm'] = spec.algorithm
    if spec.early_stopping:
        study['medianAutomatedStoppingSpec'] = {'useElapsedDuration': False}
    return study


def _make_parameter(param: Parameter) -> dict[str, Any]:
    parameter: dict[str, Any] = {'parameterId': param.name}
    if param.type == hptuning.CATEGORICAL:
        return {**parameter, 'categoricalValueSpec': {'values': list(param.values)}}
    if param.scale != hptuning.NONE:
        parameter['scaleType'] = param.scale
    if param.type == hptuning.DISCRETE:
        return {**parameter, 'discreteValueSpec': {'values': list(param.values)}}
    low, high = param.values
    if param.type == hptuning.INTEGER:  # 64-bit numbers are text in JSON
        return {**parameter, 'integerValueSpec': {'minValue': str(low), 'maxValue': str(high)}}
    return {**parameter, 'doubleValueSpec': {'minValue': low, 'maxValue': high}}
