"""The same values on TensorFlow 2.15 and on 2.16-2.21: run this file under both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.util import event_pb2
from tensorflow.python.distribute import distribute_coordinator
from tensorflow.python.distribute.distribute_config import DistributeConfig

from tests import compat_task
from trainer import compat
from trainer.errors import UsageError

ROOT = Path(__file__).parents[1]
RELEASE = tuple(int(part) for part in tf.__version__.split('.')[:2])
IS_NATIVE = RELEASE == compat.NATIVE
after_2_15 = pytest.mark.skipif(IS_NATIVE, reason='TensorFlow 2.15 ships Estimator')

estimator = compat.estimator
CLUSTER = {'chief': ['a:1'], 'worker': ['b:1', 'c:1'], 'ps': ['d:1', 'e:1']}


def expected_losses(steps):
    """Losses of compat_task's regression, worked out in float64: mean squared error, plain gradient descent."""
    x, y = compat_task.X.astype(np.float64), compat_task.Y.astype(np.float64)
    weights, bias, losses = np.zeros((2, 1)), 0.0, []
    for _ in range(steps):
        error = x @ weights + bias - y
        losses.append(float(np.mean(error**2)))
        weights -= compat_task.LEARNING_RATE * 2 * x.T @ error / len(x)
        bias -= compat_task.LEARNING_RATE * 2 * float(np.mean(error))
    return losses


