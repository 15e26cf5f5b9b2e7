from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable

import pytest

from tests.conftest import REPOSITORY
from tests.launcher import FOREVER, Launcher, end_all, has_been_waited_for, is_gone, lines_of, wait_until
from trainer import cluster, folder_lock, launch

Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts a launch of fake tasks; whatever it leaves is ended."""
    started: list[Launcher] = []

    def start(*flags: str, tasks: dict[str, str], **options: Any) -> Launcher:
        started.append(Launcher(tmp_path, *flags, tasks=tasks, **options))
        return started[-1]

    yield start
    for launcher in started:
        end_all([launcher.process.pid, *launcher.pids()])
        launcher.process.communicate()


def test_every_task_gets_its_place_and_a_port_that_is_free(start: Start) -> None:
    note_config = 'note(f"{role}-{index}.config", os.environ["TF_CONFIG"])'
    bind = f'{note_config}; held = socket.socket(); held.bind((address.split(":")[0], int(address.split(":")[1])))'
    place = f'address = config["cluster"][role][index]; {bind}'
    tasks = {'chief': place, 'worker': place, 'ps': place, 'evaluator': note_config}
    # The chief stays until the others have bound their ports.
    tasks['chief'] += '; [wait_for(f"{name}.config") for name in ("worker-0", "worker-1", "ps-0", "evaluator-0")]'
    launcher = start('--workers', '2', '--ps=1', '--evaluator=1', tasks=tasks)
    assert launcher.finish()[0] == 0

    names = ('chief-0', 'worker-0', 'worker-1', 'ps-0', 'evaluator-0')
    configs = {name: json.loads(launcher.notes(f'{name}.config')[0]) for name in names}
    spec = configs['chief-0']['cluster']
    assert {role: len(hosts) for role, hosts in spec.items()} == {'chief': 1, 'worker': 2, 'ps': 1}
    assert len({host for hosts in spec.values() for host in hosts}) == 4
    for name, config in configs.items():
        role, index = name.split('-')
        task = {'type': role, 'index': int(index)}
        assert config == {'cluster': spec, 'task': task, 'job': {'evaluator_count': '1'}}
        place_read = cluster.read_cluster({'TF_CONFIG': json.dumps(config)})
        assert (place_read.name, place_read.num_workers, place_read.has_evaluator) == (f'{role}/{index}', 3, True)


def test_a_chief_alone_is_a_cluster_of_one(start: Start) -> None:
    launcher = start(tasks={'chief': 'note("config", os.environ["TF_CONFIG"])'})
    assert launcher.finish()[0] == 0
    config = json.loads(launcher.notes('config')[0])
    assert list(config['cluster']) == ['chief']
    place = cluster.read_cluster({'TF_CONFIG': json.dumps(config)})
    assert (place.name, place.is_distributed, place.has_evaluator) == ('chief/0', False, False)


def test_ports_are_held_until_the_tasks_start(tmp_path: pathlib.Path) -> None:
    options, _ = launch.parse(['--workers=3', '--module=json', '--', '--x'])
    jobs = [launch.make_tasks(options, str(tmp_path / name)) for name in 'ab']
    held = [task.port for tasks in jobs for task in tasks]
    assert len({port.getsockname()[1] for port in held if port}) == 8
    for port in held:
        assert port is not None
        port.close()


def test_lines_are_printed_with_the_name_and_logged_as_they_are(start: Start) -> None:
    speak = 'print("out"); sys.stdout.flush(); print("err \\u00e9", file=sys.stderr); os.write(1, b"\\xff\\nno end")'
    launcher = start('--workers=2', tasks={'worker/1': speak, 'chief': 'wait_for("worker-1.pids"); time.sleep(0.5)'})
    launcher.process.wait(30)
    assert launcher.process.stderr is not None
    printed = os.read(launcher.process.stderr.fileno(), 1 << 16)
    assert [line for line in printed.split(b'\n') if line.startswith(b'[worker/1]')] == [
        b'[worker/1] out', '[worker/1] err é'.encode(), b'[worker/1] \xff', b'[worker/1] no end',
    ]  # fmt: skip
    assert (launcher.logs / 'worker-1.log').read_bytes() == 'out\nerr é\n'.encode() + b'\xff\nno end\n'
    assert (launcher.logs / 'worker-0.log').read_bytes() == b''
    assert b'\033' not in printed
    assert printed.startswith(f'[launch] 3 tasks; logs in {launcher.logs}\n'.encode())


@pytest.mark.parametrize(('no_color', 'line'), [('', '\033[36m[chief/0]\033[0m hello'), ('1', '[chief/0] hello')])
def test_names_are_coloured_on_a_terminal(start: Start, monkeypatch: pytest.MonkeyPatch, no_color: str, line: str) -> None:
    monkeypatch.setenv('NO_COLOR', no_color)
    terminal, child = pty.openpty()
    launcher = start(tasks={'chief': 'print("hello", sys.stdout.isatty())'}, stderr=child)
    launcher.process.wait(30)
    os.close(child)
    printed = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert f'{line} False\r\n' in printed


def test_a_task_that_fails_is_started_again_and_one_that_is_done_is_not(start: Start) -> None:
    fail = 'print("attempt", attempt); attempt == 1 and sys.exit(1); attempt == 2 and os.kill(os.getpid(), signal.SIGKILL)'
    launcher = start('--workers=1', tasks={'worker': f'{fail}; note("done", attempt)', 'chief': 'wait_for("over")'})
    launcher.await_notes('done')
    wait_until(lambda: all(map(has_been_waited_for, map(int, launcher.notes('worker-0.pids')))), 'end of the worker')
    launcher.note('over')
    code, printed = launcher.finish()
    assert code == 0
    assert lines_of(printed, 'launch')[1:4] == [
        'worker/0 ended with code 1; restart 1 of 3',
        'worker/0 ended with SIGKILL; restart 2 of 3',
        'worker/0 ended with code 0',
    ]
    assert launcher.log('worker-0') == (
        'attempt 1\n--- worker/0 started NOW, restart 1 of 3 ---\nattempt 2\n'
        '--- worker/0 started NOW, restart 2 of 3 ---\nattempt 3\n'
    )
    assert len(launcher.notes('worker-0.pids')) == 3


def test_the_next_launch_adds_to_the_logs(start: Start) -> None:
    for _ in range(2):
        assert start(tasks={'chief': 'print("hello")'}).finish()[0] == 0
    assert start(tasks={'chief': ''}).log('chief-0').startswith('hello\n--- chief/0 started NOW, by a new launch ---\nhello\n')


def test_a_task_that_fails_twice_with_one_error_is_not_started_again(start: Start) -> None:
    fail = 'sys.exit(f"bad record {attempt // 2}")'
    launcher = start('--workers=1', '--max_restarts=9', tasks={'worker': fail, 'chief': FOREVER})
    code, printed = launcher.finish()
    assert code == 1
    assert lines_of(printed, 'launch')[1:4] == [
        'worker/0 ended with code 1; restart 1 of 9',
        'worker/0 ended with code 1; restart 2 of 9',
        'worker/0 ended with code 1 with the same error as before, so the job ends: bad record 1',
    ]


@pytest.mark.parametrize(
    ('end', 'exit_code', 'what', 'last_line'),
    [
        ('sys.exit("no disk" + "!" * attempt)', 1, 'code 1', 'no disk!!'),
        ('print("no disk"); os.kill(os.getpid(), signal.SIGKILL)', 137, 'SIGKILL', 'no disk'),
    ],
)
def test_when_restarts_are_used_up_all_end(start: Start, end: str, exit_code: int, what: str, last_line: str) -> None:
    launcher = start('--workers=1', '--ps=1', '--max_restarts=1', tasks={'worker': end, 'chief': FOREVER, 'ps': FOREVER})
    code, printed = launcher.finish()
    assert code == exit_code
    assert lines_of(printed, 'launch')[1:5] == [
        f'worker/0 ended with {what}; restart 1 of 1',
        f'worker/0 ended with {what} after 1 restarts (--max_restarts), so the job ends: {last_line}',
        'SIGTERM to chief/0',
        'SIGTERM to ps/0',
    ]
    assert len(launcher.notes('worker-0.pids')) == 2
    assert all(map(is_gone, launcher.pids()))


def test_wrong_flags_end_the_job_at_once(start: Start) -> None:
    tasks = {'worker': 'print("trainer: error: --x: expected y", file=sys.stderr); sys.exit(2)', 'chief': FOREVER}
    launcher = start('--workers=1', tasks=tasks)
    code, printed = launcher.finish()
    assert code == 2
    problem = 'worker/0 ended with code 2, wrong flags or environment, so the job ends: trainer: error: --x: expected y'
    assert lines_of(printed, 'launch')[1:3] == [problem, 'SIGTERM to chief/0']
    assert len(launcher.notes('worker-0.pids')) == 1
    assert all(map(is_gone, launcher.pids()))


def test_wrong_flags_of_the_trainer_are_found_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(['--workers=2', '--', '--learing_rate=1']) == 2
    assert capsys.readouterr().err == (
        'trainer.launch: error: unknown flag --learing_rate; did you mean --learning_rate?\n'
    )  # fmt: skip


def test_when_the_chief_is_done_the_others_may_end_by_themselves(start: Start) -> None:
    tasks = {'chief': 'note("over", 1)', 'ps': 'wait_for("over"); time.sleep(0.5); note("ps", "left")'}
    launcher = start('--ps=1', tasks=tasks)
    code, printed = launcher.finish()
    assert (code, launcher.notes('ps')) == (0, ['left'])
    assert lines_of(printed, 'launch')[1] == 'chief/0 ended with code 0: the job is done; up to 10 s for ps/0 to end'
    assert 'SIGTERM' not in printed


def test_tasks_that_stay_after_the_chief_get_sigterm_and_then_sigkill(start: Start) -> None:
    tasks = {
        'chief': 'wait_for("ps-0.ready")',
        'ps': f'on_sigterm(lambda: note("ps", "SIGTERM")); note("ps-0.ready", 1); {FOREVER}; {FOREVER}',
        'worker': FOREVER,
    }
    launcher = start('--ps=1', '--workers=1', '--grace_secs=0.2', tasks=tasks)
    code, printed = launcher.finish()
    assert (code, launcher.notes('ps')) == (0, ['SIGTERM'])
    lines = lines_of(printed, 'launch')
    assert lines[2:5] == ['SIGTERM to worker/0', 'SIGTERM to ps/0', 'SIGKILL to ps/0']
    summary = [re.split(r'\s{2,}', line) for line in lines[5:]]
    assert [row[:3] for row in summary] == [
        ['task', 'ended with', 'restarts'],
        ['chief/0', 'code 0', '0'],
        ['worker/0', 'SIGTERM', '0'],
        ['ps/0', 'SIGKILL', '0'],
    ]
    assert 5.0 < float(summary[3][3]) < 15.0
    assert [row[4] for row in summary[1:]] == [str(launcher.logs / f'{name}-0.log') for name in ('chief', 'worker', 'ps')]
    assert all(map(is_gone, launcher.pids()))


@pytest.mark.parametrize(('number', 'exit_code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_every_task_once_as_sigterm_servers_last_and_nothing_is_restarted(
    start: Start, number: signal.Signals, exit_code: int
) -> None:
    save = 'on_sigterm(lambda: (note("saved", "begin"), time.sleep(0.5), note("saved", role), sys.exit(143)))'
    task = f'{save}; note(f"{{role}}.ready", 1); {FOREVER}'
    launcher = start('--workers=1', '--ps=1', tasks={'chief': task, 'worker': task, 'ps': task})
    launcher.await_notes('chief.ready', 'worker.ready', 'ps.ready')
    launcher.process.send_signal(number)
    time.sleep(0.2)
    launcher.process.send_signal(number)  # as `timeout` does
    code, printed = launcher.finish()
    assert code == exit_code
    saved = launcher.notes('saved')
    assert saved[:2] + sorted(saved[2:4]) + saved[4:] == ['begin', 'begin', 'chief', 'worker', 'begin', 'ps']
    assert lines_of(printed, 'launch')[1:4] == [
        f'{number.name}: up to 15 s for the tasks to save; once more kills them',
        'SIGTERM to chief/0, worker/0',
        'SIGTERM to ps/0',
    ]
    assert 'restart 1' not in printed
    assert all(map(is_gone, launcher.pids()))


def test_a_second_signal_kills(start: Start) -> None:
    launcher = start(tasks={'chief': f'on_sigterm(lambda: note("heard", 1)); note("ready", 1); {FOREVER}; {FOREVER}'})
    launcher.await_notes('ready')
    launcher.process.send_signal(signal.SIGINT)
    launcher.await_notes('heard')
    time.sleep(1.2)
    launcher.process.send_signal(signal.SIGINT)
    code, printed = launcher.finish()
    assert code == 130
    assert lines_of(printed, 'launch')[2:4] == ['SIGTERM to chief/0', 'SIGKILL to chief/0']
    assert all(map(is_gone, launcher.pids()))


def test_what_a_task_started_ends_with_it(start: Start) -> None:
    child = 'note("child", subprocess.Popen(["sleep", "300"]).pid)'
    launcher = start(tasks={'chief': child})
    assert launcher.finish()[0] == 0
    (pid,) = map(int, launcher.notes('child'))
    wait_until(lambda: is_gone(pid), 'end of the child')


def test_nothing_outlives_a_launcher_that_was_killed(start: Start) -> None:
    save = 'on_sigterm(lambda: (time.sleep(0.5), note("saved", "chief"), sys.exit(143)))'
    tasks = {
        'chief': f'{save}; note("chief.ready", 1); {FOREVER}',
        'worker': f'note("child", subprocess.Popen(["sleep", "300"]).pid); {FOREVER}',
        'ps': f'on_sigterm(lambda: (note("saved", "ps"), sys.exit())); note("ps.ready", 1); {FOREVER}',
    }
    launcher = start('--workers=1', '--ps=1', tasks=tasks)
    launcher.await_notes('chief.ready', 'child', 'ps.ready')
    launcher.process.kill()
    assert launcher.process.wait(10) == -signal.SIGKILL
    pids = [*launcher.pids(), *map(int, launcher.notes('child'))]
    assert len(pids) == 4
    wait_until(lambda: all(map(is_gone, pids)), 'end of the tasks')
    assert launcher.notes('saved') == ['chief', 'ps']


def test_two_launches_do_not_share_a_folder(
    start: Start, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start(tasks={'chief': f'note("ready", 1); {FOREVER}'})
    first.await_notes('ready')
    monkeypatch.setattr(folder_lock, '_WAIT_SECS', 0.1)
    assert launch.main([f'--log_dir={first.logs}', '--module=json.tool', '--', '--x']) == 1
    waiting, problem = capsys.readouterr().err.splitlines()
    assert waiting == f'{first.logs}: another process works here; waiting up to 0.1 s for its end'
    assert problem.startswith(f'trainer.launch: error: {first.logs}: another launch runs with its logs in this folder; end it,')
    # Of one that was killed the folder is free as soon as its tasks have ended.
    first.process.kill()
    monkeypatch.undo()
    with folder_lock.lock(str(first.logs), ''):
        assert all(map(is_gone, first.pids()))


@pytest.mark.parametrize(
    ('argv', 'line'),
    [
        (['--nosuch=2', '--', '--x'], 'unknown flag --nosuch'),
        (['--worker=2', '--', '--x'], 'unknown flag --worker; did you mean --workers?'),
        (['--max-restart', '2', '--', '--x'], 'unknown flag --max_restart; did you mean --max_restarts?'),
        (['--workers=1', '--batch_size=3'], '--batch_size is a flag of the trainer; they come after --'),
        (['--workers=-1', '--', '--x'], "--workers: expected a whole number from 0, got '-1'"),
        (['--ps=two', '--', '--x'], "--ps: expected a whole number from 0, got 'two'"),
        (['--grace_secs=soon', '--', '--x'], "--grace_secs: expected seconds from 0, got 'soon'"),
        (['--grace_secs=inf', '--', '--x'], "--grace_secs: expected seconds from 0, got 'inf'"),
        (['--log_dir', '--', '--x'], '--log_dir: expected one argument'),
        (['--log_dir=gs://b/logs', '--', '--x'], '--log_dir=gs://b/logs: expected a local folder'),
        (['--chief=0', '--', '--x'], '--chief=0: expected 1, a job has one chief; add --workers'),
        (['--evaluator=2', '--', '--x'], '--evaluator=2: expected 0 or 1; two would write the same files'),
        (
            ['--workers=1'],
            'no flags for the trainer; they come after --, as in: trainer.launch --workers 2 -- --output_path=out',
        ),
        (['--workers=1', '--'], 'no flags for the trainer; they come after --'),
        (['--workers=1', '--', '--train_data_paths=x', '--mode=train'], 'no place for the results: give --output_path=FOLDER'),
        (['--module=trainer.nosuch', '--', '--x'], '--module=trainer.nosuch: no such module'),
        (['--module=nosuch.task', '--', '--x'], '--module=nosuch.task: no such module'),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    assert launch.main(argv) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f'trainer.launch: error: {line}')
    assert printed.count('\n') == 1


def test_logs_that_cannot_be_written_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'file').touch()
    launcher = Launcher(tmp_path, f'--log_dir={tmp_path}/file/logs', tasks={'chief': 'note("ran", 1)'})
    code, printed = launcher.finish()
    assert (code, launcher.notes('ran')) == (1, [])
    assert printed == f'trainer.launch: error: {tmp_path}/file/logs: cannot make the folder: Not a directory\n'


@pytest.mark.parametrize(
    ('flags', 'folder'),
    [
        (['--output_path=out'], 'out/logs'),
        (['--output-path', 'out', '--job-dir=job', '--max_steps=3'], 'job/logs'),
        (['--output_path=gs://bucket/out'], ''),
        (['--mode=export'], ''),
    ],
)
def test_logs_go_below_a_local_output_folder(flags: list[str], folder: str) -> None:
    found = launch.find_log_dir(flags)
    if folder:
        assert found == folder
    else:
        assert os.path.basename(found).startswith('trainer-logs-')
        os.rmdir(found)


def test_help_names_every_flag_and_imports_no_tensorflow() -> None:
    code = (
        'import sys, trainer.launch\n'
        'try: trainer.launch.main(["--help"])\n'
        'except SystemExit as end: sys.exit("tensorflow in" if "tensorflow" in sys.modules else end.code)'
    )
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, '')
    assert re.findall(r'--\w+', done.stdout.split('options:')[-1])[:-1] == [
        '--help', '--chief', '--workers', '--ps', '--evaluator', '--max_restarts', '--log_dir', '--grace_secs', '--module',
    ]  # fmt: skip
