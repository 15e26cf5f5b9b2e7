"""Ends training before its last step: on SIGTERM, because an evaluation says so, or because another task of the job does.

SIGTERM (a preempted machine, `scancel`, `kubectl delete`): a checkpoint is saved after the step that runs, and the process
ends with code 143 = 128 + 15. Workers in lockstep stop together: each feeds a vote into the next step and all see the sum
(`replicas.py`). A main thread that is stuck inside TensorFlow never sees the signal, so a thread ends the process when the
grace is over.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf

from trainer import watchdog
from trainer.errors import Terminated
from trainer.loop import LoopState
from trainer.replicas import FINISH, TERMINATE

logger = logging.getLogger(__name__)

# Services kill after 10 to 30 seconds.
GRACE_SECS = 8.0


class SigtermGuard:
    """Takes note of SIGTERM while it is entered.

    Args:
      grace_secs: after so long a process that has not come to `is_set` is ended, its main thread being stuck.
    """

    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self, grace_secs: float = GRACE_SECS) -> None:
        self._grace_secs = grace_secs
        self._received = False
        self._noticed = threading.Event()

    def __enter__(self) -> SigtermGuard:
        self._is_on = threading.current_thread() is threading.main_thread()  # Python allows handlers nowhere else
        if self._is_on:
            # The byte is written when the signal comes, while the handler waits for the main thread to be back in Python.
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._old_handler = signal.signal(signal.SIGTERM, self._handle)
            self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name='sigterm', daemon=True).start()
        return self

    def __exit__(self, *unused_error: Any) -> None:
        if self._is_on:
            self._noticed.set()
            signal.signal(signal.SIGTERM, self._old_handler)
            signal.set_wakeup_fd(self._old_fd)
            self._writer.close()

    def is_set(self) -> bool:
        """Says whether SIGTERM has come; who asks is trusted to end soon."""
        if self._received:
            self._noticed.set()
        return self._received

    def _handle(self, unused_number: int, unused_frame: Any) -> None:
        if not self._received:
            logger.warning('SIGTERM: ending as soon as the checkpoint is saved')
        self._received = True

    def _watch(self) -> None:
        with self._reader:
            while True:
                numbers = self._reader.recv(1)
                if not numbers:
                    return
                if numbers[0] == signal.SIGTERM:
                    break
            if not self._noticed.wait(self._grace_secs):
                message = f'SIGTERM: no step ended within {self._grace_secs:g} seconds; ending with the last checkpoint'
                watchdog.die(self.EXIT_CODE, message)


class StopHook(tf.compat.v1.train.SessionRunHook):
    """Ends training early. It comes last, after the hook whose evaluation may decide so.

    Args:
      state: of the step.
      sigterm: entered by whoever trains.
      is_lockstep: whether the workers stop by vote.
      find_reason: looks for another task's wish to end training; asked every `poll_secs`. None: there is no other task.
      poll_secs: between two looks.
    """

    def __init__(
        self,
        state: LoopState,
        sigterm: SigtermGuard,
        *,
        is_lockstep: bool,
        find_reason: Optional[Callable[[], Optional[str]]] = None,
        poll_secs: float = 2.0,
    ) -> None:
        self._state = state
        self._sigterm = sigterm
        self._is_lockstep = is_lockstep
        self._find_reason = find_reason
        self._poll_secs = poll_secs
        self._looked_at = time.monotonic()
        self.reason = ''
        """Why training ended early, for the log; '' when it did not, or by SIGTERM."""
        self._is_terminated = False

    def finish(self, reason: str) -> None:
        """Ends training after this step, or with a vote after the next."""
        self.reason = reason

    def raise_if_terminated(self, saved_step: Optional[int]) -> None:
        """Raises Terminated when a SIGTERM, here or at another worker, ended training.

        Args:
          saved_step: of the checkpoint that this process saved; None: the chief saves.
        """
        if not self._is_terminated:
            return
        saved = 'the chief saves the checkpoint' if saved_step is None else f'the checkpoint of step {saved_step} is saved'
        if not self._sigterm.is_set():
            raise Terminated(f'another worker got SIGTERM; {saved}', watchdog.EXIT_CODE)
        remedy = 'joins the job again' if saved_step is None else 'goes on from it'
        raise Terminated(f'SIGTERM; {saved}, the same command {remedy}', SigtermGuard.EXIT_CODE)

    def before_run(self, run_context: Any) -> Any:
        result = self._state.result
        if not self._is_lockstep:
            return None
        vote = np.zeros([2], np.float32)
        vote[TERMINATE], vote[FINISH] = self._sigterm.is_set(), bool(self.reason)
        return tf.compat.v1.train.SessionRunArgs(result.votes, feed_dict={result.vote: vote})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self._find_reason and not self.reason and time.monotonic() - self._looked_at >= self._poll_secs:
            self.finish(self._find_reason() or '')
            self._looked_at = time.monotonic()
        if self._is_lockstep:
            terminate, finish = run_values.results[TERMINATE] > 0, run_values.results[FINISH] > 0
        else:
            terminate, finish = self._sigterm.is_set(), bool(self.reason)
        self._is_terminated = bool(terminate)
        if finish and not self.reason:
            self.reason = 'another task asked for it'
        if terminate or finish:
            run_context.request_stop()


class StopEvaluationHook(tf.compat.v1.train.SessionRunHook):
    """Raises Terminated in an evaluation inside training when SIGTERM comes: the checkpoint has just been saved."""

    def __init__(self, sigterm: SigtermGuard) -> None:
        self._sigterm = sigterm

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self._sigterm.is_set():
            raise Terminated(
                'SIGTERM; the checkpoint was saved before this evaluation, the same command goes on from it',
                SigtermGuard.EXIT_CODE,
            )
