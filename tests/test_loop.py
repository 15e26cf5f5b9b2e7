"""The loop trains as step by step training does, and stops where it should."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer import compat, hooks, loop
from trainer.models import keras_network, mlp
from trainer.models.classifier import make_classifier_spec


def _weights(estimator):
    names = [name for name in estimator.get_variable_names() if name != 'global_step']
    return {name: estimator.get_variable_value(name) for name in names}


def _dropout_model_fn(features, labels, mode, params):
    net = tf.cast(features['image'], tf.float32) / 255
    net = tf.nn.relu(mlp.dense(net, 8, name='hidden', stddev=0.3))
    if mode == compat.estimator.ModeKeys.TRAIN:
        net = tf.nn.dropout(net, rate=0.4)
    return make_classifier_spec(mlp.dense(net, 3, name='logits', stddev=0.3), features, labels, mode, params)


@pytest.mark.parametrize('model_fn', [mlp.model_fn, _dropout_model_fn])
def test_losses_and_weights_do_not_depend_on_steps_per_loop(tmp_path, model_fn):
    one, losses_of_one = fakes.train_looped(model_fn, tmp_path / 'one', max_steps=40, steps_per_loop=1)
    seven, losses_of_seven = fakes.train_looped(model_fn, tmp_path / 'seven', max_steps=40, steps_per_loop=7)
    assert [step for step, _ in losses_of_one] == list(range(1, 41))
    assert [step for step, _ in losses_of_seven] == [7, 14, 21, 28, 35, 40]
    every_loss = dict(losses_of_one)
    assert all(every_loss[step] == loss for step, loss in losses_of_seven)
    weights = _weights(seven)
    assert weights.keys() == _weights(one).keys() and len(weights) >= 4
    for name, value in _weights(one).items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_loop_equals_plain_estimator(tmp_path):
    looped, _ = fakes.train_looped(mlp.model_fn, tmp_path / 'looped', max_steps=25, steps_per_loop=10)
    plain = fakes.make_estimator(mlp.model_fn, tmp_path / 'plain', params=fakes.make_params())
    plain.train(fakes.make_blobs_input_fn(8), max_steps=25)
    for name, value in _weights(plain).items():
        np.testing.assert_array_equal(value, looped.get_variable_value(name), err_msg=name)


def test_calls_end_on_steps_to_be_summarised_and_on_the_last(tmp_path):
    _, seen = fakes.train_looped(mlp.model_fn, tmp_path, max_steps=50, steps_per_loop=16, summary_steps=20)
    assert [step for step, _ in seen] == [16, 20, 36, 40, 50]
    assert sorted(fakes.read_events(tmp_path / 'train')['accuracy']) == [20, 40]


def test_call_ends_at_the_step_whose_loss_is_not_finite(tmp_path):
    def model_fn(features, labels, mode, params):
        spec = mlp.model_fn(features, labels, mode, params)
        # The step is read before the update: the 13th step sees 12.
        step = tf.compat.v1.train.get_global_step().read_value()
        with tf.control_dependencies([step]):
            loss = tf.where(tf.equal(step, 12), tf.constant(np.nan), spec.loss)
        with tf.control_dependencies([loss]):
            return spec._replace(loss=loss, train_op=tf.compat.v1.assign_add(tf.compat.v1.train.get_global_step(), 1))

    with pytest.raises(hooks.NanLossError, match='the loss became nan at step 13'):
        fakes.train_looped(model_fn, tmp_path, max_steps=20, steps_per_loop=20)
    # Step 13 is not saved.
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / 'model.ckpt-0')


def test_input_that_ends_stops_training_and_keeps_what_was_learnt(tmp_path):
    endless = fakes.make_blobs_input_fn(8)
    estimator, seen = fakes.train_looped(
        mlp.model_fn, tmp_path, max_steps=100, steps_per_loop=10, input_fn=lambda params: endless().take(25)
    )
    assert [step for step, _ in seen] == [10, 20]
    assert estimator.get_variable_value('global_step') == 25


def test_batch_normalisation_of_a_keras_model_moves_once_a_step(tmp_path):
    def model_fn(features, labels, mode, params):
        return keras_network.model_fn(fakes.make_keras_network, features, labels, mode, {**params, 'width': 16})

    one, _ = fakes.train_looped(model_fn, tmp_path / 'one', max_steps=12, steps_per_loop=1)
    five, seen = fakes.train_looped(model_fn, tmp_path / 'five', max_steps=12, steps_per_loop=5)
    assert [step for step, _ in seen] == [5, 10, 12]
    plain = fakes.make_estimator(model_fn, tmp_path / 'plain', params=fakes.make_params())
    plain.train(fakes.make_blobs_input_fn(8), max_steps=12)
    (name,) = [name for name in one.get_variable_names() if name.endswith('moving_mean')]
    moved = one.get_variable_value(name)
    assert np.abs(moved).max() > 0.01
    np.testing.assert_array_equal(moved, five.get_variable_value(name))
    np.testing.assert_allclose(moved, plain.get_variable_value(name), rtol=1e-6)


class _Session:
    def __init__(self):
        self.loaded = []

    def run(self, op, feed_dict):
        self.loaded.extend(feed_dict.values())


class _Context:
    def __init__(self):
        self.session = _Session()


def _make_context(hook):
    context = _Context()
    hook._assign, hook._value = 'assign', 'value'
    hook.after_create_session(context.session, None)
    return context


def _steps_after_calls(hook, clock, secs_of_calls):
    context = _make_context(hook)
    for secs in secs_of_calls:
        hook.before_run(context)
        clock.now += secs
        hook.after_run(context, None)
    return hook.steps_per_call, context.session.loaded


def test_steps_per_call_grow_until_a_call_takes_its_time():
    clock = fakes.FakeClock()
    # The first two calls are start-up; then 1 ms, 10 ms, 100 ms, 125 ms a call.
    steps, loaded = _steps_after_calls(loop.StepsPerCallHook(0, clock), clock, [3.0, 0.001, 0.001, 0.01, 0.1, 0.2])
    assert (steps, loaded) == (200, [1, 10, 100, 200])


def test_steps_per_call_stay_at_one_for_long_steps_and_as_set():
    clock = fakes.FakeClock()
    assert _steps_after_calls(loop.StepsPerCallHook(0, clock), clock, [1.0] * 5) == (1, [1])
    assert _steps_after_calls(loop.StepsPerCallHook(30, clock), clock, [0.001] * 5) == (30, [30])


def test_workers_in_lockstep_take_the_steps_of_the_chief_in_the_same_call():
    clock = fakes.FakeClock()
    state = loop.LoopState()
    state.result = types.SimpleNamespace(pace='pace', agreed_pace='agreed')
    hooks = [loop.StepsPerCallHook(0, clock, lockstep=state, is_chief=is_chief) for is_chief in (True, False)]
    contexts = [_make_context(hook) for hook in hooks]
    for secs in (3.0, 0.001, 0.001, 0.01, 0.1, 0.2):
        fed = [hook.before_run(context).feed_dict['pace'] for hook, context in zip(hooks, contexts)]
        clock.now += secs
        agreed = np.sum(fed, axis=0)
        for hook, context in zip(hooks, contexts):
            hook.after_run(context, types.SimpleNamespace(results=agreed))
    assert [context.session.loaded for context in contexts] == [[1, 10, 100, 200]] * 2
