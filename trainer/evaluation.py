"""Evaluation and what follows from it: the Eval line, the metric report, the best export, early stopping.

One `Evaluator` lives through a run. What must survive a restart, the best value and its step, is in `<output>/best.json`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import storage
from trainer.config import EvalConfig
from trainer.errors import DataError, UsageError
from trainer.tuning import MetricReporter, choose_default_metric

logger = logging.getLogger(__name__)

BEST_FILE = 'best.json'


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far, as `best.json` holds it."""

    metric: str
    value: float
    step: int
    export: str = ''


class Evaluator:
    """Evaluates checkpoints and acts on the metrics.

    Args:
      evaluate: from a checkpoint path (None: the latest) to the metrics, 'global_step' and weighted means among them.
      export_best: writes the export of the latest checkpoint and returns its path; None does not export.
      config: the evaluation settings.
      output_dir: of `best.json`.
      reporter: takes the metrics of every evaluation.
      clock: seconds, for tests.
    """

    def __init__(
        self,
        *,
        evaluate: Callable[[Optional[str]], Mapping[str, Any]],
        export_best: Optional[Callable[[], str]],
        config: EvalConfig,
        output_dir: str,
        reporter: MetricReporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._evaluate = evaluate
        self._export_best = export_best
        self._config = config
        self._best_path = storage.join(output_dir, BEST_FILE)
        self._reporter = reporter
        self._clock = clock
        self._evaluated_at = clock()
        self.last_step: Optional[int] = None
        self.metrics: dict[str, float] = {}
        self.best = read_best(output_dir)

    def is_due(self, step: int) -> bool:
        """Says whether the checkpoint of `step` is to be evaluated now."""
        by_steps = self._config.eval_steps and step % self._config.eval_steps == 0
        by_time = self._config.eval_secs and self._clock() - self._evaluated_at >= self._config.eval_secs
        return bool(by_steps or by_time)

    def evaluate(self, checkpoint: Optional[str] = None) -> dict[str, float]:
        """Evaluates, logs, reports, and exports when it is the best so far; returns the metrics with 'global_step'."""
        metrics = tidy_metrics(self._evaluate(checkpoint))
        # The graph of an evaluation is full of cycles; left to itself Python lets dozens of them pile up.
        gc.collect()
        step = int(metrics['global_step'])
        numbers = ', '.join(f'{name}: {value:.3f}' for name, value in metrics.items() if name != 'global_step')
        logger.info('Eval, step %d: %s', step, numbers)
        if step != self.last_step:
            self._reporter.report({name: value for name, value in metrics.items() if name != 'global_step'}, step)
        self._update_best(metrics, step)
        self.last_step, self.metrics, self._evaluated_at = step, metrics, self._clock()
        return metrics

    def find_stop_reason(self, step: int) -> str:
        """Returns why training should end: `--early_stopping_steps` have gone by without a better value; else ''."""
        patience = self._config.early_stopping_steps
        if not patience or self.best is None or step - self.best.step < patience:
            return ''
        reason = (
            f'{self.best.metric} has not improved on {self.best.value:.4f} of step {self.best.step} '
            f'for {step - self.best.step} steps'
        )
        logger.info('Early stopping at step %d: %s', step, reason)
        return f'early stopping: {reason}'

    def _update_best(self, metrics: Mapping[str, float], step: int) -> None:
        name = self._config.best_metric or choose_default_metric(metrics)
        if name not in metrics:
            names = ', '.join(sorted(set(metrics) - {'global_step'}))
            raise UsageError(f'--best_metric={name}: the model has no such metric; it has {names}')
        value = metrics[name]
        old = self.best if self.best is not None and self.best.metric == name else None
        if not math.isfinite(value) or (old is not None and not self._is_better(name, value, old.value)):
            return
        path = self._export_best() if self._export_best else ''
        self.best = Best(name, value, step, path)
        storage.write_atomic(self._best_path, json.dumps(dataclasses.asdict(self.best), indent=2) + '\n')
        # Only now that the new one is on record may the old one go.
        if old is not None and old.export and path:
            storage.remove_tree(old.export)

    def _is_better(self, name: str, value: float, than: float) -> bool:
        goal = self._config.best_goal
        if goal == 'auto':
            goal = 'minimize' if any(word in name for word in ('loss', 'error', 'distance')) else 'maximize'
        return value < than if goal == 'minimize' else value > than


def read_best(output_dir: str) -> Optional[Best]:
    """Returns the best evaluation of the run in a folder, None when there was none.

    Raises:
      DataError: `best.json` is not what an Evaluator writes.
    """
    path = storage.join(output_dir, BEST_FILE)
    if not storage.exists(path):
        return None
    content = storage.read_json(path)
    try:
        return Best(str(content['metric']), float(content['value']), int(content['step']), str(content['export']))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'{path}: expected metric, value, step and export ({error!r}); remove the file and run again'
        ) from error


class EvaluationListener(tf.compat.v1.train.CheckpointSaverListener):
    """Evaluates checkpoints as they are saved, in the process that trains, and ends training when it should.

    Args:
      evaluator: of the run.
      finish: called with the reason when training should end.
      is_needed: asked before each evaluation; an evaluator task that has come does it instead.
      pauses: training ends with the reason PAUSE where an evaluation is due, for whoever trains to evaluate and go on.
    """

    PAUSE = 'an evaluation is due'

    def __init__(
        self,
        evaluator: Evaluator,
        finish: Callable[[str], None],
        is_needed: Callable[[], bool] = lambda: True,
        *,
        pauses: bool = False,
    ) -> None:
        self._evaluator = evaluator
        self._finish = finish
        self._is_needed = is_needed
        self._pauses = pauses

    def after_save(self, session: Any, global_step_value: int) -> None:
        step = int(global_step_value)
        if step == 0 or not self._evaluator.is_due(step) or not self._is_needed():
            return
        if self._pauses:
            self._finish(self.PAUSE)
            return
        self._evaluator.evaluate()
        reason = self._evaluator.find_stop_reason(step)
        if reason:
            self._finish(reason)


def tidy_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as Python numbers, the loss first.

    Estimator's own 'loss' is a mean of batch means, wrong where the last batch is padded; 'average_loss', a mean over examples,
    takes its place where the model has it.
    """
    values = {name: float(value) for name, value in metrics.items()}
    loss = values.pop('average_loss', values.get('loss'))
    step = int(values.pop('global_step'))
    values.pop('loss', None)
    tidied: dict[str, float] = {} if loss is None else {'loss': loss}
    tidied.update(sorted(values.items()))
    tidied['global_step'] = step
    return tidied
