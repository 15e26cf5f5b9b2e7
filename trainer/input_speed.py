"""`python -m trainer.inputs --measure [flags as for a run]`: how fast the training input is, alone and beside the model's step.

The order of work:
  1. The pipeline alone: batches are drawn and thrown away.
  2. Its stages: the first of them alone, then the first two, and so on; what one more costs is the cost of the stage.
  3. The step: once with this input, once with a batch that is there already. The difference is waiting for input.
Nothing is written. Everything runs on one device in this process, whatever the flags say of a cluster.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from trainer import compat, flags, hooks, inputs, loop, pipelines
from trainer.cluster import read_cluster
from trainer.config import ClusterConfig, DistributionConfig
from trainer.data_errors import translate_errors
from trainer.errors import DataError, UsageError
from trainer.experiment import Experiment

# Of each measurement, after half as long to warm up.
MEASURE_SECS = 4.0
_READ_RECORDS = 64


class Speed(NamedTuple):
    """What was drawn from a pipeline."""

    examples: int
    secs: float
    """By the clock."""
    cpu_secs: float
    """User and system, of all threads of the process."""


class Report(NamedTuple):
    """What `measure` found."""

    pipeline: str
    """As `inputs.InputFn.pipeline`."""
    alone: Speed
    stages: Mapping[str, tuple[float, float]]
    """Name to seconds an example, by the clock and of CPU, in the order of the work."""
    load_secs: float
    """To the first batch; the whole set is read in it when the pipeline is one from memory."""
    step_secs: float
    """A training step with this input."""
    bare_step_secs: float
    """A training step with a batch that is there already."""

    @property
    def waiting(self) -> float:
        """Share of the step, 0 to 1, that is spent waiting for input."""
        return max(0.0, 1 - self.bare_step_secs / self.step_secs)

    @property
    def slowest(self) -> str:
        """The stage that takes longest by the clock."""
        return max(self.stages, key=lambda name: self.stages[name][0])

    def describe(self) -> list[str]:
        """The lines to print."""
        examples, secs, cpu_secs = self.alone
        lines = [
            f'input alone    {examples / secs:,.0f} examples/s, {examples / cpu_secs:,.0f} per CPU-second '
            f'(pipeline {self.pipeline!r}; first batch after {self.load_secs:.1f} s)'
        ]
        for name, (clock, cpu) in self.stages.items():
            mark = '  <- slowest' if name == self.slowest and len(self.stages) > 1 else ''
            lines.append(f'  {name:22} {clock * 1e6:10,.2f} us an example, {cpu * 1e6:10,.2f} us of CPU{mark}')
        lines.append(
            f'training step  {self.step_secs * 1e3:,.3f} ms with this input, {self.bare_step_secs * 1e3:,.3f} ms with a batch '
            f'that is there: {self.waiting:.0%} of the step is waiting for input'
        )
        return lines


def measure(experiment: Experiment, secs: float) -> Report:
    """Measures the training input of a run, for five times `secs` seconds and half as long to warm up.

    Raises:
      DataError: as training would.
    """
    input_fn = experiment.make_train_input_fn(0)
    with translate_errors(experiment.dataset, input_fn.files):
        alone, load_secs = _draw(lambda: input_fn({}), input_fn.batch_size, secs)
        stages = _measure_stages(input_fn, alone, secs)
        step_secs = _time_steps(experiment, lambda params: input_fn(params), secs)
        bare_step_secs = _time_steps(experiment, lambda params: input_fn(params).take(1).cache().repeat(), secs)
    return Report(input_fn.pipeline, alone, stages, load_secs, step_secs, bare_step_secs)


def _measure_stages(input_fn: inputs.InputFn, alone: Speed, secs: float) -> dict[str, tuple[float, float]]:
    """Name to seconds an example, by the clock and of CPU."""
    dataset = input_fn.dataset
    if input_fn.pipeline == 'memory':
        return {'gather': (alone.secs / alone.examples, alone.cpu_secs / alone.examples)}
    last = 'decode' if dataset.schema.pictures else 'shuffle'
    if input_fn.pipeline == 'encoded':
        return {'gather and decode': (alone.secs / alone.examples, alone.cpu_secs / alone.examples)}

    def read() -> tf.data.Dataset:
        return pipelines.read_in_order(input_fn.source).repeat().batch(_READ_RECORDS, drop_remainder=True)

    def parse() -> tf.data.Dataset:
        return read().map(lambda serialized: pipelines.parse_labelled(serialized, dataset, decode_pictures=False))

    total = (0.0, 0.0)
    stages = {}
    speeds = {'read': _draw(read, _READ_RECORDS, secs)[0], 'parse': _draw(parse, _READ_RECORDS, secs)[0], last: alone}
    for name, speed in speeds.items():
        so_far = (speed.secs / speed.examples, speed.cpu_secs / speed.examples)
        stages[name] = (max(0.0, so_far[0] - total[0]), max(0.0, so_far[1] - total[1]))
        total = so_far
    return stages


def _draw(make_dataset: Callable[[], tf.data.Dataset], batch_size: int, secs: float) -> tuple[Speed, float]:
    """Draws batches for so long; also returns the seconds to the first batch."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        began = time.perf_counter()
        iterator = tf.compat.v1.data.make_initializable_iterator(make_dataset())
        draw = session.make_callable(tf.group(*(tensor.op for tensor in tf.nest.flatten(iterator.get_next()))))
        session.run(iterator.initializer)
        draw()
        first_secs = time.perf_counter() - began
        _repeat(draw, secs / 2)
        cpu, clock = _cpu_secs(), time.perf_counter()
        count = _repeat(draw, secs)
        return Speed(count * batch_size, time.perf_counter() - clock, _cpu_secs() - cpu), first_secs


