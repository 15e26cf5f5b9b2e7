"""Micro-batches: the update of a batch worked on in parts is that of the whole, and so are losses, summaries and steps."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer import compat
from trainer.accumulation import wrap_model_fn
from trainer.config import Config, DataConfig, ModelConfig, OptimizerConfig
from trainer.errors import UsageError
from trainer.models import keras_network, mlp, premade


def _make_keras_model(params):
    layers = compat.keras.layers
    return compat.keras.Sequential([layers.Rescaling(1 / 255), layers.Dense(8, activation='relu'), layers.Dense(3)])


MODELS = {
    'mlp': mlp.model_fn,
    'wide_deep': premade.wide_deep_model_fn,
    'keras': functools.partial(keras_network.model_fn, _make_keras_model),
}


def _train(folder, model_fn, num_parts, **settings):
    params = fakes.make_params(**settings)
    estimator, seen = fakes.train_looped(
        *(wrap_model_fn(model_fn, num_parts), folder),
        max_steps=12,
        steps_per_loop=4,
        batch_size=12,
        summary_steps=3,
        params=params,
    )
    weights = {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}
    return weights, seen, fakes.read_events(folder / 'train')


@pytest.mark.parametrize('model', MODELS)
def test_update_of_parts_is_that_of_the_whole_batch(tmp_path, model):
    settings = {'optimizer': 'momentum', 'clip_norm': 0.5, 'weight_decay': 0.01}
    one, seen_one, events_one = _train(tmp_path / 'one', MODELS[model], 1, **settings)
    parts, seen_parts, events_parts = _train(tmp_path / 'parts', MODELS[model], 3, **settings)
    # Nothing is added to the checkpoint: either run may go on from the other's.
    assert set(parts) == set(one) and parts['global_step'] == 12
    for name, value in one.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert [step for step, _ in seen_parts] == [step for step, _ in seen_one]
    np.testing.assert_allclose([loss for _, loss in seen_parts], [loss for _, loss in seen_one], rtol=1e-4)
    for tag in ('loss', 'accuracy', 'learning_rate'):
        assert sorted(events_parts[tag]) == [3, 6, 9, 12]
        expected = {step: float(value) for step, value in events_one[tag].items()}
        assert events_parts[tag] == pytest.approx(expected, rel=1e-4)


def test_parts_run_one_after_the_other():
    with tf.Graph().as_default() as graph:
        features = {'image': tf.constant(fakes.make_blobs(12)[0])}
        spec = wrap_model_fn(mlp.model_fn, 3)(features, tf.zeros([12], tf.int64), 'train', fakes.make_params())
        updates = [op for op in graph.get_operations() if op.type.startswith('ResourceApply')]
        assert len(updates) == 6
        # From the update back along all edges: each part's product waits for the gradients of the part before.
        products = sorted(op.name for op in graph.get_operations() if op.type == 'MatMul' and 'gradients' not in op.name)
        assert len(products) == 9

        def find_ancestors(op, found):
            for parent in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
                if parent not in found:
                    found.add(parent)
                    find_ancestors(parent, found)
            return found

        firsts = [graph.get_operation_by_name(name) for name in ('MatMul', 'MatMul_3', 'MatMul_6')]
        assert firsts[1] in find_ancestors(firsts[2], set()) and firsts[0] in find_ancestors(firsts[1], set())
        assert spec.loss.shape == []


def test_evaluation_and_prediction_are_left_alone():
    seen = []
    wrapped = wrap_model_fn(lambda features, labels, mode, params: seen.append((features, mode)), 2)
    for mode in ('eval', 'infer'):
        wrapped('features', None, mode, {})
    assert seen == [('features', 'eval'), ('features', 'infer')]
    assert wrap_model_fn(mlp.model_fn, 1) is mlp.model_fn


def test_batch_that_does_not_divide_is_refused():
    with (
        tf.Graph().as_default(),
        pytest.raises(UsageError, match=r'--micro_batches=3 does not divide the 10 examples .*--batch'),
    ):
        wrap_model_fn(mlp.model_fn, 3)({'image': tf.zeros([10, 16])}, tf.zeros([10], tf.int64), 'train', fakes.make_params())


def test_optimizer_of_the_models_own_is_refused():
    def model_fn(features, labels, mode, params):
        weight = tf.Variable(1.0)
        step = tf.compat.v1.train.get_or_create_global_step()
        train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(weight * features['x'][0], step)
        return compat.estimator.tpu.TPUEstimatorSpec(mode=mode, loss=weight, train_op=train_op)

    with tf.Graph().as_default(), pytest.raises(UsageError, match=r'--micro_batches=2: --model makes an optimizer of its own'):
        wrap_model_fn(model_fn, 2)({'x': tf.zeros([4])}, None, 'train', {})


def test_gan_is_refused():
    data = DataConfig(train_data_paths='train', eval_data_paths='eval')
    with pytest.raises(UsageError, match=r'--micro_batches=2: --model=dcgan makes several updates .*--n_disc'):
        Config(data=data, model=ModelConfig(model='dcgan'), optimizer=OptimizerConfig(micro_batches=2))
