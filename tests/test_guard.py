from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.conftest import REPOSITORY
from tests.launcher import end_all, is_gone, wait_until

TASK = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, {handler})
print(subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)
time.sleep(300)
"""
LAUNCHER = """
import os, signal, subprocess, sys
from trainer import guard

guard.SAVE_SECS = 0.5
guarded = guard.Guard()
task = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True, text=True)
guarded.watch(task.pid)
print(task.pid, int(task.stdout.readline()), flush=True)
{end}
"""


def run_launcher(handler: str, end: str) -> list[int]:
    """Runs a launcher that ends as told, and returns the ids of its task and of what that has started."""
    command = [sys.executable, '-c', LAUNCHER.format(end=end), TASK.format(handler=handler)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    return [int(pid) for pid in done.stdout.split()]


@pytest.mark.parametrize('end', ['os.kill(os.getpid(), signal.SIGKILL)', 'raise SystemExit', 'guarded.dismiss()'])
@pytest.mark.parametrize('handler', ['signal.SIG_DFL', 'signal.SIG_IGN'])
def test_tasks_and_what_they_started_end_with_the_launcher(handler: str, end: str) -> None:
    pids = run_launcher(handler, end)
    try:
        assert len(pids) == 2
        wait_until(lambda: all(map(is_gone, pids)), 'end of the tasks', secs=10)
    finally:
        end_all(pids)


def test_a_task_that_it_was_told_to_forget_is_left_alone() -> None:
    pids = run_launcher('signal.SIG_DFL', 'guarded.forget(task.pid)')
    try:
        time.sleep(1.0)
        assert [is_gone(pid) for pid in pids] == [False, False]
    finally:
        end_all(pids)
