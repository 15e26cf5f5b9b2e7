"""The job files, `config.yaml` and `hptuning.yaml`, checked before anything is sent; gcloud and the services say little, late.

A job file holds a `trainingInput`, as AI Platform's API defines it, and `labels` if there are any
(https://cloud.google.com/ai-platform/training/docs/reference/rest/v1/projects.jobs#TrainingInput).
Checked are: keys and the types of their values; tiers, machine types and accelerators; `args` as the trainer reads them; what a
tuning job tunes and optimizes. Every error is a `UsageError` of one line with file and key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from trainer import data_files, flags, hptuning, machines, schema, storage
from trainer.config import Config
from trainer.errors import UsageError, did_you_mean
from trainer.hptuning import HyperparameterSpec
from trainer.machines import Machine

MODULE = 'trainer.task'
# What TensorFlow would have to be imported for; a test compares with the modules that have it.
DATASETS = ('mnist', 'autompg', 'images', 'csv')
_CLASSIFIER = ('accuracy', 'average_loss', 'loss')
METRICS = {
    **dict.fromkeys(('mlp', 'convnet', 'resnet50', 'linear', 'dnn', 'wide_deep'), _CLASSIFIER),
    'dcgan': ('average_loss', 'discriminator_loss', 'frechet_distance', 'generator_loss', 'loss'),
}
MASTER, WORKER, PARAMETER_SERVER, EVALUATOR = 'master', 'worker', 'parameterServer', 'evaluator'
ROLES = (MASTER, WORKER, PARAMETER_SERVER, EVALUATOR)

_REPLICA_CONFIG = {
    'acceleratorConfig': {'count': schema.COUNT, 'type': machines.ACCELERATORS},
    'imageUri': schema.TEXT,
    'tpuTfVersion': schema.TEXT,
    'containerCommand': [schema.TEXT],
    'containerArgs': [schema.TEXT],
    'diskConfig': {'bootDiskType': ('pd-ssd', 'pd-standard'), 'bootDiskSizeGb': schema.COUNT},
}
_SCHEMA = {
    'trainingInput': {
        'scaleTier': machines.SCALE_TIERS,
        **{f'{role}Type': schema.TEXT for role in ROLES},
        **{f'{role}Config': _REPLICA_CONFIG for role in ROLES},
        **{f'{role}Count': schema.COUNT for role in ROLES if role != MASTER},
        'packageUris': [schema.TEXT],
        'pythonModule': schema.TEXT,
        'args': [schema.TEXT],
        'hyperparameters': hptuning.SCHEMA,
        'region': schema.TEXT,
        'jobDir': schema.TEXT,
        'runtimeVersion': schema.TEXT,
        'pythonVersion': schema.TEXT,
        'encryptionConfig': {'kmsKeyName': schema.TEXT},
        'scheduling': {
            'maxRunningTime': schema.DURATION,
            'maxWaitTime': schema.DURATION,
            'priority': schema.COUNT,
            'strategy': ('ON_DEMAND', 'LOW_COST'),
        },
        'network': schema.TEXT,
        'serviceAccount': schema.TEXT,
        'useChiefInTfConfig': schema.FLAG,
        'enableWebAccess': schema.FLAG,
    },
    'labels': schema.OBJECT,
}
_VERSION = re.compile(r'\d+\.\d+')
_LABEL_KEY, _LABEL_VALUE = re.compile(r'[a-z][a-z0-9_-]{0,62}'), re.compile(r'[a-z0-9_-]{0,63}')
# https://cloud.google.com/storage/docs/buckets#naming
_GS_PATH = re.compile(r'gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?')


@dataclasses.dataclass(frozen=True)
class TrainingInput:
    """A checked job file."""

    path: str
    """Of the file, for messages."""
    values: Mapping[str, Any]
    """The `trainingInput`, with `args` as they will be."""
    labels: Mapping[str, str]
    hyperparameters: Optional[HyperparameterSpec]
    """What to tune, None when this is no tuning job."""
    args_place: str
    """Where the args are from, for messages."""
    is_local: bool = False
    """Whether it runs on this machine: with local paths, and with models and datasets of whatever can be imported."""

    @property
    def args(self) -> Sequence[str]:
        """Flags of the trainer."""
        return self.values.get('args', ())

    @property
    def tier(self) -> str:
        """The scale tier; a job without one has BASIC."""
        return self.values.get('scaleTier', 'BASIC')

    def where(self, key: str) -> str:
        """The file and a key of the trainingInput, for messages."""
        return f'{self.path}: trainingInput.{key}'

    def config(self, role: str) -> Mapping[str, Any]:
        """The `*Config` of a role; one that names no image has that of the master."""
        image = {key: value for key, value in self.values.get('masterConfig', {}).items() if key == 'imageUri'}
        return {**image, **self.values.get(f'{role}Config', {})}

    @property
    def has_image(self) -> bool:
        """Whether the job runs a container image of its own in place of the package."""
        return 'imageUri' in self.config(MASTER)

    def machine(self, role: str) -> Machine:
        """The machine of a role of a CUSTOM job, as the file has it; a type of '' when it has none."""
        accelerator = self.values.get(f'{role}Config', {}).get('acceleratorConfig', {})
        return Machine(self.values.get(f'{role}Type', ''), accelerator.get('type', ''), accelerator.get('count', 0))

    def count(self, role: str) -> int:
        """How many replicas of a role a CUSTOM job has."""
        return 1 if role == MASTER else self.values.get(f'{role}Count', 0)


def load(path: str, args: Sequence[str] = (), *, is_local: bool = False) -> TrainingInput:
    """The job file, checked.

    Args:
        path: of the YAML file.
        args: flags of the trainer that take the place of the file's `args`, of all of them, as in gcloud; none leaves those.
        is_local: the job runs on this machine.

    Raises:
        UsageError: something in the file is wrong; one line with file and key, what was expected, what it is.
        DataError: the file cannot be read.
    """
    document = schema.read_yaml(path)
    schema.check(document, _SCHEMA, path)
    if 'trainingInput' not in document:
        raise UsageError(f'{path}: expected a trainingInput at the top, it has {", ".join(map(str, document)) or "nothing"}')
    values = dict(document['trainingInput'])
    if args:
        values['args'] = list(args)
    tuning = hptuning.parse(values['hyperparameters'], path) if 'hyperparameters' in values else None
    place = 'the flags after --' if args else f'{path}: trainingInput.args'
    training_input = TrainingInput(path, values, document.get('labels', {}), tuning, place, is_local)
    _check_labels(training_input)
    _check_software(training_input)
    _check_machines(training_input)
    _check_args(training_input)
    if tuning:
        _check_tuning(training_input, tuning)
    return training_input


def _check_labels(job: TrainingInput) -> None:
    for key, value in job.labels.items():
        schema.check(value, schema.TEXT, job.path, f'labels.{key}')
        for text, pattern in ((str(key), _LABEL_KEY), (value, _LABEL_VALUE)):
            if not pattern.fullmatch(text):
                raise UsageError(f'{job.path}: labels.{key}: expected at most 63 of a-z, 0-9, _ and -, got {text!r}')


def _check_software(job: TrainingInput) -> None:
    for key in ('runtimeVersion', 'pythonVersion'):
        version = job.values.get(key, '0.0')
        if not _VERSION.fullmatch(version):
            raise UsageError(f"{job.where(key)}: expected a version such as '2.11', {schema.describe(version)}")
        if job.has_image and key in job.values:
            raise UsageError(f'{job.where(key)}: an image has its own; leave out this, or masterConfig.imageUri')
    for role in ROLES:
        config = job.values.get(f'{role}Config', {})
        for key in ('containerCommand', 'containerArgs'):
            if key in config and not job.config(role).get('imageUri'):
                raise UsageError(f'{job.where(f"{role}Config.{key}")}: needs an imageUri beside it')
        if 'imageUri' in config and not job.has_image:
            raise UsageError(
                f'{job.where(f"{role}Config.imageUri")}: needs masterConfig.imageUri: all replicas run images, or none'
            )
    if job.values.get('pythonModule', MODULE) != MODULE:
        raise UsageError(f'{job.where("pythonModule")}: expected {MODULE}, whose flags the args are, or nothing')
    for uri in job.values.get('packageUris', ()):
        check_gs_path(uri, job.where('packageUris'))
    if 'jobDir' in job.values:
        check_gs_path(job.values['jobDir'], job.where('jobDir'))


def check_gs_path(path: str, where: str) -> None:
    """Raises a UsageError unless this is the path of something that may be in a bucket.

    Args:
        path: such as 'gs://bucket/folder'.
        where: the flag, or file and key, for messages.
    """
    if not path.startswith('gs://'):
        got = path or 'nothing'
        raise UsageError(f'{where}: expected a path that starts with gs://, got {got}')
    if not _GS_PATH.fullmatch(path):
        bucket = path[5:].partition('/')[0]
        remedy = (
            'put the name of your bucket in its place'
            if bucket == 'BUCKET'
            else '3 or more of lower-case letters, digits, -, _, .'
        )
        raise UsageError(f'{where}: {bucket or "nothing"} is no name of a bucket in {path}: {remedy}')


def _check_machines(job: TrainingInput) -> None:
    if job.tier != machines.CUSTOM:
        for role in ROLES:
            for key in (f'{role}Type', f'{role}Count', f'{role}Config.acceleratorConfig'):
                outer, _, inner = key.partition('.')
                if inner in job.values.get(outer, {}) if inner else outer in job.values:
                    raise UsageError(
                        f'{job.where(key)}: scaleTier {job.tier} has machines of its own; leave it out, or set CUSTOM'
                    )
        return
    if not job.machine(MASTER).type:
        raise UsageError(f'{job.where("masterType")}: missing, and scaleTier CUSTOM needs it; add one such as n1-standard-8')
    for role in ROLES:
        machine, count = job.machine(role), job.count(role)
        if count and not machine.type:
            raise UsageError(f'{job.where(f"{role}Type")}: missing, and {role}Count is {count}; add one such as n1-standard-8')
        if machine.type and not count:
            raise UsageError(f'{job.where(f"{role}Type")}: {role}Count is missing or 0; set it, or leave out {role}Type')
        if bool(machine.accelerator) != bool(machine.accelerators):
            missing = 'count' if machine.accelerator else 'type'
            raise UsageError(f'{job.where(f"{role}Config.acceleratorConfig.{missing}")}: missing')
        if machine.type:
            machines.check(machine, job.where(f'{role}Type'), job.where(f'{role}Config.acceleratorConfig'))
    if job.count(EVALUATOR) > 1:
        raise UsageError(f'{job.where("evaluatorCount")}: expected 0 or 1, two would write the same files')
    legacy = {role: job.machine(role).type in machines.LEGACY for role in ROLES if job.count(role)}
    if len(set(legacy.values())) > 1 and machines.CLOUD_TPU not in (job.machine(role).type for role in ROLES):
        other = next(role for role in legacy if legacy[role] != legacy[MASTER])
        raise UsageError(
            f'{job.where(f"{other}Type")}: {job.machine(other).type} beside masterType {job.machine(MASTER).type}; '
            "expected all of them to be AI Platform's own names, or none"
        )


def _check_args(job: TrainingInput) -> None:
    remedy = "the sweep's own goes before --" if job.is_local else 'the results go to jobDir'
    for flag in ('--job_dir', '--output_path'):
        if flag in _names(job.args):
            raise UsageError(f'{job.args_place}: leave out {flag}; {remedy}')
    config = _parse(job, job.args, job.args_place)
    if not job.has_image:
        _check_paths(job, config)


def _parse(job: TrainingInput, args: Sequence[str], place: str) -> Config:
    """The settings that the trainer will read from the args, with models and datasets that the package has.

    Args:
        job: whose trainer it is.
        args: to be read.
        place: where the last of them are from, for messages.
    """
    try:
        config = flags.parse([*args, '--job_dir=gs://job/dir'])
    except UsageError as error:
        raise UsageError(f'{place}: {error}') from None
    except SystemExit:
        raise UsageError(f'{place}: --help and --version start no run') from None
    for name, spec, known in (('model', config.model.model, METRICS), ('dataset', config.data.dataset, DATASETS)):
        if job.has_image or spec in known or spec.startswith('trainer.'):
            continue
        if ':' not in spec:
            hint = did_you_mean(spec, known) or f'; expected one of {", ".join(known)}, or package.module:NAME of your own'
            raise UsageError(f'{place}: --{name}={spec}: unknown {name}{hint}')
        if 'packageUris' not in job.values and not job.is_local:
            raise UsageError(
                f'{place}: --{name}={spec}: not in the package that is sent; '
                'name one that has it in packageUris, or an image in masterConfig.imageUri'
            )
    return config


def _check_paths(job: TrainingInput, config: Config) -> None:
    """The data must be where the job's machines reach them."""
    paths = {name: getattr(config.data, name) for name in ('train_data_paths', 'eval_data_paths', 'predict_data_paths')}
    paths['warm_start_from'] = config.loop.warm_start_from
    for name, spec in paths.items():
        for path in filter(None, (entry.strip() for entry in spec.split(','))):
            if job.is_local and not storage.is_remote(path):
                data_files.resolve(path, f'{job.args_place}: --{name}')
            elif not path.startswith('/gcs/'):  # where Vertex AI mounts buckets
                check_gs_path(path, f'{job.args_place}: --{name}')


