from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from trainer import tuning
from trainer.cluster import Cluster
from trainer.config import Config, EvalConfig, RunConfig, TuningConfig
from trainer.errors import UsageError


def make_config(metric_tag: str = '', best_metric: str = '') -> Config:
    return Config(
        run=RunConfig(mode='export'), eval=EvalConfig(best_metric=best_metric), tuning=TuningConfig(metric_tag=metric_tag)
    )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuning.METRIC_FILE, str(tmp_path / 'hypertune' / 'output.metrics'))
    return tmp_path / 'hypertune' / 'output.metrics'


def make_reporter(config: Config = make_config(), **cluster: object) -> tuning.MetricReporter:  # noqa: B008  # it is frozen
    return tuning.make_reporter(config, Cluster(**cluster), os.environ)  # type: ignore[arg-type]


def read(path: Path) -> list[dict[str, str]]:
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    for report in reports:
        assert isinstance(report.pop('timestamp'), float)
    return reports


def test_report_is_hypertunes_own_line(path: Path) -> None:
    make_reporter(trial='3').report({'accuracy': 0.9, 'loss': 0.5, 'global_step': 200}, step=200)
    assert read(path) == [{'accuracy': '0.9', 'checkpoint_path': '', 'global_step': '200', 'trial': '3'}]


def test_each_evaluation_adds_one_report(path: Path) -> None:
    reporter = make_reporter()
    for step, accuracy in ((100, 0.5), (200, 0.75)):
        reporter.report({'accuracy': accuracy}, step)
    assert [(r['global_step'], r['accuracy'], r['trial']) for r in read(path)] == [('100', '0.5', '0'), ('200', '0.75', '0')]
    assert os.listdir(path.parent) == ['output.metrics'], 'a temporary file was left'


def test_loss_is_reported_when_there_is_no_accuracy(path: Path) -> None:
    make_reporter().report({'loss': 0.25}, 10)
    assert read(path)[0]['loss'] == '0.25'


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
def test_value_that_is_not_finite_is_left_out_and_logged(path: Path, caplog: pytest.LogCaptureFixture, value: float) -> None:
    reporter = make_reporter()
    reporter.report({'accuracy': 0.5}, 100)
    with caplog.at_level(logging.WARNING):
        reporter.report({'accuracy': value}, 200)
    assert [r['global_step'] for r in read(path)] == ['100']
    assert caplog.messages == [
        f'accuracy is {value} at step 200: not reported to the tuning service, which takes finite values only'
    ]


def test_tag_comes_from_flag_then_service_then_job_then_best_metric(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {'hyperparameters': {'hyperparameter_metric_tag': 'auc'}}
    assert make_reporter(make_config(best_metric='top_5')).tag == 'top_5'
    assert make_reporter(make_config(best_metric='top_5'), job=job).tag == 'auc'
    monkeypatch.setenv(tuning.METRIC_TAG, 'recall')
    assert make_reporter(make_config(best_metric='top_5'), job=job).tag == 'recall'
    assert make_reporter(make_config(metric_tag='recall')).tag == 'recall'


def test_tag_other_than_the_jobs_is_an_error_at_the_start(path: Path) -> None:
    job = {'hyperparameters': {'hyperparameter_metric_tag': 'accuracy'}}
    with pytest.raises(UsageError) as raised:
        make_reporter(make_config(metric_tag='loss'), job=job)
    assert str(raised.value) == (
        '--metric_tag=loss: the tuning job optimizes accuracy; leave the flag out, or change hptuning.yaml'
    )


def test_unknown_tag_lists_the_metrics_there_are(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.METRIC_TAG, 'acuracy')
    with pytest.raises(UsageError) as raised:
        make_reporter().report({'loss': 1.0, 'accuracy': 0.5, 'global_step': 5}, 5)
    assert str(raised.value) == (
        'CLOUD_ML_HP_METRIC_TAG=acuracy: expected a metric of the model: accuracy, loss; did you mean accuracy?'
    )
    assert not path.exists()


def test_resumed_trial_keeps_its_reports_and_replaces_later_ones(path: Path) -> None:
    first = make_reporter(trial='2')
    for step in (100, 200, 300):
        first.report({'accuracy': step / 1000}, step)
    make_reporter(trial='2').report({'accuracy': 0.9}, 200)
    assert [(r['global_step'], r['accuracy']) for r in read(path)] == [('100', '0.1'), ('200', '0.9')]


def test_reports_of_another_trial_and_broken_lines_are_passed_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_reporter(trial='1').report({'accuracy': 0.1}, 100)
    path.write_text(path.read_text() + '{"accuracy": "0.2", "glob')
    make_reporter(trial='1').report({'accuracy': 0.2}, 200)
    assert [r['accuracy'] for r in read(path)] == ['0.1', '0.2']
    assert f'{path}: passed over a line that is no report' in caplog.text
    make_reporter(trial='2').report({'accuracy': 0.3}, 300)
    assert [r['accuracy'] for r in read(path)] == ['0.3']


def test_shared_default_file_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, '_DEFAULT_FILE', str(tmp_path / 'output.metrics'))
    make_reporter().report({'accuracy': 0.1}, 100)
    make_reporter().report({'accuracy': 0.2}, 200)
    assert [r['accuracy'] for r in read(tmp_path / 'output.metrics')] == ['0.2']


def test_bare_file_name_is_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(tuning.METRIC_FILE, 'output.metrics')
    make_reporter().report({'accuracy': 0.5}, 1)
    assert read(tmp_path / 'output.metrics')[0]['accuracy'] == '0.5'


def test_last_100_reports_are_kept(path: Path) -> None:
    reporter = make_reporter()
    for step in range(1, 131):
        reporter.report({'accuracy': 0.5}, step)
    assert [int(r['global_step']) for r in read(path)] == list(range(31, 131))


def test_file_is_whole_whenever_it_is_read(path: Path) -> None:
    reporter = make_reporter()
    reporter.report({'accuracy': 0.0}, 1)
    done, texts = threading.Event(), []

    def read_on() -> None:
        while not done.is_set():
            texts.append(path.read_text())

    thread = threading.Thread(target=read_on)
    thread.start()
    for step in range(2, 100):
        reporter.report({'accuracy': step / 100}, step)
    done.set()
    thread.join()
    assert len(texts) > 10
    assert all(text.endswith('}\n') for text in texts)
    counts = [len([json.loads(line) for line in text.splitlines()]) for text in texts]
    assert counts == sorted(counts), 'a read found fewer reports than the one before it'
