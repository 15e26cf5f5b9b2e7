"""The two errors a user can cause; `task.py` prints either as one line and exits with its code."""

from __future__ import annotations


class UsageError(ValueError):
    """A flag, a setting or an environment variable is wrong; nothing has been read or written."""

    exit_code = 2


class DataError(ValueError):
    """A file, a record or a directory is not what the settings say it is."""

    exit_code = 1
