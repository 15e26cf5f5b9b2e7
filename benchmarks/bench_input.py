"""Records per CPU-second and per second of the input pipelines, for small records (784 bytes and a label).

Steps: write the records (real digits, repeated to --records of them, in 16 plain shards in a temporary folder); for each
round and batch size run every pipeline in turn, each in a fresh process that warms up and then draws batches for
--secs through the same v1 session call; print medians and the spread of the ratios within a round.

The pipelines:
  memory       ours, the parsed set in memory (loading it, once, belongs to the warm-up and is stated apart)
  streaming    ours, read from the files all the time
  lab          the TPU lab's recommendation: shuffled records, parsed one at a time with AUTOTUNE, batched, prefetched
  lab_float32  the same with the pixels cast and scaled on the host, as it is usually written
  one_by_one   no parallel calls: shuffled records parsed one at a time

All but lab_float32 give the same: [batch, 784] uint8 and [batch] int64, shuffled. A fetch runs the batch's operations and
copies nothing to Python.

`bench_input.py images` measures pictures: `bench_images.py`.

Run: python benchmarks/bench_input.py [--rounds 5] [--secs 3] [--save benchmarks/results/input_....md]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.measure import compare, describe_machine, run_child

PIPELINES = ('memory', 'streaming', 'lab', 'lab_float32', 'one_by_one')
SHUFFLE_BUFFER = 10000
NUM_SHARDS = 16


def write_records(folder: pathlib.Path, count: int) -> None:
    """Writes `count` records to `folder`: the 4,000 training digits of scripts/convert_mnist over and over."""
    from trainer import convert, records

    digits = folder / 'digits'
    convert.convert('mnist', str(digits))
    payloads = [record.payload for path in sorted(digits.glob('train-*')) for record in records.scan(str(path))]
    for index in range(NUM_SHARDS):
        part = (payloads[i % len(payloads)] for i in range(index, count, NUM_SHARDS))
        records.write_file(str(folder / f'bench-{index:05d}.tfrecord'), part)


def make_ours(files: Sequence[str], batch_size: int, cache: str) -> Any:
    """Our input_fn's dataset."""
    from trainer import inputs
    from trainer.config import DataConfig
    from trainer.datasets import MNIST

    config = DataConfig(cache=cache, shuffle_buffer=SHUFFLE_BUFFER)
    return inputs.make_input_fn(files, MNIST, training=True, global_batch_size=batch_size, seed=1, config=config)()


