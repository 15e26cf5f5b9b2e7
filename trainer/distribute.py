"""Which strategy a run takes, on which devices, and what one update is made of.

`choose` is plain logic over settings, cluster and devices; `make_distribution` makes TensorFlow's strategy from its answer.
Nothing is replaced in silence: what is asked for and missing is an error at once.

| strategy | one update of the weights is made of |
| --- | --- |
| off, one_device | the batch |
| mirrored, central_storage | the batch, in equal parts on the devices of this process |
| multi_worker_mirrored | the batch, in equal parts on the devices of all workers |
| parameter_server | the batch, on one worker; with `--sync_replicas` in equal parts on several |
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import tensorflow as tf

from trainer.cluster import EVALUATOR, PS, Cluster
from trainer.config import DistributionConfig
from trainer.errors import UsageError

logger = logging.getLogger(__name__)

ONE_DEVICE, MIRRORED, CENTRAL_STORAGE, TPU = 'one_device', 'mirrored', 'central_storage', 'tpu'
MULTI_WORKER, PARAMETER_SERVER = 'multi_worker_mirrored', 'parameter_server'
# Of several devices in one process.
_LOCAL = (MIRRORED, CENTRAL_STORAGE)
# What --all_reduce_alg may be, auto aside.
_ALL_REDUCE = {
    MIRRORED: ('nccl', 'hierarchical_copy', 'reduction_to_one'),
    MULTI_WORKER: ('nccl', 'ring'),
}
_PROBE_SECS = 5.0


@dataclasses.dataclass(frozen=True)
class Devices:
    """What this process finds on its machine."""

    gpus: int = 0
    tpu: str = ''
    """Name or address of a TPU that answers."""
    tpu_problem: str = ''
    """Why there is none."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The strategy of this run as every task of the cluster sees it."""

    name: str
    """one_device, mirrored, central_storage, multi_worker_mirrored or parameter_server."""
    reason: str
    """For the log: why this one."""
    strategy: Any = None
    """A `tf.distribute.Strategy`, where TensorFlow has one for the purpose."""
    local_replicas: int = 1
    """Devices of this process, each with its part of the batch."""
    num_workers: int = 1
    """Processes that share an update: all that train, one when they update by themselves."""
    sync_replicas: int = 0
    """Gradients that an update of synchronous parameter servers awaits; 0 for the other strategies."""
    num_shards: int = 1
    """Processes that train, among which the records are divided."""

    @property
    def is_lockstep(self) -> bool:
        """Whether several processes make every step together, so that none can go on without the others."""
        return self.name == MULTI_WORKER

    @property
    def is_looped(self) -> bool:
        """Whether many steps run in one session call: where a process has one replica, and its own copy of the variables."""
        return self.name == ONE_DEVICE or (self.name == MULTI_WORKER and self.local_replicas == 1)

    @property
    def batch_parts(self) -> int:
        """Equal parts in which the batch of an update is worked on."""
        return self.sync_replicas or self.num_workers * self.local_replicas

    def split_batch(self, global_batch_size: int) -> int:
        """Returns the examples of one replica.

        Raises:
          UsageError: the batch does not divide by the replicas.
        """
        parts = self.batch_parts
        if global_batch_size % parts:
            nearest = max(1, round(global_batch_size / parts)) * parts
            raise UsageError(
                f'--batch_size={global_batch_size} does not divide by the {parts} replicas of '
                f'--distribution_strategy={self.name}; the nearest that does is {nearest}'
            )
        return global_batch_size // parts

    def describe_batch(self, global_batch_size: int) -> str:
        """Returns the arithmetic, such as 'global batch 100 = 2 workers x 1 replica x 50'."""
        each = self.split_batch(global_batch_size)
        if self.sync_replicas:
            backup = self.num_shards - self.sync_replicas
            spare = f' ({backup} more as backup)' if backup else ''
            return f'global batch {global_batch_size} = {_count(self.sync_replicas, "worker")} x {each}{spare}'
        if self.name == PARAMETER_SERVER:
            return f'global batch {global_batch_size}, each update by one of {_count(self.num_shards, "worker")}'
        workers = f'{_count(self.num_workers, "worker")} x ' if self.num_workers > 1 else ''
        return f'global batch {global_batch_size} = {workers}{_count(self.local_replicas, "replica")} x {each}'


