"""The processes of a job on this machine, from their start to their end: output, restarts, signals.

One thread does everything: it waits for output, and looks ten times a second who has ended. Each process leads a session of its
own, so that Ctrl-C reaches the launcher alone, and what a process has started can be ended with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Optional

from trainer import storage
from trainer.errors import DataError, UsageError
from trainer.guard import SAVE_SECS, Guard, signal_group

_POLL_SECS = 0.1
_END_SECS = 5.0  # from SIGTERM to SIGKILL, of tasks that have nothing to save
# `timeout` and some services signal the process and then its group: one wish, heard twice.
_ECHO_SECS = 1.0
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # of terminals; all can be read on black and on white


@dataclasses.dataclass
class Task:
    """One task of the job, over all its restarts."""

    name: str
    environ: Mapping[str, str]
    log_path: str
    port: Optional[socket.socket] = None
    """Holds the task's port until it starts; None: it has none."""
    is_leader: bool = False
    """The job is done when it is."""
    is_server: bool = False
    """The others need it to save a checkpoint, so that it is told to end after them."""

    process: Optional[subprocess.Popen[bytes]] = None
    """None: it does not run."""
    restarts: int = 0
    exit_code: int = 0
    """As Popen has it: -N for signal N."""
    rest: bytes = b''
    """Of its output, what is not a whole line yet."""
    last_line: str = ''
    last_error: str = ''
    """Its last line when it failed before."""
    started_at: float = 0.0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.log = storage.open_append(self.log_path)

    def send(self, number: int) -> None:
        """Sends a signal: SIGKILL to whatever the task has started as well, others to its own process."""
        assert self.process is not None
        if number == signal.SIGKILL:
            signal_group(self.process.pid, number)
        else:
            self.process.send_signal(number)


