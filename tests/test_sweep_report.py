"""What a sweep leaves for the eye: the table, and what TensorBoard's HParams page reads."""

from __future__ import annotations

import io

import pytest
import rich.console
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from trainer import hptuning, sweep_report
from trainer.hptuning import HyperparameterSpec, Parameter
from trainer.study import FAILED, RUNNING, STOPPED, SUCCEEDED, Trial

SPEC = HyperparameterSpec(
    'MINIMIZE',
    'loss',
    (
        Parameter('learning_rate', hptuning.DOUBLE, (0.001, 0.5), hptuning.LOG),
        Parameter('batch_size', hptuning.DISCRETE, (32, 100)),
        Parameter('optimizer', hptuning.CATEGORICAL, ('sgd', 'adam')),
    ),
)
TIMES = ('2026-12-01T10:00:00+00:00', '2026-12-01T10:01:05+00:00')


def make_trial(number, state, *reports):
    params = {'learning_rate': 0.0123456 * number, 'batch_size': 32, 'optimizer': 'adam'}
    return Trial(str(number), params, state, {10 * n: value for n, value in enumerate(reports, 1)}, *TIMES)


TRIALS = [
    make_trial(1, SUCCEEDED, 0.5, 0.25),
    make_trial(2, FAILED),
    make_trial(3, STOPPED, 0.75),
    make_trial(4, SUCCEEDED, 0.125),
    make_trial(5, RUNNING, 0.0625),
]


def test_table_has_what_runs_first_and_then_the_best():
    lines = [line.split() for line in sweep_report.format_table(SPEC, TRIALS).splitlines()]
    assert lines == [
        ['trial', 'state', 'learning_rate', 'batch_size', 'optimizer', 'step', 'loss', 'seconds'],
        ['5', 'RUNNING', '0.06173', '32', 'adam', '10', '0.0625', '65'],
        ['*', '4', 'SUCCEEDED', '0.04938', '32', 'adam', '10', '0.125', '65'],
        ['1', 'SUCCEEDED', '0.01235', '32', 'adam', '20', '0.25', '65'],
        ['3', 'STOPPED', '0.03704', '32', 'adam', '10', '0.75', '65'],
        ['2', 'FAILED', '0.02469', '32', 'adam', '-', '-', '65'],
    ]


def test_table_of_many_is_cut():
    console = rich.console.Console(width=200, record=True, file=io.StringIO())
    console.print(sweep_report.make_table(SPEC, TRIALS, rows=2))
    text = console.export_text()
    assert 'and 3 more' in text and '0.125' in text and '0.25' not in text


def read_hparams(folder, name):
    """The tag and content of the one summary in an event file, as TensorBoard reads it."""
    (path,) = folder.glob(f'events.out.tfevents.*.hparams.{name}')
    (event,) = [event for event in event_file_loader.EventFileLoader(str(path)).Load() if event.HasField('summary')]
    (value,) = event.summary.value
    assert value.metadata.plugin_data.plugin_name == 'hparams'
    return value.tag, plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)


def test_hparams_page_is_told_what_is_tuned(tmp_path):
    sweep_report.write_experiment(str(tmp_path), SPEC)
    tag, data = read_hparams(tmp_path, 'experiment')
    assert tag == '_hparams_/experiment'
    assert [info.name for info in data.experiment.hparam_infos] == ['learning_rate', 'batch_size', 'optimizer']
    assert data.experiment.hparam_infos[0].domain_interval.max_value == 0.5
    assert [value.number_value for value in data.experiment.hparam_infos[1].domain_discrete.values] == [32, 100]
    assert [value.string_value for value in data.experiment.hparam_infos[2].domain_discrete.values] == ['sgd', 'adam']
    (metric,) = data.experiment.metric_infos
    assert (metric.name.group, metric.name.tag) == ('eval', 'loss')


@pytest.mark.parametrize(('state', 'status'), [(SUCCEEDED, api_pb2.STATUS_SUCCESS), (FAILED, api_pb2.STATUS_FAILURE)])
def test_hparams_page_is_told_of_each_trial(tmp_path, state, status):
    for _ in range(2):  # a trial that goes on tells it again, in the same file
        sweep_report.write_session_start(str(tmp_path), TRIALS[0].params, '1')
    sweep_report.write_session_end(str(tmp_path), state)
    tag, data = read_hparams(tmp_path, 'start')
    assert tag == '_hparams_/session_start_info'
    assert data.session_start_info.group_name == '1'
    assert data.session_start_info.hparams['learning_rate'].number_value == 0.0123456
    assert data.session_start_info.hparams['optimizer'].string_value == 'adam'
    tag, data = read_hparams(tmp_path, 'end')
    assert (tag, data.session_end_info.status) == ('_hparams_/session_end_info', status)
