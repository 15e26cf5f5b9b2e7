"""Steps a second of the training loop: ours, a plain Estimator, Keras fit; the same net, data, optimizer and duties.

    python benchmarks/bench_loop.py --data DIR [--rounds 5] [--batches 10,100,1024] [--peer_input ours]

All train the perceptron 784-128-32-10 by SGD on the same shards; all save a checkpoint every 1,000 steps, write summaries
every 100 and log. The peers read as TensorFlow's guide to tf.data performance has it (parse, cache in memory, shuffle, repeat,
batch, prefetch); with --peer_input=ours they read by our input_fn, which compares the loops alone. Each runs in a fresh
process; the variants take turns within a round. The window measured leaves out the first part of the steps (start-up,
tracing, choosing steps per call). CPU is user and system time of the process in the window.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import measure

PEER_INPUT = 'guide'
VARIANTS = ('ours', 'estimator', 'keras_1', 'keras_100')
# Steps of the window by batch size: some seconds of it.
STEPS = {10: 8000, 100: 5000, 1024: 1000}
WARM_UP = {10: 4000, 100: 2000, 1024: 300}


class Window:
    """Wall-clock and CPU seconds between two steps."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._started: tuple[int, float, float] | None = None
        self.result: dict[str, float] = {}

    def see(self, step: int) -> None:
        """Takes note that `step` is done."""
        now = (step, time.perf_counter(), time.process_time())
        if self._started is None and step >= self._first:
            self._started = now
        if step >= self._last and self._started is not None and not self.result:
            steps, wall, cpu = (end - start for end, start in zip(now, self._started))
            self.result = {'steps_per_sec': steps / wall, 'steps_per_cpu_sec': steps / cpu}


def run_ours(data: str, batch_size: int, window: Window, output: str, last: int) -> None:
    """Trains with trainer.task, as a user would."""
    flags = [f'--train_data_paths={data}', '--mode=train', f'--output_path={output}', f'--batch_size={batch_size}']
    run_task([*flags, f'--max_steps={last}', '--save_checkpoints_steps=1000', '--cache=memory'], window)


def run_task(flags: list[str], window: Window) -> None:
    """Runs trainer.task in this process and lets `window` see the step after every session call."""
    import tensorflow as tf

    from trainer import task, training

    make_hooks = training.make_hooks

    def make_hooks_and_watch(run, state, *others, **settings):
        class Watch(tf.compat.v1.train.SessionRunHook):
            def before_run(self, run_context):
                return tf.compat.v1.train.SessionRunArgs(state.result.step)

            def after_run(self, run_context, run_values):
                window.see(int(run_values.results))

        return [*make_hooks(run, state, *others, **settings), Watch()]

    training.make_hooks = make_hooks_and_watch
    code = task.main(flags)
    assert code == 0, code


def make_peer_input_fn(data: str, batch_size: int):
    """Returns the peers' input_fn: batches of ({'image': [batch, 784] uint8}, [batch] int64), read as PEER_INPUT says."""
    import tensorflow as tf

    from trainer import data_files, inputs
    from trainer.config import DataConfig
    from trainer.datasets import get_dataset

    files = data_files.resolve(data, '--data')
    if PEER_INPUT == 'ours':
        config = DataConfig(cache='memory')
        dataset = get_dataset('mnist')
        return inputs.make_input_fn(files, dataset, training=True, global_batch_size=batch_size, seed=1, config=config)

    def parse(serialized):
        spec = {'image': tf.io.FixedLenFeature([], tf.string), 'label': tf.io.FixedLenFeature([], tf.int64)}
        example = tf.io.parse_single_example(serialized, spec)
        return {'image': tf.reshape(tf.io.decode_raw(example['image'], tf.uint8), [784])}, example['label']

    def input_fn(params):
        records = tf.data.TFRecordDataset(files).map(parse, num_parallel_calls=tf.data.AUTOTUNE).cache()
        return records.shuffle(4000).repeat().batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    return input_fn