class Supervisor:
    """Runs the tasks of a job.

    Args:
        tasks: all of them.
        command: what each runs.
        guard: ends them should this process be killed.
        max_restarts: of each task that fails.
        grace_secs: time that the others have to end by themselves when the leader has.
    """

    def __init__(
        self, tasks: Sequence[Task], command: Sequence[str], guard: Guard, *, max_restarts: int, grace_secs: float
    ) -> None:
        self._tasks = tasks
        self._command = command
        self._guard = guard
        self._max_restarts = max_restarts
        self._grace_secs = grace_secs
        is_colourful = sys.stderr.isatty() and not os.environ.get('NO_COLOR')
        self._colours = dict(zip((task.name for task in tasks), itertools.cycle(_COLOURS))) if is_colourful else {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []  # that came and have not been heeded
        self._signalled_at: Optional[float] = None
        self._exit_code: Optional[int] = None
        """Of the job, once it ends; from then on nothing is restarted."""
        self._steps: list[tuple[float, int]] = []
        """Of the end: at what time which signal goes to those that still run."""
        self._is_servers_turn = False
        """SIGTERM has gone to the others, and servers get it when those have ended."""

    def run(self) -> int:
        """Starts everything, stays until everything has ended, and returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._signals.append(number))
        try:
            for task in self._tasks:
                self._start(task)
            while self._running():
                for key, _ in self._selector.select(_POLL_SECS):
                    self._read(key.data)
                self._heed_signals()
                for task in self._running():
                    self._look_at(task)
                self._take_steps()
        finally:
            self._guard.dismiss()  # after an error here it ends what still runs
            for task in self._tasks:
                task.log.close()
        self._print_summary()
        assert self._exit_code is not None
        return self._exit_code

    def _running(self) -> list[Task]:
        return [task for task in self._tasks if task.process is not None]

    def _start(self, task: Task) -> None:
        now = time.monotonic()
        task.started_at = task.started_at or now
        if task.log.tell():
            which = f'restart {task.restarts} of {self._max_restarts}' if task.restarts else 'by a new launch'
            when = time.strftime('%Y-%m-%d %H:%M:%S')
            task.log.write(f'--- {task.name} started {when}, {which} ---\n'.encode())
        if task.port is not None:
            task.port.close()
            task.port = None
        task.process = subprocess.Popen(
            self._command,
            env=task.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        self._guard.watch(task.process.pid, is_server=task.is_server)
        assert task.process.stdout is not None
        os.set_blocking(task.process.stdout.fileno(), False)
        self._selector.register(task.process.stdout, selectors.EVENT_READ, task)

    def _read(self, task: Task) -> bool:
        """Passes on what the task has written; returns whether there may be more by now."""
        assert task.process is not None and task.process.stdout is not None
        data = None if task.process.stdout.closed else task.process.stdout.read(1 << 16)  # None: nothing yet
        if data:
            self._pass_on(task, data)
        elif data is not None:
            self._close_output(task)
        return bool(data)

    def _pass_on(self, task: Task, data: bytes) -> None:
        *lines, task.rest = (task.rest + data).split(b'\n')
        for line in lines:
            task.log.write(line + b'\n')
            self._print(task.name, line)
            task.last_line = line.decode(errors='replace').strip() or task.last_line
        task.log.flush()

    def _close_output(self, task: Task) -> None:
        assert task.process is not None and task.process.stdout is not None
        if not task.process.stdout.closed:
            self._selector.unregister(task.process.stdout)
            task.process.stdout.close()
        if task.rest:
            self._pass_on(task, b'\n')

    def _look_at(self, task: Task) -> None:
        """Does what is due when the task has ended."""
        assert task.process is not None
        code, pid = task.process.poll(), task.process.pid
        if code is None:
            return
        signal_group(pid, signal.SIGKILL)  # what the task had started and left behind
        while self._read(task):
            pass
        self._close_output(task)
        self._guard.forget(pid)
        task.process, task.exit_code, task.ended_at = None, code, time.monotonic()
        if self._exit_code is None:
            self._decide(task, code)

    def _decide(self, task: Task, code: int) -> None:
        limit, what = self._max_restarts, f'{task.name} ended with {_describe(code)}'
        # Bad data and losses that are not finite come back however often one starts again.
        is_same_error = code == DataError.exit_code and task.last_line == task.last_error
        if code == 0 and task.is_leader:
            grace = self._grace_secs
            others = ', '.join(other.name for other in self._running())
            self._say(f'{what}: the job is done' + (f'; up to {grace:g} s for {others} to end' if others else ''))
            self._end(0, (grace, signal.SIGTERM), (grace + _END_SECS, signal.SIGKILL))
        elif code == 0:
            self._say(what)
        elif code == UsageError.exit_code:
            self._say(f'{what}, wrong flags or environment, so the job ends: {task.last_line}')
            self._end(code, (0, signal.SIGTERM), (_END_SECS, signal.SIGKILL))
        elif task.restarts >= limit or is_same_error:
            why = 'with the same error as before' if is_same_error else f'after {limit} restarts (--max_restarts)'
            self._say(f'{what} {why}, so the job ends: {task.last_line}')
            self._end(code if code > 0 else 128 - code, (0, signal.SIGTERM), (SAVE_SECS, signal.SIGKILL))
        else:
            task.restarts += 1
            task.last_error = task.last_line
            self._say(f'{what}; restart {task.restarts} of {limit}')
            self._start(task)

    def _end(self, exit_code: int, *steps: tuple[float, int]) -> None:
        """Ends the job with this code. Each step: after how many seconds which signal goes to those that still run."""
        now = time.monotonic()
        self._exit_code, self._steps = exit_code, [(now + secs, number) for secs, number in steps]

    def _take_steps(self) -> None:
        while self._steps and time.monotonic() >= self._steps[0][0]:
            number = self._steps.pop(0)[1]
            self._is_servers_turn = number == signal.SIGTERM
            self._send(number, [task for task in self._running() if not (task.is_server and self._is_servers_turn)])
        if self._is_servers_turn and all(task.is_server for task in self._running()):
            self._is_servers_turn = False
            self._send(signal.SIGTERM, self._running())

    def _send(self, number: int, tasks: Sequence[Task]) -> None:
        if tasks:
            self._say(f'{signal.Signals(number).name} to {", ".join(task.name for task in tasks)}')
        for task in tasks:
            task.send(number)

    def _heed_signals(self) -> None:
        while self._signals:
            number, now = self._signals.pop(0), time.monotonic()
            if self._signalled_at is None:
                self._signalled_at = now
                self._say(f'{signal.Signals(number).name}: up to {SAVE_SECS:g} s for the tasks to save; once more kills them')
                self._end(128 + number, (0, signal.SIGTERM), (SAVE_SECS, signal.SIGKILL))
            elif now - self._signalled_at >= _ECHO_SECS:
                self._end(128 + number, (0, signal.SIGKILL))

    def _print_summary(self) -> None:
        self._say('task          ended with  restarts   seconds  log')
        for task in self._tasks:
            secs = task.ended_at - task.started_at
            self._say(f'{task.name:12}  {_describe(task.exit_code):10}  {task.restarts:8}  {secs:8.1f}  {task.log_path}')

    def _say(self, text: str) -> None:
        self._print('launch', text.encode())

    def _print(self, name: str, line: bytes) -> None:
        prefix = f'\033[{self._colours[name]}m[{name}]\033[0m ' if name in self._colours else f'[{name}] '
        sys.stderr.buffer.write(prefix.encode() + line + b'\n')
        sys.stderr.buffer.flush()


def _describe(code: int) -> str:
    """An exit code as Popen has it: 'code 1', 'SIGKILL'."""
    names = {number.value: number.name for number in signal.Signals}
    return f'code {code}' if code >= 0 else names.get(-code, f'signal {-code}')