def run_python(code, **environ):
    """Standard output of `code` in a new interpreter; a failure shows its standard error."""
    environ = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3', **environ}
    environ.pop('TF_USE_LEGACY_KERAS', None)
    done = subprocess.run([sys.executable, '-c', code], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Versions.


@pytest.mark.parametrize('version', ['2.15.0', '2.15.1', '2.15.0.post1', '2.15.0+nv24.1'])
def test_2_15_is_native_and_needs_no_tf_keras(monkeypatch, version):
    monkeypatch.delenv('TF_USE_LEGACY_KERAS', raising=False)
    assert compat.check_versions(version, '2.15.0', has_tf_keras=False)


@pytest.mark.parametrize('version', ['2.16.1', '2.17.0', '2.18.1', '2.19.0', '2.20.0', '2.21.0', '2.21.0rc1'])
def test_2_16_to_2_21_are_supplied_what_they_dropped(version):
    assert not compat.check_versions(version, '2.15.0', has_tf_keras=True)


@pytest.mark.parametrize('version', ['1.15.5', '2.14.1', '2.22.0', '3.0.0', 'unknown'])
def test_other_tensorflow_is_an_error_that_lists_the_versions_that_work(version):
    with pytest.raises(UsageError) as error:
        compat.check_versions(version, '2.15.0', has_tf_keras=True)
    assert str(error.value) == (
        f'TensorFlow {version} is not supported; install TensorFlow 2.15 (Python 3.9-3.11), or TensorFlow 2.16-2.21 '
        '(Python 3.10-3.13) with tf-keras of the same version and tensorflow-estimator 2.15.0'
    )


@pytest.mark.parametrize(
    ('estimator_package', 'message'),
    [
        (None, 'tensorflow-estimator is not installed, TensorFlow 2.18.0 needs 2.15.0'),
        ('2.14.0', 'tensorflow-estimator is version 2.14.0, TensorFlow 2.18.0 needs 2.15.0'),
    ],
)
def test_missing_or_old_tensorflow_estimator_names_the_command_that_mends_it(estimator_package, message):
    with pytest.raises(UsageError) as error:
        compat.check_versions('2.18.0', estimator_package, has_tf_keras=True)
    assert str(error.value) == message + ': pip install --no-deps tensorflow-estimator==2.15.0'


def test_missing_tf_keras_names_the_command_that_mends_it():
    with pytest.raises(UsageError, match=r'tf-keras is not installed.*2\.18\.0.*pip install "tf-keras==2\.18\.\*"'):
        compat.check_versions('2.18.0', '2.15.0', has_tf_keras=False)


def test_2_20_with_protobuf_7_names_the_command_that_mends_it():
    with pytest.raises(UsageError, match=r'TensorFlow 2\.20\.0 cannot write a graph with protobuf 7\.36\.2: pip install'):
        compat.check_versions('2.20.0', '2.15.0', has_tf_keras=True, protobuf='7.36.2')
    assert not compat.check_versions('2.20.0', '2.15.0', has_tf_keras=True, protobuf='6.33.1')
    assert not compat.check_versions('2.21.0', '2.15.0', has_tf_keras=True, protobuf='7.36.2')


def test_legacy_keras_without_tf_keras_is_an_error_on_2_15(monkeypatch):
    monkeypatch.setenv('TF_USE_LEGACY_KERAS', '1')
    with pytest.raises(UsageError, match='unset TF_USE_LEGACY_KERAS'):
        compat.check_versions('2.15.1', '2.15.0', has_tf_keras=False)
    assert compat.check_versions('2.15.1', '2.15.0', has_tf_keras=True)


def test_installed_version_takes_the_first_package_that_is_there():
    assert compat.installed_version('no-such-package', 'pytest') == pytest.__version__
    assert compat.installed_version('no-such-package') is None


def test_no_tensorflow_is_a_usage_error(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tensorflow', None)
    monkeypatch.setattr(compat, 'installed_version', lambda *packages: None)
    with pytest.raises(UsageError, match=r'TensorFlow cannot be imported .*; install TensorFlow 2\.15'):
        compat.tensorflow_version()


def test_unsupported_tensorflow_is_refused_before_it_is_imported():
    out = run_python(
        'import importlib.metadata, sys\n'
        'importlib.metadata.version = lambda package: "2.14.0"\n'
        'try:\n    from trainer import compat\n'
        'except ValueError as error:\n    print(error, "tensorflow" in sys.modules)'
    )
    assert out.startswith('TensorFlow 2.14.0 is not supported') and out.endswith(' False\n')


# --- Keras 2 and the order of imports.


def test_keras_is_keras_2():
    assert compat.keras.layers.Dense.__module__.startswith('keras.' if IS_NATIVE else 'tf_keras.')
    assert (os.environ.get('TF_USE_LEGACY_KERAS') == '1') is not IS_NATIVE


@pytest.mark.parametrize('first', ['', 'import tensorflow\n'], ids=['trainer first', 'tensorflow first'])
def test_import_loads_neither_estimator_nor_another_keras(first):
    out = run_python(
        f'{first}from trainer import compat\n'
        'import sys\n'
        'print("tensorflow_estimator" in sys.modules)\n'
        'from tensorflow.keras import layers\n'
        'print(layers.Dense is compat.keras.layers.Dense, layers.Dense.__module__.split(".")[0])\n'
        'print(compat.estimator.Estimator.__module__)'
    )
    keras_package = 'keras' if IS_NATIVE else 'tf_keras'
    assert out.split('\n') == [
        'False',
        f'True {keras_package}',
        'tensorflow_estimator.python.estimator.estimator',
        '',
    ]


@after_2_15
def test_keras_3_in_use_before_us_is_an_error():
    out = run_python(
        'import tensorflow\n'
        'tensorflow.keras.layers\n'
        'try:\n    from trainer import compat\n'
        'except ValueError as error:\n    print(error)'
    )
    assert out == (
        'tf.keras was used as Keras 3 before `trainer` was imported, and Estimator needs Keras 2: '
        'import trainer.compat first, or set TF_USE_LEGACY_KERAS=1 before Python starts\n'
    )


# --- RunConfig and the Distribute Coordinator.


@pytest.fixture
def tf_config(monkeypatch):
    """Sets TF_CONFIG to a task of a cluster: tf_config('worker', 1) or tf_config('chief', cluster={...})."""

    def set_task(task_type, index=0, cluster=None):
        task = {'type': task_type, 'index': index}
        monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': cluster or CLUSTER, 'task': task}))

    monkeypatch.delenv('TF_CONFIG', raising=False)
    return set_task


@pytest.mark.parametrize(
    ('task', 'index', 'master', 'is_chief', 'global_id'),
    [
        ('chief', 0, 'grpc://a:1', True, 0),
        ('worker', 1, 'grpc://c:1', False, 2),
        ('ps', 1, 'grpc://e:1', False, 4),
    ],
)
def test_run_config_reads_its_task_from_tf_config(tf_config, task, index, master, is_chief, global_id):
    tf_config(task, index)
    config = estimator.RunConfig()
    assert (config.task_type, config.task_id, config.master) == (task, index, master)
    assert (config.is_chief, config.global_id_in_cluster) == (is_chief, global_id)
    assert (config.num_worker_replicas, config.num_ps_replicas) == (3, 2)
    assert config.cluster_spec.as_dict() == CLUSTER


def test_run_config_of_the_evaluator_knows_no_cluster(tf_config):
    tf_config('evaluator')
    config = estimator.RunConfig()
    assert (config.task_type, config.is_chief, config.master) == ('evaluator', False, '')
    assert (config.num_worker_replicas, config.cluster_spec.as_dict()) == (0, {})


def test_tpu_run_config_reads_its_loop(tf_config):
    config = estimator.tpu.RunConfig(tpu_config=estimator.tpu.TPUConfig(iterations_per_loop=7, num_shards=8))
    assert (config.tpu_config.iterations_per_loop, config.tpu_config.num_shards, config.master) == (7, 8, '')


def mode_of(config):
    return getattr(config, '_distribute_coordinator_mode', None)


def test_a_strategy_and_a_cluster_make_an_independent_worker(tf_config):
    tf_config('chief')
    config = estimator.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy('CPU:0'))
    assert mode_of(config) == 'independent_worker'
    assert config.cluster_spec.as_dict() == CLUSTER


@pytest.mark.parametrize(
    ('cluster', 'strategies'),
    [
        ({'master': ['a:1'], 'worker': ['b:1']}, {'train_distribute'}),
        ({'master': ['a:1'], 'worker': ['b:1']}, {'eval_distribute'}),
        ({'master': ['a:1'], 'worker': ['b:1']}, set()),
    ],
    ids=['a master', 'evaluation only', 'no strategy'],
)
def test_other_clusters_do_not_use_the_coordinator(tf_config, cluster, strategies):
    tf_config('master', cluster=cluster)
    config = estimator.RunConfig(**{name: tf.distribute.OneDeviceStrategy('CPU:0') for name in strategies})
    assert mode_of(config) is None
    assert (config.task_type, config.num_worker_replicas) == ('master', 2)


def test_a_remote_cluster_makes_a_standalone_client(tf_config):
    remote = DistributeConfig(remote_cluster={'worker': ['b:1', 'c:1']})
    config = estimator.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy('CPU:0'), experimental_distribute=remote)
    assert mode_of(config) == 'standalone_client'
    assert config.cluster_spec == {'worker': ['b:1', 'c:1']}
    tf_config('chief')
    with pytest.raises(ValueError, match='Cannot set both "cluster_spec" of TF_CONFIG'):
        estimator.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy('CPU:0'), experimental_distribute=remote)


