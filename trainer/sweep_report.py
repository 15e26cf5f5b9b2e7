"""What a sweep shows: a table that follows its trials, the result files, and TensorBoard's HParams page.

The result files have the form of `trainingOutput` in `gcloud ai-platform jobs describe`, the trials from the best to the worst.
The table is drawn by rich; where there is no terminal, a line tells of each trial that starts or ends.
"""

from __future__ import annotations

import datetime
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import rich.console
import rich.live
import rich.table
import yaml
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from trainer import hptuning, records, storage, study
from trainer.hptuning import HyperparameterSpec, Value
from trainer.study import FAILED, RUNNING, STOPPED, SUCCEEDED, Trial

JSON_NAME, YAML_NAME = 'sweep_results.json', 'sweep_results.yaml'
_COLOURS = {RUNNING: 'cyan', SUCCEEDED: 'green', STOPPED: 'yellow', FAILED: 'red'}
_ROWS = 20  # of the live table: what runs, then the best
_EXPERIMENT, _SESSION_START, _SESSION_END = (
    f'_hparams_/{name}' for name in ('experiment', 'session_start_info', 'session_end_info')
)
_STATUSES = {SUCCEEDED: api_pb2.STATUS_SUCCESS, STOPPED: api_pb2.STATUS_SUCCESS, FAILED: api_pb2.STATUS_FAILURE}


class Display:
    """Follows the trials on stderr; a context manager.

    Args:
        spec: what is tuned.
    """

    def __init__(self, spec: HyperparameterSpec) -> None:
        self._spec = spec
        self._console = rich.console.Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
        self._live: Optional[rich.live.Live] = None
        if self._console.is_terminal:
            self._live = rich.live.Live(console=self._console, auto_refresh=False, transient=True)
        self._shown: list[Trial] = []

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *unused: Any) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line, above the table."""
        self._console.print(f'[sweep] {text}', markup=False)

    def show(self, trials: Sequence[Trial]) -> None:
        """Brings the table, or the lines, to the present."""
        if self._live:  # seconds go on
            self._live.update(make_table(self._spec, trials, rows=_ROWS), refresh=True)
        elif trials != self._shown:
            known = {trial.id: trial for trial in self._shown}
            for trial in trials:
                if trial.id not in known:
                    params = ', '.join(f'{name}={_format(value)}' for name, value in trial.params.items())
                    self.say(f'trial {trial.id}: {params}')
                if trial.state != RUNNING and (trial.id not in known or known[trial.id].state == RUNNING):
                    self.say(f'trial {trial.id} {trial.state}{self._describe(trial)}{self._describe_best(trials)}')
        self._shown = list(trials)

    def _describe(self, trial: Trial) -> str:
        if trial.objective is None:
            return ''
        return f': {self._spec.metric_tag} {_format(trial.objective)} at step {trial.step}'

    def _describe_best(self, trials: Sequence[Trial]) -> str:
        best = study.find_best(trials, maximize=study.is_maximized(self._spec))
        return f'; the best is {_format(best.objective)} of trial {best.id}' if best else ''


def make_table(spec: HyperparameterSpec, trials: Sequence[Trial], *, rows: Optional[int] = None) -> rich.table.Table:
    """The trials as a table: from the best to the worst, those that run first; the best is marked.

    Args:
        spec: what is tuned.
        trials: to be shown.
        rows: at most; None shows all.
    """
    maximize = study.is_maximized(spec)
    ranked = study.rank(trials, maximize=maximize)
    ordered = [t for t in ranked if t.state == RUNNING] + [t for t in ranked if t.state != RUNNING]
    best = study.find_best(trials, maximize=maximize)
    table = rich.table.Table(box=None, pad_edge=False, header_style='bold')
    for name in ('', 'trial', 'state', *(param.name for param in spec.params), 'step', spec.metric_tag, 'seconds'):
        table.add_column(name, justify='left' if name in ('', 'state') else 'right', no_wrap=name in ('', 'trial', 'state'))
    for trial in ordered[:rows]:
        values = [_format(trial.params[param.name]) for param in spec.params]
        table.add_row(
            '*' if trial == best else '',
            trial.id,
            f'[{_COLOURS[trial.state]}]{trial.state}[/]',
            *values,
            _format(trial.step),
            _format(trial.objective),
            f'{_seconds(trial):.0f}',
        )
    if len(ordered) > len(ordered[:rows]):
        table.caption = f'and {len(ordered) - len(ordered[:rows])} more'
    return table


def format_table(spec: HyperparameterSpec, trials: Sequence[Trial]) -> str:
    """The whole table as text, as wide as it needs."""
    buffer = io.StringIO()
    rich.console.Console(file=buffer, width=1000).print(make_table(spec, trials))
    return ''.join(f'{line.rstrip()}\n' for line in buffer.getvalue().splitlines())


def write_results(folder: str, spec: HyperparameterSpec, trials: Sequence[Trial]) -> None:
    """Writes both result files.

    Args:
        folder: local or gs://.
        spec: what was tuned.
        trials: all of them.
    """
    output = {
        'completedTrialCount': str(sum(trial.state in (SUCCEEDED, STOPPED) for trial in trials)),
        'hyperparameterMetricTag': spec.metric_tag,
        'isHyperparameterTuningJob': True,
        'trials': [_describe_trial(trial) for trial in study.rank(trials, maximize=study.is_maximized(spec))],
    }
    storage.write_atomic(storage.join(folder, JSON_NAME), json.dumps({'trainingOutput': output}, indent=2) + '\n')
    storage.write_atomic(storage.join(folder, YAML_NAME), yaml.safe_dump({'trainingOutput': output}, sort_keys=False))


def _describe_trial(trial: Trial) -> dict[str, Any]:
    described: dict[str, Any] = {
        'trialId': trial.id,
        # Text, as in the API.
        'hyperparameters': {name: str(value) for name, value in trial.params.items()},
        'state': SUCCEEDED if trial.state == STOPPED else trial.state,
    }
    if trial.objective is not None:
        described['finalMetric'] = {'objectiveValue': trial.objective, 'trainingStep': str(trial.step)}
        described['allMetrics'] = [
            {'objectiveValue': value, 'trainingStep': str(step)} for step, value in trial.reports.items()
        ]
    if trial.state == STOPPED:
        described['isTrialStoppedEarly'] = True
    times = {'startTime': trial.start_time, 'endTime': trial.end_time}
    return {**described, **{name: value for name, value in times.items() if value}}


def write_experiment(folder: str, spec: HyperparameterSpec) -> None:
    """Tells TensorBoard's HParams page what is tuned; the metric is that of each trial's `eval` summaries."""
    infos = []
    for param in spec.params:
        info = api_pb2.HParamInfo(name=param.name)
        if param.type == hptuning.CATEGORICAL:
            info.type = api_pb2.DATA_TYPE_STRING
            info.domain_discrete.extend([str(value) for value in param.values])
        else:
            info.type = api_pb2.DATA_TYPE_FLOAT64
            if param.type == hptuning.DISCRETE:
                info.domain_discrete.extend([float(value) for value in param.values])
            else:
                info.domain_interval.min_value, info.domain_interval.max_value = map(float, param.values)
        infos.append(info)
    metric = api_pb2.MetricInfo(name=api_pb2.MetricName(group='eval', tag=spec.metric_tag), display_name=spec.metric_tag)
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=[metric], time_created_secs=time.time())
    _write_event(folder, 'experiment', _EXPERIMENT, plugin_data_pb2.HParamsPluginData(version=0, experiment=experiment))


def write_session_start(folder: str, params: Mapping[str, Value], trial_id: str) -> None:
    """Tells the HParams page of a trial, in the trial's folder."""
    start = plugin_data_pb2.SessionStartInfo(group_name=trial_id, start_time_secs=time.time())
    for name, value in params.items():
        if isinstance(value, str):
            start.hparams[name].string_value = value
        else:
            start.hparams[name].number_value = value
    _write_event(folder, 'start', _SESSION_START, plugin_data_pb2.HParamsPluginData(version=0, session_start_info=start))


