"""Many training steps in one session call: the step runs inside a `tf.while_loop` in the graph.

A session call costs about a millisecond of Python and runtime, more than a small step itself. TPUEstimator spends it once in
`iterations_per_loop` steps, on a TPU only; this module does the same on one CPU or GPU. The model_fn is not changed: the
input_fn hands over its iterator instead of a batch, and the loop's body takes a batch and calls the model_fn.

The order of work:
  1. `wrap_input_fn` makes the iterator; its initializer joins TABLE_INITIALIZERS, so every session start runs it. Small batches
     come over several at a time.
  2. `wrap_model_fn` builds the loop. One call makes `steps_per_call` steps, fewer where the next step to be saved, summarised
     or the last one comes first, and stops at once at a loss that is not finite.
  3. `StepsPerCallHook` sets `steps_per_call`, a variable, from the time that a call takes.
Workers in lockstep run the same loop, each over its own iterator, with the all-reduce of the gradients inside
(`wrap_lockstep_model_fn`); all make as many steps a call as the chief chooses.
What the host sees of a call is its last step: the loss and the tensors of `host_call`. As calls end on every step that is to be
summarised or saved, files and numbers are those of a run step by step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import compat, summaries

EXAMPLES_PER_SEC = 'examples_per_sec'

MAX_STEPS_PER_CALL = 1000

# Taking an element from an iterator wakes another thread, which costs a fourth of a small step. So many bytes come at a time.
_HANDOVER_BYTES = 1 << 20
_MAX_HANDOVER_BATCHES = 64


class LoopInput:
    """Stands for the features: gives the loop's body a batch a step.

    Args:
      dataset: elements are batches. Built in the graph that is current, with its iterator.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._spec = dataset.element_spec
        self._num_batches = _count_handover_batches(self._spec)
        if self._num_batches > 1:
            dataset = dataset.batch(self._num_batches).prefetch(1)
        self._iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, self._iterator.initializer)

    def __deepcopy__(self, memo: Any) -> LoopInput:
        return self

    def take(self) -> Any:
        """Returns the next batch; to be called inside the loop's body, once."""
        if self._num_batches == 1:
            return self._iterator.get_next()
        with tf.device('/CPU:0'):
            # The last handover of a dataset that ends has fewer batches.
            held = [_Cell((None, *spec.shape), spec.dtype, 'batches') for spec in tf.nest.flatten(self._spec)]
            position = _Cell([], tf.int64, 'position')
            num_held = held[0].count_rows()

            def refill() -> tf.Tensor:
                tensors = tf.nest.flatten(self._iterator.get_next())
                with tf.control_dependencies([cell.assign(tensor) for cell, tensor in zip(held, tensors)]):
                    return tf.constant(0, tf.int64)

            next_row = position.read()
            row = tf.cond(next_row >= num_held, refill, lambda: next_row)
            with tf.control_dependencies([row]):
                batch = [cell.read_row(row) for cell in held]
            with tf.control_dependencies(batch), tf.control_dependencies([position.assign(row + 1)]):
                batch = [tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(batch, tf.nest.flatten(self._spec))]
        return tf.nest.pack_sequence_as(self._spec, batch)


