"""Who this process is: TF_CONFIG, Vertex AI's CLUSTER_SPEC or the flags, read once, as one frozen `Cluster`. Pure Python.

The services disagree: `master` or `chief` or a first worker, an index as a string, empty lists of parameter servers, the
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
from trainer.cluster_config import ClusterConfig, is_host_port
from trainer.config import RunConfig
from trainer.errors import UsageError, did_you_mean

CHIEF, WORKER, PS, EVALUATOR = 'chief', 'worker', 'ps', 'evaluator'
ROLES = (CHIEF, WORKER, PS, EVALUATOR)
_NO_FLAGS = ClusterConfig()
_Spec = dict[str, tuple[str, ...]]  # {role: addresses}

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
    def evaluates(self) -> bool:
        """Whether this process runs the evaluations: the evaluator, or the chief when no evaluator is known of."""
        return self.role == EVALUATOR or (self.is_chief and not self.has_evaluator)

    @property
    def exports(self) -> bool:
        """Whether this process writes the final export: the chief, which is there in every job."""
        return self.is_chief

    @property
    def reports(self) -> bool:
        """Whether this process reports the tuning metric: whoever evaluates, so that each is reported once."""
        return self.evaluates

    @property
    def name(self) -> str:
        """For log lines: 'chief/0'."""
        return f'{self.role}/{self.index}'

    def hosts(self, role: str) -> tuple[str, ...]:
        """The addresses, 'host:port', of all tasks of a role; none for an evaluator, which is outside of the cluster."""
        return self.spec.get(role, ())

    def peers(self) -> dict[str, str]:
        """The other tasks of the cluster, those that train or serve: name, such as 'worker/1', to 'host:port'."""
        tasks = {f'{role}/{index}': host for role in ROLES for index, host in enumerate(self.hosts(role))}
        return {name: host for name, host in tasks.items() if name != self.name}

    def device_filters(self) -> list[str]:
        """The devices that a session of this process may see; [] for no limit.

        As Estimator's RunConfig has them by default: those that train see the parameter servers and themselves, never each
        other, so that none waits for one that is gone. A parameter server sees all.
        """
        if not self.is_distributed or self.role == EVALUATOR:
            return []
        if self.role == PS:
            return ['/job:ps', '/job:worker', '/job:chief']
        return ['/job:ps', '/job:chief' if self.is_chief else f'/job:worker/task:{self.index}']

    def tf_config(self) -> str:
        """TF_CONFIG in the one form that every TensorFlow takes; '' when this is the only process."""
        if not self.is_distributed and self.role != EVALUATOR:
            return ''
        # TensorFlow takes an evaluator only beside a chief, though it never calls one.
        spec = {role: list(hosts) for role, hosts in self.spec.items()} or {CHIEF: ['localhost:0']}
        return json.dumps({'cluster': spec, 'task': {'type': self.role, 'index': self.index}, 'environment': 'cloud'})


def read_cluster(environ: Mapping[str, str], flags: ClusterConfig = _NO_FLAGS) -> Cluster:
    """The place of this process in its job.

    The flags decide when they are given, else TF_CONFIG when it has a cluster or a task, else Vertex AI's CLUSTER_SPEC; with
    none of them this is the only process. Trial and job come from the environment in each case.

    Args:
        environ: the environment; TF_CONFIG, CLUSTER_SPEC and CLOUD_ML_TRIAL_ID are read.
        flags: the cluster of the command line.

    Raises:
        UsageError: a variable is not what it should be (names the part, what was expected and what came), or a cluster is in
            the environment and in the flags.
    """
    variable, content = _TF_CONFIG, _TF_CONFIG.parse(environ)
    if not content.get('cluster') and not content.get('task'):
        cluster_spec = _CLUSTER_SPEC.parse(environ)
        if cluster_spec.get('cluster') or cluster_spec.get('task'):
            variable, content = _CLUSTER_SPEC, cluster_spec
    place = variable.read(content, environ.get('CLOUD_ML_TRIAL_ID', ''))
    if not flags.is_given:
        return place
    if place.is_distributed or place.has_evaluator:
        raise UsageError(
            f'--job_name={flags.job_name} and {variable.name} ({place.name}) both place this process in a cluster; leave the '
            f'flags out (--job_name, --task_index, --worker_hosts, --ps_hosts), or unset {variable.name}'
        )
    return _place_by_flags(place, flags)


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


@dataclasses.dataclass(frozen=True)
class _Variable:
    """An environment variable that holds a cluster in JSON, and how it calls the roles."""

    name: str
    roles: Mapping[str, str]  # {its word: ours}
    legal_types: str

    def parse(self, environ: Mapping[str, str]) -> Mapping[str, Any]:
        """The object in it; {} when it is not set."""
        text = environ.get(self.name, '')
        if not text.strip():
            return {}
        try:
            value = json.loads(text)
        except ValueError as error:
            self._fail(f'not JSON: {error}; got {_short(text)}; correct it, or unset it to run on this machine alone')
        if not isinstance(value, dict):
            self._fail(f'expected an object with cluster and task, got {_short(text)}')
        if 'sparseCluster' in value:  # each worker would take itself for the only one
            self._fail('sparseCluster names only a part of the tasks; turn enableDynamicWorker off in the TFJob')
        return value

    def read(self, content: Mapping[str, Any], trial: str) -> Cluster:
        """The place of this process by an object from `parse`; `trial` is taken when the task has none."""
        task, job = self._object(content, 'task'), self._read_job(content)
        spec = self._read_spec(self._object(content, 'cluster'))
        if PS in spec and _has_reduction_server(job):
            del spec[PS]
            _log.info('%s: left the Reduction Server out of the cluster; it sums gradients, and is no task of it', self.name)
        role, index = self._read_task(task, spec)
        evaluators = spec.pop(EVALUATOR, ())
        if evaluators:
            _log.warning(
                '%s: took the evaluator out of the cluster; TensorFlow would wait for it to join the training', self.name
            )
        if WORKER in spec and CHIEF not in spec:
            _log.info('%s: no chief in the cluster, so the first worker is the chief, and worker N is worker N - 1', self.name)
            role, index, spec = _with_chief(role, index, spec)
        return Cluster(
            role=role,
            index=index,
            trial=self._read_trial(task.get('trial') or trial),
            job=job,
            spec=spec,
            has_evaluator=bool(evaluators) or role == EVALUATOR or str(job.get('evaluator_count') or '0') != '0',
        )

    def _fail(self, problem: str) -> NoReturn:
        raise UsageError(f'{self.name}: {problem}')

    def _object(self, content: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = {} if content.get(key) in (None, '') else content[key]
        if not isinstance(value, dict):
            self._fail(f'{key}: expected an object, got {_short(value)}')
        return value

    def _read_job(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The job that was asked for; Vertex AI sends it as a string of JSON."""
        job = content.get('job')
        if isinstance(job, str) and job.strip():
            try:
                job = json.loads(job)
            except ValueError as error:
                self._fail(f'job: neither an object nor JSON of one: {error}')
        return self._object({'job': job}, 'job')

    def _read_spec(self, cluster: Mapping[str, Any]) -> _Spec:
        """{role: hosts} without empty roles, in our words."""
        for key, hosts in cluster.items():
            if key not in self.roles:
                self._fail(f'cluster.{key}: expected {self.legal_types}{did_you_mean(key, self.roles)}')
            if not isinstance(hosts, list) or not all(isinstance(host, str) and is_host_port(host) for host in hosts):
                self._fail(f'cluster.{key}: expected a list of "host:port", got {_short(hosts)}')
        filled = {key: tuple(hosts) for key, hosts in cluster.items() if hosts}
        if CHIEF in filled and 'master' in filled:
            self._fail('cluster: has both chief and master, which are two names of one task; leave one out')
        spec = {self.roles[key]: hosts for key, hosts in filled.items()}
        if len(spec.get(CHIEF, ())) > 1:
            word = next(key for key in filled if self.roles[key] == CHIEF)
            self._fail(f'cluster.{word}: expected one host, got {len(spec[CHIEF])}; call the others {self._word(WORKER)}')
        every = [host for hosts in spec.values() for host in hosts]
        for host in every:
            if every.count(host) > 1:
                self._fail(f'cluster: {host} is given twice; each task needs an address of its own')
        if PS in spec and CHIEF not in spec and WORKER not in spec:
            self._fail(f'cluster: has {" and ".join(filled)} but nobody who trains; add {self._word(CHIEF)}')
        return spec

    def _read_task(self, task: Mapping[str, Any], spec: _Spec) -> tuple[str, int]:
        total, word = sum(map(len, spec.values())), task.get('type')
        if not word:
            if total > 1:
                self._fail(f'task.type is missing: the cluster has {total} tasks, so say which one this is: {self.legal_types}')
            return next(iter(spec), CHIEF), 0
        if not isinstance(word, str) or word not in self.roles:
            self._fail(f'task.type: expected {self.legal_types}, got {_short(word)}')
        role, index = self.roles[word], self._read_index(task.get('index', 0))
        if role == EVALUATOR:  # need not be in the cluster, and is better not
            return role, index
        if not spec:  # some launchers name a lone process worker 0
            if role == PS or index > 0:
                self._fail(f'task {word}/{index} needs a cluster, and cluster is empty; list the tasks in it')
            return CHIEF, 0
        if role not in spec:
            self._fail(f'task.type: {_short(word)} is not in the cluster, which has {", ".join(map(self._word, spec))}')
        if index >= len(spec[role]):
            last = len(spec[role]) - 1
            self._fail(f'task.index: {index} is out of range: cluster.{word} has {last + 1} (index 0 to {last})')
        return role, index

    def _word(self, role: str) -> str:
        return next(word for word, ours in self.roles.items() if ours == role)

    def _read_index(self, value: Any) -> int:
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if type(value) is not int or value < 0:
            self._fail(f'task.index: expected a whole number from 0, got {_short(value)}')
        return value

    def _read_trial(self, value: Any) -> str:
        """The trial as text that can name a folder; hypertune's '0' for 'no trial' is ''."""
        trial = str(value).strip()
        if trial and not re.fullmatch(r'[\w-]+', trial):
            self._fail(f'task.trial (or CLOUD_ML_TRIAL_ID): expected a number, got {_short(value)}')
        return '' if trial == '0' else trial


