"""SIGTERM: noticed by whoever asks, and by a thread when nobody does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types

import pytest

from tests import fakes
from tests.conftest import REPOSITORY
from trainer import peers, stopping
from trainer.errors import Terminated
from trainer.loop import LoopState


class Session:
    """Stands for a run context."""

    def __init__(self):
        self.stopped = False

    def request_stop(self):
        self.stopped = True


def test_sigterm_ends_training_after_the_step_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    context = Session()
    with stopping.SigtermGuard() as sigterm:
        hook = stopping.StopHook(LoopState(), sigterm, is_lockstep=False)
        hook.after_run(context, None)
        assert not context.stopped
        os.kill(os.getpid(), signal.SIGTERM)
        hook.after_run(context, None)
        assert context.stopped
        with pytest.raises(Terminated, match='SIGTERM; the checkpoint of step 7 is saved') as error:
            hook.raise_if_terminated(7)
        assert error.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_lockstep_a_vote_is_fed_and_the_sum_decides():
    result = types.SimpleNamespace(vote='vote', votes='votes')
    state = types.SimpleNamespace(result=result)
    context = Session()
    with stopping.SigtermGuard() as sigterm:
        hook = stopping.StopHook(state, sigterm, is_lockstep=True)
        assert hook.before_run(context).feed_dict['vote'].tolist() == [0, 0]
        os.kill(os.getpid(), signal.SIGTERM)
        assert hook.before_run(context).feed_dict['vote'].tolist() == [1, 0]
        hook.after_run(context, types.SimpleNamespace(results=[0.0, 0.0]))
        assert not context.stopped  # the vote counts when all have seen it
        hook.after_run(context, types.SimpleNamespace(results=[0.5, 0.0]))
        assert context.stopped


def test_worker_that_stops_for_another_ends_to_be_started_again():
    state = types.SimpleNamespace(result=types.SimpleNamespace(vote='vote', votes='votes'))
    with stopping.SigtermGuard() as sigterm:
        hook = stopping.StopHook(state, sigterm, is_lockstep=True)
        hook.after_run(Session(), types.SimpleNamespace(results=[0.5, 0.0]))
        with pytest.raises(Terminated, match='another worker got SIGTERM; the checkpoint of step 9 is saved') as error:
            hook.raise_if_terminated(9)
    assert error.value.exit_code == 75


def test_worker_that_saves_nothing_speaks_of_no_step():
    with stopping.SigtermGuard() as sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
        hook = stopping.StopHook(LoopState(), sigterm, is_lockstep=False)
        hook.after_run(Session(), None)
        with pytest.raises(Terminated) as error:
            hook.raise_if_terminated(None)
    assert str(error.value) == 'SIGTERM; the chief saves the checkpoint, the same command joins the job again'


def test_wish_of_another_task_ends_training_with_its_reason():
    context = Session()
    with stopping.SigtermGuard() as sigterm:
        hook = stopping.StopHook(LoopState(), sigterm, is_lockstep=False, find_reason=lambda: 'early stopping', poll_secs=0)
        hook.after_run(context, None)
        hook.raise_if_terminated(3)  # it is not a termination
    assert (context.stopped, hook.reason) == (True, 'early stopping')


def test_main_thread_that_is_stuck_is_ended_when_the_grace_is_over():
    # A lock that is never free stands for TensorFlow's C++: Python handles no signal while it waits there.
    program = """
import ctypes
from trainer.stopping import SigtermGuard
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with SigtermGuard(grace_secs=1.0):
    print('ready', flush=True)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)
"""
    process = subprocess.Popen([sys.executable, '-c', program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'ready\n'
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert time.monotonic() - started >= 0.9


class _Files:
    """Stands for the JobFiles of a job; `over` is what the chief has said."""

    poll_secs = 0.0

    def __init__(self):
        self.over = None

    def find_over(self, max_steps):
        return self.over


def _await_end(monkeypatch, answers, *, over_after=None, peer_timeout_secs=60.0, is_set=False):
    """`peers.await_end` with a chief of which `answers` says, half a second apart, whether it answers."""
    clock, files, answers = fakes.FakeClock(), _Files(), list(answers)

    def sleep(secs):
        clock.now += secs
        files.over = 'max_steps reached' if over_after is not None and clock.now >= over_after else None

    monkeypatch.setattr(peers.time, 'monotonic', clock)
    monkeypatch.setattr(peers.time, 'sleep', sleep)
    monkeypatch.setattr(
        peers.watchdog.Connections, 'answers', lambda self, address: answers.pop(0) if len(answers) > 1 else answers[0]
    )
    experiment = types.SimpleNamespace(
        distribution=types.SimpleNamespace(name='parameter_server'),
        files=files,
        cluster=types.SimpleNamespace(spec={'chief': ('c:1',)}),
        config=types.SimpleNamespace(
            loop=types.SimpleNamespace(max_steps=5),
            distribution=types.SimpleNamespace(peer_timeout_secs=peer_timeout_secs),
        ),
    )
    peers.await_end(experiment, types.SimpleNamespace(is_set=lambda: is_set, EXIT_CODE=143))
    return clock.now


def test_worker_stays_until_the_chief_says_that_training_is_over(monkeypatch):
    start = fakes.FakeClock().now
    assert _await_end(monkeypatch, [True], over_after=start + 20) == start + 20


@pytest.mark.parametrize(
    ('answers', 'settings', 'code', 'message'),
    [
        ([True, False, True], {}, 75, 'the chief was lost after the last step and has come back'),
        ([True, False], {'peer_timeout_secs': 30.0}, 75, r'the chief \(c:1\) has been gone for 30 seconds'),
        ([True], {'is_set': True}, 143, 'SIGTERM after the last step'),
    ],
)
def test_worker_that_has_seen_the_last_step_ends_to_be_started_again(monkeypatch, answers, settings, code, message):
    with pytest.raises(Terminated, match=message) as error:
        _await_end(monkeypatch, answers, **settings)
    assert error.value.exit_code == code