def _count_handover_batches(spec: Any) -> int:
    """Batches that come over at a time: 1 where they are large, or not tensors of numbers and static shape."""
    parts = tf.nest.flatten(spec)
    if not all(isinstance(part, tf.TensorSpec) and part.shape.is_fully_defined() and part.dtype.size for part in parts):
        return 1
    batch_bytes = sum(part.dtype.size * part.shape.num_elements() for part in parts)
    return max(1, min(_MAX_HANDOVER_BATCHES, _HANDOVER_BYTES // max(1, batch_bytes)))


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Tensors that hooks may fetch or feed: the state after the last step of a session call.

    A fetch of the global step itself races with the loop that raises it; `step` is read after the loop.
    """

    step: tf.Tensor  # [] int64
    loss: tf.Tensor  # [] float32
    scalars: dict[str, tf.Tensor]  # the scalar summaries by name, each [1] float32
    examples_per_sec: tf.Tensor  # [1] float32, to be fed; goes to the summaries
    seen_step: Optional[tf.Tensor] = None  # [1] int64, to be fed where others raise the step too: the step of the call before
    vote: Optional[tf.Tensor] = None  # [2] float32, to be fed by a worker in lockstep: what it votes for
    votes: Optional[tf.Tensor] = None  # [2] float32, above 0 where any worker voted
    pace: Optional[tf.Tensor] = None  # [1] float32, to be fed by the chief of a lockstep: steps of the calls to come
    agreed_pace: Optional[tf.Tensor] = None  # [1] float32, what the chief fed, on every worker


class LoopState:
    """Holds the StepResult of the graph being trained: hooks are made before the graph and look here when they run."""

    result: StepResult


def wrap_input_fn(input_fn: Callable[..., Any]) -> Callable[..., LoopInput]:
    """Returns an input_fn that yields the LoopInput of `input_fn`'s dataset, for a model_fn of `wrap_model_fn`."""

    def looped_input_fn(params: Any) -> LoopInput:
        return LoopInput(input_fn(params))

    return looped_input_fn


def wrap_model_fn(
    model_fn: Callable[..., Any],
    *,
    state: LoopState,
    stop_multiples: Sequence[int],
    max_steps: int,
    constants: Optional[Mapping[str, float]] = None,
) -> Callable[..., Any]:
    """Returns a model_fn that trains many steps a session call.

    Args:
      model_fn: `(features, labels, mode, params) -> TPUEstimatorSpec`.
      state: gets the StepResult once the loop is built.
      stop_multiples: no call runs past a multiple of any of these steps (saving, summaries); zeros are passed over.
      max_steps: no call runs past this step.
      constants: scalar summaries that do not change, by name; None means none.
    """

    def looped_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        if not isinstance(features, LoopInput):
            return model_fn(features, labels, mode, params)
        spec = _build_loop(model_fn, features, params, stop_multiples, max_steps)
        with tf.control_dependencies([spec.train_op]):
            state.result = StepResult(
                step=tf.compat.v1.train.get_global_step().read_value(),
                loss=tf.identity(spec.loss),
                scalars=summaries.get_scalars(spec.host_call),
                # Fed by the progress hook with what it measured up to the call before.
                examples_per_sec=tf.compat.v1.placeholder_with_default(tf.zeros([1]), [1], name=EXAMPLES_PER_SEC),
            )
        if summaries.is_ours(spec.host_call):
            for name, value in {**(constants or {}), EXAMPLES_PER_SEC: state.result.examples_per_sec}.items():
                summaries.add_scalar(spec.host_call, name, value)
        return spec

    return looped_model_fn


def wrap_lockstep_model_fn(
    model_fn: Callable[..., Any], input_fn: Callable[..., Any], *, stop_multiples: Sequence[int], max_steps: int
) -> Callable[..., Any]:
    """Returns a model_fn for the one replica of a worker in lockstep that trains many steps a session call.

    Estimator must get `idle_input_fn`: the loop takes batches from an iterator of its own.

    Args:
      model_fn: `(features, labels, mode, params) -> TPUEstimatorSpec`.
      input_fn: of this worker's batches.
      stop_multiples, max_steps: as for `wrap_model_fn`; the same on all workers, which must make as many steps.
    """

    def looped_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        loop_input = LoopInput(input_fn(params))
        # A strategy's merge_call fails inside of a function.
        with compat.control_flow(in_functions=False):
            return _build_loop(model_fn, loop_input, params, stop_multiples, max_steps, is_lockstep=True)

    return looped_model_fn


def idle_input_fn() -> tf.data.Dataset:
    """Gives Estimator something to iterate over where the loop has its own input; nobody takes from it."""
    return tf.data.Dataset.from_tensors(0).repeat()


def _build_loop(
    model_fn: Any,
    loop_input: LoopInput,
    params: Any,
    stop_multiples: Sequence[int],
    max_steps: int,
    *,
    is_lockstep: bool = False,
) -> Any:
    """Returns the TPUEstimatorSpec of the loop: its train_op makes a call's steps, loss and host_call are of the last one."""
    mode = compat.estimator.ModeKeys.TRAIN
    first_step = tf.compat.v1.train.get_or_create_global_step().read_value()
    steps_per_call = tf.compat.v1.get_variable(
        StepsPerCallHook.VARIABLE,
        initializer=tf.constant(1, tf.int64),
        trainable=False,
        use_resource=True,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
    )
    stops = [first_step + steps_per_call, tf.constant(max_steps, tf.int64)]
    stops += [(first_step // every + 1) * every for every in stop_multiples if every]
    num_steps = tf.reduce_min(tf.stack(stops)) - first_step

    built: list[Any] = []
    host_values: list[_Cell] = []

    def body(i: tf.Tensor, unused_loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features, labels = loop_input.take()
        # Keras names variables after the scope of names, which here is that of the loop's own.
        with tf.compat.v1.name_scope(None):
            spec = model_fn(features, labels, mode, params)
        built.append(spec)
        tensors = tf.nest.flatten(spec.host_call[1]) if spec.host_call else []
        host_values.extend(_Cell(tensor.shape, tensor.dtype, tensor.op.name.split('/')[-1]) for tensor in tensors)
        assigns = [cell.assign(tensor) for cell, tensor in zip(host_values, tensors)]
        with tf.control_dependencies([spec.train_op, *assigns]):
            return i + 1, tf.reshape(tf.cast(spec.loss, tf.float32), [])

    def has_more(i: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
        # In lockstep the loss is this worker's alone: who stopped for it would leave the others waiting.
        return i < num_steps if is_lockstep else tf.logical_and(i < num_steps, tf.math.is_finite(loss))

    start = (tf.constant(0, tf.int64), tf.constant(0.0))
    num_done, loss = tf.compat.v1.while_loop(has_more, body, start, parallel_iterations=1)
    (spec,) = built
    with tf.control_dependencies([num_done]):
        host_call = _read_host_call(spec.host_call, host_values)
    return compat.estimator.tpu.TPUEstimatorSpec(
        mode=mode,
        loss=loss,
        train_op=num_done,
        host_call=host_call,
        scaffold_fn=spec.scaffold_fn,
        training_hooks=spec.training_hooks,
    )


class _Cell:
    """Holds a tensor from step to step and out of the loop; loop variables would have to be known before the body is built.

    It is made outside of the loop and starts as zeros. A strategy would mirror a `tf.Variable` and send its first value around.

    Args:
      shape: a dimension of None may change, and starts as 0.
      dtype: any.
      name: for the graph.
    """

    def __init__(self, shape: Any, dtype: tf.DType, name: str) -> None:
        self._shape, self._dtype = tf.TensorShape(shape), dtype
        with tf.init_scope():
            name = tf.compat.v1.get_default_graph().unique_name('loop/' + name)
            self._handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=self._shape, shared_name=name, name=name)
            start = self.assign(tf.zeros([dim or 0 for dim in self._shape], dtype))
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, start)

    def assign(self, value: tf.Tensor) -> tf.Operation:
        return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def read(self) -> tf.Tensor:
        return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype), self._shape)

    def read_row(self, row: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(resource=self._handle, indices=row, dtype=self._dtype)

    def count_rows(self) -> tf.Tensor:
        return tf.raw_ops.VariableShape(input=self._handle, out_type=tf.int64)[0]


def _read_host_call(host_call: Any, cells: Sequence[_Cell]) -> Any:
    if host_call is None:
        return None
    host_fn, tensors = host_call
    return host_fn, tf.nest.pack_sequence_as(tensors, [cell.read() for cell in cells])


class StepsPerCallHook(tf.compat.v1.train.SessionRunHook):
    """Sets how many steps the next session call makes.

    Args:
      steps_per_loop: a fixed number of steps; 0 doubles it until a call takes a quarter of a second.
      clock: seconds, for tests.
      lockstep: of workers in lockstep: the chief's choice goes through its StepResult to all; None: there are no others.
      is_chief: whether this worker chooses.
    """

    VARIABLE = 'loop/steps_per_call'
    # A call of this length hides the cost of a session call and still lets hooks, signals and the progress line come through.
    TARGET_SECS = 0.25

    def __init__(
        self,
        steps_per_loop: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        lockstep: Optional[LoopState] = None,
        is_chief: bool = True,
    ) -> None:
        self._fixed = steps_per_loop
        self._clock = clock
        self._lockstep = lockstep
        self._is_chief = is_chief
        self.steps_per_call = steps_per_loop or 1
        self._loaded = 0
        self._started: Optional[float] = None
        self._num_calls = 0

    def begin(self) -> None:
        variables = tf.compat.v1.local_variables()
        (self._variable,) = [variable for variable in variables if variable.op.name == self.VARIABLE]
        self._value = tf.compat.v1.placeholder(self._variable.dtype, [], name='loop/steps_per_call_value')
        self._assign = self._variable.assign(self._value).op

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._loaded = 0
        self._load(session, self.steps_per_call)
        self._num_calls = 0

    def before_run(self, run_context: Any) -> Any:
        self._started = self._clock()
        if self._lockstep is None:
            return None
        result = self._lockstep.result
        feed_dict = {result.pace: [float(self.steps_per_call if self._is_chief else 0)]}
        return tf.compat.v1.train.SessionRunArgs(result.agreed_pace, feed_dict=feed_dict)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        assert self._started is not None
        call_secs = self._clock() - self._started
        self._num_calls += 1
        if self._lockstep is not None:
            # Before the choice is made anew: this is what the others saw too.
            self._load(run_context.session, round(float(run_values.results[0])))
        # The first calls pay for start-up: memory, threads, filling the input's buffers.
        if self._fixed or self._num_calls <= 2 or self.steps_per_call >= MAX_STEPS_PER_CALL:
            return
        if call_secs < self.TARGET_SECS / 2:
            growth = max(2, min(10, int(self.TARGET_SECS / 2 / call_secs)))
            self.steps_per_call = min(MAX_STEPS_PER_CALL, self.steps_per_call * growth)
            if self._lockstep is None:
                self._load(run_context.session, self.steps_per_call)

    def _load(self, session: Any, steps: int) -> None:
        if steps != self._loaded:
            session.run(self._assign, {self._value: steps})
            self._loaded = steps
