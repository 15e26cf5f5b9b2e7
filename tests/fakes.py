"""Small stand-ins that tests share: a dataset of ten blobs, an Estimator over it, a clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from trainer import compat, hooks, loop
from trainer.config import ModelConfig, OptimizerConfig
from trainer.models.classifier import make_classifier_spec
from trainer.models.mlp import dense
from trainer.normalization import batch_norm
from trainer.summaries import Summaries, SummaryParams


class FakeClock:
    """A clock that a test sets: `clock.now += 2` is two seconds later."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_blobs(count: int, *, width: int = 16, num_classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns [count, width] uint8 features around a centre for each class, and [count] int64 labels."""
    random = np.random.RandomState(seed)
    centres = np.random.RandomState(7).randint(40, 215, (num_classes, width))
    labels = random.randint(0, num_classes, count)
    features = np.clip(centres[labels] + random.normal(0, 20, (count, width)), 0, 255)
    return features.astype(np.uint8), labels.astype(np.int64)


def make_blobs_input_fn(batch_size: int, *, count: int = 512, width: int = 16) -> Any:
    """Returns an input_fn of endless shuffled batches ({'image': [batch, width] uint8}, [batch] int64)."""
    features, labels = make_blobs(count, width=width)

    def input_fn(params: Any = None) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(({'image': features}, labels))
        return dataset.shuffle(count, seed=3).repeat().batch(batch_size, drop_remainder=True)

    return input_fn


def make_params(**settings: Any) -> dict[str, Any]:
    """Returns the params of a small model; `settings` replace or add."""
    defaults = {
        **dataclasses.asdict(OptimizerConfig()),
        **dataclasses.asdict(ModelConfig(hidden1=8, hidden2=6)),
        'num_classes': 3,
        'vocabularies': {},
        'moments': {},
    }
    return {**defaults, **settings}


def make_keras_network(params: Any) -> Any:
    """A Keras model with batch normalisation that knows its inputs: [batch, width], by default a digit's width."""
    layers = compat.keras.layers
    inputs = compat.keras.Input((params.get('width', 784),))
    hidden = layers.Dense(8, activation='relu')(layers.Rescaling(1 / 255)(inputs))
    normalised = layers.BatchNormalization(momentum=0.5)(hidden)
    return compat.keras.Model(inputs, layers.Dense(params['num_classes'])(normalised))


def normalized_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """A classifier of [batch, width] uint8 with batch normalisation over all replicas."""
    net = tf.cast(features['image'], tf.float32) / 255.0
    net = dense(net, params['hidden1'], name='hidden1', stddev=0.05)
    net = tf.nn.relu(batch_norm(net, is_training=mode == compat.estimator.ModeKeys.TRAIN, name='norm'))
    logits = dense(net, params['num_classes'], name='logits', stddev=0.05)
    return make_classifier_spec(logits, features, labels, mode, params, summaries=Summaries(params.get('summaries')))


def train_looped(
    model_fn: Any,
    model_dir: Any,
    *,
    max_steps: int,
    steps_per_loop: int,
    batch_size: int = 8,
    summary_steps: int = 0,
    params: Any = None,
    input_fn: Any = None,
    seed: int = 1,
) -> tuple[Any, list[tuple[int, float]]]:
    """Trains in the loop; returns the Estimator and the (step, loss) after every session call."""
    seen: list[tuple[int, float]] = []
    state = loop.LoopState()

    class Recorder(tf.compat.v1.train.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return tf.compat.v1.train.SessionRunArgs([state.result.step, state.result.loss])

        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append((int(run_values.results[0]), float(run_values.results[1])))

    params = params or make_params()
    params = {**params, 'summaries': SummaryParams(f'{model_dir}/train', summary_steps)}
    estimator = make_estimator(
        loop.wrap_model_fn(model_fn, state=state, stop_multiples=[summary_steps], max_steps=max_steps),
        model_dir,
        params=params,
        batch_size=batch_size,
        seed=seed,
    )
    estimator.train(
        loop.wrap_input_fn(input_fn or make_blobs_input_fn(batch_size)),
        hooks=[
            loop.StepsPerCallHook(steps_per_loop),
            Recorder(),
            hooks.StopOnNanHook(state),
            hooks.SaveHook(state, str(model_dir), save_steps=0, save_secs=0),
            hooks.StopAtStepHook(state, max_steps),
        ],
    )
    return estimator, seen


def make_estimator(model_fn: Any, model_dir: Any, *, params: Any, batch_size: int = 8, seed: int = 1) -> Any:
    """Returns a TPUEstimator for one CPU."""
    config = compat.estimator.tpu.RunConfig(
        model_dir=str(model_dir),
        tf_random_seed=seed,
        save_summary_steps=0,
        log_step_count_steps=None,
        save_checkpoints_steps=10**6,
        save_checkpoints_secs=None,
    )
    return compat.estimator.tpu.TPUEstimator(
        model_fn=model_fn,
        config=config,
        params=params,
        use_tpu=False,
        eval_on_tpu=False,
        export_to_tpu=False,
        train_batch_size=batch_size,
        eval_batch_size=batch_size,
        predict_batch_size=batch_size,
    )


def read_events(directory: Any) -> dict[str, dict[int, Any]]:
    """Returns {tag: {step: value}} of all event files in a folder; images and histograms as their tensors."""
    values: dict[str, dict[int, Any]] = {}
    for path in sorted(tf.io.gfile.glob(f'{directory}/*tfevents*')):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                kind = value.WhichOneof('value')
                number = value.simple_value if kind == 'simple_value' else tf.make_ndarray(value.tensor)
                values.setdefault(value.tag, {})[event.step] = number
    return values
