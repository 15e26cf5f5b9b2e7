"""The program that TPUEstimator would send to a TPU, built without one, and what a TPU cannot do of it."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from trainer.errors import UsageError

TOPOLOGY_FLAG = '--tpu_topology'
_TOPOLOGY = re.compile(r'v([23])-(\d+)')
_CORES_PER_HOST = 8  # of v2 and v3
# Of the TPU's own, and of control flow as it was before version 2, which TPUEstimator builds with.
_TPU_OPS = frozenset(
    (
        *('CrossReplicaSum', 'CollectivePermute', 'AllToAll', 'InfeedDequeue', 'InfeedDequeueTuple', 'OutfeedEnqueue'),
        *('OutfeedEnqueueTuple', 'TPUReplicateMetadata', 'TPUReplicatedInput', 'TPUReplicatedOutput', 'TPUCompilationResult'),
        *('Enter', 'Exit', 'LoopCond', 'Merge', 'NextIteration', 'Switch', 'RefSwitch', 'RefMerge', 'ControlTrigger'),
        *('NoOp', 'Const', 'Placeholder', 'PlaceholderWithDefault', 'Assert'),
    )
)
_REMEDIES = {
    'PyFunc': 'tf.py_function runs on the host: do it in the dataset',
    'EagerPyFunc': 'tf.py_function runs on the host: do it in the dataset',
    'DecodeJpeg': 'decode in the dataset',
    'DecodeRaw': 'decode in the dataset',
    'AsString': 'a TPU has no strings; keep them on the host',
    'Print': 'tf.print in a model_fn: send the value through host_call',
    'PrintV2': 'tf.print in a model_fn: send the value through host_call',
}
_VARIABLE_SHAPES = ('Where', 'Unique', 'UniqueV2', 'NonMaxSuppressionV2', 'NonMaxSuppressionV3')


@dataclasses.dataclass(frozen=True)
class Topology:
    """The TPU that is meant."""

    name: str
    cores: int

    @property
    def hosts(self) -> int:
        """Machines that feed it."""
        return max(1, self.cores // _CORES_PER_HOST)


def parse_topology(name: str) -> Topology:
    """The topology of a name such as 'v3-8', a generation and its cores.

    Raises:
      UsageError: there is no such one.
    """
    match = _TOPOLOGY.fullmatch(name)
    cores = int(match.group(2)) if match else 0
    if not cores or cores % _CORES_PER_HOST or cores & (cores - 1):
        raise UsageError(f'{TOPOLOGY_FLAG}={name}: expected v2 or v3 and its cores, 8, 16, 32 up to 2048: v3-8, v2-32')
    return Topology(name, cores)


class _Built(Exception):
    """Ends TPUEstimator.train when the graph is whole, before anything is sent to a TPU."""


def build(run: Any, input_fn: Callable[..., Any], topology: Topology) -> Any:
    """Returns the graph with which TPUEstimator would train.

    Args:
      run: the Experiment.
      input_fn: gives the batches of a core.
      topology: what TPUEstimator is told that it found.

    Raises:
      UsageError: TPUEstimator refuses the model.
    """
    import tensorflow as tf
    from tensorflow.python.tpu import tpu_system_metadata
    from tensorflow_estimator.python.estimator.tpu import tpu_context

    from trainer import compat, tpu

    metadata = tpu_system_metadata.TPUSystemMetadata(
        num_cores=topology.cores,
        num_hosts=topology.hosts,
        num_of_cores_per_host=topology.cores // topology.hosts,
        topology=None,
        devices=(),
    )
    graphs = []

    class Keep(tf.compat.v1.train.SessionRunHook):
        def begin(self) -> None:
            graphs.append(tf.compat.v1.get_default_graph())
            raise _Built

    context: Any = tpu_context._InternalTPUContext
    original = context._get_tpu_system_metadata
    context._get_tpu_system_metadata = lambda self: metadata
    data, loop_config = run.config.data, run.config.loop
    try:
        # In functions the loop, and what is wrong in it, would be hidden.
        with tempfile.TemporaryDirectory() as folder, compat.control_flow(in_functions=False):
            estimator = tpu.make_estimator(
                tpu.wrap_model_fn(run.model_fn),
                name='',
                params=run.make_params(),
                run_settings={'model_dir': folder},
                batch_size=data.batch_size,
                eval_batch_size=data.eval_batch_size,
                summary_steps=loop_config.summary_steps,
            )
            estimator.train(input_fn, max_steps=1, hooks=[Keep()])
    except _Built:
        pass
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f'TPUEstimator refuses it: {" ".join(str(error).split())[:400]}') from error
    finally:
        context._get_tpu_system_metadata = original
    return graphs[0]


def find_operations(graph: Any) -> list[Any]:
    """What of the graph runs on the device, the nodes of functions that are called there included."""
    operations = [op for op in graph.get_operations() if '_tpu_replicate' in op.node_def.attr]
    return [*operations, *_find_function_nodes(graph, operations)]


def _find_function_nodes(graph: Any, operations: Iterable[Any]) -> list[Any]:
    """The nodes of all functions that these operations call, and those call: branches, loops, tf.function."""
    library = {function.signature.name: function for function in graph.as_graph_def().library.function}
    found, waiting = [], [op.node_def for op in operations]
    while waiting:
        for value in waiting.pop().attr.values():
            for name in (value.func.name, *(func.name for func in value.list.func)):
                function = library.pop(name, None)
                if function is not None:
                    found += [_FunctionNode(name, node) for node in function.node_def]
                    waiting += function.node_def
    return found


class _FunctionNode:
    """A node of a function, as an operation of a graph looks."""

    def __init__(self, function: str, node: Any) -> None:
        self.name, self.type, self.node_def = f'{function}/{node.name}', node.op, node


def _find_types(op: Any) -> set[str]:
    import tensorflow as tf

    values = [*op.node_def.attr.values()]
    numbers = [value.type for value in values if value.type] + [number for value in values for number in value.list.type]
    return {tf.dtypes.as_dtype(number).name for number in numbers}


def check_operations(operations: Sequence[Any]) -> list[str]:
    """Looks at every operation of the device program; returns notes on what may be slow or fail.

    Args:
      operations: of `find_operations`.

    Raises:
      UsageError: a TPU has no such operation.
    """
    from tensorflow.python.util import pywrap_xla_ops

    known = {*pywrap_xla_ops.get_cpu_kernel_names(), *_TPU_OPS}
    kinds: dict[str, str] = {}
    warnings: list[str] = []
    for op in operations:
        kinds.setdefault(op.type, op.name)
        for dtype in _find_types(op):
            if dtype in ('int8', 'qint8'):
                raise UsageError(f'{op.name} ({op.type}) computes in {dtype}; use int32 or bfloat16')
            if dtype == 'float64':
                warnings.append(f'{op.name} ({op.type}) is float64, which a TPU computes slowly or not at all')
    for kind, name in kinds.items():
        if 'Summary' in kind:
            raise UsageError(
                f'{name}: tf.summary in the model_fn, which a TPU cannot write; collect it with trainer.summaries.Summaries, '
                'whose host_call writes it'
            )
    unknown = {kind: name for kind, name in kinds.items() if kind not in known}
    if unknown:
        listed = ', '.join(f'{kind} ({name})' for kind, name in list(unknown.items())[:5])
        remedies = [_REMEDIES[kind] for kind in unknown if kind in _REMEDIES]
        raise UsageError(f'not for a TPU: {listed}' + (f': {remedies[0]}' if remedies else ''))
    for kind in _VARIABLE_SHAPES:
        if kind in kinds:
            warnings.append(f'{kinds[kind]} ({kind}) has a shape that depends on values; a TPU needs fixed ones')
    return warnings