def make_peer(files: Sequence[str], batch_size: int, *, is_parallel: bool, is_float: bool) -> Any:
    """One record at a time: files interleaved, records shuffled, parsed, batched, prefetched."""
    import tensorflow as tf

    parallel = tf.data.AUTOTUNE if is_parallel else None
    wanted = {'image': tf.io.FixedLenFeature((), tf.string), 'label': tf.io.FixedLenFeature((), tf.int64)}

    def parse(serialized: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        parsed = tf.io.parse_single_example(serialized, wanted)
        image = tf.ensure_shape(tf.io.decode_raw(parsed['image'], tf.uint8), [784])
        return {'image': tf.cast(image, tf.float32) / 255.0 if is_float else image}, parsed['label']

    records = (
        tf.data.Dataset.from_tensor_slices(list(files))
        .shuffle(len(files))
        .interleave(tf.data.TFRecordDataset, cycle_length=NUM_SHARDS, num_parallel_calls=parallel)
        .shuffle(SHUFFLE_BUFFER)
        .repeat()
    )
    batches = records.map(parse, num_parallel_calls=parallel).batch(batch_size, drop_remainder=True)
    return batches.prefetch(tf.data.AUTOTUNE if is_parallel else 1)


def make_dataset(name: str, files: Sequence[str], batch_size: int) -> Any:
    """The dataset of a pipeline in `PIPELINES`."""
    if name in ('memory', 'streaming'):
        return make_ours(files, batch_size, 'memory' if name == 'memory' else 'off')
    return make_peer(files, batch_size, is_parallel=name.startswith('lab'), is_float=name == 'lab_float32')


def measure(name: str, folder: str, *, batch_size: int, secs: float) -> dict[str, float]:
    """Draws batches for `secs` seconds in this process.

    Returns:
      Records per second of CPU (user and system, all threads) and of the clock, and seconds to the first batch.
    """
    import tensorflow as tf

    files = sorted(map(str, pathlib.Path(folder).glob('bench-*')))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        began = time.perf_counter()
        iterator = tf.compat.v1.data.make_initializable_iterator(make_dataset(name, files, batch_size))
        features, labels = iterator.get_next()
        draw = session.make_callable(tf.group(features['image'].op, labels.op))
        session.run(iterator.initializer)
        draw()
        first_secs = time.perf_counter() - began
        draw_for(draw, secs / 2)
        cpu, clock = cpu_secs(), time.perf_counter()
        count = draw_for(draw, secs) * batch_size
        return {
            'per_cpu_sec': count / (cpu_secs() - cpu),
            'per_sec': count / (time.perf_counter() - clock),
            'first_batch_secs': first_secs,
        }


def draw_for(draw: Any, secs: float) -> int:
    """Draws batches for so long; returns how many."""
    end = time.perf_counter() + secs
    count = 0
    while time.perf_counter() < end:
        draw()
        count += 1
    return count


def cpu_secs() -> float:
    """CPU time of this process so far, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def describe(results: dict[str, list[dict[str, float]]], batch_size: int) -> list[str]:
    """A Markdown table of one batch size: medians, and the ratio to `lab` with the least and greatest of a round."""
    lines = [
        f'## Batch {batch_size}',
        '',
        '| pipeline | records per CPU-second | records per second | first batch, s | to lab, per CPU-second |',
        '|---|---|---|---|---|',
    ]
    for name, rounds in results.items():
        medians = {key: statistics.median(result[key] for result in rounds) for key in rounds[0]}
        ratio = compare(*([result['per_cpu_sec'] for result in runs] for runs in (rounds, results['lab'])))
        lines.append(
            f'| {name} | {medians["per_cpu_sec"]:,.0f} | {medians["per_sec"]:,.0f} | {medians["first_batch_secs"]:.2f} '
            f'| {ratio} |'
        )
    return [*lines, '']


def main() -> None:
    """Runs the benchmark, or one measurement of it as a child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--records', type=int, default=60000, help='records of the set')
    parser.add_argument('--batches', type=int, nargs='+', default=[128, 1024], help='batch sizes')
    parser.add_argument('--rounds', type=int, default=5, help='runs of each pipeline')
    parser.add_argument('--secs', type=float, default=3.0, help='seconds of a run that count, after half as many')
    parser.add_argument('--save', default='', help='also write the report to this file')
    for internal in ('--child', '--folder', '--batch'):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    if sys.argv[1:2] == ['images']:
        from benchmarks import bench_images

        bench_images.main(sys.argv[2:])
        return
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(measure(flags.child, flags.folder, batch_size=int(flags.batch), secs=flags.secs)))
        return
    report = run_all(flags)
    print(report)
    if flags.save:
        pathlib.Path(flags.save).write_text(report)


def run_all(flags: argparse.Namespace) -> str:
    """Runs every pipeline in turn, round by round; returns the report."""
    results: dict[int, dict[str, list[dict[str, float]]]] = {b: {name: [] for name in PIPELINES} for b in flags.batches}
    with tempfile.TemporaryDirectory(prefix='bench-input-') as folder:
        write_records(pathlib.Path(folder), flags.records)
        for _ in range(flags.rounds):
            for batch_size in flags.batches:
                for name in PIPELINES:
                    arguments = ['--child', name, '--folder', folder, '--batch', str(batch_size), '--secs', str(flags.secs)]
                    results[batch_size][name].append(run_child(__file__, arguments, timeout_secs=600))
    tables = [line for batch_size in flags.batches for line in describe(results[batch_size], batch_size)]
    command = ' '.join(['python benchmarks/bench_input.py', *sys.argv[1:]])
    return '\n'.join(
        [
            '# Input pipelines, small records (784 bytes of uint8 and a label)',
            '',
            f'`{command}`',
            '',
            f'{describe_machine()}; load {os.getloadavg()[0]:.1f} at the end. {flags.records:,} records in {NUM_SHARDS} plain '
            f'shards: 4,000 real digits repeated. {flags.rounds} rounds, interleaved; medians, and of ratios also the least '
            f'and the greatest of a round. Each run is a process of its own, {flags.secs:g} s after {flags.secs / 2:g} s of '
            'warming up; CPU is user + system of the whole process.',
            '',
            'All give [batch, 784] uint8 images and [batch] int64 labels, shuffled, except lab_float32: float32 in [0, 1].',
            '',
            *tables,
            '```json',
            json.dumps(results),
            '```',
            '',
        ]
    )


if __name__ == '__main__':
    main()
