"""Weights are taken by name and shape; what does not fit is listed, and nothing else of the other run comes along."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests import fakes
from trainer import warm_start
from trainer.errors import DataError
from trainer.models import mlp


@pytest.fixture(scope='module')
def donor(tmp_path_factory):
    folder = tmp_path_factory.mktemp('donor')
    params = fakes.make_params(optimizer='momentum')
    estimator, _ = fakes.train_looped(mlp.model_fn, folder, max_steps=20, steps_per_loop=10, params=params)
    return estimator


def _start(folder, donor, tmp_path, **settings):
    """The weights before the first step: one step is made at a rate of next to nothing."""
    params = fakes.make_params(learning_rate=1e-20, **settings)
    model_fn = warm_start.wrap_model_fn(mlp.model_fn, folder)
    estimator = fakes.make_estimator(model_fn, tmp_path, params=params)
    estimator.train(fakes.make_blobs_input_fn(8), max_steps=1)
    return estimator


@pytest.mark.parametrize('where', ['folder', 'checkpoint'])
def test_all_weights_are_taken(donor, tmp_path, where):
    path = donor.model_dir if where == 'folder' else donor.latest_checkpoint()
    estimator = _start(path, donor, tmp_path)
    for name in ('hidden1/weights', 'hidden1/biases', 'hidden2/weights', 'logits/weights', 'logits/biases'):
        np.testing.assert_array_equal(estimator.get_variable_value(name), donor.get_variable_value(name), err_msg=name)
    assert estimator.get_variable_value('global_step') == 1


def test_slots_of_the_optimizer_are_not_taken(donor, tmp_path):
    estimator = _start(donor.model_dir, donor, tmp_path, optimizer='momentum', momentum=0.0)
    slot = 'hidden1/weights/Momentum'
    assert slot in donor.get_variable_names()
    assert not np.allclose(estimator.get_variable_value(slot), donor.get_variable_value(slot))


def test_changed_class_count_is_skipped_and_listed(donor, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    estimator = _start(donor.model_dir, donor, tmp_path, num_classes=5)
    weights = estimator.get_variable_value('hidden2/weights')
    np.testing.assert_array_equal(weights, donor.get_variable_value('hidden2/weights'))
    (line,) = [message for message in caplog.messages if message.startswith('Warm start')]
    assert 'took 4 weights' in line
    assert 'logits/weights (here [6, 5], there [6, 3])' in line and 'logits/biases (here [5], there [3])' in line


def test_nothing_that_fits_is_an_error(donor, tmp_path):
    with pytest.raises(DataError, match=r'--warm_start_from: nothing in .* fits this model; skipped hidden1/weights \(here'):
        params = fakes.make_params(hidden1=5, hidden2=4, num_classes=7)
        estimator = fakes.make_estimator(warm_start.wrap_model_fn(mlp.model_fn, donor.model_dir), tmp_path, params=params)
        estimator.train(fakes.make_blobs_input_fn(8), max_steps=1)


def test_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(DataError, match=f'--warm_start_from={tmp_path}: no checkpoint there'):
        warm_start.find_checkpoint(str(tmp_path))
    with pytest.raises(DataError, match=r'no checkpoint there; give model\.ckpt-N'):
        warm_start.find_checkpoint(str(tmp_path / 'model.ckpt-7'))
