"""What the tasks of a job tell each other through files: over or not, the evaluator's metrics, a wish to stop."""

from __future__ import annotations

import threading
import time

import pytest

from trainer.job_files import JobFiles


def test_training_is_over_when_the_chief_says_so(tmp_path):
    chief, server = JobFiles(str(tmp_path)), JobFiles(str(tmp_path))
    assert server.find_over(100) is None
    chief.announce_over(40, 'early stopping')
    assert server.find_over(100) == 'early stopping at step 40'


@pytest.mark.parametrize(('max_steps', 'expected'), [(100, None), (40, 'max_steps reached at step 40')])
def test_what_an_earlier_run_left_counts_only_if_it_went_far_enough(tmp_path, max_steps, expected):
    JobFiles(str(tmp_path)).announce_over(40, 'max_steps reached')
    assert JobFiles(str(tmp_path)).find_over(max_steps) == expected


def test_start_removes_what_an_earlier_run_left(tmp_path):
    files = JobFiles(str(tmp_path))
    files.announce_over(40, 'early stopping')
    files.request_stop(40, 'early stopping')
    files.announce_start()
    assert (files.find_over(10), files.find_stop_request(), list(tmp_path.iterdir())) == (None, None, [])


def test_chief_gets_the_metrics_of_the_step_that_it_waits_for(tmp_path):
    chief, evaluator = JobFiles(str(tmp_path)), JobFiles(str(tmp_path))
    chief.poll_secs = 0.01
    evaluator.announce_evaluator()
    evaluator.write_evaluation({'accuracy': 0.5, 'global_step': 10})
    later = threading.Timer(0.2, evaluator.write_evaluation, [{'accuracy': 0.75, 'global_step': 20}])
    later.start()
    assert chief.await_evaluation(20, 10) == {'accuracy': 0.75, 'global_step': 20}
    later.join()


def test_chief_waits_no_longer_than_its_limit_and_not_for_one_that_left(tmp_path):
    chief = JobFiles(str(tmp_path))
    chief.poll_secs = 0.01
    chief.announce_evaluator()
    started = time.monotonic()
    assert chief.await_evaluation(20, 0.3) is None
    assert time.monotonic() - started >= 0.3
    chief.withdraw_evaluator()
    assert chief.await_evaluation(20, 600) is None


def test_wish_to_stop_carries_its_reason(tmp_path):
    files = JobFiles(str(tmp_path))
    assert files.find_stop_request() is None
    files.request_stop(30, 'accuracy has not improved')
    assert files.find_stop_request() == 'accuracy has not improved'