@pytest.mark.parametrize('field', ['train_distribute', 'eval_distribute'])
def test_a_strategy_given_twice_is_an_error(tf_config, field):
    strategy = tf.distribute.OneDeviceStrategy('CPU:0')
    with pytest.raises(ValueError, match=f'Either `{field}` or'):
        estimator.RunConfig(**{field: strategy}, experimental_distribute=DistributeConfig(**{field: strategy}))


class RecordingEstimator(estimator.Estimator):
    """An Estimator whose train() is recorded in `calls` with the RunConfig it ran under, not run."""

    @staticmethod
    def _assert_members_are_not_overridden(self):
        del self

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None):
        self.calls.append((self.config, hooks, max_steps))


@pytest.mark.parametrize(
    ('task', 'index', 'is_chief', 'global_id'), [('chief', 0, True, 0), ('worker', 1, False, 2), ('worker', 0, False, 1)]
)
def test_each_independent_worker_trains_a_copy_that_knows_its_task(
    tf_config, tmp_path, monkeypatch, task, index, is_chief, global_id
):
    tf_config(task, index)
    strategy = tf.distribute.OneDeviceStrategy('CPU:0')
    calls = []

    def run(worker_fn, strategy, eval_fn, eval_strategy, mode, cluster_spec, session_config):
        calls.append((mode, cluster_spec, eval_strategy))
        spec = tf.train.ClusterSpec(CLUSTER)
        with distribute_coordinator._WorkerContext(strategy, spec, task, index):
            worker_fn(strategy)

    monkeypatch.setattr(distribute_coordinator, 'run_distribute_coordinator', run)
    monkeypatch.setattr(RecordingEstimator, 'calls', [], raising=False)
    config = estimator.RunConfig(model_dir=str(tmp_path), train_distribute=strategy)
    job = RecordingEstimator(compat_task.model_fn, config=config, params={})
    hook = estimator.SessionRunHook()
    estimator.train_and_evaluate(
        job,
        estimator.TrainSpec(compat_task.train_input_fn, max_steps=3, hooks=[hook]),
        estimator.EvalSpec(compat_task.eval_input_fn, steps=1),
    )
    # An independent worker's coordinator reads the cluster from TF_CONFIG by itself.
    assert calls == [('independent_worker', None, None)]
    [(seen, hooks, max_steps)] = RecordingEstimator.calls
    assert ([type(hook) for hook in hooks], max_steps) == ([type(hook)], 3)
    assert (seen.task_type, seen.task_id, seen.is_chief) == (task, index, is_chief)
    assert (seen.global_id_in_cluster, seen.num_worker_replicas, seen.num_ps_replicas) == (global_id, 3, 2)
    assert seen.master == seen.evaluation_master
    # Else train() of the copy would go through the coordinator again.
    assert (mode_of(seen), mode_of(job.config)) == (None, 'independent_worker')


