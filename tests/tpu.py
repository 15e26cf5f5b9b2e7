"""A TPU that is simulated: `TPUEstimator(use_tpu=True)` trains and evaluates on the CPU, for TensorFlow 2.15.

The graph is TPUEstimator's own, with loop, infeed, outfeed and host_call; what only a TPU can do is replaced:
  Infeed and outfeed are queues, one for each core.
  `tpu.split_compile_and_shard` builds the device program once for each core instead of having it replicated. Each core has
  copies of the variables, made from those of the first core when a session starts.
  CrossReplicaSum is an exchange of queues, one for each pair of cores.
Everything else runs on CPU kernels: what a TPU cannot compile is not found here but by `trainer.preflight`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.ops import variable_scope
from tensorflow.python.tpu import tpu, tpu_feed, tpu_function, tpu_system_metadata
from tensorflow.python.tpu.ops import tpu_ops
from tensorflow_estimator.python.estimator.tpu import tpu_context, tpu_estimator

from trainer import checkpoints

_QUEUE_CAPACITY = 4
_KEYS = tf.compat.v1.GraphKeys


class _GraphState:
    """What is under way in one graph."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.core = 0
        """The one whose program is being built."""
        self.num_sums = 0
        """CrossReplicaSum operations built for it so far."""
        self.infeeds: list[Any] = []
        self.outfeeds: list[Any] = []
        self.num_outfeeds_read = 0
        self.links: dict[tuple[int, int, int], Any] = {}
        """(sum, from core, to core): queue."""


