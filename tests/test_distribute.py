"""Which strategy is taken: by settings, cluster and devices; and what is refused, naming both sides."""

from __future__ import annotations

import dataclasses

import pytest

from trainer import distribute
from trainer.cluster import Cluster
from trainer.config import DistributionConfig
from trainer.distribute import Devices, Distribution
from trainer.errors import UsageError
from trainer.tpu_system import System

ALONE = Cluster()
WORKERS = Cluster(spec={'chief': ('a:1',), 'worker': ('b:1', 'c:1')})
SERVERS = Cluster(spec={'chief': ('a:1',), 'worker': ('b:1',), 'ps': ('d:1',)})
CPU = Devices(tpu_problem='none named')
TPU = System('local', cores=8, hosts=1)


@pytest.mark.parametrize(
    ('cluster', 'devices', 'settings', 'expected'),
    [
        (ALONE, CPU, {}, ('one_device', 'no TPU (none named), no GPU')),
        (ALONE, Devices(gpus=1, tpu_problem='none named'), {}, ('one_device', 'no TPU (none named), 1 GPU')),
        (ALONE, Devices(gpus=4, tpu_problem='none named'), {}, ('mirrored', 'no TPU (none named), 4 GPUs')),
        (ALONE, Devices(gpus=4, tpu_problem='none named'), {'num_gpus': 1}, ('one_device', 'no TPU (none named), 1 GPU')),
        (ALONE, Devices(tpu=TPU), {}, ('tpu', 'found local')),
        (ALONE, Devices(tpu=TPU, gpus=2), {'distribution_strategy': 'tpu'}, ('tpu', 'as asked')),
        (Cluster(role='evaluator'), CPU, {'distribution_strategy': 'tpu'}, ('one_device', 'an evaluator works alone')),
        (ALONE, CPU, {'num_cpu_replicas': 2}, ('mirrored', '--num_cpu_replicas=2')),
        (WORKERS, CPU, {}, ('multi_worker_mirrored', 'the cluster has workers and no parameter servers')),
        (SERVERS, CPU, {}, ('parameter_server', 'the cluster has parameter servers')),
        (SERVERS, CPU, {'sync_replicas': True}, ('parameter_server', 'the cluster has parameter servers')),
        (ALONE, CPU, {'distribution_strategy': 'off'}, ('one_device', 'as asked')),
        (Cluster(role='evaluator'), CPU, {}, ('one_device', 'an evaluator works alone')),
        (Cluster(role='evaluator'), CPU, {'all_reduce_alg': 'ring'}, ('one_device', 'an evaluator works alone')),
        (Cluster(role='evaluator'), CPU, {'sync_replicas': True}, ('one_device', 'an evaluator works alone')),
        (Cluster(role='evaluator'), CPU, {'distribution_strategy': 'mirrored'}, ('one_device', 'an evaluator works alone')),
        (Cluster(role='evaluator'), CPU, {'num_gpus': 4}, ('one_device', 'an evaluator works alone')),
        (
            dataclasses.replace(SERVERS, role='ps'),
            CPU,
            {'num_gpus': 4},
            ('parameter_server', 'the cluster has parameter servers'),
        ),
    ],
)
def test_strategy_chosen(cluster, devices, settings, expected):
    assert distribute.choose(DistributionConfig(**settings), cluster, devices) == expected


