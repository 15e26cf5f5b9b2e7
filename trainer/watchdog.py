"""Ends a task that waits for others in vain, so that whoever started it starts it again.

TensorFlow waits for ever for a task that died: in a collective, in a session that cannot be made, for a parameter server.
Nothing inside the process can break that wait, so a thread ends the process, with a code that means "try again" (EX_TEMPFAIL of
sysexits.h). Every service restarts a task that ends with an error, and each resumes from the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Callable

import tensorflow as tf

logger = logging.getLogger(__name__)

EXIT_CODE = 75
_POLL_SECS = 1.0
_CONNECT_SECS = 2.0
_SPEAK_SECS = 2.0
# Whoever starts the tasks by hand learns by then which one is missing.
_TELL_SECS = 15.0
# After the last step workers leave one by one, each as soon as it is ready. Short, so that whoever waits in vain has ended
# by the time that the lost one is back: they start anew together.
_LOCKSTEP_GONE_SECS = 1.0


# Of the kernel's own questions to a silent peer: seconds before the first, seconds between them, how many.
_KEEPALIVE = {'TCP_KEEPIDLE': 5, 'TCP_KEEPALIVE': 5, 'TCP_KEEPINTVL': 2, 'TCP_KEEPCNT': 3}
# A gRPC server closes a connection on which nobody greets it after two minutes.
_RENEW_SECS = 60.0


class Connections:
    """Says who is there, over one connection kept to each task.

    A kept connection breaks when the process at its other end dies, however soon another takes its place; and it costs the
    other's gRPC server one file descriptor, where a new one for each look would cost one for two minutes each. The kernel's
    keepalive finds a machine that has gone without a word.

    Args:
      renew_secs: after which a connection is replaced by a new one.
    """

    def __init__(self, renew_secs: float = _RENEW_SECS) -> None:
        self._renew_secs = renew_secs
        self._kept: dict[str, tuple[socket.socket, float]] = {}

    def answers(self, address: str) -> bool:
        """Says whether somebody listens at 'host:port'; False once, too, when who was there is another now."""
        kept = self._kept.get(address)
        if kept is not None and not _is_open(kept[0]):
            self._kept.pop(address)[0].close()
            return False
        if kept is None or time.monotonic() - kept[1] >= self._renew_secs:
            fresh = _connect(address)
            if fresh is not None:
                self._kept[address] = fresh, time.monotonic()
                if kept is not None:
                    kept[0].close()
        return address in self._kept

    def close(self) -> None:
        """Closes them all."""
        while self._kept:
            self._kept.popitem()[1][0].close()


def _connect(address: str) -> socket.socket | None:
    host, _, port = address.rpartition(':')
    try:
        connection = socket.create_connection((host.strip('[]'), int(port)), timeout=_CONNECT_SECS)
    except OSError:
        return None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setblocking(False)
    return connection


def _is_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):  # the greeting of the server
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_free(address: str) -> bool:
    """Says whether this process could listen at the port of 'host:port', on every interface, as TensorFlow's servers do."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('', int(address.rpartition(':')[2])))
            probe.listen()
        except OSError:
            return False
    return True


def die(exit_code: int, message: str) -> None:
    """Says why and ends the process at once: its main thread cannot be reached."""
    _say(logger.error, message)
    os._exit(exit_code)


def _say(log: Callable[..., None], message: str) -> None:
    # The main thread may hold the lock of the log, when nobody reads our output any more, so this may take a moment only.
    speaker = threading.Thread(target=log, args=('%s', message), daemon=True)
    speaker.start()
    speaker.join(_SPEAK_SECS)


