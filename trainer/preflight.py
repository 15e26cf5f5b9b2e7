"""`python -m trainer.preflight [flags as for a run]`: whether a run with these flags would train on a TPU, told without one.

What TensorFlow decides when a TPU program is built can be decided anywhere: the whole `use_tpu=True` graph of TPUEstimator is
built for a stated topology (`--tpu_topology=v3-8`) and looked through for operations that a TPU has not, and the step is
compiled by XLA for the CPU and run once. Each check prints a line: what it found, or what is wrong and what to change.

Not seen here: the memory of the TPU, its speed, and operations that XLA compiles for a CPU alone.

Exit code: 0 when nothing is in the way, 1 when something is, 2 for wrong flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

from trainer import checks, cluster, data_files, flags, tool_flags, tpu_graph
from trainer.checks import Subject
from trainer.errors import DataError, UsageError

DEFAULT_TOPOLOGY = 'v3-8'
# Examples of the step that XLA compiles here: what it compiles does not depend on their number, how long it runs does.
_XLA_EXAMPLES = 4
# What a TPU takes from the host (https://cloud.google.com/tpu/docs/tensorflow-ops; uint8 is made a number there).
_DEVICE_TYPES = ('float32', 'bfloat16', 'int32', 'int64', 'uint8', 'uint32', 'bool')


@dataclasses.dataclass
class Flight(Subject):
    """What is being looked at, and what earlier checks have established; None: not established."""

    topology: tpu_graph.Topology
    run: Any = None
    input_fn: Any = None
    core_batch: Optional[int] = None
    spec: Any = None
    """Of the batch of a core."""
    operations: Any = None
    """Those that are on the device."""
    warnings: list[str] = dataclasses.field(default_factory=list)


def check_batch(flight: Flight) -> str:
    """The global batches, divided among the cores."""
    data, topology = flight.need('run').config.data, flight.topology
    for flag, batch in (('batch_size', data.batch_size), ('eval_batch_size', data.eval_batch_size)):
        if batch % topology.cores:
            nearest = max(topology.cores, round(batch / topology.cores) * topology.cores)
            raise UsageError(
                f'--{flag}={batch} does not divide by the {topology.cores} cores of {topology.name}; '
                f'the nearest that does is {nearest}'
            )
    flight.core_batch = data.batch_size // topology.cores
    return f'{data.batch_size} = {topology.hosts} x {topology.cores // topology.hosts} cores x {flight.core_batch}'


def check_input(flight: Flight) -> str:
    """The batches: static shapes, types that a TPU has, bytes a step."""
    import tensorflow as tf

    from trainer import inputs

    run, topology = flight.need('run'), flight.topology
    data = run.config.data
    flight.input_fn = inputs.make_input_fn(
        data_files.resolve(data.train_data_paths, '--train_data_paths'),
        run.dataset,
        training=True,
        global_batch_size=data.batch_size,
        batch_size=flight.core_batch or 1,  # of a batch that does not divide, the rest can be looked at
        seed=run.config.run.seed,
        config=data,
    )
    spec = flight.input_fn({}).element_spec
    names = {**{f'feature {name}': tensor for name, tensor in spec[0].items()}, 'label': spec[1]}
    for name, tensor in names.items():
        _check_tensor(name, tensor)
    flight.spec = spec
    num_bytes = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tf.nest.flatten(spec))
    per_host = num_bytes * topology.cores // topology.hosts
    described = ', '.join(f'{name} {tensor.dtype.name}{tensor.shape.as_list()}' for name, tensor in names.items())
    return f'{described}; {per_host / 1e6:.2f} MB a step to each of {topology.hosts} host{"s" * (topology.hosts > 1)}'


def _check_tensor(name: str, tensor: Any) -> None:
    kind, shape = tensor.dtype.name, getattr(tensor, 'shape', None)
    if kind == 'string':
        raise UsageError(f'{name} is a string, and a TPU has none: look words up or decode pictures in the dataset')
    if kind not in _DEVICE_TYPES:
        raise UsageError(f'{name} is {kind}, expected one of {", ".join(_DEVICE_TYPES)}: cast it in the dataset')
    if shape is None or not shape.is_fully_defined():
        raise UsageError(
            f'{name} has the shape {shape}, expected one that is known beforehand: give the feature a fixed length (or '
            '--image_size), and batch with drop_remainder'
        )


def check_graph(flight: Flight) -> str:
    """The whole training graph of TPUEstimator for the topology."""
    run, input_fn = flight.need('run'), flight.need('input_fn')
    flight.need('spec'), flight.need('core_batch')
    started = time.monotonic()
    flight.operations = tpu_graph.find_operations(tpu_graph.build(run, input_fn, flight.topology))
    return f'{len(flight.operations):,} operations on the device, built in {time.monotonic() - started:.0f} s'


def check_operations(flight: Flight) -> str:
    """Every operation of the device program, those in branches and functions too."""
    operations = flight.need('operations')
    flight.warnings += tpu_graph.check_operations(operations)
    return f'{len({op.type for op in operations})} kinds, all known to XLA'


def check_host_call(flight: Flight) -> str:
    """What travels to the host each step; TPUEstimator concatenates it over the cores."""
    import tensorflow as tf

    from trainer import compat

    run, spec = flight.need('run'), flight.need('spec')
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        features, labels = _make_placeholders(spec)
        built = run.model_fn(features, labels, compat.estimator.ModeKeys.TRAIN, run.make_params())
        host_call = getattr(built, 'host_call', None)
        if host_call is None:
            return 'none: no summaries are written'
        tensors = host_call[1] if isinstance(host_call[1], dict) else dict(enumerate(host_call[1]))
        for name, tensor in tensors.items():
            if tensor.shape.rank == 0:
                raise UsageError(
                    f'host_call tensor {name} has the shape (), expected a batch dimension: tf.reshape(value, [1]), and '
                    'the mean of it in the function'
                )
            _check_tensor(f'host_call tensor {name}', tensor)
        num_bytes = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors.values())
    return f'{len(tensors)} tensors, {num_bytes * flight.topology.cores / 1e3:.1f} kB a step'


def check_xla(flight: Flight) -> str:
    """The step compiled by XLA and run once, on the CPU and on a few examples."""
    import numpy as np
    import tensorflow as tf

    from trainer import compat

    run, spec = flight.need('run'), flight.need('spec')
    flight.need('operations')
    count = min(_XLA_EXAMPLES, spec[1].shape[0])
    started = time.monotonic()
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()

        def step(*flat: Any) -> Any:
            features, labels = tf.nest.pack_sequence_as(spec, list(flat))
            built = run.model_fn(features, labels, compat.estimator.ModeKeys.TRAIN, run.make_params())
            with tf.control_dependencies([built.train_op]):
                return tf.identity(built.loss)

        inputs = [tf.zeros([count, *tensor.shape[1:]], tensor.dtype) for tensor in tf.nest.flatten(spec)]
        (loss,) = tf.compat.v1.xla.experimental.compile(step, inputs)
        with tf.compat.v1.Session() as session, _quiet():
            session.run(tf.compat.v1.global_variables_initializer())
            value = session.run(loss)
    if not np.isfinite(value):
        flight.warnings.append(f'the loss of a batch of zeros is {value}')
    return f'compiled for a batch of {count} and run in {time.monotonic() - started:.0f} s'


CHECKS: dict[str, Callable[[Flight], str]] = {
    'batch': check_batch,
    'input': check_input,
    'host_call': check_host_call,
    'graph': check_graph,
    'operations': check_operations,
    'xla': check_xla,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what XLA logs from stderr: it obeys no level, and what goes wrong is raised."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, 'wb') as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _make_placeholders(spec: Any) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(lambda tensor: tf.compat.v1.placeholder(tensor.dtype, tensor.shape), spec)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs every check, prints a line for each, and returns the exit code."""
    from trainer.task import set_up_logs

    set_up_logs(debug=False, level=logging.ERROR)
    logging.getLogger('tensorflow').setLevel(logging.CRITICAL)  # it says that what was left unfinished was never used
    try:
        flight = _prepare(sys.argv[1:] if argv is None else argv)
    except (UsageError, DataError) as error:
        print('trainer.preflight: error:', ' '.join(str(error).split()), file=sys.stderr)
        return error.exit_code
    problems = checks.run(CHECKS, flight)
    for warning in dict.fromkeys(flight.warnings[:5]):
        print(f'{"note":6}{"":11} {warning}')
    verdict = f'would not train on {flight.topology.name}' if problems else f'nothing here keeps it from {flight.topology.name}'
    print(f'\n{problems} problem{"s" * (problems != 1)}: {verdict}')
    return 1 if problems else 0


def _prepare(argv: Sequence[str]) -> Flight:
    parser = tool_flags.Parser(add_help=False)
    parser.add_argument(tpu_graph.TOPOLOGY_FLAG, default=DEFAULT_TOPOLOGY)
    options, rest = parser.parse_known_args(flags.with_underscores(argv))
    topology = tpu_graph.parse_topology(options.tpu_topology)
    if '--help' in rest:
        print(f'{tpu_graph.TOPOLOGY_FLAG} NAME: the TPU that is meant [{DEFAULT_TOPOLOGY}]; all others as of trainer.task:\n')
    with tempfile.TemporaryDirectory() as folder:  # nothing is written to the folder of the run
        config = flags.parse([*rest, '--distribution_strategy=one_device', f'--job_dir={folder}'])
        if not config.data.train_data_paths:
            raise UsageError('--train_data_paths: missing; what is fed to the TPU is looked at')
        from trainer.experiment import Experiment

        return Flight(topology, run=Experiment(config, cluster.read_cluster({}, config.cluster), {}))


if __name__ == '__main__':
    sys.exit(main())
