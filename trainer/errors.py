"""The errors that `task.py` prints as one line: two that a user can cause, and a run that was told to end."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """A flag, a setting or an environment variable is wrong; nothing has been read or written."""

    exit_code = 2


class DataError(ValueError):
    """A file, a record or a directory is not what the settings say it is."""

    exit_code = 1


class Terminated(RuntimeError):
    """Training ended before its time and goes on when it is started again; `exit_code` is not 0, so that it is."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' with the name nearest to a misspelt one, '' when none is near."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f'; did you mean {matches[0]}?' if matches else ''
