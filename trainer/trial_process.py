"""The process of one trial, started as a service does it: `python -m trainer.task`, or a cluster by `python -m trainer.launch`.

It learns its trial from TF_CONFIG and CLOUD_ML_TRIAL_ID, which metric to report from CLOUD_ML_HP_METRIC_TAG and where to from
CLOUD_ML_HP_METRIC_FILE, and gets each hyperparameter as a flag and a `--job_dir` of its own
(https://cloud.google.com/ai-platform/training/docs/using-hyperparameter-tuning).
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from trainer import storage, tuning
from trainer.guard import SAVE_SECS, Guard, signal_group

_MAX_RESTARTS = 3
_TRY_AGAIN = os.EX_TEMPFAIL  # what a task ends with to be started again


class Share(NamedTuple):
    """What of the machine one of the trials that run at once may use."""

    cores: Sequence[int]
    """Numbers of CPU cores; () where the system cannot bind a process to some."""
    threads: int
    gpus: str
    """For CUDA_VISIBLE_DEVICES; '' leaves it as it is."""


class TrialProcess:
    """A trial that runs.

    Args:
        trial_id: of the trial.
        command: arguments for Python: a module and its flags.
        folder: for its log and its reports, local; made when there is none.
        tag: the metric to report.
        slot: which of the places for trials that run at once it has.
        share: of the machine.
        guard: ends it should this process be killed.
    """

    def __init__(
        self, trial_id: str, command: Sequence[str], *, folder: str, tag: str, slot: int, share: Share, guard: Guard
    ) -> None:
        self.trial_id, self.slot = trial_id, slot
        self.log_path = storage.join(folder, 'trial.log')
        self._metric_path = storage.join(folder, 'hypertune.metrics')
        self._command, self._tag, self._share, self._guard = command, tag, share, guard
        self._restarts = 0
        self._kill_at: Optional[float] = None
        self._metric_stamp = 0.0
        self.is_stopped_early = False
        self._start()

    def _start(self) -> None:
        environ = {
            **os.environ,
            'TF_CONFIG': json.dumps({'cluster': {}, 'task': {'trial': self.trial_id}, 'environment': 'cloud'}),
            'CLOUD_ML_TRIAL_ID': self.trial_id,
            tuning.METRIC_TAG: self._tag,
            tuning.METRIC_FILE: self._metric_path,
            'PYTHONUNBUFFERED': '1',
        }
        if self._share.gpus:
            environ['CUDA_VISIBLE_DEVICES'] = self._share.gpus
        own = os.sched_getaffinity(0) if self._share.cores else ()
        with storage.open_append(self.log_path) as log:
            try:
                if own:
                    os.sched_setaffinity(0, self._share.cores)  # what is started has its parent's
                self._process = subprocess.Popen(
                    [sys.executable, '-m', *self._command],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            finally:
                if own:
                    os.sched_setaffinity(0, own)
        self._guard.watch(self._process.pid)

    def poll(self) -> Optional[int]:
        """The exit code, 128 + N for signal N, once it has ended for good; one that asks for it is started again."""
        code = self._process.poll()
        if code is None:
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.kill()
            return None
        signal_group(self._process.pid, signal.SIGKILL)  # what it had started and left behind
        self._guard.forget(self._process.pid)
        if (code < 0 or code == _TRY_AGAIN) and self._kill_at is None and self._restarts < _MAX_RESTARTS:
            self._restarts += 1
            self._start()
            return None
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Tells it to save a checkpoint and end; it is killed if that takes too long."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + SAVE_SECS
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self._kill_at = 0.0
        if self._process.poll() is None:
            signal_group(self._process.pid, signal.SIGKILL)

    def read_reports(self) -> dict[int, float]:
        """Step to metric of all that it has reported; {} when nothing is new."""
        try:
            stamp = os.stat(self._metric_path).st_mtime_ns
        except OSError:  # nothing yet
            return {}
        if stamp == self._metric_stamp:
            return {}
        self._metric_stamp = stamp
        return read_metric_file(self._metric_path, self._tag)

    def read_last_line(self) -> str:
        """The last line of its log that says something."""
        with open(self.log_path, 'rb') as log:
            log.seek(max(0, os.path.getsize(self.log_path) - 4096))
            lines = [line.strip() for line in log.read().decode(errors='replace').splitlines() if line.strip()]
        return lines[-1] if lines else 'it wrote nothing'


def read_metric_file(path: str, tag: str) -> dict[int, float]:
    """Step to value of hypertune's file, which our trainer writes whole; of another's, lines that are none are passed over."""
    values = {}
    for line in storage.read_text(path).splitlines():
        try:
            report = json.loads(line)
            step, value = int(report['global_step']), float(report[tag])
        except (ValueError, KeyError, TypeError):
            continue
        if math.isfinite(value):
            values[step] = value
    return values


def divide_machine(parallel: int, environ: Mapping[str, str] = os.environ) -> list[Share]:
    """The share of each of the trials that run at once.

    Args:
        parallel: how many, from 1.
        environ: CUDA_VISIBLE_DEVICES is read; its GPUs are divided.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
    threads = max(1, (len(cores) or os.cpu_count() or 1) // parallel)
    gpus = [gpu for gpu in environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if gpu]
    return [
        Share(
            cores=_part(cores, slot, parallel) if parallel > 1 else (),
            threads=threads,
            gpus=','.join(_part(gpus, slot, parallel)) if parallel > 1 else '',
        )
        for slot in range(parallel)
    ]


def _part(items: Sequence, slot: int, parallel: int) -> Sequence:
    """This slot's of the items; with fewer items than slots, one that others have too."""
    if len(items) < parallel:
        return [items[slot % len(items)]] if items else []
    return items[len(items) * slot // parallel : len(items) * (slot + 1) // parallel]
