"""Update rules against their formulas, in numpy: LARS, clipping, decay; and label smoothing."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer.config import ModelConfig, OptimizerConfig
from trainer.errors import UsageError
from trainer.models.classifier import make_classifier_spec
from trainer.optimizers import OPTIMIZERS, make_optimizer, make_train_op

WEIGHTS = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
BIASES = np.array([1.0, -2.0], np.float32)
GRADIENTS = {'weights': np.array([[0.6, 0.0], [0.0, 0.8]], np.float32), 'biases': np.array([2.0, 1.0], np.float32)}


def _move(steps, *, weights=WEIGHTS, gradients=GRADIENTS, **settings):
    """Weights and biases after so many updates by the same gradients."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        start = {'weights': weights, 'biases': BIASES}
        variables = {name: tf.Variable(value, name=name) for name, value in start.items()}
        loss = tf.add_n([tf.reduce_sum(variables[name] * gradients[name]) for name in variables])
        train_op = make_train_op(loss, make_optimizer(fakes.make_params(**settings)))
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(steps):
            session.run(train_op)
        return session.run(variables)


def test_lars_follows_its_formula_and_leaves_biases_to_momentum():
    # |w| = 5 and |g| = 1 at first.
    settings = {'learning_rate': 2.0, 'momentum': 0.5, 'lars_coefficient': 0.01, 'weight_decay': 0.1}
    moved = _move(3, optimizer='lars', **settings)
    weights, velocity = WEIGHTS.astype(np.float64), 0.0
    biases, bias_velocity = BIASES.astype(np.float64), 0.0
    for _ in range(3):
        norm, gradient = np.linalg.norm(weights), GRADIENTS['weights']
        trust = 0.01 * norm / (np.linalg.norm(gradient) + 0.1 * norm)
        velocity = 0.5 * velocity + 2.0 * trust * (gradient + 0.1 * weights)
        weights = weights - velocity
        bias_velocity = 0.5 * bias_velocity + 2.0 * GRADIENTS['biases']
        biases = biases - bias_velocity
    np.testing.assert_allclose(moved['weights'], weights, rtol=1e-5)
    np.testing.assert_allclose(moved['biases'], biases, rtol=1e-5)


@pytest.mark.parametrize('zero', ['weights', 'gradients'])
def test_lars_of_nothing_has_trust_one(zero):
    settings = {'optimizer': 'lars', 'learning_rate': 0.5, 'weight_decay': 0.1}
    if zero == 'weights':
        moved = _move(1, weights=np.zeros_like(WEIGHTS), **settings)['weights']
        np.testing.assert_allclose(moved, -0.5 * GRADIENTS['weights'], rtol=1e-6)
    else:
        moved = _move(1, gradients={**GRADIENTS, 'weights': np.zeros_like(WEIGHTS)}, **settings)['weights']
        np.testing.assert_allclose(moved, WEIGHTS - 0.5 * 0.1 * WEIGHTS, rtol=1e-6)


def test_lars_takes_gradients_of_looked_up_rows():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = tf.Variable(WEIGHTS)
        loss = tf.reduce_sum(tf.gather(table, [1]))
        optimizer = make_optimizer(fakes.make_params(optimizer='lars', learning_rate=1.0, lars_coefficient=0.1))
        train_op = make_train_op(loss, optimizer)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train_op)
        np.testing.assert_allclose(session.run(table)[1], WEIGHTS[1] - 0.1 * 5 / np.sqrt(2), rtol=1e-5)


@pytest.mark.parametrize('clip_norm', [1.0, 100.0])
def test_gradients_are_scaled_down_to_the_norm_over_all_variables(clip_norm):
    norm = np.sqrt(sum((gradient**2).sum() for gradient in GRADIENTS.values()))
    scale = min(1.0, clip_norm / norm)
    moved = _move(1, learning_rate=0.1, clip_norm=clip_norm)
    np.testing.assert_allclose(moved['weights'], WEIGHTS - 0.1 * scale * GRADIENTS['weights'], rtol=1e-6)
    np.testing.assert_allclose(moved['biases'], BIASES - 0.1 * scale * GRADIENTS['biases'], rtol=1e-6)


def test_weights_decay_after_clipping_and_biases_do_not():
    norm = np.sqrt(sum((gradient**2).sum() for gradient in GRADIENTS.values()))
    moved = _move(1, learning_rate=0.1, clip_norm=1.0, weight_decay=0.5)
    np.testing.assert_allclose(moved['weights'], WEIGHTS - 0.1 * (GRADIENTS['weights'] / norm + 0.5 * WEIGHTS), rtol=1e-6)
    np.testing.assert_allclose(moved['biases'], BIASES - 0.1 * GRADIENTS['biases'] / norm, rtol=1e-6)


# FTRL computes weights from its gradients alone, whatever they start from.
@pytest.mark.parametrize('name', [name for name in OPTIMIZERS if name != 'ftrl'])
def test_every_rule_takes_clipping_and_decay_and_goes_downhill(name):
    moved = _move(2, optimizer=name, learning_rate=0.01, clip_norm=0.5, weight_decay=0.01)
    for variable, start in (('weights', WEIGHTS), ('biases', BIASES)):
        assert ((moved[variable] - start) * GRADIENTS[variable]).sum() < 0


def test_label_smoothing_is_of_training_only():
    logits = np.array([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]], np.float32)
    labels = np.array([0, 1])
    log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    smooth = 0.9 * np.eye(3)[labels] + 0.1 / 3
    expected = {'train': -(smooth * log_shares).sum(axis=1).mean(), 'eval': -log_shares[[0, 1], labels].mean()}
    for mode, loss in expected.items():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.Variable(logits)
            params = fakes.make_params(label_smoothing=0.1)
            spec = make_classifier_spec(variable, {}, tf.constant(labels, tf.int64), mode, params)
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(spec.loss) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ('section', 'settings', 'message'),
    [
        (OptimizerConfig, {'lars_coefficient': 0.01}, '--lars_coefficient=0.01 is for --optimizer=lars; it is sgd'),
        (ModelConfig, {'label_smoothing': 0.1, 'model': 'dcgan'}, '--label_smoothing=0.1: --model=dcgan uses no labels'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(section, settings, message):
    with pytest.raises(UsageError) as raised:
        section(**settings)
    assert str(raised.value).startswith(message)
