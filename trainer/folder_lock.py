"""One process at a time works in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from typing import Any

from trainer import storage
from trainer.errors import DataError
from trainer.guard import SAVE_SECS

_NAME = '.lock'
_POLL_SECS = 0.3
# In which the processes of one that was killed have ended.
_WAIT_SECS = SAVE_SECS + 5


@contextlib.contextmanager
def lock(folder: str, problem: str) -> Iterator[None]:
    """Keeps others out of a folder meanwhile; it is made when missing.

    A `Guard` that is made meanwhile has the lock too: of a process that was killed, nothing runs any more once it is free.

    Args:
      folder: local.
      problem: what to say when another has it.

    Raises:
      DataError: another has it for longer than it takes to end.
    """
    storage.make_dirs(folder)
    with storage.open_append(storage.join(folder, _NAME)) as file:
        deadline = 0.0
        while not _try(file):
            if not deadline:
                print(f'{folder}: another process works here; waiting up to {_WAIT_SECS:g} s for its end', file=sys.stderr)
                deadline = time.monotonic() + _WAIT_SECS
            if time.monotonic() > deadline:
                raise DataError(f'{folder}: {problem}')
            time.sleep(_POLL_SECS)
        yield


def _try(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
