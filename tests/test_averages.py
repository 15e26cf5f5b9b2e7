"""Averages of weights: they follow their formula, and are what is evaluated and exported."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer import checkpoints, export
from trainer.averages import wrap_model_fn
from trainer.cluster import Cluster
from trainer.config import Config, DataConfig, DistributionConfig, ModelConfig, OptimizerConfig, RunConfig
from trainer.datasets import Dataset
from trainer.errors import DataError, UsageError
from trainer.experiment import Experiment
from trainer.features import Feature, Schema
from trainer.models import mlp

DATA = DataConfig(train_data_paths='train', eval_data_paths='eval')
DECAY = 0.3
BLOBS = Dataset(
    name='blobs',
    schema=Schema({'image': Feature('bytes', (16,), raw='uint8'), 'label': Feature('int64')}),
    label='label',
    num_classes=3,
)


def _train(folder, max_steps, steps_per_loop=1):
    params = fakes.make_params(learning_rate=0.5)
    model_fn = checkpoints.wrap_model_fn(wrap_model_fn(mlp.model_fn, DECAY), str(folder))
    return fakes.train_looped(model_fn, folder, max_steps=max_steps, steps_per_loop=steps_per_loop, params=params)[0]


def _get(estimator, prefix=''):
    names = [name for name in estimator.get_variable_names() if name.endswith(('weights', 'biases'))]
    own = [name for name in names if name.startswith('average/') == bool(prefix)]
    return {name[len(prefix) :]: estimator.get_variable_value(name) for name in own}


def _predict(values, images):
    net = images / np.float32(255)
    for layer in ('hidden1', 'hidden2'):
        net = np.maximum(net @ values[f'{layer}/weights'] + values[f'{layer}/biases'], 0)
    logits = net @ values['logits/weights'] + values['logits/biases']
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def test_averages_follow_the_weights_and_are_what_is_evaluated_and_exported(tmp_path):
    expected = {}
    for step in range(1, 7):
        estimator = _train(tmp_path / 'run', step)
        kept = min(DECAY, (step - 1) / (step + 9))
        for name, value in _get(estimator).items():
            expected[name] = kept * expected.get(name, 0) + (1 - kept) * value
    averages = _get(estimator, 'average/')
    assert set(averages) == set(_get(estimator)) and len(averages) == 6
    for name, value in averages.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert np.abs(value - _get(estimator)[name]).max() > 1e-4
    images, labels = fakes.make_blobs(8, seed=5)
    shares = _predict(averages, images)
    metrics = estimator.evaluate(lambda params: tf.data.Dataset.from_tensors(({'image': images}, labels)), steps=1)
    assert metrics['average_loss'] == pytest.approx(-np.log(shares[range(8), labels]).mean(), rel=1e-4)
    model = tf.saved_model.load(export.export_model(estimator, BLOBS, str(tmp_path / 'model')))
    result = model.signatures['serving_default'](image=tf.constant(images), key=tf.constant([''] * 8))
    np.testing.assert_allclose(result['probabilities'], shares, rtol=1e-4, atol=1e-6)


def test_averages_do_not_depend_on_steps_per_loop(tmp_path):
    looped = _get(_train(tmp_path / 'loop', 6, steps_per_loop=6), 'average/')
    for name, value in _get(_train(tmp_path / 'steps', 6), 'average/').items():
        np.testing.assert_array_equal(looped[name], value, err_msg=name)


@pytest.mark.parametrize(('mode', 'is_averaged', 'expected'), [('eval', True, 1.0), ('eval', False, 0.0), ('train', True, 0.0)])
def test_what_does_not_train_finds_the_averages_by_itself(tmp_path, mode, is_averaged, expected):
    if is_averaged:
        _train(tmp_path, 2)
    else:
        fakes.train_looped(mlp.model_fn, tmp_path, max_steps=1, steps_per_loop=1)
    config = Config(run=RunConfig(mode=mode, output_path=str(tmp_path)), data=DATA)
    assert Experiment(config, Cluster(), {})._find_ema_decay() == expected


def test_run_without_averages_is_named(tmp_path):
    fakes.train_looped(mlp.model_fn, tmp_path, max_steps=1, steps_per_loop=1)
    model_fn = checkpoints.wrap_model_fn(wrap_model_fn(mlp.model_fn, DECAY), str(tmp_path))
    with pytest.raises(DataError, match=r'does not fit the model: average/\S+ is \[.*\] here, not there; give the flags'):
        fakes.make_estimator(model_fn, tmp_path, params=fakes.make_params()).evaluate(fakes.make_blobs_input_fn(8), steps=1)


@pytest.mark.parametrize(
    ('sections', 'message'),
    [
        ({'model': ModelConfig(model='dcgan')}, r'--ema_decay=0.9: --model=dcgan averages its generator in any case'),
        ({'distribution': DistributionConfig(sync_replicas=True)}, r'--ema_decay=0.9: with --sync_replicas each worker'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(sections, message):
    with pytest.raises(UsageError, match=message):
        Config(data=DATA, optimizer=OptimizerConfig(ema_decay=0.9), **sections)
