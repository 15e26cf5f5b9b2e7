"""The two errors a user can cause; `task.py` prints either as one line and exits with its code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """A flag, a setting or an environment variable is wrong; nothing has been read or written."""

    exit_code = 2


class DataError(ValueError):
    """A file, a record or a directory is not what the settings say it is."""

    exit_code = 1


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' with the name nearest to a misspelt one, '' when none is near."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f'; did you mean {matches[0]}?' if matches else ''
