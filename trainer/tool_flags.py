"""The command line of the tools around the trainer: their own flags, `--`, and the flags of the trainer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainer import flags
from trainer.errors import DataError, UsageError, did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse with flags never shortened, and errors raised, not printed under a page of usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, exit_on_error=False, **settings)

    def error(self, message: str) -> NoReturn:  # before Python 3.12, some errors come here in spite of exit_on_error
        raise UsageError(message)

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The tool's settings, and the flags behind `--`.

        Raises:
            UsageError: a flag before `--` is wrong.
            SystemExit: `--help` was asked for and has been printed.
        """
        end = argv.index('--') if '--' in argv else len(argv)
        try:
            options, unknown = self.parse_known_args(flags.with_underscores(argv[:end]))
        except argparse.ArgumentError as error:
            raise UsageError(f'{error.argument_name}: {error.message}') from None
        if unknown:
            name = unknown[0].partition('=')[0]
            if name[2:] in flags.flag_names():
                raise UsageError(f'{name} is a flag of the trainer; they come after --')
            raise UsageError(f'unknown flag {name}{did_you_mean(name, [f"--{known}" for known in vars(options)])}')
        return options, list(argv[end + 1 :])


def report(tool: str, work: Callable[[], int]) -> int:
    """Does a tool's work and returns its exit code; an error is printed as one line.

    Args:
        tool: its name, such as 'trainer.sweep'.
        work: returns an exit code; what it raises beside UsageError, DataError and OSError is a fault of the tool.
    """
    try:
        return work()
    except (UsageError, DataError) as error:
        message, code = str(error), error.exit_code
    except OSError as error:  # no process, no port or no room to be had
        message, code = str(error), 1
    print(f'{tool}: error:', ' '.join(message.split()), file=sys.stderr)
    return code
