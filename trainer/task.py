"""The entry, `python -m trainer.task`: flags and environment in, exit code out. Every run on any service starts here.

Exit codes: 0 done, 1 the data or the run failed, 2 wrong flags or environment, 75 to be started again, 130 interrupted, 143
terminated with a checkpoint saved. An error is one line on stderr, with the stack trace only under --debug. TensorFlow is
imported only once the settings are known to be good.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, Optional

from trainer import cluster, flags
from trainer.errors import DataError, Terminated, UsageError

_INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
_MAX_MESSAGE = 400  # characters; TensorFlow's own messages can hold pages of graph
_TRACE_HEADERS = re.compile(r'\s*(Graph execution error:|in user code:|Detected at node .* defined at|Node: |Traceback )')


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the job that the flags ask for.

    Args:
        argv: flags without the program's name; None takes those of this process.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    debug = '--debug' in argv  # until the flags are parsed, and for an error in them
    try:
        config = flags.parse(argv)
        debug = config.run.debug
        set_up_logs(debug)
        place = cluster.read_cluster(os.environ, config.cluster)
        cluster.output_flag(config.run, os.environ)  # a run with no place for its results ends here
        _import_modes().run(config, place)
    except KeyboardInterrupt:
        return _report('interrupted; the same command goes on from the last checkpoint', _INTERRUPTED, debug)
    except (UsageError, DataError, Terminated) as error:
        return _report(str(error), error.exit_code, debug)
    except Exception as error:
        message = _summarize(str(error))[:_MAX_MESSAGE]
        remedy = '' if debug else '; run again with --debug for the stack trace'
        return _report(f'{type(error).__name__}: {message}{remedy}', 1, debug)
    return 0


def _summarize(message: str) -> str:
    """What an error says, without the stack trace that TensorFlow writes into it: lines of files and the code below them."""
    said: list[str] = []
    file_indent = -1  # of the last line that names a file
    for line in message.partition('Original stack trace for')[0].splitlines():
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith('File "'):
            file_indent = indent
        elif line.strip() and (file_indent < 0 or indent <= file_indent):
            file_indent = -1
            said += [] if _TRACE_HEADERS.match(line) else [line]
    return ' '.join(' '.join(said or [message]).split())


def _import_modes() -> Any:
    try:
        from trainer import modes  # imports TensorFlow, which takes seconds
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed for {sys.executable}; python -m pip install -e '.[tensorflow]' installs it"
        ) from error
    return modes


def _report(message: str, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print('trainer: error:', ' '.join(message.split()), file=sys.stderr)
    return exit_code


def set_up_logs(debug: bool, level: int = logging.INFO) -> None:
    """Our own lines from `level` on go to stderr, of TensorFlow's only errors; under --debug all there is."""
    logging.basicConfig(stream=sys.stderr, format='%(message)s', level=level)
    if debug:
        return
    # Read by the C++ side when TensorFlow is loaded. Level 2 would leave its "errors", but on a machine without a GPU these
    # are four lines about CUDA in every run, and a real one is raised as an exception as well.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    # Estimator is deprecated in every version that has it, and says so many times a run. The logger is made here so that
    # TensorFlow finds the level set when it is imported.
    logging.getLogger('tensorflow').setLevel(logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow')


if __name__ == '__main__':
    sys.exit(main())
