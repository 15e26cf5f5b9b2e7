"""When a task gives up waiting: a peer gone, no step for too long; and when it does not."""

from __future__ import annotations

import socket
import threading

import pytest

from trainer import watchdog


class Ending:
    """Stands for the end of the process."""

    def __init__(self):
        self.reason = ''
        self.event = threading.Event()

    def __call__(self, exit_code, reason):
        self.exit_code, self.reason = exit_code, reason
        self.event.set()


def make_watchdog(probe, *, is_lockstep=True, peer_timeout_secs=0.1, step_timeout_secs=60.0, is_over=False, tell_secs=15.0):
    ending = Ending()
    dog = watchdog.Watchdog(
        {'worker/0': 'b:1'},
        is_lockstep=is_lockstep,
        peer_timeout_secs=peer_timeout_secs,
        step_timeout_secs=step_timeout_secs,
        is_over=lambda: is_over,
        end=ending,
        probe=probe,
        poll_secs=0.01,
        tell_secs=tell_secs,
    )
    return dog, ending


def test_peer_that_was_there_and_has_gone_ends_the_task():
    answers = iter([True, True])
    dog, ending = make_watchdog(lambda address: next(answers, False))
    dog.start()
    assert ending.event.wait(10)
    assert ending.exit_code == 75
    assert ending.reason.startswith('worker/0 (b:1) has been gone for 0 seconds; ending with code 75')


def test_task_that_waits_when_the_job_is_done_ends_well():
    answers = iter([True, True])
    dog, ending = make_watchdog(lambda address: next(answers, False), is_over=True)
    dog.start()
    assert ending.event.wait(10)
    assert (ending.exit_code, ending.reason) == (0, 'worker/0 (b:1) has been gone for 0 seconds; training is over')


def test_peer_that_has_not_come_yet_is_waited_for_until_the_step_timeout():
    dog, ending = make_watchdog(lambda address: False, step_timeout_secs=0.3)
    dog.start()
    assert ending.event.wait(10)
    assert 'no step for 0 seconds (--step_timeout_secs), waiting for worker/0 (b:1)' in ending.reason


def test_log_says_for_whom_it_waits_long_before_it_ends(caplog):
    calls = iter(range(200))
    dog, ending = make_watchdog(lambda address: next(calls, None) is None, step_timeout_secs=60.0, tell_secs=0.05)
    dog.start()
    while next(calls, None) is not None:
        threading.Event().wait(0.005)
    dog.stop()
    said = [record.getMessage() for record in caplog.records if 'waiting for' in record.getMessage()]
    assert said[0] == 'No step for 0 seconds: waiting for worker/0 (b:1); after 60 seconds (--step_timeout_secs) this task ends'
    assert 2 <= len(said) <= 6  # each time the wait has doubled, not at every look
    assert not ending.event.is_set()


def test_no_step_though_all_answer_ends_the_task():
    dog, ending = make_watchdog(lambda address: True, step_timeout_secs=0.2)
    dog.start()
    assert ending.event.wait(10)
    assert 'though every task that it needs answers' in ending.reason


def test_steps_keep_it_quiet_and_a_stop_ends_it():
    answers = iter([True])
    dog, ending = make_watchdog(lambda address: next(answers, False), step_timeout_secs=0.4, peer_timeout_secs=60)
    dog.start()
    for _ in range(8):
        dog.after_run(None, None)
        assert not ending.event.wait(0.1)
    dog.end(None)
    assert not ending.event.wait(0.6)


def test_parameter_server_may_be_away_for_the_peer_timeout():
    seen = []

    def probe(address):
        seen.append(address)
        return not 2 < len(seen) < 12  # away for ten looks, then back

    dog, ending = make_watchdog(probe, is_lockstep=False, peer_timeout_secs=5)
    dog.start()
    assert not ending.event.wait(0.5)
    dog.stop()


@pytest.mark.parametrize('listens', [True, False])
def test_probe_of_a_port(listens):
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        if listens:
            server.listen()
        address = f'127.0.0.1:{server.getsockname()[1]}'
        assert watchdog.answers(address) is listens
        if listens:
            assert not watchdog.is_free(address)
    assert watchdog.is_free(address)
