"""The metric that a tuning service optimizes, reported through cloudml-hypertune after each evaluation.

The library writes the file that the service reads in place, so a reader may find half of it; takes NaN, which fails a
trial; and starts anew after a restart. `MetricReporter` has it write to a temporary file and renames that.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import hypertune

from trainer import storage
from trainer.cluster import Cluster
from trainer.config import Config
from trainer.errors import UsageError, did_you_mean

METRIC_FILE = 'CLOUD_ML_HP_METRIC_FILE'
METRIC_TAG = 'CLOUD_ML_HP_METRIC_TAG'
_DEFAULT_FILE = '/tmp/hypertune/output.metrics'  # hypertune's own

# The metric that decides where none is named: the first of these that the model has.
DEFAULT_METRICS = ('accuracy', 'frechet_distance', 'loss')

_log = logging.getLogger(__name__)


class MetricReporter:
    """Reports one metric to the tuning service; the file is whole whenever it is read."""

    def __init__(self, tag: str, *, source: str, path: str, trial: str, keep: bool) -> None:
        """See `make_reporter`, which finds all of these.

        Args:
            tag: the metric's name; '' takes the first of DEFAULT_METRICS that the model has.
            source: the flag or variable that the tag comes from, for messages.
            path: the file that the service reads.
            trial: id of the trial, '' outside of a tuning job.
            keep: keep what the file holds of this trial, which is being resumed.
        """
        self.tag, self.path, self._source = tag, os.path.abspath(path), source
        # The library fails on a bare file name: it takes the variable's folder, '', and makes it.
        if os.environ.get(METRIC_FILE) and not os.path.dirname(os.environ[METRIC_FILE]):
            os.environ[METRIC_FILE] = self.path
        self._hypertune = hypertune.HyperTune()
        self._hypertune.trial_id = trial or '0'
        if keep and storage.exists(self.path):
            self._hypertune.metrics_queue.extend(_read_reports(self.path, trial or '0'))

    def check(self, names: Iterable[str]) -> str:
        """The name of the metric among those of an evaluation.

        Raises:
            UsageError: there is no such metric; lists those there are.
        """
        names = sorted(names)
        tag = self.tag or choose_default_metric(names)
        if tag not in names:
            raise UsageError(
                f'{self._source}={tag}: expected a metric of the model: {", ".join(names)}{did_you_mean(tag, names)}'
            )
        return tag

    def report(self, metrics: Mapping[str, Any], step: int) -> None:
        """Reports the metric of one evaluation; one that is not finite is left out, and said so.

        Args:
            metrics: {name: value} of the evaluation, scalars.
            step: global step of the weights that were evaluated. An earlier report of this step or a later one is
                replaced: the run was resumed from before it.

        Raises:
            UsageError: the metric to report is not among them.
        """
        tag = self.check(name for name in metrics if name != 'global_step')
        value = float(metrics[tag])
        if not math.isfinite(value):
            _log.warning(
                '%s is %s at step %d: not reported to the tuning service, which takes finite values only', tag, value, step
            )
            return
        queue = self._hypertune.metrics_queue
        earlier = [report for report in queue if int(report['global_step']) < step]
        queue.clear()
        queue.extend(earlier)
        with storage.atomic_path(self.path) as temporary:
            self._hypertune.metric_path = temporary
            self._hypertune.report_hyperparameter_tuning_metric(tag, value, step)


def choose_default_metric(names: Iterable[str]) -> str:
    """Returns the metric that decides where none is named."""
    return next(name for name in DEFAULT_METRICS if name in names or name == DEFAULT_METRICS[-1])


def make_reporter(config: Config, cluster: Cluster, environ: Mapping[str, str]) -> MetricReporter:
    """The reporter of a run.

    The metric is `--metric_tag`, else CLOUD_ML_HP_METRIC_TAG, else the tag in the tuning job that TF_CONFIG describes,
    else `--best_metric`. The file is CLOUD_ML_HP_METRIC_FILE's, else hypertune's own; what the first one holds is kept,
    since the service makes one for each trial, while the other is shared by all runs of the machine.

    Raises:
        UsageError: `--metric_tag` is not the metric that the tuning job optimizes.
    """
    job_tag = environ.get(METRIC_TAG) or _job_tag(cluster)
    tag = config.tuning.metric_tag
    if tag and job_tag and tag != job_tag:
        raise UsageError(f'--metric_tag={tag}: the tuning job optimizes {job_tag}; leave the flag out, or change hptuning.yaml')
    sources = {'--metric_tag': tag, METRIC_TAG: environ.get(METRIC_TAG), 'hyperparameterMetricTag': _job_tag(cluster)}
    source = next((name for name, value in sources.items() if value), '--best_metric')
    return MetricReporter(
        tag or job_tag or config.eval.best_metric,
        source=source,
        path=environ.get(METRIC_FILE) or _DEFAULT_FILE,
        trial=cluster.trial,
        keep=bool(environ.get(METRIC_FILE)),
    )


def _job_tag(cluster: Cluster) -> str:
    hyperparameters = cluster.job.get('hyperparameters')
    return str(hyperparameters.get('hyperparameter_metric_tag') or '') if isinstance(hyperparameters, dict) else ''


def _read_reports(path: str, trial: str) -> list[dict[str, str]]:
    """The reports of this trial in the file; a line that is none, as another writer may leave, is passed over."""
    reports = []
    for line in storage.read_text(path).splitlines():
        try:
            report = json.loads(line)
            if report['trial'] == trial and int(report['global_step']) >= 0:
                reports.append(report)
        except (ValueError, KeyError, TypeError):
            _log.warning('%s: passed over a line that is no report: %s', path, line[:80])
    return reports