@pytest.mark.parametrize(
    ('cluster', 'settings', 'message'),
    [
        (ALONE, {'num_gpus': 2}, '--num_gpus=2: TensorFlow finds 0 here; expected at most that many'),
        (ALONE, {'distribution_strategy': 'tpu'}, '--distribution_strategy=tpu: no TPU: none named'),
        (ALONE, {'tpu': 'grpc://a:1'}, '--distribution_strategy=auto: no TPU: none named'),
        (WORKERS, {'distribution_strategy': 'tpu'}, 'tpu is for one process, the cluster has 1 chief, 2 worker'),
        (ALONE, {'tpu': 'a', 'distribution_strategy': 'off'}, '--tpu=a is for --distribution_strategy=tpu or auto, not off'),
        (ALONE, {'distribution_strategy': 'mirrored'}, 'finds no GPU here; to try it on the CPU add --num_cpu_replicas=2'),
        (
            WORKERS,
            {'distribution_strategy': 'off'},
            'off is for one process, the cluster has 1 chief, 2 worker; expected multi_',
        ),
        (SERVERS, {'distribution_strategy': 'mirrored'}, 'has 1 chief, 1 worker, 1 ps; expected parameter_server, or auto'),
        (SERVERS, {'distribution_strategy': 'multi_worker_mirrored'}, 'has no parameter servers, the cluster has 1 chief'),
        (ALONE, {'distribution_strategy': 'multi_worker_mirrored'}, 'needs a cluster: set TF_CONFIG, or try it with'),
        (WORKERS, {'distribution_strategy': 'parameter_server'}, 'needs a task ps in the cluster, which has 1 chief, 2 worker'),
        (ALONE, {'distribution_strategy': 'parameter_server'}, 'needs a task ps in the cluster, which is empty'),
        (WORKERS, {'sync_replicas': True}, '--sync_replicas is for parameter_server; the strategy is multi_worker_mirrored'),
        (SERVERS, {'sync_replicas': True, 'replicas_to_aggregate': 3}, 'the cluster trains on 2 tasks; expected at most'),
        (
            ALONE,
            {'num_cpu_replicas': 2, 'all_reduce_alg': 'nccl'},
            'nccl sums on GPUs, but the replicas are on the CPU; expected h',
        ),
        (WORKERS, {'all_reduce_alg': 'nccl'}, 'nccl sums on GPUs, but the replicas are on the CPU; expected ring or auto'),
        (
            ALONE,
            {'num_cpu_replicas': 2, 'all_reduce_alg': 'ring'},
            'ring is not for mirrored, which is the strategy (--num_cpu',
        ),
        (
            WORKERS,
            {'all_reduce_alg': 'hierarchical_copy'},
            'the cluster has workers and no parameter servers); expected nccl, ring',
        ),
        (SERVERS, {'all_reduce_alg': 'ring'}, '--all_reduce_alg=ring is not for parameter_server, which is the strategy'),
        (
            ALONE,
            {'all_reduce_alg': 'ring'},
            '--all_reduce_alg=ring is not for one_device, which is the strategy (no TPU (none ',
        ),
        (SERVERS, {'num_cpu_replicas': 2}, '--num_cpu_replicas=2 is for mirrored and central_storage; the strategy is param'),
    ],
)
def test_what_does_not_go_together_is_refused(cluster, settings, message):
    with pytest.raises(UsageError) as error:
        distribute.choose(DistributionConfig(**settings), cluster, CPU)
    assert message in str(error.value)


def test_backup_workers_need_synchronous_replicas():
    with pytest.raises(UsageError, match='--replicas_to_aggregate=1: needs --sync_replicas'):
        DistributionConfig(replicas_to_aggregate=1)


@pytest.mark.parametrize(
    ('distribution', 'each', 'described'),
    [
        (Distribution('one_device', ''), 120, 'global batch 120 = 1 replica x 120'),
        (Distribution('mirrored', '', local_replicas=4), 30, 'global batch 120 = 4 replicas x 30'),
        (
            Distribution('multi_worker_mirrored', '', local_replicas=2, num_workers=3, num_shards=3),
            20,
            'global batch 120 = 3 workers x 2 replicas x 20',
        ),
        (Distribution('parameter_server', '', num_shards=3), 120, 'global batch 120, each update by one of 3 workers'),
        (Distribution('tpu', '', local_replicas=8), 15, 'global batch 120 = 8 cores x 15'),
        (
            Distribution('tpu', '', local_replicas=4, num_workers=2, num_shards=2),
            15,
            'global batch 120 = 2 hosts x 4 cores x 15',
        ),
        (
            Distribution('parameter_server', '', sync_replicas=2, num_shards=3),
            60,
            'global batch 120 = 2 workers x 60 (1 more as backup)',
        ),
    ],
)
def test_batch_arithmetic(distribution, each, described):
    assert distribution.split_batch(120) == each
    assert distribution.describe_batch(120) == described


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match=r'--batch_size=100 does not divide by the 3 replicas .* the nearest that does is 99'):
        Distribution('mirrored', '', local_replicas=3).split_batch(100)


def test_all_reduce_has_no_timeout_for_which_tensorflow_would_start_a_thread_each_time(monkeypatch):
    made = []
    monkeypatch.setattr(distribute.tf.compat.v1, 'disable_eager_execution', lambda: None)
    monkeypatch.setattr(distribute.tf.distribute, 'MultiWorkerMirroredStrategy', lambda **settings: made.append(settings))
    distribute.make_distribution(DistributionConfig(all_reduce_alg='ring'), WORKERS, {})
    (options,) = [settings['communication_options'] for settings in made]
    assert (options.timeout_seconds, options.implementation.name) == (None, 'RING')