def write_session_end(folder: str, state: str) -> None:
    """Tells the HParams page how a trial ended.

    Args:
        folder: of the trial.
        state: SUCCEEDED, STOPPED or FAILED.
    """
    end = plugin_data_pb2.SessionEndInfo(status=_STATUSES[state], end_time_secs=time.time())
    _write_event(folder, 'end', _SESSION_END, plugin_data_pb2.HParamsPluginData(version=0, session_end_info=end))


def _write_event(folder: str, name: str, tag: str, content: plugin_data_pb2.HParamsPluginData) -> None:
    """An event file of its own, always under the same name: a sweep that goes on writes it again."""
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name='hparams', content=content.SerializeToString())
    )
    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata)
    value.tensor.dtype = 1  # DT_FLOAT; the page wants a tensor and looks at none
    value.tensor.float_val.append(0.0)
    value.tensor.tensor_shape.SetInParent()
    events = [
        event_pb2.Event(wall_time=time.time(), file_version='brain.Event:2'),
        event_pb2.Event(wall_time=time.time(), step=0, summary=summary_pb2.Summary(value=[value])),
    ]
    path = storage.join(folder, f'events.out.tfevents.0000000000.hparams.{name}')
    records.write_file(path, [event.SerializeToString() for event in events])


def _format(value: Any) -> str:
    if value is None:
        return '-'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def _seconds(trial: Trial) -> float:
    start = _parse_time(trial.start_time)
    return (_parse_time(trial.end_time) if trial.end_time else time.time()) - start


def _parse_time(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
