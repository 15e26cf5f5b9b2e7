"""When an evaluation is due, what is best, and when training stops early; across restarts too."""

from __future__ import annotations

import json
import logging

import pytest

from tests import fakes
from trainer import evaluation
from trainer.config import EvalConfig
from trainer.errors import UsageError


class _Reporter:
    def __init__(self):
        self.reports = []

    def report(self, metrics, step):
        self.reports.append((step, metrics))


def _make(tmp_path, results, *, clock=None, export=True, **settings):
    """An Evaluator whose evaluations give `results`, (step, accuracy, loss) each, in turn."""
    remaining = iter(results)

    def evaluate(checkpoint):
        step, accuracy, loss = next(remaining)
        return {'global_step': step, 'accuracy': accuracy, 'loss': 99.0, 'average_loss': loss}

    exports = []

    def export_best():
        path = tmp_path / f'export{len(exports)}-{len(list(tmp_path.iterdir()))}'
        path.mkdir()
        exports.append(str(path))
        return str(path)

    evaluator = evaluation.Evaluator(
        evaluate=evaluate,
        export_best=export_best if export else None,
        config=EvalConfig(**settings),
        output_dir=str(tmp_path),
        reporter=_Reporter(),
        clock=clock or fakes.FakeClock(),
    )
    return evaluator, exports


def test_eval_line_and_report_have_the_mean_over_examples_as_loss(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    evaluator, _ = _make(tmp_path, [(482, 0.857, 0.6011)])
    assert evaluator.evaluate() == {'loss': 0.6011, 'accuracy': 0.857, 'global_step': 482}
    assert caplog.messages == ['Eval, step 482: loss: 0.601, accuracy: 0.857']
    assert evaluator._reporter.reports == [(482, {'loss': 0.6011, 'accuracy': 0.857})]


def test_one_report_per_step(tmp_path):
    evaluator, _ = _make(tmp_path, [(10, 0.5, 1.0), (10, 0.5, 1.0), (20, 0.6, 0.9)])
    for _ in range(3):
        evaluator.evaluate()
    assert [step for step, _ in evaluator._reporter.reports] == [10, 20]


def test_due_by_steps_and_by_time(tmp_path):
    clock = fakes.FakeClock()
    evaluator, _ = _make(tmp_path, [(130, 0.5, 1.0)], clock=clock, eval_steps=100, eval_secs=60)
    assert [evaluator.is_due(step) for step in (99, 100, 150, 200)] == [False, True, False, True]
    clock.now += 60
    assert evaluator.is_due(130)
    evaluator.evaluate()
    assert not evaluator.is_due(130)


def test_only_better_models_are_exported_and_the_one_before_goes(tmp_path):
    evaluator, exports = _make(tmp_path, [(1, 0.5, 1.0), (2, 0.7, 0.9), (3, 0.6, 0.8)])
    for _ in range(3):
        evaluator.evaluate()
    assert len(exports) == 2
    assert evaluator.best == evaluation.Best('accuracy', 0.7, 2, exports[1])
    assert not (tmp_path / exports[0]).exists() and (tmp_path / exports[1]).exists()


def test_best_survives_a_restart(tmp_path):
    first, _ = _make(tmp_path, [(10, 0.9, 1.0)])
    first.evaluate()
    second, exports = _make(tmp_path, [(20, 0.8, 0.9), (30, 0.95, 0.9)])
    second.evaluate()
    assert exports == []
    second.evaluate()
    assert len(exports) == 1
    assert json.loads((tmp_path / 'best.json').read_text())['value'] == 0.95


@pytest.mark.parametrize(
    ('metric', 'goal', 'best_step'), [('loss', 'auto', 2), ('accuracy', 'auto', 1), ('accuracy', 'minimize', 2)]
)
def test_goal_follows_from_the_name_unless_given(tmp_path, metric, goal, best_step):
    evaluator, _ = _make(tmp_path, [(1, 0.9, 2.0), (2, 0.8, 1.0)], best_metric=metric, best_goal=goal)
    evaluator.evaluate()
    evaluator.evaluate()
    assert evaluator.best.step == best_step


def test_value_that_is_not_finite_is_never_the_best(tmp_path):
    evaluator, _ = _make(tmp_path, [(1, float('nan'), 1.0), (2, 0.1, 1.0)])
    evaluator.evaluate()
    assert evaluator.best is None
    evaluator.evaluate()
    assert evaluator.best.value == 0.1


def test_unknown_best_metric_lists_those_there_are(tmp_path):
    evaluator, _ = _make(tmp_path, [(1, 0.5, 1.0)], best_metric='f1')
    with pytest.raises(UsageError, match=r'--best_metric=f1: .* it has accuracy, loss'):
        evaluator.evaluate()


def test_early_stopping_fires_at_the_step_it_should(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    results = [(100, 0.5, 1.0), (200, 0.8, 0.9), (300, 0.7, 0.8), (400, 0.79, 0.7)]
    evaluator, _ = _make(tmp_path, results, early_stopping_steps=200)
    stops = []
    for step, _, _ in results:
        evaluator.evaluate()
        stops.append(evaluator.find_stop_reason(step))
    reason = 'accuracy has not improved on 0.8000 of step 200 for 200 steps'
    assert stops == ['', '', '', f'early stopping: {reason}']
    assert caplog.messages[-1] == f'Early stopping at step 400: {reason}'


def test_listener_evaluates_when_due_and_needed_and_says_when_to_stop(tmp_path):
    needed, reasons = [True], []
    evaluator, _ = _make(tmp_path, [(100, 0.8, 1.0), (300, 0.7, 1.0)], early_stopping_steps=200, eval_steps=100)
    listener = evaluation.EvaluationListener(evaluator, reasons.append, lambda: needed[0])
    listener.after_save(None, 0)
    listener.after_save(None, 50)
    assert evaluator.last_step is None
    listener.after_save(None, 100)
    needed[0] = False  # an evaluator task has come
    listener.after_save(None, 200)
    assert (evaluator.last_step, reasons) == (100, [])
    needed[0] = True
    listener.after_save(None, 300)
    assert reasons == ['early stopping: accuracy has not improved on 0.8000 of step 100 for 200 steps']


def test_early_stopping_counts_on_after_a_restart(tmp_path):
    first, _ = _make(tmp_path, [(100, 0.8, 1.0)], early_stopping_steps=200)
    first.evaluate()
    second, _ = _make(tmp_path, [(300, 0.7, 1.0)], early_stopping_steps=200)
    second.evaluate()
    assert second.find_stop_reason(300).startswith('early stopping: accuracy has not improved on 0.8000')
