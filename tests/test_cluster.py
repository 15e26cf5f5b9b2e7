from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from trainer import cluster
from trainer.cluster import Cluster, read_cluster
from trainer.config import RunConfig
from trainer.errors import UsageError

CHIEF, WORKERS, PS = ['c:1'], ['w0:1', 'w1:1'], ['p:1']
FULL = {'chief': CHIEF, 'worker': WORKERS, 'ps': PS}
JOB = {'scale_tier': 'STANDARD_1', 'args': ['--max_steps=10']}


def read(tf_config: Any, **environ: str) -> Cluster:
    text = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    return read_cluster({'TF_CONFIG': text, **environ})


def task(role: str, index: Any = 0, **more: Any) -> dict[str, Any]:
    return {'type': role, 'index': index, **more}


@pytest.mark.parametrize(
    ('tf_config', 'expected'),
    [
        # One process: (role, index, num_workers, worker_index, trial, is_distributed)
        ('', ('chief', 0, 1, 0, '', False)),
        ('{}', ('chief', 0, 1, 0, '', False)),
        (
            {'job': {'job_name': 'j', 'args': []}, 'task': {}, 'cluster': {}, 'environment': 'cloud'},
            ('chief', 0, 1, 0, '', False),
        ),
        ({'task': None, 'cluster': None}, ('chief', 0, 1, 0, '', False)),
        ({'cluster': {'chief': ['127.0.0.1:2222']}, 'task': task('chief', '0')}, ('chief', 0, 1, 0, '', False)),
        ({'cluster': {'master': ['127.0.0.1:2222']}, 'task': task('master')}, ('chief', 0, 1, 0, '', False)),
        ({'cluster': {'chief': CHIEF}}, ('chief', 0, 1, 0, '', False)),
        ({'cluster': {}, 'task': task('worker')}, ('chief', 0, 1, 0, '', False)),
        ({'cluster': {'chief': CHIEF, 'ps': [], 'worker': []}, 'task': task('chief')}, ('chief', 0, 1, 0, '', False)),
        # Many processes
        ({'cluster': FULL, 'task': task('chief')}, ('chief', 0, 3, 0, '', True)),
        ({'cluster': FULL, 'task': task('worker', 0)}, ('worker', 0, 3, 1, '', True)),
        ({'cluster': FULL, 'task': task('worker', '1')}, ('worker', 1, 3, 2, '', True)),
        ({'cluster': FULL, 'task': task('ps')}, ('ps', 0, 3, 0, '', True)),
        ({'cluster': FULL, 'task': task('evaluator')}, ('evaluator', 0, 3, 0, '', True)),
        ({'cluster': {**FULL, 'evaluator': ['e:1']}, 'task': task('worker')}, ('worker', 0, 3, 1, '', True)),
        ({'cluster': {**FULL, 'evaluator': ['e:1']}, 'task': task('evaluator')}, ('evaluator', 0, 3, 0, '', True)),
        ({'cluster': {'master': CHIEF, 'worker': WORKERS}, 'task': task('worker', 1)}, ('worker', 1, 3, 2, '', True)),
        ({'cluster': {'master': CHIEF, 'worker': WORKERS, 'ps': []}, 'task': task('master')}, ('chief', 0, 3, 0, '', True)),
        ({'cluster': {'chief': CHIEF, 'ps': PS}, 'task': task('chief')}, ('chief', 0, 1, 0, '', True)),
        ({'cluster': {'chief': CHIEF}, 'task': task('evaluator')}, ('evaluator', 0, 1, 0, '', False)),
        ({'task': task('evaluator')}, ('evaluator', 0, 1, 0, '', False)),
        # Tuning
        ({'cluster': {'chief': CHIEF}, 'task': task('chief', trial='3')}, ('chief', 0, 1, 0, '3', False)),
        ({'cluster': FULL, 'task': task('worker', 1, trial=12)}, ('worker', 1, 3, 2, '12', True)),
        ({'cluster': {'chief': CHIEF}, 'task': task('chief', trial='')}, ('chief', 0, 1, 0, '', False)),
        ({'cluster': {'chief': CHIEF}, 'task': task('chief', trial='0')}, ('chief', 0, 1, 0, '', False)),
        ({'cluster': {'chief': CHIEF}, 'task': task('chief', cloud='x')}, ('chief', 0, 1, 0, '', False)),
    ],
)
def test_legal_tf_config(tf_config: Any, expected: tuple[Any, ...]) -> None:
    got = read(tf_config)
    assert (got.role, got.index, got.num_workers, got.worker_index, got.trial, got.is_distributed) == expected
    assert got.is_chief is (expected[0] == 'chief')


def test_no_tf_config_is_one_process_and_takes_the_trial_of_the_service() -> None:
    assert read_cluster({}) == Cluster()
    assert read_cluster({'CLOUD_ML_TRIAL_ID': '7'}).trial == '7'
    assert read({'task': {'trial': '2'}}, CLOUD_ML_TRIAL_ID='7').trial == '2'


def test_worker_indices_are_unique_over_chief_and_workers() -> None:
    places = [read({'cluster': FULL, 'task': task(role, i)}) for role, i in (('chief', 0), ('worker', 0), ('worker', 1))]
    assert [place.worker_index for place in places] == [0, 1, 2]
    assert {place.num_workers for place in places} == {3}
    assert [place.name for place in places] == ['chief/0', 'worker/0', 'worker/1']


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
        ('"chief"', "expected an object with cluster and task, got '\"chief\"'"),
        ({'cluster': ['a:1']}, "cluster: expected an object, got '[\"a:1\"]'"),
        ({'task': 'chief'}, "task: expected an object, got 'chief'"),
        ({'job': 'not JSON'}, 'job: neither an object nor JSON of one: Expecting value'),
        ({'job': [1]}, "job: expected an object, got '[1]'"),
        ({'cluster': {'workers': WORKERS}}, 'cluster.workers: expected chief (or master), worker, ps, evaluator; did you mean'),
        ({'cluster': {'chief': 'c:1'}}, 'cluster.chief: expected a list of "host:port", got \'c:1\''),
        ({'cluster': {'chief': [2222]}}, 'cluster.chief: expected a list of "host:port", got \'[2222]\''),
        ({'cluster': {'worker': {'0': 'w:1'}}}, 'cluster.worker: expected a list of "host:port", got \'{"0": "w:1"}\''),
        ({'cluster': {'chief': CHIEF, 'master': CHIEF}}, 'cluster: has both chief and master, which are two names of one task'),
        ({'cluster': {'chief': ['a:1', 'b:1']}}, 'cluster.chief: expected one host, got 2; call the others worker'),
        ({'cluster': {'worker': WORKERS}, 'task': task('worker')}, 'cluster: has worker but no chief; call one of'),
        ({'cluster': {'worker': WORKERS, 'ps': PS}}, 'cluster: has worker and ps but no chief; call one of'),
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
)  # fmt: skip
def test_illegal_tf_config_is_one_line_with_the_part_and_the_remedy(tf_config: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(tf_config)
    assert str(raised.value).startswith(f'TF_CONFIG: {message}')
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