def choose(config: DistributionConfig, cluster: Cluster, devices: Devices) -> tuple[str, str]:
    """Returns the strategy to take and why.

    Raises:
      UsageError: the strategy does not go with the cluster, or a device that it needs is not there; names both.
    """
    if cluster.role == EVALUATOR:
        # It measures checkpoints, whatever made them, on what its machine has, and talks to no other task.
        return ONE_DEVICE, 'an evaluator works alone'
    asked = config.distribution_strategy
    if config.num_gpus > devices.gpus and cluster.role != PS:
        raise UsageError(
            f'--num_gpus={config.num_gpus}: TensorFlow finds {devices.gpus} here; expected at most that many, or 0 for all. '
            'Is the CUDA version of TensorFlow installed, and does nvidia-smi list them?'
        )
    if (asked == TPU or config.tpu) and not devices.tpu:
        raise UsageError(f'--distribution_strategy={asked}: no TPU: {devices.tpu_problem}')
    if asked == TPU or config.tpu:
        raise UsageError(f'--distribution_strategy={asked}: found {devices.tpu}, but this version does not train on a TPU yet')
    name, reason = (asked, 'as asked') if asked != 'auto' else _choose_automatically(config, cluster, devices)
    name = ONE_DEVICE if name == 'off' else name
    flag = f'--distribution_strategy={asked}'
    tasks = ', '.join(f'{len(hosts)} {role}' for role, hosts in cluster.spec.items())
    if name in (ONE_DEVICE, *_LOCAL) and cluster.is_distributed:
        raise UsageError(
            f'{flag} is for one process, the cluster has {tasks}; expected '
            f'{PARAMETER_SERVER if cluster.spec.get(PS) else MULTI_WORKER}, or auto'
        )
    if name == MULTI_WORKER:
        if not cluster.is_distributed:
            raise UsageError(f'{flag} needs a cluster: set TF_CONFIG, or try it with python -m trainer.launch --workers=1')
        if cluster.spec.get(PS):
            raise UsageError(f'{flag} has no parameter servers, the cluster has {tasks}; expected {PARAMETER_SERVER}, or auto')
    if name == PARAMETER_SERVER and not cluster.spec.get(PS):
        has = f'has {tasks}' if tasks else 'is empty'
        raise UsageError(f'{flag} needs a task ps in the cluster, which {has}; try it with python -m trainer.launch --ps=1')
    if config.sync_replicas and name != PARAMETER_SERVER:
        raise UsageError(f'--sync_replicas is for {PARAMETER_SERVER}; the strategy is {name} ({reason}), leave it out')
    if config.replicas_to_aggregate > cluster.num_workers:
        raise UsageError(
            f'--replicas_to_aggregate={config.replicas_to_aggregate}: the cluster trains on {cluster.num_workers} tasks; '
            'expected at most that many'
        )
    if config.num_cpu_replicas > 1 and name not in _LOCAL:
        raise UsageError(
            f'--num_cpu_replicas={config.num_cpu_replicas} is for {" and ".join(_LOCAL)}; the strategy is {name} ({reason})'
        )
    if name in _LOCAL and not devices.gpus and not config.num_cpu_replicas:
        raise UsageError(f'{flag}: TensorFlow finds no GPU here; to try it on the CPU add --num_cpu_replicas=2')
    _check_all_reduce(config, name, reason, has_gpu=bool(devices.gpus and not config.num_cpu_replicas))
    return name, reason


def _check_all_reduce(config: DistributionConfig, name: str, reason: str, *, has_gpu: bool) -> None:
    algorithm, legal = config.all_reduce_alg, _ALL_REDUCE.get(name, ())
    if algorithm == 'auto':
        return
    if algorithm not in legal:
        expected = f'expected {", ".join(legal)} or auto' if legal else 'leave it out'
        raise UsageError(f'--all_reduce_alg={algorithm} is not for {name}, which is the strategy ({reason}); {expected}')
    if algorithm == 'nccl' and not has_gpu:
        others = ', '.join(other for other in legal if other != 'nccl')
        raise UsageError(f'--all_reduce_alg=nccl sums on GPUs, but the replicas are on the CPU; expected {others} or auto')


def _choose_automatically(config: DistributionConfig, cluster: Cluster, devices: Devices) -> tuple[str, str]:
    if cluster.is_distributed:
        if cluster.spec.get(PS):
            return PARAMETER_SERVER, 'the cluster has parameter servers'
        return MULTI_WORKER, 'the cluster has workers and no parameter servers'
    tpu = f'found {devices.tpu}, but this version does not train on a TPU yet' if devices.tpu else ''
    tpu = tpu or f'no TPU ({devices.tpu_problem})'
    gpus = config.num_gpus or devices.gpus
    if gpus > 1:
        return MIRRORED, f'{tpu}, {gpus} GPUs'
    if gpus:
        return ONE_DEVICE, f'{tpu}, 1 GPU'
    if config.num_cpu_replicas > 1:
        return MIRRORED, f'--num_cpu_replicas={config.num_cpu_replicas}'
    return ONE_DEVICE, f'{tpu}, no GPU'


