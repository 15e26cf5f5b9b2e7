"""A process that ends the tasks of a launcher that has gone without doing so, killed with SIGKILL for instance.

It reads the tasks' process ids from a pipe, which ends when the launcher does. Unlike Linux's PR_SET_PDEATHSIG this works on
every Unix, reaches what the tasks have started, and follows a SIGTERM that was ignored with a SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

# From SIGTERM to SIGKILL: a task saves a checkpoint, or gives up after nine seconds.
SAVE_SECS = 15.0
_POLL_SECS = 0.1


class Guard:
    """The launcher's side of it. To be made first: what the launcher opens later, the guard does not hold open."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                _stand_guard(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def watch(self, pid: int, *, is_server: bool = False) -> None:
        """Takes charge of a task, a process that leads a group. A server is ended after the others, who need it to save."""
        self._tell(pid, is_server)

    def forget(self, pid: int) -> None:
        """Lets go of a task that has ended: its id may soon be another process's."""
        self._tell(-pid, False)

    def dismiss(self) -> None:
        """Lets the guard end what it still has in its charge, and then itself."""
        os.close(self._writer)

    def _tell(self, number: int, is_server: bool) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has ended the guard; the job need not end for it
            os.write(self._writer, b'%d %d\n' % (number, is_server))


def signal_group(pid: int, number: int) -> None:
    """Sends a signal to all processes of a group; there being none is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, of one not waited for yet
        os.killpg(pid, number)


def _stand_guard(reader: int) -> None:
    os.setsid()  # what is sent to the launcher's group, by Ctrl-C for instance, is not for the guard
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)  # else whoever reads the launcher's output would wait for the guard's
    servers: dict[int, bool] = {}  # of each task in its charge, whether it is one
    with open(reader, encoding='ascii') as messages:
        for number, is_server in (map(int, message.split()) for message in messages):
            if number > 0:
                servers[number] = bool(is_server)
            else:
                servers.pop(-number, None)
    for turn in (False, True):
        _end_all({pid for pid, is_server in servers.items() if is_server == turn})


def _end_all(pids: set[int]) -> None:
    deadline = time.monotonic() + SAVE_SECS
    for pid in pids:
        _signal(pid, signal.SIGTERM)
    while pids and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
        for pid in [pid for pid in pids if not _signal(pid, 0)]:
            signal_group(pid, signal.SIGKILL)  # what the task had started and left behind
            pids.remove(pid)
    for pid in pids:
        signal_group(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> bool:
    """Sends a signal, 0 for none; returns whether there is such a process."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True