def test_an_independent_worker_has_no_train_of_its_own(tf_config, tmp_path):
    tf_config('chief')
    config = estimator.RunConfig(
        model_dir=str(tmp_path),
        train_distribute=tf.distribute.OneDeviceStrategy('CPU:0'),
        eval_distribute=tf.distribute.OneDeviceStrategy('CPU:0'),
    )
    job = estimator.Estimator(compat_task.model_fn, config=config, params={})
    with pytest.raises(ValueError, match='Only `STANDALONE_CLIENT` mode is supported when you call'):
        job.train(compat_task.train_input_fn, max_steps=1)
    with pytest.raises(ValueError, match='Only `STANDALONE_CLIENT` mode is supported when you call'):
        job.evaluate(compat_task.eval_input_fn, checkpoint_path='any')


def test_a_standalone_client_gives_hooks_to_the_chief_alone(tf_config, tmp_path, monkeypatch):
    strategy = tf.distribute.OneDeviceStrategy('CPU:0')
    config = estimator.RunConfig(
        model_dir=str(tmp_path),
        train_distribute=strategy,
        experimental_distribute=DistributeConfig(remote_cluster={'worker': ['b:1', 'c:1']}),
    )
    job = estimator.Estimator(compat_task.model_fn, config=config, params={})
    seen = []

    def run(worker_fn, strategy, mode, cluster_spec, session_config):
        for index in range(2):
            with distribute_coordinator._WorkerContext(strategy, cluster_spec, 'worker', index):
                worker_fn(strategy)

    monkeypatch.setattr(distribute_coordinator, 'run_distribute_coordinator', run)
    monkeypatch.setattr(
        estimator.Estimator,
        '_actual_train_model_distributed',
        lambda self, strategy, input_fn, hooks, listeners: seen.append((self.config.task_id, len(hooks))),
    )
    job.train(compat_task.train_input_fn, max_steps=2, hooks=[estimator.SessionRunHook()])
    # One hook of ours and the one that stops at max_steps.
    assert seen == [(0, 2), (1, 0)]


# --- TPU.


@after_2_15
def test_tpu_embedding_says_that_it_is_not_there():
    column = tf.compat.v1.tpu.experimental.embedding_column(
        tf.feature_column.categorical_column_with_identity('x', 4), dimension=2
    )
    text = r'TPU embedding \(embedding_config_spec of TPUEstimator\) needs TensorFlow 2.15.*ordinary variable'
    with pytest.raises(UsageError, match=text):
        tf.compat.v1.tpu.experimental.AdagradParameters(0.1)
    spec = estimator.tpu.experimental.EmbeddingConfigSpec
    with pytest.raises(UsageError, match=text):
        spec(feature_columns=[column], optimization_parameters=object())
    with pytest.raises(UsageError, match=text):
        spec(feature_to_config_dict={'x': 1}, table_to_config_dict={'t': 1}, optimization_parameters=object())


