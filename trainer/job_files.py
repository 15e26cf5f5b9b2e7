"""Files in the output folder by which the tasks of one job tell each other how far it is.

They are all that an evaluator, a parameter server and a worker of another machine share with the chief.

| file | written by | says |
| --- | --- | --- |
| `training_over.json` | chief | training has ended, at which step and why |
| `final_metrics.json` | chief | all is done: evaluated, exported |
| `evaluator.json` | evaluator | there is one |
| `last_evaluation.json` | evaluator | metrics of the newest checkpoint that it has evaluated |
| `stop_request.json` | evaluator | training should end, from which step on and why |
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Optional

from trainer import storage

FINAL = 'final_metrics.json'
_OVER, _EVALUATOR, _EVALUATION, _STOP = (
    'training_over.json', 'evaluator.json', 'last_evaluation.json', 'stop_request.json',
)  # fmt: skip
# How often a waiting task looks; on a remote store a look is some seven requests.
POLL_SECS, REMOTE_POLL_SECS = 2.0, 10.0


class JobFiles:
    """The files of one output folder.

    Args:
      output_dir: of the run.
    """

    def __init__(self, output_dir: str) -> None:
        self._directory = output_dir
        self.poll_secs = REMOTE_POLL_SECS if storage.is_remote(output_dir) else POLL_SECS
        self._found_over = self._read(_OVER)

    def announce_start(self) -> None:
        """Chief: training goes on, whatever an earlier run left. An evaluator that is there announces itself again."""
        for name in (_OVER, _STOP, _EVALUATOR):
            if storage.exists(self._path(name)):
                storage.remove(self._path(name))

    def announce_over(self, step: int, reason: str) -> None:
        """Chief: training has ended."""
        self._write(_OVER, {'step': step, 'reason': reason})

    def find_over(self, max_steps: int) -> Optional[str]:
        """Returns why training has ended, None while it goes on.

        What an earlier run left, which the chief may not have removed yet, counts only if it reached `max_steps`.
        """
        over = self._read(_OVER)
        if over is None or (over == self._found_over and int(over['step']) < max_steps):
            return None
        return f'{over["reason"]} at step {over["step"]}'

    def announce_evaluator(self) -> None:
        """Evaluator: it is there; to be called again and again."""
        if not self.has_evaluator():
            self._write(_EVALUATOR, {})

    def withdraw_evaluator(self) -> None:
        """Evaluator: it leaves."""
        if self.has_evaluator():
            storage.remove(self._path(_EVALUATOR))

    def has_evaluator(self) -> bool:
        """Says whether an evaluator has come and not left."""
        return storage.exists(self._path(_EVALUATOR))

    def write_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Evaluator: these are the metrics of a checkpoint, 'global_step' among them."""
        self._write(_EVALUATION, {'metrics': dict(metrics)})

    def await_evaluation(self, step: int, timeout_secs: float) -> Optional[dict[str, float]]:
        """Returns the evaluator's metrics of `step`; None when they do not come in time, or the evaluator has left."""
        deadline = time.monotonic() + timeout_secs
        while True:
            is_there = self.has_evaluator()
            evaluation = self._read(_EVALUATION)
            if evaluation and evaluation['metrics'].get('global_step') == step:
                return evaluation['metrics']
            if not is_there or time.monotonic() > deadline:
                return None
            time.sleep(self.poll_secs)

    def request_stop(self, step: int, reason: str) -> None:
        """Evaluator: training should end."""
        self._write(_STOP, {'step': step, 'reason': reason})

    def find_stop_request(self) -> Optional[str]:
        """Returns why training should end; None when nobody asks for it."""
        request = self._read(_STOP)
        return None if request is None else str(request['reason'])

    def _path(self, name: str) -> str:
        return storage.join(self._directory, name)

    def _read(self, name: str) -> Any:
        return storage.read_json(self._path(name)) if storage.exists(self._path(name)) else None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps({**content, 'at': time.time()}, indent=2)
        storage.write_atomic(self._path(name), text + '\n')
