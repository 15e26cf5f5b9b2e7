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
# A connection may be refused once on a busy machine.
_LOCKSTEP_GONE_SECS = 3.0


def answers(address: str) -> bool:
    """Says whether somebody listens at 'host:port'."""
    host, _, port = address.rpartition(':')
    try:
        socket.create_connection((host.strip('[]'), int(port)), timeout=_CONNECT_SECS).close()
    except OSError:
        return False
    return True


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
      is_lockstep: a peer that left cannot join again, so it is not waited for.
      peer_timeout_secs: how long a peer that was there may be away.
      step_timeout_secs: longest time without a step, evaluation and start included.
      is_over: whether the job is done; then this task has nothing more to do, and ends well.
      end: called with the exit code and the reason; for tests.
      probe: whether an address answers; for tests.
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
        probe: Callable[[str], bool] = answers,
        poll_secs: float = _POLL_SECS,
        tell_secs: float = _TELL_SECS,
    ) -> None:
        self._peers = dict(peers)
        self._gone_secs = min(_LOCKSTEP_GONE_SECS, peer_timeout_secs) if is_lockstep else peer_timeout_secs
        self._step_timeout_secs = step_timeout_secs
        self._is_over = is_over
        self._end = end
        self._probe = probe
        self._poll_secs = poll_secs
        self._first_tell_secs = self._tell_secs = tell_secs
        self._last_step = time.monotonic()
        self._seen: dict[str, float] = {}  # when each peer answered last
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
        missing = []
        for name, address in self._peers.items():
            if self._probe(address):
                self._seen[name] = now
                continue
            missing.append(f'{name} ({address})')
            if name in self._seen and now - self._seen[name] >= self._gone_secs:
                return f'{name} ({address}) has been gone for {now - self._seen[name]:.0f} seconds'
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
