"""The settings of `config.py` that say which processes and devices a job has."""

from __future__ import annotations

import dataclasses
import re

from trainer.errors import UsageError, did_you_mean
from trainer.settings import Section, setting

JOB_NAMES = ('ps', 'worker', 'evaluator', 'chief', 'master')
_HOST_PORT = re.compile(r'(\[[0-9a-fA-F:.]+\]|[^\s:/,\[\]]+):\d{1,5}')


def is_host_port(text: str) -> bool:
    """Whether a text is the address of a task: 'host:port', an IPv6 address in brackets; nobody can be called at port 0."""
    return bool(_HOST_PORT.fullmatch(text)) and 0 < int(text.rpartition(':')[2]) < 2**16


@dataclasses.dataclass(frozen=True)
class ClusterConfig(Section):
    """Cluster: the other processes of the job; a service sets TF_CONFIG instead."""

    ps_hosts: str = setting('', 'parameter servers: comma-separated host:port')
    worker_hosts: str = setting('', 'those that train: comma-separated host:port; the first is the chief')
    job_name: str = setting('', 'what this process is: ps, worker, evaluator, or chief (master), which is worker 0')
    task_index: int = setting(0, 'which of --ps_hosts or --worker_hosts this process is', at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.job_name and self.job_name not in JOB_NAMES:
            expected = f'expected one of {", ".join(JOB_NAMES)}{did_you_mean(self.job_name, JOB_NAMES)}'
            raise UsageError(f'--job_name={self.job_name}: {expected}')
        self._check_hosts()
        if self.job_name:
            self._check_index()
        elif self.ps_hosts or self.worker_hosts or self.task_index:
            given = [f'--{field.name}' for field in dataclasses.fields(self) if getattr(self, field.name)]
            raise UsageError(f'{" and ".join(given)} without --job_name: say which of the tasks this process is')

    @property
    def is_given(self) -> bool:
        """Whether the flags say anything."""
        return bool(self.job_name)

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of those that train, the chief first."""
        return _split_hosts(self.worker_hosts)

    @property
    def ps(self) -> tuple[str, ...]:
        """Addresses of the parameter servers."""
        return _split_hosts(self.ps_hosts)

    def _check_hosts(self) -> None:
        seen: dict[str, str] = {}
        for flag, hosts in (('--ps_hosts', self.ps), ('--worker_hosts', self.workers)):
            for host in hosts:
                if not is_host_port(host):
                    raise UsageError(f'{flag}: expected comma-separated host:port, got {host!r}')
                if host in seen:
                    where = f'twice in {flag}' if seen[host] == flag else f'in {seen[host]} and in {flag}'
                    raise UsageError(f'{host} is {where}: each task needs an address of its own')
                seen[host] = flag
        if self.ps and not self.workers:
            raise UsageError('--ps_hosts without --worker_hosts: say who trains, the chief first')

    def _check_index(self) -> None:
        if self.job_name == 'evaluator':  # is not in the cluster
            return
        flag, hosts = ('--ps_hosts', self.ps) if self.job_name == 'ps' else ('--worker_hosts', self.workers)
        if not hosts:
            raise UsageError(f'--job_name={self.job_name} without {flag}: give every task as host:port')
        if self.job_name in ('chief', 'master') and self.task_index:
            raise UsageError(f'--task_index={self.task_index}: expected 0 for --job_name={self.job_name}, which is worker 0')
        if self.task_index >= len(hosts):
            raise UsageError(f'--task_index={self.task_index}: {flag} has {len(hosts)} (index 0 to {len(hosts) - 1})')


def _split_hosts(text: str) -> tuple[str, ...]:
    return tuple(host.strip() for host in text.split(',')) if text.strip() else ()


STRATEGIES = (
    'auto', 'off', 'one_device', 'mirrored', 'multi_worker_mirrored', 'parameter_server', 'central_storage', 'tpu',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DistributionConfig(Section):
    """Distribution: on which devices and processes a step runs."""

    distribution_strategy: str = setting(
        'auto', 'auto: by the cluster, else a TPU, else all GPUs, else the CPU', choices=STRATEGIES
    )
    num_gpus: int = setting(0, 'GPUs of each process; 0 takes all', unit='GPUs', at_least=0)
    num_cpu_replicas: int = setting(
        0, 'replicas on the CPU of a mirrored or central_storage run, to try it anywhere', unit='replicas', at_least=0
    )
    all_reduce_alg: str = setting(
        'auto', 'how gradients are summed', choices=('auto', 'nccl', 'ring', 'hierarchical_copy', 'reduction_to_one')
    )
    tpu: str = setting('', 'name or grpc:// address of a TPU; empty takes the one that the environment names')
    sync_replicas: bool = setting(False, 'with parameter servers: wait for the gradients of several workers, then update')
    replicas_to_aggregate: int = setting(
        0,
        'gradients of an update with --sync_replicas; 0: of all workers; fewer leaves the others as backup',
        unit='workers',
        at_least=0,
    )
    peer_timeout_secs: float = setting(
        30.0, 'a task of the cluster that was lost may be away for so long; then this one ends to be restarted',
        unit='seconds', above=0,
    )  # fmt: skip
    step_timeout_secs: float = setting(
        900.0, 'longest time without a step in a cluster, evaluation included; then this task ends to be restarted',
        unit='seconds', above=0,
    )  # fmt: skip
    evaluator_timeout_secs: float = setting(
        300.0, 'the chief awaits the last evaluation of an evaluator task for so long, then does it itself',
        unit='seconds', above=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas_to_aggregate and not self.sync_replicas:
            raise UsageError(
                f'--replicas_to_aggregate={self.replicas_to_aggregate}: needs --sync_replicas; without it every gradient is '
                'an update of its own'
            )
