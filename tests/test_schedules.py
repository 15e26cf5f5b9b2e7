"""Learning rates at chosen steps, of numbers and of tensors, and that training and its summaries have them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer.config import Config, DataConfig, LoopConfig, OptimizerConfig
from trainer.errors import UsageError
from trainer.models import mlp, premade
from trainer.schedules import Schedule, make_schedule

DATA = DataConfig(train_data_paths='train', eval_data_paths='eval', batch_size=512)


@pytest.mark.parametrize(
    ('settings', 'rates'),
    [
        ({}, {0: 2, 7: 2}),
        ({'warmup_steps': 4}, {0: 0.5, 1: 1, 3: 2, 4: 2, 100: 2}),
        ({'kind': 'exponential', 'decay_steps': 10, 'decay_rate': 0.25}, {0: 2, 5: 1, 10: 0.5, 20: 0.125}),
        ({'kind': 'polynomial', 'decay_steps': 10}, {0: 2, 1: 1.8, 5: 1, 10: 0, 11: 0}),
        ({'kind': 'polynomial', 'decay_steps': 10, 'decay_power': 2.0, 'decay_end': 0.1}, {0: 2, 5: 0.65, 10: 0.2, 99: 0.2}),
        ({'kind': 'cosine', 'decay_steps': 12}, {0: 2, 3: 1 + math.sqrt(0.5), 4: 1.5, 6: 1, 8: 0.5, 12: 0, 13: 0}),
        ({'kind': 'cosine', 'decay_steps': 12, 'decay_end': 0.5}, {0: 2, 6: 1.5, 12: 1}),
        ({'kind': 'piecewise', 'boundaries': (10, 20)}, {0: 2, 9: 2, 10: 0.2, 19: 0.2, 20: 0.02, 50: 0.02}),
        # Boundaries count from the start of training, as epochs do; the others begin when warm-up is over.
        ({'kind': 'piecewise', 'boundaries': (10,), 'warmup_steps': 5}, {0: 0.4, 4: 2, 9: 2, 10: 0.2}),
        ({'kind': 'exponential', 'decay_steps': 10, 'decay_rate': 0.25, 'warmup_steps': 2}, {0: 1, 1: 2, 2: 2, 7: 1}),
        ({'kind': 'polynomial', 'decay_steps': 10, 'warmup_steps': 2}, {0: 1, 2: 2, 7: 1, 12: 0}),
        ({'kind': 'cosine', 'decay_steps': 12, 'warmup_steps': 3}, {0: 2 / 3, 2: 2, 3: 2, 9: 1, 15: 0}),
    ],
)
def test_rate_at_steps(settings, rates):
    schedule = Schedule(2.0, **settings)
    assert {step: schedule(step) for step in rates} == pytest.approx(rates, abs=1e-12)
    tensors = {step: schedule(tf.constant(step, tf.int64)) for step in rates}
    if not schedule.is_constant:
        assert all(tensor.dtype == tf.float32 and tensor.shape == [] for tensor in tensors.values())
    assert {step: float(tensor) for step, tensor in tensors.items()} == pytest.approx(rates, abs=1e-6)


def test_rate_grows_with_the_global_batch():
    def peak(**settings):
        return make_schedule(Config(data=DATA, optimizer=OptimizerConfig(learning_rate=0.1, **settings))).peak

    assert peak() == 0.1
    assert peak(learning_rate_batch=256) == pytest.approx(0.2)


def test_decay_ends_with_training_unless_told_otherwise():
    def decay_steps(**settings):
        optimizer = OptimizerConfig(learning_rate_schedule='cosine', **settings)
        return make_schedule(Config(data=DATA, optimizer=optimizer, loop=LoopConfig(max_steps=1000))).decay_steps

    assert decay_steps() == 1000
    assert decay_steps(warmup_steps=100) == 900
    assert decay_steps(warmup_steps=100, decay_steps=300) == 300


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (
            {'decay_steps': 5},
            '--decay_steps=5 is for --learning_rate_schedule=exponential or polynomial or cosine; it is constant',
        ),
        (
            {'decay_power': 2.0, 'learning_rate_schedule': 'cosine'},
            '--decay_power=2.0 is for --learning_rate_schedule=polynomial; it is cosine',
        ),
        ({'learning_rate_schedule': 'exponential'}, '--learning_rate_schedule=exponential needs --decay_steps'),
        ({'learning_rate_schedule': 'piecewise'}, '--learning_rate_schedule=piecewise needs --decay_boundaries'),
        (
            {'learning_rate_schedule': 'piecewise', 'decay_boundaries': '20,10'},
            '--decay_boundaries=20,10: expected rising steps above 0',
        ),
        ({'learning_rate_schedule': 'piecewise', 'decay_boundaries': 'a'}, '--decay_boundaries=a: expected rising steps'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(UsageError) as raised:
        OptimizerConfig(**settings)
    assert str(raised.value).startswith(message)


def test_warm_up_that_never_ends_is_refused():
    with pytest.raises(UsageError, match=r'--warmup_steps=10 never ends: --max_steps=10; expected fewer'):
        Config(data=DATA, optimizer=OptimizerConfig(warmup_steps=10), loop=LoopConfig(max_steps=10))


@pytest.mark.parametrize('model_fn', [mlp.model_fn, premade.wide_deep_model_fn])
def test_training_in_the_loop_takes_the_rate_of_its_step_and_summaries_say_so(tmp_path, model_fn):
    schedule = Schedule(0.4, 'piecewise', warmup_steps=4, boundaries=(6,))
    params = fakes.make_params(schedule=schedule, learning_rate=0.4)
    fakes.train_looped(model_fn, tmp_path, max_steps=8, steps_per_loop=4, summary_steps=1, params=params)
    # What is written at step n is of the n-th update.
    rates = fakes.read_events(tmp_path / 'train')['learning_rate']
    assert rates == pytest.approx({n: schedule(n - 1) for n in range(1, 9)}, rel=1e-6)


def test_weights_move_by_the_rate_of_the_step():
    params = fakes.make_params(schedule=Schedule(1.0, 'exponential', decay_steps=1, decay_rate=0.5))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        from trainer.optimizers import make_optimizer, make_train_op

        weight = tf.compat.v1.get_variable('weight', [], initializer=tf.compat.v1.zeros_initializer(), use_resource=True)
        train_op = make_train_op(-weight, make_optimizer(params))
        session.run(tf.compat.v1.global_variables_initializer())
        values = []
        for _ in range(4):
            session.run(train_op)
            values.append(session.run(weight))
    np.testing.assert_allclose(values, [1, 1.5, 1.75, 1.875])