class FakeWorkers:
    """Stands for the WorkerHeartbeat op of two workers: keeps each request, answers with `health`."""

    def __init__(self):
        self.requests = []
        self.health = event_pb2.OK

    def op(self, request):
        def answer(message):
            self.requests.append(event_pb2.WorkerHeartbeatRequest.FromString(message))
            return event_pb2.WorkerHeartbeatResponse(health_status=self.health).SerializeToString()

        return tf.compat.v1.py_func(answer, [request], tf.string)


@pytest.fixture
def workers(monkeypatch):
    from tensorflow.python.tpu import session_support

    fake = FakeWorkers()
    monkeypatch.setattr(session_support, 'all_worker_devices', lambda session: ['/device:CPU:0', '/device:CPU:0'])
    monkeypatch.setattr(session_support.tpu_ops, 'worker_heartbeat', fake.op)
    return fake


def test_a_worker_that_shuts_down_gets_a_checkpoint_and_the_shutdown_hooks(workers, tmp_path):
    from tensorflow.python.tpu import session_support

    seen = []
    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        train_op = tf.compat.v1.assign_add(step, 1)

        def on_shutdown(context, all_workers, lame_workers):
            seen.append((all_workers.num_workers(), lame_workers.num_workers()))

        hook = session_support.GracefulShutdownHook(str(tmp_path / 'model.ckpt'), on_shutdown_hooks=[on_shutdown])
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            session.run(train_op)
            assert (seen, tf.train.latest_checkpoint(tmp_path)) == ([], None)
            workers.health = event_pb2.SHUTTING_DOWN
            session.run(train_op)
    assert seen == [(2, 2)]
    assert tf.train.latest_checkpoint(tmp_path) == str(tmp_path / 'model.ckpt-2')
    assert workers.requests[0].shutdown_mode == event_pb2.WAIT_FOR_COORDINATOR


def test_the_watchdog_arms_pings_and_disarms_the_workers(workers):
    from tensorflow.python.tpu import session_support

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        watchdog = session_support.WatchdogManager(session, ping_interval=0.05, shutdown_timeout=7)
        with watchdog:
            deadline = time.monotonic() + 10
            while len(workers.requests) < 8 and time.monotonic() < deadline:
                time.sleep(0.05)
    timeouts = [request.watchdog_config.timeout_ms for request in workers.requests]
    # Two workers: armed with 7 s, pinged at least three times, disarmed.
    assert timeouts[:2] == [7000, 7000] and timeouts[2:8] == [0] * 6
    assert timeouts.count(-1) == 2


def test_reset_computation_restarts_the_workers_and_the_session():
    from tensorflow.python.tpu import session_support

    class Workers:
        def __init__(self):
            self.exit_codes = []

        def shutdown(self, exit_code):
            self.exit_codes.append(exit_code)

    everyone, lame = Workers(), Workers()
    with pytest.raises(tf.errors.AbortedError, match='Resetting session loop'):
        session_support.ResetComputation()(None, everyone, lame)
    session_support.ShutdownAllWorkers()(None, everyone, None)
    session_support.ShutdownLameWorkers()(None, None, lame)
    assert (everyone.exit_codes, lame.exit_codes) == ([42, 42], [42])


def test_estimator_symbols_keep_their_export_names():
    from tensorflow.python.util import tf_export

    name = tf_export.get_canonical_name_for_symbol(estimator.RunConfig, api_name='estimator')
    assert name == 'estimator.RunConfig'


# --- Training.