def _check_tuning(job: TrainingInput, spec: HyperparameterSpec) -> None:
    _check_objective(job, spec, _parse(job, job.args, job.args_place))
    for index, param in enumerate(spec.params):
        place = job.where(f'hyperparameters.params[{index}].parameterName')
        (flag,) = flags.with_underscores([f'--{param.name}'])
        if flag in _names(job.args):
            raise UsageError(f'{place}: {param.name} is tuned, and args set {flag} too; leave it out of one of them')
        for value in param.values:
            # The bounds may be whole numbers, what the service draws between them is not.
            text = float(value) if param.type == hptuning.DOUBLE else value
            _check_objective(job, spec, _parse(job, [*job.args, f'{flag}={text}'], place))


def _check_objective(job: TrainingInput, spec: HyperparameterSpec, config: Config) -> None:
    """A trial with these settings must report the metric that is optimized."""
    tag, where, model = spec.metric_tag, job.where('hyperparameters.hyperparameterMetricTag'), config.model.model
    metrics = METRICS.get(model)
    if metrics and tag not in metrics:
        raise UsageError(
            f'{where}: expected a metric of --model={model}: {", ".join(metrics)}, got {tag}{did_you_mean(tag, metrics)}'
        )
    if config.tuning.metric_tag not in ('', tag):
        raise UsageError(f'{where}: {tag}, and args have --metric_tag={config.tuning.metric_tag}; leave the flag out')
    if config.run.mode != 'train_and_eval':
        raise UsageError(f'{where}: with --mode={config.run.mode} no trial reports {tag}; expected --mode=train_and_eval')


def _names(args: Sequence[str]) -> set[str]:
    """The flags among the args, with underscores."""
    return {argument.partition('=')[0] for argument in flags.with_underscores(args)}
