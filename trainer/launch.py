"""`python -m trainer.launch --workers 2 --ps 1 --evaluator 1 -- FLAGS`: a real cluster of processes on this machine.

Each task is `python -m trainer.task FLAGS` in a session of its own, told its place by TF_CONFIG. Its output comes to our stderr
with its name before each line, and goes to a log file as it is.

A task that fails is started again, at most `--max_restarts` times; code 2, wrong flags, ends the job at once. The job is done
when the chief ends with 0: the others may finish by themselves for `--grace_secs`, then get SIGTERM and at last SIGKILL. Ctrl-C
and SIGTERM are passed on as SIGTERM, to parameter servers last: the others need them to save a checkpoint. A second one kills.
When the launcher is killed, its guard (`guard.py`) ends the tasks.

Exit codes: the chief's, or that of the task that failed for good (128 + signal); 2 wrong flags, 130 interrupted, 143 ended by
SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Optional

from trainer import flags, folder_lock, storage, tool_flags
from trainer.cluster import CHIEF, EVALUATOR, PS, WORKER, output_flag
from trainer.errors import UsageError
from trainer.guard import Guard
from trainer.supervisor import Supervisor, Task

_TASK_MODULE = 'trainer.task'


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the cluster that the flags ask for.

    Args:
        argv: flags without the program's name; None takes those of this process.

    Returns:
        The exit code.
    """
    return tool_flags.report('trainer.launch', lambda: run(*parse(sys.argv[1:] if argv is None else argv)))


def run(options: argparse.Namespace, task_flags: Sequence[str]) -> int:
    """Runs the cluster and returns the exit code.

    Raises:
        DataError: the logs cannot be written, or another launch writes there.
        OSError: the system gives no port or no process.
    """
    log_dir = os.path.abspath(options.log_dir or find_log_dir(task_flags))
    with folder_lock.lock(log_dir, 'another launch runs with its logs in this folder; end it, or take another output folder'):
        guard = Guard()  # before the ports, which it would hold on to
        tasks = make_tasks(options, log_dir)
        print(f'[launch] {len(tasks)} task{"" if len(tasks) == 1 else "s"}; logs in {log_dir}', file=sys.stderr, flush=True)
        command = [sys.executable, '-m', options.module, *task_flags]
        supervisor = Supervisor(tasks, command, guard, max_restarts=options.max_restarts, grace_secs=options.grace_secs)
        return supervisor.run()


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's settings, and the flags behind `--` for every task.

    Raises:
        UsageError: a flag of either is wrong.
        SystemExit: `--help` was asked for and has been printed.
    """
    options, task_flags = _make_parser().parse(argv)
    if options.chief != 1:
        raise UsageError(f'--chief={options.chief}: expected 1, a job has one chief; add --workers')
    if options.evaluator > 1:
        raise UsageError(f'--evaluator={options.evaluator}: expected 0 or 1; two would write the same files')
    if storage.is_remote(options.log_dir):
        raise UsageError(f'--log_dir={options.log_dir}: expected a local folder')
    if not task_flags:
        raise UsageError('no flags for the trainer; they come after --, as in: trainer.launch --workers 2 -- --output_path=out')
    if not _has_module(options.module):
        raise UsageError(f'--module={options.module}: no such module; expected one that python -m can run')
    if options.module == _TASK_MODULE:
        # Else every task would say the same, one after the other.
        output_flag(flags.parse(task_flags).run, os.environ)
    return options, task_flags


def _make_parser() -> tool_flags.Parser:
    parser = tool_flags.Parser(
        prog='python -m trainer.launch',
        usage='%(prog)s [flags] -- FLAGS_OF_THE_TRAINER',
        description='Runs a cluster of processes on this machine: chief, workers, parameter servers, evaluator.',
        epilog='What stands after -- goes to every task; python -m trainer.task --help lists it.',
    )
    parser.add_argument('--chief', metavar='N', type=_parse_count, default=1, help='chiefs, always 1')
    parser.add_argument('--workers', metavar='N', type=_parse_count, default=0, help='workers beside the chief [%(default)s]')
    parser.add_argument('--ps', metavar='N', type=_parse_count, default=0, help='parameter servers [%(default)s]')
    parser.add_argument('--evaluator', metavar='N', type=_parse_count, default=0, help='evaluators, 0 or 1 [%(default)s]')
    parser.add_argument(
        '--max_restarts', metavar='N', type=_parse_count, default=3, help='restarts of each failed task [%(default)s]'
    )
    parser.add_argument('--log_dir', metavar='DIR', default='', help="logs of the tasks [logs in the run's output folder]")
    parser.add_argument(
        '--grace_secs', metavar='X', type=_parse_secs, default=10.0, help='seconds to end after the chief [%(default)g]'
    )
    parser.add_argument('--module', default=_TASK_MODULE, help='what each task runs [%(default)s]')
    return parser


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'expected a whole number from 0, got {text!r}')
    return int(text)


def _parse_secs(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f'expected seconds from 0, got {text!r}')


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package above it; of an empty name
        return False


def find_log_dir(task_flags: Sequence[str]) -> str:
    """The folder for logs that the tasks' flags suggest: `logs` in their output folder if it is local, else a temporary one."""
    parser = tool_flags.Parser(add_help=False)
    for name in ('--job_dir', '--output_path'):
        parser.add_argument(name, default='')
    values, _ = parser.parse_known_args(flags.with_underscores(task_flags))
    folder = values.job_dir or values.output_path
    if folder and not storage.is_remote(folder):
        return storage.join(folder, 'logs')
    return tempfile.mkdtemp(prefix='trainer-logs-')


