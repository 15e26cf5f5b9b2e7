from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from trainer import cluster, doctor, flags
from trainer import task as task_module
from trainer.cluster import Cluster, read_cluster
from trainer.config import ClusterConfig, RunConfig
from trainer.errors import UsageError

CHIEF, WORKERS, PS = ['c:1'], ['w0:1', 'w1:1'], ['p:1']
FULL = {'chief': CHIEF, 'worker': WORKERS, 'ps': PS}
JOB = {'scale_tier': 'STANDARD_1', 'args': ['--max_steps=10']}


def read(tf_config: Any, **environ: str) -> Cluster:
    text = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    return read_cluster({'TF_CONFIG': text, **environ})


def task(role: str, index: Any = 0, **more: Any) -> dict[str, Any]:
    return {'type': role, 'index': index, **more}


# The hosts of Vertex AI and of Kubernetes, as these services write them.
V = [f'cmle-training-workerpool{pool}-ab-0:2222' for pool in range(4)]
K = [f'digits-worker-{index}.default.svc:2222' for index in range(3)]
VERTEX_CLUSTER = {'chief': V[:1], 'worker': V[1:2], 'ps': V[2:3], 'evaluator': V[3:]}
VERTEX_POOLS = {f'workerpool{pool}': [host] for pool, host in enumerate(V)}
REDUCTION_SERVER = 'us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest'
POOL_SPECS = [{'container_spec': {'image_uri': 'eu.gcr.io/p/digits'}}] * 2
REDUCTION_JOB = json.dumps({'worker_pool_specs': [*POOL_SPECS, {'container_spec': {'image_uri': REDUCTION_SERVER}}]})
REST_JOB = json.dumps({'workerPoolSpecs': [{}, {}, {'containerSpec': {'imageUri': REDUCTION_SERVER}}]})
PS_JOB = json.dumps({'worker_pool_specs': POOL_SPECS + POOL_SPECS[:1]})
LOCAL_JOB = {'job_name': 'trainer.task', 'args': ['--max_steps=10']}
LOCAL = {'chief': ['localhost:27182'], 'ps': ['localhost:27183'], 'worker': ['localhost:27184', 'localhost:27185']}
STANDARD_1 = {
    'master': ['m:2222'],
    'worker': [f'w{index}:2222' for index in range(4)],
    'ps': [f'p{index}:2222' for index in range(3)],
}


def cloud(cluster: Any, task: Any, job: Any = JOB) -> dict[str, Any]:
    return {'cluster': cluster, 'task': task, 'job': job, 'environment': 'cloud'}


# (role, index, worker_index, num_workers, evaluates, has_evaluator, trial)
ALONE = ('chief', 0, 0, 1, True, False, '')

