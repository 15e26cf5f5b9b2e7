"""Who this process is: TF_CONFIG, read once, as one frozen `Cluster`. Pure Python, no TensorFlow.

The services disagree about TF_CONFIG: `master` or `chief`, an index as a string, empty lists of parameter servers, the
evaluator inside or outside the cluster, a job as an object or as a string. Here all become one form. Where the results
go also depends on the environment and the trial, so it is worked out here too (`output_dir`, `export_dir`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from trainer import storage
from trainer.config import RunConfig
from trainer.errors import UsageError, did_you_mean

CHIEF, WORKER, PS, EVALUATOR = 'chief', 'worker', 'ps', 'evaluator'
ROLES = (CHIEF, WORKER, PS, EVALUATOR)
_LEGAL_TYPES = 'chief (or master), worker, ps, evaluator'

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process of a job; the default is the only process of a job on one machine."""

    role: str = CHIEF  # one of ROLES; master is called chief
    index: int = 0  # among those of the same role
    trial: str = ''  # of a tuning job, from '1'; '' outside of one
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the service was asked for
    spec: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # {role: (host:port, ...)}, no evaluator
    has_evaluator: bool = False  # another process, or this one, is known to evaluate

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints, exports and final metrics."""
        return self.role == CHIEF

    @property
    def num_workers(self) -> int:
        """Processes that train: the chief and the workers."""
        return 1 + len(self.spec.get(WORKER, ()))

    @property
    def worker_index(self) -> int:
        """This process among those that train: the chief is 0, worker i is i + 1; 0 for the others, who do not share."""
        return self.index + 1 if self.role == WORKER else 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes to talk to; an evaluator talks to none."""
        return sum(map(len, self.spec.values())) > 1

    @property
    def name(self) -> str:
        """For log lines: 'chief/0'."""
        return f'{self.role}/{self.index}'

    def tf_config(self) -> str:
        """TF_CONFIG in the one form that every TensorFlow takes; '' when this is the only process."""
        if not self.is_distributed and self.role != EVALUATOR:
            return ''
        # TensorFlow takes an evaluator only beside a chief, though it never calls one.
        spec = {role: list(hosts) for role, hosts in self.spec.items()} or {CHIEF: ['localhost:0']}
        return json.dumps({'cluster': spec, 'task': {'type': self.role, 'index': self.index}, 'environment': 'cloud'})


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """The place of this process in its job.

    Args:
        environ: the environment; TF_CONFIG and CLOUD_ML_TRIAL_ID are read. Without TF_CONFIG this is the only process.

    Raises:
        UsageError: TF_CONFIG is not what it should be; names the part, what was expected and what came.
    """
    tf_config = _read_tf_config(environ.get('TF_CONFIG', ''))
    task, job = _object(tf_config, 'task'), _read_job(tf_config)
    spec = _read_spec(_object(tf_config, 'cluster'))
    role, index = _read_task(task, spec)
    evaluators = spec.pop(EVALUATOR, ())
    if evaluators:
        _log.warning('TF_CONFIG: took the evaluator out of the cluster; TensorFlow would wait for it to join the training')
    return Cluster(
        role=role,
        index=index,
        trial=_read_trial(task.get('trial') or environ.get('CLOUD_ML_TRIAL_ID', '')),
        job=job,
        spec=spec,
        has_evaluator=bool(evaluators) or role == EVALUATOR or str(job.get('evaluator_count') or '0') != '0',
    )


def output_dir(run: RunConfig, cluster: Cluster, environ: Mapping[str, str]) -> str:
    """The folder of checkpoints, event files and everything else of this run (of this trial, in a tuning job).

    `--job-dir` is taken as it is: the service makes it per trial. `--output_path` reaches every trial unchanged, so the
    trial's id is appended. With neither, Vertex AI's AIP_CHECKPOINT_DIR (or AIP_MODEL_DIR, when it is alone) is taken
    as it is. Event files stay here also where Vertex AI sets AIP_TENSORBOARD_LOG_DIR: TensorBoard reads any folder.

    Raises:
        UsageError: none of them is given.
    """
    source = output_flag(run, environ)
    if source == '--job-dir':
        return run.job_dir
    if source == '--output_path':
        return storage.join(run.output_path, cluster.trial) if cluster.trial else run.output_path
    return environ[source]


def export_dir(run: RunConfig, cluster: Cluster, environ: Mapping[str, str]) -> str:
    """The folder that exports go to, each in one named by its time: `model` below `output_dir`.

    AIP_MODEL_DIR is taken instead only when neither flag is given, as for `output_dir`: flags beat the environment.
    """
    if not run.job_dir and not run.output_path and environ.get('AIP_MODEL_DIR'):
        return environ['AIP_MODEL_DIR']
    return storage.join(output_dir(run, cluster, environ), 'model')