class Watchdog(tf.compat.v1.train.SessionRunHook):
    """Ends the process when no step is made for too long, or a task that it needs has gone.

    Args:
      peers: name to 'host:port' of the tasks without which no step can be made.
      is_lockstep: once a step has been made with it, a peer that left cannot join again, nor can one that takes its place: they
        are not waited for.
      peer_timeout_secs: how long a peer that was there may be away.
      step_timeout_secs: longest time without a step, evaluation and start included.
      is_over: whether the job is done; then this task has nothing more to do, and ends well.
      end: called with the exit code and the reason; for tests.
      probe: whether an address answers; for tests. None: over connections that are kept.
      tell_secs: seconds without a step after which the log says whom this task waits for, again each time they have doubled.
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        *,
        is_lockstep: bool,
        peer_timeout_secs: float,
        step_timeout_secs: float,
        is_over: Callable[[], object] = lambda: False,
        end: Callable[[int, str], None] = die,
        probe: Callable[[str], bool] | None = None,
        poll_secs: float = _POLL_SECS,
        tell_secs: float = _TELL_SECS,
    ) -> None:
        self._peers = dict(peers)
        self._is_lockstep = is_lockstep
        self._has_stepped = False
        self._peer_timeout_secs = peer_timeout_secs
        self._step_timeout_secs = step_timeout_secs
        self._is_over = is_over
        self._end = end
        self._probe = probe or Connections().answers
        self._poll_secs = poll_secs
        self._first_tell_secs = self._tell_secs = tell_secs
        self._last_step = time.monotonic()
        self._seen: set[str] = set()
        self._lost: dict[str, float] = {}  # when each peer that had answered did not
        self._off = threading.Event()

    def start(self) -> None:
        """Watches from now on; making the servers and the session counts too."""
        self._last_step = time.monotonic()
        threading.Thread(target=self._watch, name='watchdog', daemon=True).start()

    def stop(self) -> None:
        """Watches no longer: the last step is done, and peers leave as they like."""
        self._off.set()

    def feed(self) -> None:
        """Says that the process is alive and well."""
        self._last_step = time.monotonic()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.feed()
        self._has_stepped = True
        if run_context.stop_requested:  # what follows, the last checkpoint and its evaluation, needs no peer
            self.stop()

    def end(self, session: Any) -> None:
        self.stop()

    def _watch(self) -> None:
        while not self._off.wait(self._poll_secs):
            reason = self._find_reason()
            if not reason or self._off.is_set():
                continue
            if self._is_over():
                self._end(0, f'{reason}; training is over')
            else:
                self._end(EXIT_CODE, f'{reason}; ending with code {EXIT_CODE}, to be started again from the last checkpoint')
            return

    def _find_reason(self) -> str:
        now = time.monotonic()
        is_bound = self._is_lockstep and self._has_stepped
        gone_secs = min(_LOCKSTEP_GONE_SECS, self._peer_timeout_secs) if is_bound else self._peer_timeout_secs
        missing = []
        for name, address in self._peers.items():
            if self._probe(address):
                self._seen.add(name)
                if not is_bound:
                    self._lost.pop(name, None)
            else:
                missing.append(f'{name} ({address})')
                if name in self._seen:
                    self._lost.setdefault(name, now)
            if name in self._lost and now - self._lost[name] >= gone_secs:
                return f'{name} ({address}) was lost {now - self._lost[name]:.0f} seconds ago'
        if now - self._last_step >= self._step_timeout_secs:
            whom = f'waiting for {", ".join(missing)}' if missing else 'though every task that it needs answers'
            return f'no step for {now - self._last_step:.0f} seconds (--step_timeout_secs), {whom}'
        self._tell(missing, now - self._last_step)
        return ''

    def _tell(self, missing: list[str], waited_secs: float) -> None:
        if waited_secs < self._first_tell_secs:
            self._tell_secs = self._first_tell_secs
        elif missing and waited_secs >= self._tell_secs:
            self._tell_secs = 2 * waited_secs
            _say(
                logger.warning,
                f'No step for {waited_secs:.0f} seconds: waiting for {", ".join(missing)}; '
                f'after {self._step_timeout_secs:g} seconds (--step_timeout_secs) this task ends',
            )