class Simulator:
    """The replaced parts.

    Args:
      cores: of the whole TPU.
      hosts: among which they are divided.
    """

    def __init__(self, cores: int, hosts: int = 1) -> None:
        self._metadata = tpu_system_metadata.TPUSystemMetadata(cores, hosts, cores // hosts, topology=None, devices=())
        self._cores = cores
        self._states: weakref.WeakKeyDictionary[Any, _GraphState] = weakref.WeakKeyDictionary()
        self.num_sums = 0
        """CrossReplicaSum operations of the last program, per core."""
        self.loops: list[int] = []
        """Steps of each session call."""

    @contextlib.contextmanager
    def running(self) -> Iterator[Simulator]:
        """Puts the parts in place."""
        record, dequeue = tpu_estimator._OutfeedHostCall.record, tpu_feed.InfeedQueue.generate_dequeue_op
        before_run, check_fit = tpu_estimator.TPUInfeedOutfeedSessionHook.before_run, checkpoints.check_fit

        def record_anew(calls: Any, host_calls: Any) -> None:
            for kept in (calls._names, calls._tensors, calls._tensor_dtypes, calls._tensor_shapes):
                kept.clear()
            record(calls, host_calls)

        def dequeue_again(queue: Any, *args: Any, **settings: Any) -> Any:
            queue._generated_dequeue_op = False
            return dequeue(queue, *args, **settings)

        def capture_first(captured: Any, value: Any) -> None:
            if not captured._captured:
                captured._captured, captured._object = True, value

        def note_loop(hook: Any, run_context: Any) -> None:
            self.loops.append(int(run_context.session.run(hook._iterations_per_loop_var)))
            before_run(hook, run_context)

        def check_first_core(path: str, variables: Any) -> None:
            if not self._state.core:  # the copies of the others have names of their own
                check_fit(path, variables)

        nothing = lambda *args, **settings: tf.no_op()  # noqa: E731
        replaced = [
            (tpu_context._InternalTPUContext, '_get_tpu_system_metadata', lambda context: self._metadata),
            (tpu_context._InternalTPUContext, 'tpu_host_placement_function', lambda *args, **settings: '/device:CPU:0'),
            (tpu_context._InternalTPUContext, 'device_for_replica', lambda context, core: ('/device:CPU:0', core)),
            (tpu, 'split_compile_and_shard', self._build),
            (tpu, 'initialize_system', nothing),
            (tpu, 'shutdown_system', nothing),
            (tf.compat.v1.tpu, 'initialize_system', nothing),
            (tf.compat.v1.tpu, 'shutdown_system', nothing),
            (tf.compat.v1.tpu, 'core', lambda core: ''),
            (tpu_feed.tpu_name_util, 'core', lambda core: ''),
            (tf.compat.v1.tpu, 'cross_replica_sum', self._sum),
            (tpu_ops, 'cross_replica_sum', self._sum),
            (tpu_ops, 'infeed_enqueue_tuple', self._enqueue_infeed),
            (tpu_ops, 'infeed_dequeue_tuple', self._dequeue_infeed),
            (tpu_ops, 'outfeed_enqueue_tuple', self._enqueue_outfeed),
            (tpu_ops, 'outfeed_dequeue_tuple', self._dequeue_outfeed),
            (tpu_estimator, '_validate_tpu_training_graph', nothing),  # it looks for CrossReplicaSum
            (tpu_estimator._OutfeedHostCall, 'record', record_anew),
            (tpu_estimator._CapturedObject, 'capture', capture_first),
            (tpu_feed.InfeedQueue, 'generate_dequeue_op', dequeue_again),
            (tpu_estimator.TPUInfeedOutfeedSessionHook, 'before_run', note_loop),
            (checkpoints, 'check_fit', check_first_core),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield self

    @property
    def _state(self) -> _GraphState:
        return self._states.setdefault(tf.compat.v1.get_default_graph(), _GraphState(self._cores))

    def _build(self, computation: Any, inputs: Any, num_shards: int, **unused_settings: Any) -> Any:
        """Stands for `tpu.split_compile_and_shard`: one program for each core; the results are those of the first."""
        state, graph = self._state, tf.compat.v1.get_default_graph()
        made: list[Any] = []

        def make(next_creator: Any, **settings: Any) -> Any:
            made.append(next_creator(**settings))
            return made[-1]

        results, programs = [], []
        for core in range(num_shards):
            state.core, state.num_sums = core, 0
            scope = _copies_of(graph, made, core) if core else tf.variable_creator_scope(make)
            with tpu_function.tpu_shard_context(num_shards), scope:
                results.append([tf.convert_to_tensor(value) for value in computation(*(part[core] for part in inputs))])
            programs += results[-1]
        state.core, self.num_sums = 0, state.num_sums
        with tf.control_dependencies(programs):
            return tf.no_op(), [tf.identity(value) for value in results[0]]

    def _sum(self, value: Any, group_assignment: Any = None, name: Any = None) -> tf.Tensor:
        @tf.custom_gradient
        def exchange(value: tf.Tensor) -> Any:
            return self._exchange(value), self._sum

        return exchange(tf.convert_to_tensor(value))

    def _exchange(self, value: tf.Tensor) -> tf.Tensor:
        state = self._state
        number, state.num_sums = state.num_sums, state.num_sums + 1

        def link(source: int, target: int) -> Any:
            key = (number, source, target)
            if key not in state.links:
                state.links[key] = _make_queue([value.dtype], [value.shape])
            return state.links[key]

        sent = [link(state.core, other).enqueue([value]) for other in range(state.cores)]
        with tf.control_dependencies(sent):
            parts = [link(other, state.core).dequeue() for other in range(state.cores)]
        return tf.add_n([tf.ensure_shape(part, value.shape) for part in parts])

    def _enqueue_infeed(self, inputs: Any, shapes: Any, **unused_settings: Any) -> Any:
        queue = _make_queue([tensor.dtype for tensor in inputs], shapes)
        self._state.infeeds.append(queue)  # core by core, host by host
        return queue.enqueue(inputs)

    def _dequeue_infeed(self, dtypes: Any, shapes: Any, name: Any = None) -> Any:
        return _dequeue(self._state.infeeds[self._state.core], shapes)

    def _enqueue_outfeed(self, tensors: Any, name: Any = None) -> Any:
        queue = _make_queue([tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors])
        self._state.outfeeds.append(queue)
        return queue.enqueue(tensors)

    def _dequeue_outfeed(self, dtypes: Any, shapes: Any, **unused_settings: Any) -> Any:
        state = self._state
        core, state.num_outfeeds_read = state.num_outfeeds_read, state.num_outfeeds_read + 1
        return _dequeue(state.outfeeds[core], shapes)


def _make_queue(dtypes: Any, shapes: Any) -> Any:
    with tf.init_scope(), tf.device('/CPU:0'):
        return tf.queue.FIFOQueue(_QUEUE_CAPACITY, dtypes, shapes)


def _dequeue(queue: Any, shapes: Any) -> list[tf.Tensor]:
    tensors = queue.dequeue()
    tensors = tensors if isinstance(tensors, list) else [tensors]
    return [tf.ensure_shape(tensor, shape) for tensor, shape in zip(tensors, shapes)]


@contextlib.contextmanager
def _copies_of(graph: Any, originals: list[Any], core: int) -> Iterator[None]:
    """Each variable made meanwhile is a copy of the next original; the graph's collections are as if it had no others."""
    kept = {name: list(graph.get_collection_ref(name)) for name in graph.get_all_collection_keys()}
    store = graph.get_collection_ref(variable_scope._VARSTORE_KEY)
    waiting = iter(originals)

    def make(next_creator: Any, **settings: Any) -> Any:
        original = next(waiting)
        # Named as the copies of a strategy are, which the trainer knows to be copies.
        replaced = {'name': f'{settings["name"]}/replica_{core}', 'initial_value': original.read_value, 'use_resource': True}
        return next_creator(**{**settings, **replaced, 'shape': original.shape})

    for name in kept:
        if not isinstance(name, tuple) or name == variable_scope._VARSTORE_KEY:
            del graph.get_collection_ref(name)[:]
    del store[:]
    with tf.init_scope(), tf.name_scope('copy/'):
        (step,) = kept[_KEYS.GLOBAL_STEP]
        step_copy = tf.compat.v1.Variable(
            step.read_value, trainable=False, use_resource=True, collections=[_KEYS.GLOBAL_STEP], dtype=tf.int64, shape=[]
        )
    with tf.variable_creator_scope(make):
        yield
    copies = [step_copy, *graph.get_collection_ref(_KEYS.GLOBAL_VARIABLES), *graph.get_collection_ref(_KEYS.LOCAL_VARIABLES)]
    for name in graph.get_all_collection_keys():
        graph.get_collection_ref(name)[:] = kept.get(name, [])
    graph.get_collection_ref(_KEYS.LOCAL_VARIABLES).extend(copies)