TF_CONFIGS = {
    'unset': ('', ALONE),
    'blank': (' \n', ALONE),
    'empty object': ('{}', ALONE),
    'null parts': ({'task': None, 'cluster': None}, ALONE),
    # AI Platform
    'one node, chief': (cloud({'chief': ['127.0.0.1:2222']}, task('chief', 0, cloud='x')), ALONE),
    'one node, master': (cloud({'master': ['127.0.0.1:2222']}, task('master', '0')), ALONE),
    'one node, no task': ({'cluster': {'chief': CHIEF}}, ALONE),
    'one node, empty roles': (cloud({'chief': CHIEF, 'ps': [], 'worker': []}, task('chief')), ALONE),
    'standard_1, master': (cloud(STANDARD_1, task('master', '0')), ('chief', 0, 0, 5, True, False, '')),
    'standard_1, worker': (cloud(STANDARD_1, task('worker', '3')), ('worker', 3, 4, 5, False, False, '')),
    'standard_1, ps': (cloud(STANDARD_1, task('ps', '2')), ('ps', 2, 0, 5, False, False, '')),
    'no ps, empty list': (
        cloud({'chief': CHIEF, 'worker': WORKERS, 'ps': []}, task('worker', 1)),
        ('worker', 1, 2, 3, False, False, ''),
    ),
    'ps and a chief alone': (cloud({'chief': CHIEF, 'ps': PS}, task('chief')), ('chief', 0, 0, 1, True, False, '')),
    'trial of one node': (cloud({'chief': CHIEF}, task('chief', trial='3')), ('chief', 0, 0, 1, True, False, '3')),
    'trial as a number': (cloud(FULL, task('worker', 1, trial=12)), ('worker', 1, 2, 3, False, False, '12')),
    'blank trial': (cloud({'chief': CHIEF}, task('chief', trial='')), ALONE),
    'trial 0': (cloud({'chief': CHIEF}, task('chief', trial='0')), ALONE),
    'evaluator counted by the job': (
        cloud(FULL, task('chief'), {**JOB, 'evaluator_count': '1'}),
        ('chief', 0, 0, 3, False, True, ''),
    ),
    'job as a string': (
        cloud(FULL, task('chief'), json.dumps({**JOB, 'evaluator_count': 1})),
        ('chief', 0, 0, 3, False, True, ''),
    ),
    # gcloud ai-platform local train
    'local, single': (cloud({}, {}, LOCAL_JOB), ALONE),
    'local, chief': (cloud(LOCAL, task('chief', 0), LOCAL_JOB), ('chief', 0, 0, 3, True, False, '')),
    'local, worker': (cloud(LOCAL, task('worker', 0), LOCAL_JOB), ('worker', 0, 1, 3, False, False, '')),
    'local, evaluator outside': (cloud(LOCAL, task('evaluator', 0), LOCAL_JOB), ('evaluator', 0, 0, 3, True, True, '')),
    # Vertex AI
    'vertex, chief': (cloud(VERTEX_CLUSTER, task('chief', 0, trial=''), PS_JOB), ('chief', 0, 0, 2, False, True, '')),
    'vertex, worker': (cloud(VERTEX_CLUSTER, task('worker'), PS_JOB), ('worker', 0, 1, 2, False, True, '')),
    'vertex, ps': (cloud(VERTEX_CLUSTER, task('ps'), PS_JOB), ('ps', 0, 0, 2, False, True, '')),
    'vertex, evaluator': (cloud(VERTEX_CLUSTER, task('evaluator'), PS_JOB), ('evaluator', 0, 0, 2, True, True, '')),
    # Kubernetes
    'tfjob, chief': (cloud({'worker': K[1:], 'ps': PS, 'chief': K[:1]}, task('chief')), ('chief', 0, 0, 3, True, False, '')),
    'tfjob, worker': (
        cloud({'worker': K[1:], 'ps': PS, 'chief': K[:1]}, task('worker')),
        ('worker', 0, 1, 3, False, False, ''),
    ),
    'tfjob, workers only, first': (cloud({'worker': K}, task('worker', 0)), ('chief', 0, 0, 3, True, False, '')),
    'tfjob, workers only, last': (cloud({'worker': K}, task('worker', 2)), ('worker', 1, 2, 3, False, False, '')),
    'tfjob, workers and ps, first': (cloud({'worker': K, 'ps': PS}, task('worker', 0)), ('chief', 0, 0, 3, True, False, '')),
    'tfjob, workers and ps, ps': (cloud({'worker': K, 'ps': PS}, task('ps', 0)), ('ps', 0, 0, 3, False, False, '')),
    'tfjob, workers only, evaluator': (cloud({'worker': K}, task('evaluator')), ('evaluator', 0, 0, 3, True, True, '')),
    # By hand
    'one worker': ({'cluster': {'worker': K[:1]}, 'task': task('worker')}, ALONE),
    'one worker, no task': ({'cluster': {'worker': K[:1]}}, ALONE),
    'worker 0 of no cluster': ({'cluster': {}, 'task': task('worker')}, ALONE),
    'evaluator of no cluster': ({'task': task('evaluator')}, ('evaluator', 0, 0, 1, True, True, '')),
    'evaluator beside a chief': (
        {'cluster': {'chief': CHIEF}, 'task': task('evaluator')},
        ('evaluator', 0, 0, 1, True, True, ''),
    ),
    'evaluator in the cluster': (
        {'cluster': {'chief': CHIEF, 'evaluator': ['e:1']}, 'task': task('chief')},
        ('chief', 0, 0, 1, False, True, ''),
    ),
    'IPv6': (
        {'cluster': {'chief': ['[::1]:2222'], 'worker': ['[fe80::1]:2222']}, 'task': task('worker')},
        ('worker', 0, 1, 2, False, False, ''),
    ),
}

CLUSTER_SPECS = {
    'one node': (cloud({'workerpool0': V[:1]}, task('workerpool0')), ALONE),
    'one node, tuning': (cloud({'workerpool0': V[:1]}, task('workerpool0', trial='2')), ('chief', 0, 0, 1, True, False, '2')),
    'pool 0': (cloud(VERTEX_POOLS, task('workerpool0', 0, trial=''), PS_JOB), ('chief', 0, 0, 2, False, True, '')),
    'pool 1': (cloud(VERTEX_POOLS, task('workerpool1', 0, trial=''), PS_JOB), ('worker', 0, 1, 2, False, True, '')),
    'pool 2': (cloud(VERTEX_POOLS, task('workerpool2', 0, trial=''), PS_JOB), ('ps', 0, 0, 2, False, True, '')),
    'pool 3': (cloud(VERTEX_POOLS, task('workerpool3', 0, trial=''), PS_JOB), ('evaluator', 0, 0, 2, True, True, '')),
    'index as text': (
        cloud({'workerpool0': V[:1], 'workerpool1': WORKERS}, task('workerpool1', '1')),
        ('worker', 1, 2, 3, False, False, ''),
    ),
    'empty pools': (cloud({'workerpool0': V[:1], 'workerpool1': [], 'workerpool2': []}, task('workerpool0'), ''), ALONE),
    'reduction server': (cloud(VERTEX_POOLS, task('workerpool1'), REDUCTION_JOB), ('worker', 0, 1, 2, False, True, '')),
}


