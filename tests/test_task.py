from __future__ import annotations

import logging
import os
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import trainer
from tests.conftest import REPOSITORY
from trainer import task
from trainer.cluster import Cluster
from trainer.config import Config
from trainer.errors import DataError, UsageError

FLAGS = ['--mode=export', '--output_path=out']
Run = Callable[[Config, Cluster], None]


@pytest.fixture
def set_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Puts a function in the place of modes.run."""

    def replace(run: Run) -> None:
        modes = types.ModuleType('trainer.modes')
        modes.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, 'trainer.modes', modes)
        monkeypatch.setattr(trainer, 'modes', modes, raising=False)

    monkeypatch.setattr(task, 'set_up_logs', lambda debug: None)  # they would outlive the test
    return replace


def raising(error: BaseException) -> Run:
    def run(config: Config, cluster: Cluster) -> None:
        raise error

    return run


def test_run_gets_the_settings_and_the_cluster(set_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    set_run(lambda config, cluster: calls.append((config, cluster)))
    monkeypatch.setenv(
        'TF_CONFIG', '{"cluster": {"master": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": "0"}}'
    )
    assert task.main([*FLAGS, '--hidden1=7']) == 0
    ((config, cluster),) = calls
    assert (config.model.hidden1, config.run.output_path) == (7, 'out')
    assert (cluster.name, cluster.num_workers) == ('worker/0', 2)


def test_flags_of_the_process_are_the_default(set_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    set_run(lambda config, cluster: calls.append(config.model.hidden1))
    monkeypatch.setattr(sys, 'argv', ['task.py', *FLAGS, '--hidden1=9'])
    assert task.main() == 0
    assert calls == [9]


# As TensorFlow writes them.
IN_USER_CODE = (
    'in user code:\n\n    File "mine.py", line 3, in model_fn  *\n        net = layer()\n\n    ValueError: no such layer\n'
)
IN_GRAPH = """Graph execution error:

Detected at node 'a' defined at (most recent call last):
    File "mine.py", line 3, in model_fn
      net = layer()
Node: 'a'
Matrix is not square
\t [[{{node a}}]]

Original stack trace for 'a':
  File "mine.py", line 3, in model_fn
    net = layer()
