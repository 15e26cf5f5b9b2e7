"""What the tests of launching share: tasks that do what a test says, in place of the trainer."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Callable

import pytest

from tests.conftest import REPOSITORY

# A task runs the code in the flags that bear its role, or its role and index. Each start leaves a line with its process id.
FAKE_TASK = """
import json, os, pathlib, signal, socket, subprocess, sys, time

config = json.loads(os.environ['TF_CONFIG'])
role, index = config['task']['type'], config['task']['index']
state = pathlib.Path(os.environ['STATE'])


def note(name, text):
    with open(state / name, 'a') as file:
        file.write(f'{text}\\n')


def wait_for(name):
    while not (state / name).exists():
        time.sleep(0.02)


def on_sigterm(action):
    signal.signal(signal.SIGTERM, lambda *_: action())


note(f'{role}-{index}.pids', os.getpid())
attempt = len((state / f'{role}-{index}.pids').read_text().split())
for flag in sys.argv[1:]:
    name, code = flag[2:].split('=', 1)
    if name in (role, f'{role}/{index}'):
        exec(code)
"""
FOREVER = 'time.sleep(300)'


class Launcher:
    """A launch that runs; `state` is the folder in which its tasks leave notes."""

    def __init__(self, folder: pathlib.Path, *flags: str, tasks: Mapping[str, str], stderr: Any = subprocess.PIPE) -> None:
        self.state, self.logs = folder / 'state', folder / 'logs'
        self.state.mkdir(exist_ok=True)
        (folder / 'fake_task.py').write_text(FAKE_TASK, encoding='utf-8')
        command = [sys.executable, '-m', 'trainer.launch', '--module=fake_task', f'--log_dir={self.logs}', *flags, '--']
        environ = {**os.environ, 'STATE': str(self.state), 'PYTHONPATH': str(folder), 'PYTHONDONTWRITEBYTECODE': '1'}
        self.process = subprocess.Popen(
            [*command, *(f'--{name}={code}' for name, code in tasks.items())],
            cwd=REPOSITORY,
            env=environ,
            stderr=stderr,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        """Waits for its end; returns the exit code and what it printed."""
        try:
            _, printed = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f'the launcher did not end; it printed:\n{self.process.communicate()[1]}')
        return self.process.returncode, printed

    def notes(self, name: str) -> list[str]:
        """The lines that tasks have written under this name."""
        path = self.state / name
        return path.read_text(encoding='utf-8').splitlines() if path.exists() else []

    def await_notes(self, *names: str) -> None:
        """Waits until there is a whole line under each name."""
        wait_until(lambda: all(self.notes(name) for name in names), f'notes {names}')

    def note(self, name: str) -> None:
        """Lets a task go on that waits for this name."""
        (self.state / name).touch()

    def pids(self) -> list[int]:
        """Of all tasks that were ever started."""
        return [int(line) for path in self.state.glob('*.pids') for line in self.notes(path.name)]

    def log(self, name: str) -> str:
        """The log of a task, such as 'worker-0', with times of day left out."""
        text = (self.logs / f'{name}.log').read_text(encoding='utf-8')
        return re.sub(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d', 'NOW', text)


def lines_of(printed: str, name: str) -> list[str]:
    """What was printed with this name before it."""
    return [line[len(name) + 3 :] for line in printed.splitlines() if line.startswith(f'[{name}] ')]


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only what is left of it until its parent asks."""
    try:
        status = pathlib.Path(f'/proc/{pid}/stat').read_text(encoding='utf-8')
    except OSError:  # no such process, or not Linux
        return has_been_waited_for(pid)
    return status.rpartition(')')[2].split()[0] == 'Z'


def has_been_waited_for(pid: int) -> bool:
    """Whether there is nothing left of the process: its parent knows that it has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(is_true: Callable[[], bool], what: str, secs: float = 20.0) -> None:
    """Waits, and fails the test when it takes too long."""
    deadline = time.monotonic() + secs
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(f'no {what} within {secs:g} seconds')
        time.sleep(0.02)


def end_all(pids: list[int]) -> None:
    """Ends what a failed test has left running."""
    for pid in pids:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