def describe(place: Cluster) -> tuple[Any, ...]:
    return (
        place.role, place.index, place.worker_index, place.num_workers, place.evaluates, place.has_evaluator, place.trial,
    )  # fmt: skip


@pytest.mark.parametrize(('tf_config', 'expected'), TF_CONFIGS.values(), ids=TF_CONFIGS)
def test_legal_tf_config(tf_config: Any, expected: tuple[Any, ...]) -> None:
    got = read(tf_config)
    assert describe(got) == expected
    assert got.is_chief is got.exports is (expected[0] == 'chief')
    assert got.reports is got.evaluates


@pytest.mark.parametrize(('cluster_spec', 'expected'), CLUSTER_SPECS.values(), ids=CLUSTER_SPECS)
def test_legal_cluster_spec(cluster_spec: Any, expected: tuple[Any, ...]) -> None:
    for tf_config in ('', json.dumps(cloud({}, {}))):
        assert describe(read_cluster({'CLUSTER_SPEC': json.dumps(cluster_spec), 'TF_CONFIG': tf_config})) == expected


def test_cluster_spec_and_tf_config_of_vertex_say_the_same() -> None:
    for pool, role in enumerate(('chief', 'worker', 'ps', 'evaluator')):
        by_tf_config = read(cloud(VERTEX_CLUSTER, task(role), PS_JOB))
        by_cluster_spec = read_cluster({'CLUSTER_SPEC': json.dumps(cloud(VERTEX_POOLS, task(f'workerpool{pool}'), PS_JOB))})
        assert by_tf_config == by_cluster_spec


def test_tf_config_beats_cluster_spec() -> None:
    cluster_spec = json.dumps(cloud(VERTEX_POOLS, task('workerpool1')))
    assert read(cloud(FULL, task('ps')), CLUSTER_SPEC=cluster_spec).name == 'ps/0'
    assert read({'task': task('evaluator')}, CLUSTER_SPEC='not looked at').name == 'evaluator/0'
    assert read_cluster({'CLUSTER_SPEC': cluster_spec, 'CLOUD_ML_TRIAL_ID': '4'}).trial == '4'