def _time_steps(experiment: Experiment, input_fn: Callable[[Any], tf.data.Dataset], secs: float) -> float:
    """Seconds of a training step on one device, in the loop that training runs."""
    config = experiment.config
    params = {**experiment.make_params(), 'batch_size': config.data.batch_size}
    model_fn = loop.wrap_model_fn(experiment.model_fn, state=loop.LoopState(), stop_multiples=[], max_steps=tf.int64.max)
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(config.run.seed)
        global_step = tf.compat.v1.train.create_global_step()
        spec = model_fn(loop.wrap_input_fn(input_fn)(params), None, compat.estimator.ModeKeys.TRAIN, params)
        session_config = experiment.make_session_config()
        creator = tf.compat.v1.train.ChiefSessionCreator(
            spec.scaffold_fn() if spec.scaffold_fn else None, config=session_config
        )
        run_hooks = [
            hooks.ThreadsHook(session_config, config.data.batch_size),
            loop.StepsPerCallHook(config.loop.steps_per_loop),
            *(spec.training_hooks or []),
        ]
        with tf.compat.v1.train.MonitoredSession(creator, run_hooks) as session:
            _repeat(lambda: session.run(spec.train_op), secs / 2)
            first, clock = session.run(global_step), time.perf_counter()
            _repeat(lambda: session.run(spec.train_op), secs)
            passed = time.perf_counter() - clock
            return passed / (session.run(global_step) - first)


def _repeat(call: Callable[[], Any], secs: float) -> int:
    """Calls for so long, once at least; returns how often."""
    end = time.perf_counter() + secs
    count = 0
    while not count or time.perf_counter() < end:
        call()
        count += 1
    return count


def _cpu_secs() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """The command: prints the report, returns the exit code."""
    from trainer.task import set_up_logs

    parser = argparse.ArgumentParser(prog='python -m trainer.inputs', add_help=False, allow_abbrev=False)
    parser.add_argument('--measure', action='store_true')
    own, rest = parser.parse_known_args(argv)
    set_up_logs(debug=False, level=logging.WARNING)
    try:
        if not own.measure:
            raise UsageError('give --measure and the flags of a run: how fast its training input is')
        config = flags.parse(rest)
        alone = dataclasses.replace(
            config,
            run=dataclasses.replace(config.run, mode='train'),
            cluster=ClusterConfig(),
            distribution=DistributionConfig(),
        )
        report = measure(Experiment(alone, read_cluster({}), environ), MEASURE_SECS)
    except (UsageError, DataError) as error:
        print(f'trainer.inputs: {" ".join(str(error).split())}', file=sys.stderr)
        return error.exit_code
    print('\n'.join(report.describe()))
    return 0
