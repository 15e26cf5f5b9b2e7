"""What the benchmarks share: children measured in turn, medians, ratios with their spread, versions."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_child(script: str, arguments: Sequence[str], *, timeout_secs: float) -> dict[str, Any]:
    """Runs `script` in a fresh process; returns the JSON object in the last line that it prints.

    Raises:
      RuntimeError: it failed; holds what it wrote to stderr.
    """
    environment = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '2'}
    child = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=timeout_secs, env=environment
    )
    if child.returncode:
        raise RuntimeError(f'{script} {" ".join(arguments)} failed:\n{child.stderr[-3000:]}')
    return json.loads(child.stdout.strip().splitlines()[-1])


def compare(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Returns 'median (lowest-highest)' of ours over theirs, round by round."""
    ratios = [one / other for one, other in zip(ours, theirs)]
    return f'{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})'


def describe_machine() -> str:
    """Returns versions and processors in one line."""
    import importlib.metadata

    def version(package: str) -> str:
        try:
            return f'{package} {importlib.metadata.version(package)}'
        except importlib.metadata.PackageNotFoundError:
            return ''

    packages = [version(name) for name in ('tensorflow', 'tensorflow-cpu', 'tensorflow-estimator', 'keras', 'numpy')]
    return ', '.join([f'Python {platform.python_version()}', *filter(None, packages), f'{os.cpu_count()} cores'])