"""


@pytest.mark.parametrize(
    ('error', 'exit_code', 'line'),
    [
        (UsageError('--model=nosuch: no such model'), 2, '--model=nosuch: no such model'),
        (DataError('data/train-0: corrupt record 7'), 1, 'data/train-0: corrupt record 7'),
        (KeyboardInterrupt(), 130, 'interrupted; the same command goes on from the last checkpoint'),
        (RuntimeError('two\nlines'), 1, 'RuntimeError: two lines; run again with --debug for the stack trace'),
        (RuntimeError(IN_USER_CODE), 1, 'RuntimeError: ValueError: no such layer; run again with --debug for the stack trace'),
        (
            RuntimeError(IN_GRAPH),
            1,
            'RuntimeError: Matrix is not square [[{{node a}}]]; run again with --debug for the stack trace',
        ),
        (ValueError('x' * 999), 1, f'ValueError: {"x" * 400}; run again with --debug for the stack trace'),
    ],
)
def test_error_is_one_line_and_an_exit_code(
    set_run: Any, capsys: pytest.CaptureFixture[str], error: BaseException, exit_code: int, line: str
) -> None:
    set_run(raising(error))
    assert task.main(FLAGS) == exit_code
    assert capsys.readouterr().err == f'trainer: error: {line}\n'


@pytest.mark.parametrize('error', [UsageError('wrong'), DataError('wrong'), RuntimeError('wrong')])
def test_debug_shows_the_stack_trace_and_then_the_line(
    set_run: Any, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    set_run(raising(error))
    task.main([*FLAGS, '--debug'])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == 'Traceback (most recent call last):'
    assert lines[-1] in ('trainer: error: wrong', 'trainer: error: RuntimeError: wrong')


@pytest.mark.parametrize(
    ('argv', 'tf_config', 'line'),
    [
        (['--learing_rate=1'], '', 'unknown flag --learing_rate; did you mean --learning_rate?'),
        ([*FLAGS, '--batch_size=0'], '', '--batch_size=0: expected at least 1'),
        (FLAGS, '{', 'TF_CONFIG: not JSON: '),
        (
            ['--mode=export'],
            '',
            'no place for the results: give --output_path=FOLDER (or --job-dir, or set AIP_CHECKPOINT_DIR)',
        ),
    ],
)
def test_wrong_usage_is_found_before_anything_runs(
    set_run: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    tf_config: str,
    line: str,
) -> None:
    set_run(raising(AssertionError('ran')))
    monkeypatch.setenv('TF_CONFIG', tf_config)
    assert task.main(argv) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f'trainer: error: {line}')
    assert printed.count('\n') == 1


def run_task(*argv: str, code: str = '', **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-c', code, *argv] if code else [sys.executable, '-m', 'trainer.task', *argv]
    environ = {**os.environ, 'COLUMNS': '100', **environ}
    return subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ('arguments', 'exit_code', 'out', 'err'),
    [
        (['--version'], 0, f'trainer {trainer.__version__}\n', ''),
        (['--batch_size=0'], 2, '', 'trainer: error: --batch_size=0: expected at least 1\n'),
        (
            ['--train_data_paths=x', '--eval_data_paths=x', '--output_path=out'],
            *(2, ''),
            f'trainer: error: tensorflow is not installed for {sys.executable}; '
            "python -m pip install -e '.[tensorflow]' installs it\n",
        ),
    ],
)
def test_tensorflow_is_imported_by_a_run_only_and_named_when_missing(
    tmp_path: pathlib.Path, arguments: list[str], exit_code: int, out: str, err: str
) -> None:
    (tmp_path / 'tensorflow.py').write_text("raise ModuleNotFoundError('none here', name='tensorflow')\n")
    done = run_task(*arguments, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, out, err)


def test_help_imports_no_tensorflow() -> None:
    code = (
        'import sys, trainer.task\n'
        'try: trainer.task.main(["--help"])\n'
        'except SystemExit as end: sys.exit("tensorflow in" if "tensorflow" in sys.modules else end.code)'
    )
    done = run_task(code=code)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('usage: python -m trainer.task --FLAG=VALUE ...\n')


@pytest.mark.slow
def test_logs_hold_our_lines_and_no_chatter_of_tensorflow() -> None:
    code = (
        'import logging, sys\n'
        'from trainer import task\n'
        'task.set_up_logs(False)\n'
        'from trainer import compat\n'
        'import tensorflow as tf\n'
        'compat.estimator.Estimator(lambda features, labels, mode: None, model_dir=sys.argv[1])\n'
        'tf.compat.v1.logging.warning("chatter")\n'
        'tf.compat.v1.logging.error("an error")\n'
        'tf.constant(1)\n'
        'logging.getLogger("trainer.hooks").info("our line")\n'
    )
    done = run_task('unused', code=code)
    # On a machine without a GPU, TensorFlow 2.21 says so through a logger that is not set up yet and obeys no variable.
    lines = [
        line for line in done.stderr.splitlines() if not re.match(r'WARNING: All log messages before absl|[IWE]0000 ', line)
    ]
    assert (done.returncode, done.stdout, lines) == (0, '', ['an error', 'our line'])


def test_log_lines_have_no_prefix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, 'handlers', [])
    monkeypatch.setattr(logging.root, 'level', logging.WARNING)
    monkeypatch.setattr(logging.getLogger('tensorflow'), 'level', logging.WARNING)
    monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '0')
    task.set_up_logs(False)
    logging.getLogger('trainer.hooks').info('Eval, step %d: loss: %.3f', 482, 0.601)
    assert capsys.readouterr().err == 'Eval, step 482: loss: 0.601\n'
    assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '0', 'what the user set was overwritten'