def make_tf_config(spec: Mapping[str, Sequence[str]], role: str, index: int, *, evaluators: int) -> str:
    """TF_CONFIG of one task.

    Args:
        spec: {role: ['host:port', ...]} of the chief, workers and parameter servers; empty roles are left out.
        role: of this task. An evaluator is no part of the cluster: TensorFlow would wait for it to join the training.
        index: among those of the same role.
        evaluators: how many the job has, so that the chief leaves evaluating to them.
    """
    return json.dumps(
        {
            'cluster': {name: list(hosts) for name, hosts in spec.items() if hosts},
            'task': {'type': role, 'index': index},
            'job': {'evaluator_count': str(evaluators)},
        }
    )


def make_tasks(options: argparse.Namespace, log_dir: str) -> list[Task]:
    """The tasks of the job, each with a port that it holds and, but for the evaluator, a place in the cluster."""
    counts = {CHIEF: options.chief, WORKER: options.workers, PS: options.ps}
    ports = {role: [_hold_port() for _ in range(count)] for role, count in counts.items()}
    spec = {role: [f'127.0.0.1:{port.getsockname()[1]}' for port in held] for role, held in ports.items()}
    places: list[tuple[str, int, Optional[socket.socket]]]
    places = [(role, index, port) for role, held in ports.items() for index, port in enumerate(held)]
    places += [(EVALUATOR, index, None) for index in range(options.evaluator)]
    return [
        Task(
            name=f'{role}/{index}',
            environ={
                **os.environ,
                'TF_CONFIG': make_tf_config(spec, role, index, evaluators=options.evaluator),
                'PYTHONUNBUFFERED': '1',
            },
            log_path=storage.join(log_dir, f'{role}-{index}.log'),
            port=port,
            is_leader=role == CHIEF,
            is_server=role == PS,
        )
        for role, index, port in places
    ]


def _hold_port() -> socket.socket:
    """A free port, kept from others by the socket; of every interface, as TensorFlow's servers listen on all."""
    held = socket.socket()
    held.bind(('', 0))
    return held


if __name__ == '__main__':
    sys.exit(main())