def run_estimator(data: str, batch_size: int, window: Window, output: str, last: int) -> None:
    """Trains a plain Estimator with its default hooks: summaries and a log line every 100 steps."""
    import tensorflow as tf

    from trainer import compat
    from trainer.config import ModelConfig, OptimizerConfig
    from trainer.models import mlp

    estimator_api = compat.estimator

    def model_fn(features, labels, mode, params):
        return mlp.model_fn(features, labels, mode, params).as_estimator_spec()

    class Watch(tf.compat.v1.train.SessionRunHook):
        def begin(self):
            self._step = 0

        def after_run(self, run_context, run_values):
            self._step += 1
            window.see(self._step)

    params = {**dataclasses.asdict(ModelConfig()), **dataclasses.asdict(OptimizerConfig()), 'num_classes': 10}
    config = estimator_api.RunConfig(model_dir=output, save_checkpoints_steps=1000)
    estimator = estimator_api.Estimator(model_fn, params=params, config=config)
    input_fn = make_peer_input_fn(data, batch_size)
    estimator.train(lambda: input_fn({}), max_steps=last, hooks=[Watch()])


def run_keras(data: str, batch_size: int, window: Window, output: str, last: int, steps_per_execution: int) -> None:
    """Trains by Keras fit with its TensorBoard and checkpoint callbacks."""
    import tensorflow as tf

    keras = tf.keras
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Rescaling(1.0 / 255, input_shape=(784,)),
            layers.Dense(128, activation='relu'),
            layers.Dense(32, activation='relu'),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=['accuracy'], steps_per_execution=steps_per_execution)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            window.see(batch + 1)

    callbacks = [
        keras.callbacks.TensorBoard(output, update_freq=100),
        keras.callbacks.ModelCheckpoint(os.path.join(output, 'model-{batch}'), save_freq=1000, save_weights_only=True),
        Watch(),
    ]
    dataset = make_peer_input_fn(data, batch_size)({}).map(lambda features, labels: (features['image'], labels))
    model.fit(dataset, steps_per_epoch=last, epochs=1, verbose=2, callbacks=callbacks)


def run_variant(variant: str, data: str, batch_size: int) -> None:
    """Runs one variant in this process and prints its figures as JSON."""
    first, last = WARM_UP[batch_size], WARM_UP[batch_size] + STEPS[batch_size]
    window = Window(first, last)
    with tempfile.TemporaryDirectory() as output:
        if variant == 'ours':
            run_ours(data, batch_size, window, output, last)
        elif variant == 'estimator':
            run_estimator(data, batch_size, window, output, last)
        else:
            run_keras(data, batch_size, window, output, last, int(variant.rpartition('_')[2]))
    print(json.dumps(window.result))


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', required=True, help='folder of the training shards')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--batches', default='10,100,1024')
    parser.add_argument('--peer_input', choices=('guide', 'ours'), default='guide')
    parser.add_argument('--variant', choices=VARIANTS, help='run this one alone, in this process')
    arguments = parser.parse_args()
    global PEER_INPUT
    PEER_INPUT = arguments.peer_input
    batches = [int(size) for size in arguments.batches.split(',')]
    if arguments.variant:
        run_variant(arguments.variant, arguments.data, batches[0])
        return
    print(f'{measure.describe_machine()}; peers read by {arguments.peer_input}')
    for batch_size in batches:
        figures: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant in VARIANTS:
                flags = ['--data', arguments.data, '--batches', str(batch_size), '--variant', variant]
                flags += ['--peer_input', arguments.peer_input]
                figures[variant].append(measure.run_child(__file__, flags, timeout_secs=300))
        print(f'\nbatch {batch_size}, {STEPS[batch_size]} steps, median of {arguments.rounds} rounds')
        print(f'{"":12}{"steps/s":>10}{"per CPU-s":>11}   ours/this by wall     ours/this by CPU')
        for variant, runs in figures.items():
            wall, cpu = ([run[key] for run in runs] for key in ('steps_per_sec', 'steps_per_cpu_sec'))
            our_wall, our_cpu = ([run[key] for run in figures['ours']] for key in ('steps_per_sec', 'steps_per_cpu_sec'))
            ratios = f'{measure.compare(our_wall, wall):22}{measure.compare(our_cpu, cpu)}'
            print(f'{variant:12}{statistics.median(wall):10.0f}{statistics.median(cpu):11.0f}   {ratios}', flush=True)


if __name__ == '__main__':
    main()
