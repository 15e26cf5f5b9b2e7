"""The hooks print what they should, save when they should, and stop training where it should stop."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer import compat, hooks, loop
from trainer.errors import DataError
from trainer.models import mlp


class _Context:
    def __init__(self):
        self.stopped = False
        self.session = None

    def request_stop(self):
        self.stopped = True


class _Values:
    def __init__(self, results):
        self.results = results


class _Session:
    def __init__(self, step):
        self._step = step

    def run(self, *unused):
        return self._step


def _state():
    state = loop.LoopState()
    state.result = loop.StepResult(
        step='step', loss='loss', scalars={'accuracy': 'accuracy', 'learning_rate': 'rate'}, examples_per_sec='examples'
    )
    return state


def _make_progress(clock, **settings):
    settings = {'task': 'chief/0', 'global_batch_size': 10, 'max_steps': 1000, 'log_secs': 5.0, 'show_bar': False, **settings}
    hook = hooks.ProgressHook(_state(), clock=clock, **settings)
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        hook.begin()
    hook.after_create_session(_Session(0), None)
    return hook


def _call(hook, clock, *, step, secs, loss=1.3618, accuracy=0.642):
    arguments = hook.before_run(None)
    clock.now += secs
    results = {'step': step, 'loss': np.float32(loss), 'accuracy': np.array([accuracy], np.float32)}
    hook.after_run(None, _Values(results))
    return arguments


def test_train_line_has_role_step_metrics_seconds_and_rates(caplog):
    caplog.set_level(logging.INFO)
    clock = fakes.FakeClock()
    hook = _make_progress(clock)
    _call(hook, clock, step=1, secs=0.5)
    _call(hook, clock, step=482, secs=8.003)
    assert caplog.messages == [
        'Train [chief/0], step 1: loss: 1.362, accuracy: 0.642 (0.500 sec) 2.0 global steps/s, 2.0 local steps/s',
        'Train [chief/0], step 482: loss: 1.362, accuracy: 0.642 (8.503 sec) 60.1 global steps/s, 60.1 local steps/s',
    ]


def test_train_line_comes_every_log_secs_and_at_the_last_step(caplog):
    caplog.set_level(logging.INFO)
    clock = fakes.FakeClock()
    hook = _make_progress(clock)
    for step in range(100, 1001, 100):
        _call(hook, clock, step=step, secs=2.0)
    steps = [int(message.split('step ')[1].split(':')[0]) for message in caplog.messages]
    assert steps == [100, 400, 700, 1000]


def test_rates_leave_out_the_time_of_an_evaluation(caplog):
    caplog.set_level(logging.INFO)
    clock = fakes.FakeClock()
    hook = _make_progress(clock)
    _call(hook, clock, step=10, secs=1.0)
    clock.now += 60.0  # An evaluation, between two session calls.
    _call(hook, clock, step=20, secs=1.0)
    assert caplog.messages[1].endswith('(62.000 sec) 10.0 global steps/s, 10.0 local steps/s')


def test_examples_per_sec_of_the_calls_before_are_fed():
    clock = fakes.FakeClock()
    hook = _make_progress(clock)
    assert _call(hook, clock, step=50, secs=1.0).feed_dict == {'examples': [0.0]}
    assert _call(hook, clock, step=150, secs=1.0).feed_dict == {'examples': [500.0]}


def test_bar_shows_steps_loss_and_time_left(capsys):
    clock = fakes.FakeClock()
    hook = _make_progress(clock, show_bar=True)
    _call(hook, clock, step=400, secs=1.0)
    hook._bar.refresh()
    hook.end(None)
    err = capsys.readouterr().err
    assert '400/1000' in err and 'loss=1.362' in err and '40%' in err and '<' in err


@pytest.mark.parametrize(
    ('shape', 'batch_size', 'threads'),
    [([784, 130], 100, 1), ([784, 130], 1024, 0), ([784, 130000], 1, 0), ([3, 3, 1, 2], 1, 0)],
)
def test_small_step_gets_one_thread_unless_set(shape, batch_size, threads):
    for is_set in (False, True):
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=5 if is_set else 0)
        with tf.Graph().as_default():
            tf.compat.v1.get_variable('weights', shape, use_resource=True)
            hooks.ThreadsHook(config, batch_size).begin()
        assert config.inter_op_parallelism_threads == threads
        assert config.intra_op_parallelism_threads == (5 if is_set else threads)


def test_threads_chosen_in_begin_reach_the_session(tmp_path):
    estimator_api = compat.estimator
    run_config = estimator_api.tpu.RunConfig(model_dir=str(tmp_path), session_config=tf.compat.v1.ConfigProto())
    estimator = estimator_api.tpu.TPUEstimator(
        mlp.model_fn, config=run_config, params=fakes.make_params(), use_tpu=False, train_batch_size=8
    )
    config = compat.get_session_config(estimator)

    class Look(tf.compat.v1.train.SessionRunHook):
        def after_create_session(self, session, coord):
            self.threads = session._config.inter_op_parallelism_threads

    look = Look()
    estimator.train(fakes.make_blobs_input_fn(8), max_steps=1, hooks=[hooks.ThreadsHook(config, 8), look])
    assert look.threads == 1


def test_stop_at_step_stops_at_the_step_and_not_before():
    hook = hooks.StopAtStepHook(_state(), 100)
    context = _Context()
    hook.after_run(context, _Values(99))
    assert not context.stopped
    hook.after_run(context, _Values(100))
    assert context.stopped


@pytest.mark.parametrize('loss', [float('nan'), float('inf'), float('-inf')])
def test_loss_that_is_not_finite_raises_with_the_step(loss):
    hook = hooks.StopOnNanHook(_state())
    hook.after_run(_Context(), _Values([6, np.float32(2.5)]))
    with pytest.raises(hooks.NanLossError, match=f'the loss became {loss} at step 7') as raised:
        hook.after_run(_Context(), _Values([7, np.float32(loss)]))
    assert raised.value.step == 7


class _SaveHook(hooks.SaveHook):
    """Saves nothing, but notes the step."""

    def __init__(self, clock, **settings):
        super().__init__(_state(), 'unused', clock=clock, **settings)
        self.saved = []
        self.problem = None
        self._global_step_tensor = 'global_step'

    def _save(self, session, step):
        if self.problem:
            raise self.problem
        self.saved.append(step)


def test_saves_at_multiples_after_a_restart_between_two():
    clock = fakes.FakeClock()
    hook = _SaveHook(clock, save_steps=100, save_secs=0)
    hook.after_create_session(_Session(137), None)
    for step in (150, 190, 200, 250, 330, 400):
        hook.after_run(_Context(), _Values(step))
    hook.end(_Session(410))
    assert hook.saved == [200, 330, 400, 410]


def test_saves_by_time_and_not_again_at_the_end():
    clock = fakes.FakeClock()
    hook = _SaveHook(clock, save_steps=0, save_secs=10)
    hook.after_create_session(_Session(5), None)
    for step in (6, 7, 8, 9):
        clock.now += 6
        hook.after_run(_Context(), _Values(step))
    hook.end(_Session(9))
    assert hook.saved == [7, 9]


def test_full_disk_is_named_and_another_error_passes():
    hook = _SaveHook(fakes.FakeClock(), save_steps=10, save_secs=0)
    hook.after_create_session(_Session(1), None)
    hook.problem = tf.errors.ResourceExhaustedError(
        None, None, 'Graph\nout/model.ckpt-10_temp/part-0; No space left on device\nX'
    )
    with pytest.raises(
        DataError, match=r'checkpoint of step 10 cannot be written: out/model.ckpt-10_temp/part-0; No space left'
    ):
        hook.after_run(_Context(), _Values(10))
    hook.problem = tf.errors.ResourceExhaustedError(None, None, 'out of memory')
    with pytest.raises(tf.errors.ResourceExhaustedError):
        hook.after_run(_Context(), _Values(10))


@pytest.mark.parametrize(('restored', 'latest'), [(0, 0), (300, 300), (301, 300)])
def test_session_from_the_latest_checkpoint_passes(restored, latest):
    hooks.RestoredStepHook(lambda: latest).after_create_session(_Session(restored), None)


def test_session_that_starts_before_the_latest_checkpoint_ends_training():
    with pytest.raises(DataError, match='would start at step 0, but the latest checkpoint is of step 300'):
        hooks.RestoredStepHook(lambda: 300).after_create_session(_Session(0), None)


def test_files_are_looked_at_when_a_session_is_lost_only(caplog):
    looks = []
    hook = hooks.RecoveryHook(lambda: looks.append(1))
    hook.after_create_session(_Session(0), None)
    assert not looks
    hook.after_create_session(_Session(20), None)
    assert len(looks) == 1
    assert caplog.messages == ['The session was lost; going on from step 20']


def test_lost_session_whose_files_are_out_of_reach_ends_training():
    def fail():
        raise DataError('gs://b/x: cannot read')

    hook = hooks.RecoveryHook(fail)
    hook.after_create_session(_Session(0), None)
    with pytest.raises(DataError, match='gs://b/x: cannot read'):
        hook.after_create_session(_Session(0), None)


def test_session_lost_again_and_again_at_one_step_ends_training():
    hook = hooks.RecoveryHook(lambda: None)
    for step in (0, 0, 0, 10, 20, 20, 20):
        hook.after_create_session(_Session(step), None)
    with pytest.raises(DataError, match='lost 4 times after step 20, though files can be read and written'):
        hook.after_create_session(_Session(20), None)