_TF_CONFIG = _Variable(
    'TF_CONFIG', {**{role: role for role in ROLES}, 'master': CHIEF}, 'chief (or master), worker, ps, evaluator'
)
_CLUSTER_SPEC = _Variable(
    'CLUSTER_SPEC', {f'workerpool{pool}': role for pool, role in enumerate(ROLES)}, 'workerpool0 to workerpool3'
)


def _place_by_flags(place: Cluster, flags: ClusterConfig) -> Cluster:
    """The same trial and job, in the cluster of the flags."""
    role = WORKER if flags.job_name in (CHIEF, 'master') else flags.job_name
    spec = {name: hosts for name, hosts in ((WORKER, flags.workers), (PS, flags.ps)) if hosts}
    role, index, spec = _with_chief(role, flags.task_index, spec)
    return dataclasses.replace(place, role=role, index=index, spec=spec, has_evaluator=role == EVALUATOR)


def _with_chief(role: str, index: int, spec: _Spec) -> tuple[str, int, _Spec]:
    """The same task in a cluster whose first worker is called chief, as TensorFlow takes it where there is no other."""
    workers = spec.get(WORKER, ())
    renamed = {CHIEF: workers[:1], WORKER: workers[1:], PS: spec.get(PS, ())}
    if role == WORKER:
        role, index = (WORKER, index - 1) if index else (CHIEF, 0)
    return role, index, {name: hosts for name, hosts in renamed.items() if hosts}


def _has_reduction_server(job: Mapping[str, Any]) -> bool:
    """Whether the third worker pool of a Vertex AI job runs no program of ours, but Google's Reduction Server."""
    pools = job.get('worker_pool_specs') or job.get('workerPoolSpecs') or []
    pool = pools[2] if isinstance(pools, list) and len(pools) > 2 else {}
    container = (pool.get('container_spec') or pool.get('containerSpec') or {}) if isinstance(pool, dict) else {}
    return isinstance(container, dict) and 'reductionserver' in str(container.get('image_uri') or container.get('imageUri'))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = ' '.join(text.split())
    return repr(text if len(text) <= 80 else f'{text[:77]}...')
