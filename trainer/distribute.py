"""Which strategy a run takes, on which devices, and what one update is made of.

`choose` is plain logic over settings, cluster and devices; `make_distribution` makes TensorFlow's strategy from its answer.
Nothing is replaced in silence: what is asked for and missing is an error at once.

| strategy | one update of the weights is made of |
| --- | --- |
| off, one_device | the batch |
| mirrored, central_storage | the batch, in equal parts on the devices of this process |
| tpu | the batch, in equal parts on the cores of all hosts |
| multi_worker_mirrored | the batch, in equal parts on the devices of all workers |
| parameter_server | the batch, on one worker; with `--sync_replicas` in equal parts on several |
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer import tpu_system
from trainer.cluster import EVALUATOR, PS, Cluster
from trainer.config import DistributionConfig
from trainer.errors import UsageError

ONE_DEVICE, MIRRORED, CENTRAL_STORAGE, TPU = 'one_device', 'mirrored', 'central_storage', 'tpu'
MULTI_WORKER, PARAMETER_SERVER = 'multi_worker_mirrored', 'parameter_server'
# Of several devices in one process.
_LOCAL = (MIRRORED, CENTRAL_STORAGE)
# What --all_reduce_alg may be, auto aside.
_ALL_REDUCE = {
    MIRRORED: ('nccl', 'hierarchical_copy', 'reduction_to_one'),
    MULTI_WORKER: ('nccl', 'ring'),
}


@dataclasses.dataclass(frozen=True)
class Devices:
    """What this process finds on its machine."""

    gpus: int = 0
    tpu: tpu_system.System | None = None
    tpu_problem: str = ''
    """Why there is none."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The strategy of this run as every task of the cluster sees it."""

    name: str
    """one_device, mirrored, central_storage, multi_worker_mirrored, parameter_server or tpu."""
    reason: str
    """For the log: why this one."""
    strategy: Any = None
    """A `tf.distribute.Strategy`, where TensorFlow has one for the purpose."""
    local_replicas: int = 1
    """Devices of this process, or cores of a TPU's host, each with its part of the batch."""
    num_workers: int = 1
    """Processes that share an update: all that train, one when they update by themselves. Of a TPU, its hosts."""
    sync_replicas: int = 0
    """Gradients that an update of synchronous parameter servers awaits; 0 for the other strategies."""
    num_shards: int = 1
    """Processes that train, or hosts of a TPU, among which the records are divided."""
    tpu: str = ''
    """What TPUClusterResolver finds it by."""

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

    def split_batch(self, global_batch_size: int, flag: str = '--batch_size') -> int:
        """Returns the examples of one replica.

        Raises:
          UsageError: the batch does not divide by the replicas.
        """
        parts = self.batch_parts
        if global_batch_size % parts:
            nearest = max(1, round(global_batch_size / parts)) * parts
            raise UsageError(
                f'{flag}={global_batch_size} does not divide by the {parts} replicas of '
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
        worker, replica = ('host', 'core') if self.name == TPU else ('worker', 'replica')
        workers = f'{_count(self.num_workers, worker)} x ' if self.num_workers > 1 else ''
        return f'global batch {global_batch_size} = {workers}{_count(self.local_replicas, replica)} x {each}'


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
    flag = f'--distribution_strategy={asked}'
    if config.tpu and asked not in ('auto', TPU):
        raise UsageError(f'--tpu={config.tpu} is for --distribution_strategy={TPU} or auto, not {asked}; leave it out')
    if (asked == TPU or config.tpu) and not devices.tpu and not cluster.is_distributed:
        raise UsageError(f'{flag}: no TPU: {devices.tpu_problem}')
    name, reason = (asked, 'as asked') if asked != 'auto' else _choose_automatically(config, cluster, devices)
    name = ONE_DEVICE if name == 'off' else name
    tasks = ', '.join(f'{len(hosts)} {role}' for role, hosts in cluster.spec.items())
    if name in (ONE_DEVICE, TPU, *_LOCAL) and cluster.is_distributed:
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
    if devices.tpu:
        return TPU, f'found {devices.tpu.name}'
    tpu = f'no TPU ({devices.tpu_problem})'
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
    tpu, problem = None, 'not looked for'
    if config.distribution_strategy in ('auto', TPU) and not cluster.is_distributed:
        tpu, problem = tpu_system.find(config.tpu, environ)
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
    if name == TPU:
        assert tpu is not None
        # TPUEstimator would look for the cores among the devices of the eager runtime, where those of a remote TPU are not.
        tf.compat.v1.disable_eager_execution()
        # It looks into no function either, and would not see there that an optimizer is missing its CrossShardOptimizer.
        tf.compat.v1.disable_control_flow_v2()
        return Distribution(**facts, tpu=tpu.name, local_replicas=tpu.host_cores, num_workers=tpu.hosts, num_shards=tpu.hosts)
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


def _count(number: int, noun: str) -> str:
    return f'{number} {noun}{"" if number == 1 else "s"}'