def output_flag(run: RunConfig, environ: Mapping[str, str]) -> str:
    """The flag or variable that `output_dir` comes from, to name in a message.

    Raises:
        UsageError: none is given.
    """
    if run.job_dir:
        return '--job-dir'
    if run.output_path:
        return '--output_path'
    for variable in ('AIP_CHECKPOINT_DIR', 'AIP_MODEL_DIR'):
        if environ.get(variable):
            return variable
    raise UsageError('no place for the results: give --output_path=FOLDER (or --job-dir, or set AIP_CHECKPOINT_DIR)')


def _fail(problem: str) -> NoReturn:
    raise UsageError(f'TF_CONFIG: {problem}')


def _read_tf_config(text: str) -> Mapping[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        _fail(f'not JSON: {error}; got {_short(text)}; correct it, or unset it to run on this machine alone')
    if not isinstance(value, dict):
        _fail(f'expected an object with cluster and task, got {_short(text)}')
    return value


def _object(tf_config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = tf_config.get(key) or {}
    if not isinstance(value, dict):
        _fail(f'{key}: expected an object, got {_short(value)}')
    return value


def _read_job(tf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The job that was asked for; Vertex AI sends it as a string of JSON."""
    job = tf_config.get('job')
    if isinstance(job, str) and job.strip():
        try:
            job = json.loads(job)
        except ValueError as error:
            _fail(f'job: neither an object nor JSON of one: {error}')
    return _object({'job': job}, 'job')


def _read_spec(cluster: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """{role: hosts} without empty roles, master called chief."""
    for key, hosts in cluster.items():
        if key not in (*ROLES, 'master'):
            _fail(f'cluster.{key}: expected {_LEGAL_TYPES}{did_you_mean(key, ROLES)}')
        if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
            _fail(f'cluster.{key}: expected a list of "host:port", got {_short(hosts)}')
    filled = {key: tuple(hosts) for key, hosts in cluster.items() if hosts}
    if CHIEF in filled and 'master' in filled:
        _fail('cluster: has both chief and master, which are two names of one task; leave one out')
    spec = {_role(key): hosts for key, hosts in filled.items()}
    if len(spec.get(CHIEF, ())) > 1:
        _fail(f'cluster.chief: expected one host, got {len(spec[CHIEF])}; call the others worker')
    if CHIEF not in spec and (WORKER in spec or PS in spec):
        _fail(f'cluster: has {" and ".join(spec)} but no chief; call one of the workers chief')
    return spec


def _read_task(task: Mapping[str, Any], spec: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    num_tasks = sum(map(len, spec.values()))
    if not task.get('type'):
        if num_tasks > 1:
            _fail(f'task.type is missing: the cluster has {num_tasks} tasks, so say which one this is: {_LEGAL_TYPES}')
        return CHIEF, 0
    role, index = _role(task['type']), _read_index(task.get('index', 0))
    if role not in ROLES:
        _fail(f'task.type: expected {_LEGAL_TYPES}, got {_short(task["type"])}')
    if role == EVALUATOR:  # need not be in the cluster, and is better not
        return role, index
    if not spec:  # some launchers name a lone process worker 0
        if role == PS or index > 0:
            _fail(f'task {task["type"]}/{index} needs a cluster, and cluster is empty; list the tasks in it')
        return CHIEF, 0
    if role not in spec:
        _fail(f'task.type: {_short(task["type"])} is not in the cluster, which has {", ".join(spec)}')
    if index >= len(spec[role]):
        _fail(f'task.index: {index} is out of range: cluster.{role} has {len(spec[role])} (index 0 to {len(spec[role]) - 1})')
    return role, index


def _role(name: Any) -> Any:
    return CHIEF if name == 'master' else name


def _read_index(value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if type(value) is not int or value < 0:
        _fail(f'task.index: expected a whole number from 0, got {_short(value)}')
    return value


def _read_trial(value: Any) -> str:
    """The trial as text that can name a folder; hypertune's '0' for 'no trial' is ''."""
    trial = str(value).strip()
    if trial and not re.fullmatch(r'[\w-]+', trial):
        _fail(f'task.trial (or CLOUD_ML_TRIAL_ID): expected a number, got {_short(value)}')
    return '' if trial == '0' else trial


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = ' '.join(text.split())
    return repr(text if len(text) <= 80 else f'{text[:77]}...')
