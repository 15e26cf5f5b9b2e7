"""How much memory this process may use: of the machine, or of the container when that is less."""

from __future__ import annotations

import contextlib
import os

from trainer import storage
from trainer.errors import DataError

# Limits of control groups, version 2 and version 1.
_CGROUP_LIMITS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')


def limit_bytes(cgroup_limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """Memory of the machine or the limit of the container, whichever is less, in bytes."""
    limits = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    for path in cgroup_limits:
        # No such file outside a control group; 'max' in one without a limit.
        with contextlib.suppress(DataError, ValueError):
            limits.append(int(storage.read_text(path)))
    return min(limits)


def describe(num_bytes: float) -> str:
    """A number of bytes for a log line, such as 3.1 MB."""
    for unit in ('bytes', 'KB', 'MB', 'GB'):
        if num_bytes < 1000 or unit == 'GB':
            break
        num_bytes /= 1000
    return f'{num_bytes:.0f} {unit}' if unit == 'bytes' else f'{num_bytes:.1f} {unit}'