def test_tpu_estimator_on_cpu_gives_the_losses_of_the_hand_calculation(tmp_path, monkeypatch):
    monkeypatch.setattr(compat_task, 'losses', [])
    result = compat_task.run_tpu_estimator(str(tmp_path))
    expected = expected_losses(compat_task.STEPS + 1)
    np.testing.assert_allclose(compat_task.losses, expected[:-1], rtol=1e-6)
    np.testing.assert_allclose(result['loss'], expected[-1], rtol=1e-6)
    np.testing.assert_allclose(result['predictions'], result['served'], rtol=1e-6)
    [events] = (tmp_path / 'host').iterdir()
    written = {
        event.step: float(tf.make_ndarray(value.tensor))
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert sorted(written) == list(range(1, compat_task.STEPS + 1))
    np.testing.assert_allclose([written[step] for step in sorted(written)], expected[:-1], rtol=1e-6)


def start_task(kind, model_dir, environ, stderr):
    environ = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3', **environ}
    command = [sys.executable, '-W', 'ignore', '-m', 'tests.compat_task', kind, str(model_dir)]
    # A session of its own, so that everything it starts can be killed with it.
    return subprocess.Popen(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    )


def run_cluster(kind, jobs, tmp_path, timeout_secs=240):
    """The JSON of every task that ends by itself; `jobs` is the cluster of TF_CONFIG, an evaluator is added."""
    sockets = {}
    for job in jobs:
        sockets[job] = socket.socket()
        sockets[job].bind(('127.0.0.1', 0))
    cluster = {job: [f'127.0.0.1:{sock.getsockname()[1]}'] for job, sock in sockets.items()}
    for sock in sockets.values():
        sock.close()
    deadline = time.monotonic() + timeout_secs
    tasks, results = {}, {}
    try:
        for job in dict.fromkeys([*jobs, 'evaluator']):
            environ = {'TF_CONFIG': json.dumps({'cluster': cluster, 'task': {'type': job, 'index': 0}})}
            with open(tmp_path / f'{job}.err', 'w') as stderr:
                tasks[job] = start_task(kind, tmp_path / 'model', environ, stderr)
        for job in tasks:
            if job != 'ps':  # It serves until it is killed.
                stdout, _ = tasks[job].communicate(timeout=max(1, deadline - time.monotonic()))
                assert tasks[job].returncode == 0, f'{job}:\n{(tmp_path / f"{job}.err").read_text()[-3000:]}'
                results[job] = json.loads(stdout)
    except subprocess.TimeoutExpired:
        logs = '\n'.join(f'{job}:\n{(tmp_path / f"{job}.err").read_text()[-2000:]}' for job in tasks)
        pytest.fail(f'not done after {timeout_secs} s\n{logs}')
    finally:
        for task in tasks.values():
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
                task.wait()
    return results


def assert_evaluated_and_exported(model_dir: Path):
    assert tf.train.latest_checkpoint(model_dir) == str(model_dir / f'model.ckpt-{compat_task.STEPS}')
    assert list((model_dir / 'eval').glob('events.*'))
    [export_dir] = (model_dir / 'export' / 'final').iterdir()
    assert (export_dir / 'saved_model.pb').exists()


@pytest.mark.cluster
@pytest.mark.slow
def test_two_replicas_of_a_mirrored_strategy_give_the_losses_of_one(tmp_path):
    with open(tmp_path / 'err', 'w') as stderr:
        task = start_task('mirrored', tmp_path / 'model', {}, stderr)
    try:
        stdout, _ = task.communicate(timeout=180)
    finally:
        if task.poll() is None:
            os.killpg(task.pid, signal.SIGKILL)
    assert task.returncode == 0, (tmp_path / 'err').read_text()[-3000:]
    result = json.loads(stdout)
    np.testing.assert_allclose(result['losses'], expected_losses(compat_task.STEPS), rtol=1e-6)


@pytest.mark.cluster
@pytest.mark.slow
def test_independent_workers_of_a_multi_worker_strategy_train_evaluate_and_export(tmp_path):
    # The coordinator, unlike the classic cluster, wants the evaluator in `cluster`.
    results = run_cluster('multi_worker', ['chief', 'worker', 'evaluator'], tmp_path)
    for job in ('chief', 'worker'):
        np.testing.assert_allclose(results[job]['losses'], expected_losses(compat_task.STEPS), rtol=1e-6)
    assert results['evaluator']['losses'] == []
    assert_evaluated_and_exported(tmp_path / 'model')


@pytest.mark.cluster
@pytest.mark.slow
def test_a_parameter_server_cluster_trains_evaluates_and_exports(tmp_path):
    results = run_cluster('parameter_server', ['chief', 'worker', 'ps'], tmp_path)
    assert results['chief']['losses'][0] == pytest.approx(3.5)
    assert_evaluated_and_exported(tmp_path / 'model')