def make_distribution(config: DistributionConfig, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Distribution:
    """Chooses the strategy and makes it; sets the devices that TensorFlow sees, so nothing may have run before.

    Raises:
      UsageError: as `choose`.
    """
    gpus = tf.config.list_physical_devices('GPU')
    tpu, problem = find_tpu(config.tpu, environ) if config.distribution_strategy in ('auto', TPU) else ('', 'not looked for')
    name, reason = choose(config, cluster, Devices(len(gpus), tpu, problem))
    facts: dict[str, Any] = {'name': name, 'reason': reason}
    if cluster.role == EVALUATOR:
        return Distribution(**facts)
    if name in (ONE_DEVICE, MULTI_WORKER) or config.num_gpus:
        count = config.num_gpus or (1 if name == ONE_DEVICE else len(gpus))
        if gpus:
            tf.config.set_visible_devices(gpus[:count], 'GPU')
    if name in _LOCAL:
        strategy, replicas = _make_local_strategy(name, config, config.num_gpus or len(gpus))
        return Distribution(**facts, strategy=strategy, local_replicas=replicas)
    if name == MULTI_WORKER:
        strategy = _make_multi_worker_strategy(config)
        replicas = max(1, min(config.num_gpus or len(gpus), len(gpus)))
        return Distribution(
            **facts,
            strategy=strategy,
            local_replicas=replicas,
            num_workers=cluster.num_workers,
            num_shards=cluster.num_workers,
        )
    if name == PARAMETER_SERVER:
        needed = (config.replicas_to_aggregate or cluster.num_workers) if config.sync_replicas else 0
        return Distribution(**facts, sync_replicas=needed, num_shards=cluster.num_workers)
    return Distribution(**facts)


def _make_local_strategy(name: str, config: DistributionConfig, num_gpus: int) -> tuple[Any, int]:
    # Between CPU devices of one session an all-reduce of an eager runtime can wait for ever.
    tf.compat.v1.disable_eager_execution()
    if num_gpus and not config.num_cpu_replicas:
        names = [f'/gpu:{index}' for index in range(num_gpus)]
    else:
        (cpu, *_) = tf.config.list_physical_devices('CPU')
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * config.num_cpu_replicas)
        names = [f'/cpu:{index}' for index in range(config.num_cpu_replicas)]
    if name == CENTRAL_STORAGE:
        strategy = tf.compat.v1.distribute.experimental.CentralStorageStrategy(compute_devices=names, parameter_device='/cpu:0')
    else:
        strategy = tf.compat.v1.distribute.MirroredStrategy(
            names, cross_device_ops=_make_cross_device_ops(config.all_reduce_alg)
        )
    return strategy, len(names)


def _make_cross_device_ops(algorithm: str) -> Any:
    makers = {
        'nccl': tf.distribute.NcclAllReduce,
        'hierarchical_copy': tf.distribute.HierarchicalCopyAllReduce,
        'reduction_to_one': tf.distribute.ReductionToOneDevice,
    }
    return makers[algorithm]() if algorithm in makers else None


def _make_multi_worker_strategy(config: DistributionConfig) -> Any:
    # The eager runtime would start servers of its own and swallow SIGTERM.
    tf.compat.v1.disable_eager_execution()
    implementations = {
        'auto': tf.distribute.experimental.CommunicationImplementation.AUTO,
        'nccl': tf.distribute.experimental.CommunicationImplementation.NCCL,
        'ring': tf.distribute.experimental.CommunicationImplementation.RING,
    }
    # No timeout_seconds: TensorFlow starts a thread for each all-reduce then, which sleeps that long, thousands in a run. The
    # watchdog ends a wait that takes too long.
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementations[config.all_reduce_alg])
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def find_tpu(name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Looks for a TPU in the flag, the environment and on this machine; takes seconds at most.

    TensorFlow itself would resolve an address behind which nobody answers and then wait for hours.

    Args:
      name: of `--tpu`.
      environ: TPU_NAME, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS and TPU_CONFIG are read.

    Returns:
      Name or address and ''; or '' and why there is none.
    """
    named = name or environ.get('TPU_NAME', '') or environ.get('KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS', '').split(',')[0]
    if not named and environ.get('TPU_CONFIG'):
        named = environ['TPU_CONFIG']
    if named.startswith('grpc://'):
        parts = urlsplit(named)
        try:
            socket.create_connection((parts.hostname or '', parts.port or 8470), timeout=_PROBE_SECS).close()
        except (OSError, ValueError) as error:
            return '', f'{named} does not answer ({error})'
        return named, ''
    # The chips of a TPU VM are device files.
    if any(os.path.exists(path) for path in ('/dev/accel0', '/dev/vfio/0')):
        return named or 'local', ''
    if named == 'local':
        return '', 'this machine has no TPU device file (/dev/accel0)'
    if named:
        return _resolve_tpu(named)
    return '', 'none named by --tpu or TPU_NAME, no device file'


def _resolve_tpu(name: str) -> tuple[str, str]:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver('' if name.startswith('{') else name)
        address = resolver.master()
    except Exception as error:  # the client of the TPU service raises what its HTTP library raises
        return '', f'{name} cannot be resolved ({" ".join(str(error).split())[:200]})'
    return find_tpu(address, {}) if address.startswith('grpc://') else (name, '')


def _count(number: int, noun: str) -> str:
    return f'{number} {noun}{"" if number == 1 else "s"}'