@pytest.mark.parametrize('job', [REDUCTION_JOB, REST_JOB, json.loads(REDUCTION_JOB)])
def test_reduction_server_is_left_out_of_the_cluster(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    pools = {**VERTEX_POOLS, 'workerpool2': ['r0:1', 'r1:1']}
    del pools['workerpool3']
    with caplog.at_level(logging.INFO):
        got = read_cluster({'CLUSTER_SPEC': json.dumps(cloud(pools, task('workerpool0'), job))})
    assert got.spec == {'chief': (V[0],), 'worker': (V[1],)}
    assert caplog.messages == [
        'CLUSTER_SPEC: left the Reduction Server out of the cluster; it sums gradients, and is no task of it'
    ]
    assert read(cloud({'chief': CHIEF, 'worker': WORKERS, 'ps': PS}, task('chief'), job)).hosts('ps') == ()


@pytest.mark.parametrize(
    'job',
    [
        PS_JOB, '', {}, {'worker_pool_specs': POOL_SPECS}, {'worker_pool_specs': [{}, {}, None]}, {'worker_pool_specs': 'x'},
        {'worker_pool_specs': [{}, {}, {'container_spec': 'x'}]},
        {'worker_pool_specs': [{}, {}, {'container_spec': {'image_uri': 'p/digits', 'args': ['--reductionserver']}}]},
    ],
)  # fmt: skip
def test_parameter_servers_of_vertex_stay(job: Any) -> None:
    got = read_cluster({'CLUSTER_SPEC': json.dumps(cloud(VERTEX_POOLS, task('workerpool0'), job))})
    assert got.hosts('ps') == (V[2],)


def test_first_worker_is_the_chief_where_there_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        got = read(cloud({'worker': K, 'ps': PS}, task('worker', 1)))
    assert got.spec == {'chief': (K[0],), 'worker': (K[1], K[2]), 'ps': ('p:1',)}
    assert (got.name, got.worker_index) == ('worker/0', 1)
    assert caplog.messages == [
        'TF_CONFIG: no chief in the cluster, so the first worker is the chief, and worker N is worker N - 1'
    ]
    with caplog.at_level(logging.INFO):
        caplog.clear()
        read(cloud(FULL, task('worker', 1)))
    assert caplog.messages == []


FLAGS = {'worker_hosts': 'w0:1, w1:1,w2:1', 'ps_hosts': 'p0:1,p1:1'}


@pytest.mark.parametrize(
    ('job_name', 'task_index', 'expected'),
    [
        ('worker', 0, ('chief', 0, 0, 3, True, False, '')),
        ('worker', 1, ('worker', 0, 1, 3, False, False, '')),
        ('worker', 2, ('worker', 1, 2, 3, False, False, '')),
        ('chief', 0, ('chief', 0, 0, 3, True, False, '')),
        ('master', 0, ('chief', 0, 0, 3, True, False, '')),
        ('ps', 1, ('ps', 1, 0, 3, False, False, '')),
        ('evaluator', 0, ('evaluator', 0, 0, 3, True, True, '')),
    ],
)
def test_classic_flags(job_name: str, task_index: int, expected: tuple[Any, ...]) -> None:
    got = read_cluster({}, ClusterConfig(**FLAGS, job_name=job_name, task_index=task_index))
    assert describe(got) == expected
    assert got.spec == {'chief': ('w0:1',), 'worker': ('w1:1', 'w2:1'), 'ps': ('p0:1', 'p1:1')}
    assert json.loads(got.tf_config())['task'] == {'type': expected[0], 'index': expected[1]}


def test_classic_flags_of_a_command_line() -> None:
    config = flags.parse(
        ['--mode=export', '--ps-hosts=p:1', '--worker_hosts', 'a:1,b:1', '--job_name=worker', '--task-index=1']
    )
    assert read_cluster({}, config.cluster).spec == {'chief': ('a:1',), 'worker': ('b:1',), 'ps': ('p:1',)}
    assert read_cluster({}, config.cluster).name == 'worker/0'
    assert not flags.parse(['--mode=export']).cluster.is_given


def test_classic_flags_reach_the_run_and_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ['--mode=export', '--output_path=out', '--worker_hosts=a:1,b:1', '--job_name=worker', '--task_index=1']
    exam = doctor.Examination(argv, {})
    doctor.check_flags(exam)
    assert doctor.check_cluster(exam) == 'worker/0 of 2 that train'
    assert doctor.check_cluster(doctor.Examination(['--nosuch'], {})) == 'chief/0 of 1 that train'
    monkeypatch.setattr(task_module, 'set_up_logs', lambda debug: None)  # they would outlive the test
    monkeypatch.setenv('TF_CONFIG', json.dumps(cloud(FULL, task('ps'))))
    assert task_module.main(argv) == 2
    assert capsys.readouterr().err.startswith('trainer: error: --job_name=worker and TF_CONFIG (ps/0) both place this process')


def test_classic_flags_of_a_lone_process() -> None:
    assert read_cluster({}, ClusterConfig(worker_hosts='w:1', job_name='worker')).tf_config() == ''
    lone = read_cluster({}, ClusterConfig(job_name='evaluator'))
    assert (lone.name, lone.spec, lone.evaluates) == ('evaluator/0', {}, True)


def test_classic_flags_take_trial_and_job_from_the_environment() -> None:
    config = ClusterConfig(**FLAGS, job_name='worker', task_index=1)
    tf_config = json.dumps(cloud({'chief': CHIEF}, task('chief', trial='3')))
    got = read_cluster({'TF_CONFIG': tf_config}, config)
    assert (got.name, got.trial, got.job) == ('worker/0', '3', JOB)
    assert read_cluster({'CLOUD_ML_TRIAL_ID': '5'}, config).trial == '5'


@pytest.mark.parametrize(
    ('environ', 'name'),
    [
        ({'TF_CONFIG': json.dumps(cloud(FULL, task('worker', 1)))}, 'TF_CONFIG (worker/1)'),
        ({'TF_CONFIG': json.dumps({'task': task('evaluator')})}, 'TF_CONFIG (evaluator/0)'),
        ({'CLUSTER_SPEC': json.dumps(cloud(VERTEX_POOLS, task('workerpool0')))}, 'CLUSTER_SPEC (chief/0)'),
    ],
)
def test_a_cluster_in_flags_and_environment_is_an_error(environ: dict[str, str], name: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_cluster(environ, ClusterConfig(**FLAGS, job_name='ps'))
    variable = name.split()[0]
    assert str(raised.value) == (
        f'--job_name=ps and {name} both place this process in a cluster; leave the flags out (--job_name, --task_index, '
        f'--worker_hosts, --ps_hosts), or unset {variable}'
    )


JOB_NAMES = 'ps, worker, evaluator, chief, master'


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'job_name': 'wrker'}, f'--job_name=wrker: expected one of {JOB_NAMES}; did you mean worker?'),
        ({'job_name': 'boss'}, f'--job_name=boss: expected one of {JOB_NAMES}'),
        ({'job_name': 'worker'}, '--job_name=worker without --worker_hosts: give every task as host:port'),
        ({'job_name': 'worker', 'worker_hosts': ' '}, '--job_name=worker without --worker_hosts: give every task as host:port'),
        ({'job_name': 'ps', 'worker_hosts': 'a:1'}, '--job_name=ps without --ps_hosts: give every task as host:port'),
        ({'job_name': 'ps', 'ps_hosts': 'a:1'}, '--ps_hosts without --worker_hosts: say who trains, the chief first'),
        ({'worker_hosts': 'a:1'}, '--worker_hosts without --job_name: say which of the tasks this process is'),
        ({'task_index': 1}, '--task_index without --job_name: say which of the tasks this process is'),
        (FLAGS, '--ps_hosts and --worker_hosts without --job_name: say which of the tasks this process is'),
        ({**FLAGS, 'job_name': 'worker', 'task_index': 3}, '--task_index=3: --worker_hosts has 3 (index 0 to 2)'),
        ({**FLAGS, 'job_name': 'ps', 'task_index': 2}, '--task_index=2: --ps_hosts has 2 (index 0 to 1)'),
        ({**FLAGS, 'job_name': 'ps', 'task_index': -1}, '--task_index=-1: expected at least 0'),
        ({**FLAGS, 'job_name': 'chief', 'task_index': 1}, '--task_index=1: expected 0 for --job_name=chief, which is worker 0'),
        ({'job_name': 'worker', 'worker_hosts': 'a:1,b'}, "--worker_hosts: expected comma-separated host:port, got 'b'"),
        ({'job_name': 'worker', 'worker_hosts': 'a:0'}, "--worker_hosts: expected comma-separated host:port, got 'a:0'"),
        ({'job_name': 'worker', 'worker_hosts': 'a:1,'}, "--worker_hosts: expected comma-separated host:port, got ''"),
        (
            {'job_name': 'worker', 'worker_hosts': 'a:1 b:2'},
            "--worker_hosts: expected comma-separated host:port, got 'a:1 b:2'",
        ),
        (
            {'job_name': 'worker', 'worker_hosts': 'a:65536'},
            "--worker_hosts: expected comma-separated host:port, got 'a:65536'",
        ),
        ({'job_name': 'ps', 'ps_hosts': 'grpc://a:1'}, "--ps_hosts: expected comma-separated host:port, got 'grpc://a:1'"),
        (
            {'job_name': 'worker', 'worker_hosts': 'a:1,a:1'},
            'a:1 is twice in --worker_hosts: each task needs an address of its own',
        ),
        (
            {'job_name': 'worker', 'worker_hosts': 'a:1', 'ps_hosts': 'a:1'},
            'a:1 is in --ps_hosts and in --worker_hosts: each task needs an address of its own',
        ),
    ],
)
def test_wrong_classic_flags_are_errors_that_name_them(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        ClusterConfig(**values)
    assert str(raised.value) == message


def test_no_tf_config_is_one_process_and_takes_the_trial_of_the_service() -> None:
    assert read_cluster({}) == Cluster()
    assert read_cluster({'CLOUD_ML_TRIAL_ID': '7'}).trial == '7'
    assert read({'task': {'trial': '2'}}, CLOUD_ML_TRIAL_ID='7').trial == '2'


def read_all(cluster_of: dict[str, list[str]]) -> list[Cluster]:
    """Every process of a cluster by TF_CONFIG, and an evaluator outside of it."""
    tasks = [task(role, index) for role, hosts in cluster_of.items() for index in range(len(hosts))]
    return [read({'cluster': cluster_of, 'task': place}) for place in [*tasks, task('evaluator')]]


@pytest.mark.parametrize('first', ['chief', 'master', 'worker'])
@pytest.mark.parametrize('num_workers', [0, 1, 2, 5, 19])
@pytest.mark.parametrize('num_ps', [0, 1, 3])
@pytest.mark.parametrize('num_evaluators', [0, 1])
def test_every_cluster_is_shared_out_once(first: str, num_workers: int, num_ps: int, num_evaluators: int) -> None:
    workers, ps = [f'w{index}:1' for index in range(num_workers)], [f'p{index}:1' for index in range(num_ps)]
    spec = {'worker': workers, 'ps': ps, 'evaluator': ['e:1'] * num_evaluators}
    spec[first] = [*spec.get(first, ()), 'c:1']
    places = read_all(spec)
    total = num_workers + 1
    training = [place for place in places if place.role in ('chief', 'worker')]
    assert sorted(place.worker_index for place in training) == list(range(total))
    assert {place.num_workers for place in places} == {total}
    assert sum(place.is_chief for place in places) == 1
    assert sum(place.exports for place in places) == 1
    assert len({place.name for place in training}) == total
    assert len({json.dumps(place.spec, sort_keys=True) for place in places}) == 1, 'two tasks see different clusters'
    in_cluster = [place for place in places if place.role != 'evaluator']
    assert sum(place.evaluates for place in in_cluster) == (0 if num_evaluators else 1)
    assert {place.has_evaluator for place in in_cluster} == {bool(num_evaluators)}
    for place in in_cluster:
        assert len(place.peers()) == total + num_ps - 1
        assert place.name not in place.peers()


@pytest.mark.parametrize('num_workers', [1, 2, 6])
def test_every_cluster_of_flags_is_shared_out_once(num_workers: int) -> None:
    hosts = ','.join(f'w{index}:1' for index in range(num_workers))
    places = [
        read_cluster({}, ClusterConfig(worker_hosts=hosts, job_name='worker', task_index=index)) for index in range(num_workers)
    ]
    assert [place.worker_index for place in places] == list(range(num_workers))
    assert [place.role for place in places] == ['chief'] + ['worker'] * (num_workers - 1)
    assert {place.num_workers for place in places} == {num_workers}


def test_peers_are_the_other_tasks_of_the_cluster() -> None:
    spec = {**FULL, 'evaluator': ['e:1']}
    every = {'chief/0': 'c:1', 'worker/0': 'w0:1', 'worker/1': 'w1:1', 'ps/0': 'p:1'}
    for role, index in (('chief', 0), ('worker', 1), ('ps', 0)):
        peers = {name: host for name, host in every.items() if name != f'{role}/{index}'}
        assert read({'cluster': spec, 'task': task(role, index)}).peers() == peers
    assert read({'cluster': spec, 'task': task('evaluator')}).peers() == every
    assert Cluster().peers() == {}


def test_hosts_of_a_role() -> None:
    place = read({'cluster': FULL, 'task': task('chief')})
    assert (place.hosts('worker'), place.hosts('ps'), place.hosts('evaluator')) == (('w0:1', 'w1:1'), ('p:1',), ())


@pytest.mark.parametrize(
    ('place', 'filters'),
    [
        (task('chief'), ['/job:ps', '/job:chief']),
        (task('worker', 1), ['/job:ps', '/job:worker/task:1']),
        (task('ps'), ['/job:ps', '/job:worker', '/job:chief']),
        (task('evaluator'), []),
    ],
)
def test_device_filters(place: dict[str, Any], filters: list[str]) -> None:
    assert read({'cluster': FULL, 'task': place}).device_filters() == filters
    assert Cluster().device_filters() == []


def test_evaluator_is_taken_out_of_the_cluster_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        got = read({'cluster': {**FULL, 'evaluator': ['e:1']}, 'task': task('chief')})
    assert got.spec == {'chief': ('c:1',), 'worker': ('w0:1', 'w1:1'), 'ps': ('p:1',)}
    assert got.has_evaluator
    assert caplog.messages == [
        'TF_CONFIG: took the evaluator out of the cluster; TensorFlow would wait for it to join the training'
    ]


def test_evaluator_is_known_from_the_job_or_from_being_one() -> None:
    assert not read({'cluster': FULL, 'task': task('chief'), 'job': JOB}).has_evaluator
    assert read({'cluster': FULL, 'task': task('chief'), 'job': {**JOB, 'evaluator_count': '1'}}).has_evaluator
    assert not read({'cluster': FULL, 'task': task('chief'), 'job': {**JOB, 'evaluator_count': 0}}).has_evaluator
    assert read({'task': task('evaluator')}).has_evaluator


@pytest.mark.parametrize('job', [JOB, json.dumps(JOB)])
def test_job_is_an_object_or_a_string_of_one(job: Any) -> None:
    assert read({'job': job}).job == JOB


@pytest.mark.parametrize('job', [None, '', {}])
def test_no_job_is_empty(job: Any) -> None:
    assert read({'job': job}).job == {}


@pytest.mark.parametrize(
    ('tf_config', 'message'),
    [
        ('{"cluster": ', 'not JSON: Expecting value: line 1 column 13 (char 12); got \'{"cluster":\'; correct it, or unset it'),
        ('[]', "expected an object with cluster and task, got '[]'"),
        ('"chief"', 'expected an object with cluster and task, got \'"chief"\''),
        ({'cluster': ['a:1']}, 'cluster: expected an object, got \'["a:1"]\''),
        ({'cluster': []}, "cluster: expected an object, got '[]'"),
        ({'task': 'chief'}, "task: expected an object, got 'chief'"),
        ({'job': 'not JSON'}, 'job: neither an object nor JSON of one: Expecting value'),
        ({'job': [1]}, "job: expected an object, got '[1]'"),
        ({'cluster': {'workers': WORKERS}}, 'cluster.workers: expected chief (or master), worker, ps, evaluator; did you mean'),
        ({'cluster': {'chief': 'c:1'}}, 'cluster.chief: expected a list of "host:port", got \'c:1\''),
        ({'cluster': {'chief': [2222]}}, 'cluster.chief: expected a list of "host:port", got \'[2222]\''),
        ({'cluster': {'worker': {'0': 'w:1'}}}, 'cluster.worker: expected a list of "host:port", got \'{"0": "w:1"}\''),
        ({'cluster': {'chief': CHIEF, 'master': CHIEF}}, 'cluster: has both chief and master, which are two names of one task'),
        ({'cluster': {'chief': ['a:1', 'b:1']}}, 'cluster.chief: expected one host, got 2; call the others worker'),
        ({'cluster': {'chief': ['c']}}, 'cluster.chief: expected a list of "host:port", got \'["c"]\''),
        ({'cluster': {'chief': ['c:0']}}, 'cluster.chief: expected a list of "host:port", got \'["c:0"]\''),
        ({'cluster': {'chief': ['c:x']}}, 'cluster.chief: expected a list of "host:port", got \'["c:x"]\''),
        ({'cluster': {'chief': ['']}}, 'cluster.chief: expected a list of "host:port", got \'[""]\''),
        ({'cluster': {'master': ['a:1', 'b:1']}}, 'cluster.master: expected one host, got 2; call the others worker'),
        ({'cluster': {'chief': CHIEF, 'worker': ['w:1', 'c:1']}}, 'cluster: c:1 is given twice; each task needs an address'),
        ({'cluster': {'ps': PS}, 'task': task('ps')}, 'cluster: has ps but nobody who trains; add chief'),
        ({'cluster': {'worker': WORKERS}}, 'task.type is missing: the cluster has 2 tasks, so say which one this is:'),
        ({'cluster': {'worker': WORKERS}, 'task': task('chief')}, "task.type: 'chief' is not in the cluster, which has worker"),
        ({'cluster': {'worker': WORKERS}, 'task': task('worker', 2)}, 'task.index: 2 is out of range: cluster.worker has 2'),
        ({'cluster': FULL, 'task': task('ps', 1)}, 'task.index: 1 is out of range: cluster.ps has 1 (index 0 to 0)'),
        (
            {'sparseCluster': {'worker': {'1': 'w:1'}}, 'task': task('worker', 1)},
            'sparseCluster names only a part of the tasks;',
        ),
        ({'cluster': FULL}, 'task.type is missing: the cluster has 4 tasks, so say which one this is:'),
        ({'cluster': FULL, 'task': task('boss')}, "task.type: expected chief (or master), worker, ps, evaluator, got 'boss'"),
        ({'cluster': FULL, 'task': task(5)}, "task.type: expected chief (or master), worker, ps, evaluator, got '5'"),
        ({'cluster': {'chief': CHIEF}, 'task': task('ps')}, "task.type: 'ps' is not in the cluster, which has chief"),
        ({'cluster': FULL, 'task': task('worker', 2)}, 'task.index: 2 is out of range: cluster.worker has 2 (index 0 to 1)'),
        ({'cluster': FULL, 'task': task('worker', -1)}, "task.index: expected a whole number from 0, got '-1'"),
        ({'cluster': FULL, 'task': task('worker', 'one')}, "task.index: expected a whole number from 0, got 'one'"),
        ({'cluster': FULL, 'task': task('worker', 1.0)}, "task.index: expected a whole number from 0, got '1.0'"),
        ({'cluster': FULL, 'task': task('worker', None)}, "task.index: expected a whole number from 0, got 'null'"),
        ({'task': task('worker', 1)}, 'task worker/1 needs a cluster, and cluster is empty; list the tasks in it'),
        ({'task': task('ps', 0)}, 'task ps/0 needs a cluster, and cluster is empty; list the tasks in it'),
        ({'task': {'trial': '../3'}}, "task.trial (or CLOUD_ML_TRIAL_ID): expected a number, got '../3'"),
    ],
)
def test_illegal_tf_config_is_one_line_with_the_part_and_the_remedy(tf_config: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(tf_config)
    assert str(raised.value).startswith(f'TF_CONFIG: {message}')
    assert '\n' not in str(raised.value)


@pytest.mark.parametrize(
    ('cluster_spec', 'message'),
    [
        ('{', 'not JSON: Expecting property name'),
        ([1], "expected an object with cluster and task, got '[1]'"),
        (
            cloud({'workerpool4': CHIEF}, {}),
            'cluster.workerpool4: expected workerpool0 to workerpool3; did you mean workerpool3?',
        ),
        (cloud({'chief': CHIEF}, {}), 'cluster.chief: expected workerpool0 to workerpool3'),
        (cloud({'workerpool0': WORKERS}, {}), 'cluster.workerpool0: expected one host, got 2; call the others workerpool1'),
        (cloud({'workerpool2': PS}, {}), 'cluster: has workerpool2 but nobody who trains; add workerpool0'),
        (cloud({'workerpool0': ['c']}, {}), 'cluster.workerpool0: expected a list of "host:port", got \'["c"]\''),
        (cloud(VERTEX_POOLS, {}), 'task.type is missing: the cluster has 4 tasks, so say which one this is: workerpool0 to'),
        (cloud(VERTEX_POOLS, task('worker')), "task.type: expected workerpool0 to workerpool3, got 'worker'"),
        (
            cloud({'workerpool0': CHIEF}, task('workerpool1')),
            "task.type: 'workerpool1' is not in the cluster, which has workerpool0",
        ),
        (
            cloud(VERTEX_POOLS, task('workerpool1', 1)),
            'task.index: 1 is out of range: cluster.workerpool1 has 1 (index 0 to 0)',
        ),
        (cloud(VERTEX_POOLS, task('workerpool0'), 'x'), 'job: neither an object nor JSON of one: Expecting value'),
        (
            cloud(VERTEX_POOLS, task('workerpool2'), REDUCTION_JOB),
            "task.type: 'workerpool2' is not in the cluster, which has workerpool0",
        ),
    ],
)
def test_illegal_cluster_spec_is_one_line_in_the_words_of_vertex(cluster_spec: Any, message: str) -> None:
    text = cluster_spec if isinstance(cluster_spec, str) else json.dumps(cluster_spec)
    with pytest.raises(UsageError) as raised:
        read_cluster({'CLUSTER_SPEC': text})
    assert str(raised.value).startswith(f'CLUSTER_SPEC: {message}')
    assert '\n' not in str(raised.value)


def test_long_wrong_value_is_cut() -> None:
    with pytest.raises(UsageError) as raised:
        read('x' * 1000)
    assert "got '" + 'x' * 77 + "...'" in str(raised.value)


def test_tf_config_for_tensorflow_has_one_form() -> None:
    assert read({'cluster': {'master': CHIEF}, 'task': task('master')}).tf_config() == ''
    got = read({'cluster': {'master': CHIEF, 'worker': WORKERS, 'ps': [], 'evaluator': ['e:1']}, 'task': task('master', '0')})
    assert json.loads(got.tf_config()) == {
        'cluster': {'chief': CHIEF, 'worker': WORKERS},
        'task': {'type': 'chief', 'index': 0},
        'environment': 'cloud',
    }
    assert json.loads(read({'task': task('evaluator')}).tf_config())['cluster'] == {'chief': ['localhost:0']}


@pytest.mark.parametrize('role', ['master', 'worker', 'ps', 'evaluator'])
def test_tensorflow_takes_our_tf_config(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import compat

    spec = {'master': CHIEF, 'worker': WORKERS, 'ps': PS, 'evaluator': ['e:1']}
    got = read({'cluster': spec, 'task': task(role, '0')})
    monkeypatch.setenv('TF_CONFIG', got.tf_config())
    run_config = compat.estimator.RunConfig()
    assert run_config.task_type == got.role
    assert run_config.num_worker_replicas == (0 if role == 'evaluator' else got.num_workers)
    assert run_config.is_chief is got.is_chief
    session_config = run_config.session_config
    # Estimator has a second name of the chief in it.
    theirs = [name for name in (session_config.device_filters if session_config else []) if name != '/job:master']
    assert got.device_filters() == theirs


RUN, TRIAL = RunConfig(), Cluster(trial='3')
VERTEX = {'AIP_CHECKPOINT_DIR': 'gs://b/checkpoints/', 'AIP_MODEL_DIR': 'gs://b/model/'}


@pytest.mark.parametrize(
    ('run', 'place', 'environ', 'expected'),
    [  # expected: (output_dir, export_dir, output_flag)
        (RunConfig(job_dir='gs://b/j/3'), TRIAL, {}, ('gs://b/j/3', 'gs://b/j/3/model', '--job-dir')),
        (RunConfig(output_path='out'), Cluster(), {}, ('out', 'out/model', '--output_path')),
        (RunConfig(output_path='out'), TRIAL, {}, ('out/3', 'out/3/model', '--output_path')),
        (RunConfig(output_path='gs://b/o/'), TRIAL, {}, ('gs://b/o/3', 'gs://b/o/3/model', '--output_path')),
        (RunConfig(job_dir='j', output_path='out'), TRIAL, {}, ('j', 'j/model', '--job-dir')),
        (RUN, TRIAL, VERTEX, ('gs://b/checkpoints/', 'gs://b/model/', 'AIP_CHECKPOINT_DIR')),
        (RUN, TRIAL, {'AIP_MODEL_DIR': 'm'}, ('m', 'm', 'AIP_MODEL_DIR')),
        (RUN, TRIAL, {'AIP_CHECKPOINT_DIR': 'c'}, ('c', 'c/model', 'AIP_CHECKPOINT_DIR')),
        (RunConfig(output_path='out'), TRIAL, VERTEX, ('out/3', 'out/3/model', '--output_path')),
        (RunConfig(job_dir='j'), TRIAL, VERTEX, ('j', 'j/model', '--job-dir')),
    ],
)
def test_where_the_results_go(run: RunConfig, place: Cluster, environ: dict[str, str], expected: tuple[str, str, str]) -> None:
    got = (
        cluster.output_dir(run, place, environ),
        cluster.export_dir(run, place, environ),
        cluster.output_flag(run, environ),
    )
    assert got == expected


def test_no_place_for_the_results_is_an_error() -> None:
    with pytest.raises(UsageError) as raised:
        cluster.output_dir(RUN, Cluster(), {'AIP_CHECKPOINT_DIR': ''})
    assert str(raised.value) == (
        'no place for the results: give --output_path=FOLDER (or --job-dir, or set AIP_CHECKPOINT_DIR)'
    )


def test_module_needs_no_tensorflow() -> None:
    code = 'import sys, trainer.cluster, trainer.storage, trainer.flags; sys.exit("tensorflow" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], timeout=60, check=False).returncode == 0
