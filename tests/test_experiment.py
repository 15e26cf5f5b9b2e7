"""What an error of a run is turned into."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer.data_errors import translate_errors
from trainer.datasets import MNIST
from trainer.errors import DataError


@pytest.mark.parametrize('kind', [DataError, ValueError, RuntimeError, tf.errors.InvalidArgumentError])
def test_error_of_a_model_fn_comes_through_a_strategy_as_it_was_raised(kind):
    raised = kind(None, None, 'what is wrong') if issubclass(kind, tf.errors.OpError) else kind('what is wrong')

    def model_fn():
        raise raised

    def call_model_fn():
        model_fn()

    strategy = tf.compat.v1.distribute.MirroredStrategy(['/cpu:0'])
    with pytest.raises(kind) as info, translate_errors(MNIST, []), tf.Graph().as_default():
        # As Estimator does; the strategy converts what it calls, and what that calls.
        strategy.extended.call_for_each_replica(call_model_fn)
    assert info.value is raised
    assert 'in user code' not in str(info.value)
