"""When a task gives up waiting: a peer gone, no step for too long; and when it does not."""

from __future__ import annotations

import socket
import threading
import types

import pytest

from trainer import watchdog

STEP = types.SimpleNamespace(stop_requested=False)


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
    assert ending.reason.startswith('worker/0 (b:1) was lost 0 seconds ago; ending with code 75')


@pytest.mark.parametrize('has_stepped', [True, False])
def test_peer_whose_place_another_has_taken_is_lost_to_lockstep_once_a_step_was_made(has_stepped):
    calls = iter(range(1, 1000))
    dog, ending = make_watchdog(lambda address: next(calls) != 3)
    if has_stepped:
        dog.after_run(STEP, None)
    dog.start()
    assert ending.event.wait(10 if has_stepped else 0.5) is has_stepped
    dog.stop()
    assert ending.reason.startswith('worker/0 (b:1) was lost 0 seconds ago; ending with code 75' if has_stepped else '')


def test_last_step_is_the_end_of_watching():
    dog, ending = make_watchdog(lambda address: True, step_timeout_secs=0.3)
    dog.start()
    dog.after_run(types.SimpleNamespace(stop_requested=True), None)
    assert not ending.event.wait(0.6)


def test_task_that_waits_when_the_job_is_done_ends_well():
    answers = iter([True, True])
    dog, ending = make_watchdog(lambda address: next(answers, False), is_over=True)
    dog.start()
    assert ending.event.wait(10)
    assert (ending.exit_code, ending.reason) == (0, 'worker/0 (b:1) was lost 0 seconds ago; training is over')


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
        dog.after_run(STEP, None)
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


@pytest.fixture
def connections():
    made = watchdog.Connections()
    yield made
    made.close()


def test_who_listens_is_known_by_one_connection(connections):
    with socket.create_server(('127.0.0.1', 0)) as server:
        address = f'127.0.0.1:{server.getsockname()[1]}'
        assert not watchdog.is_free(address)
        assert [connections.answers(address) for _ in range(5)] == [True] * 5
        server.settimeout(5)
        taken, _ = server.accept()
        taken.sendall(b'greeting')
        server.settimeout(0.2)
        with pytest.raises(socket.timeout):  # five looks made one connection
            server.accept()
        assert connections.answers(address)
        taken.close()  # a process died, and another listens in its place
        assert [connections.answers(address) for _ in range(3)] == [False, True, True]
        server.accept()[0].close()
    assert not connections.answers(address)
    assert not connections.answers(address)
    assert watchdog.is_free(address)


def test_where_nobody_listens_nobody_answers(connections):
    with socket.socket() as silent:
        silent.bind(('127.0.0.1', 0))
        assert not connections.answers(f'127.0.0.1:{silent.getsockname()[1]}')


def test_connection_is_renewed_before_the_other_side_closes_it():
    connections = watchdog.Connections(renew_secs=0)
    with socket.create_server(('127.0.0.1', 0)) as server:
        address = f'127.0.0.1:{server.getsockname()[1]}'
        assert [connections.answers(address) for _ in range(3)] == [True] * 3
        taken = [server.accept()[0] for _ in range(3)]
        assert [connection.recv(1) for connection in taken[:2]] == [b'', b'']  # the first two were closed by us
        for connection in taken:
            connection.close()
    connections.close()
