"""Many training steps in one session call: the step runs inside a `tf.while_loop` in the graph.

A session call costs about a millisecond of Python and runtime, more than a small step itself. TPUEstimator spends it once in
`iterations_per_loop` steps, on a TPU only; this module does the same on one CPU or GPU. The model_fn is not changed: the
input_fn hands over its iterator instead of a batch, and the loop's body takes a batch and calls the model_fn.

The order of work:
  1. `wrap_input_fn` makes the iterator; its initializer joins TABLE_INITIALIZERS, so every session start runs it.
  2. `wrap_model_fn` builds the loop. One call makes `steps_per_call` steps, fewer where the next step to be saved, summarised
     or the last one comes first, and stops at once at a loss that is not finite.
  3. `StepsPerCallHook` sets `steps_per_call`, a variable, from the time that a call takes.
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

# A call of this length hides the cost of a session call and still lets hooks, signals and the progress line come through.
TARGET_CALL_SECS = 0.25
MAX_STEPS_PER_CALL = 1000


@dataclasses.dataclass
class LoopInput:
    """Stands for the features: the iterator from which the loop's body takes a batch a step."""

    iterator: Any

    def __deepcopy__(self, memo: Any) -> LoopInput:
        return self


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Tensors that hooks may fetch: the state after the last step of a session call.

    A fetch of the global step itself races with the loop that raises it; `step` is read after the loop.
    """

    step: tf.Tensor  # [] int64
    loss: tf.Tensor  # [] float32
    scalars: dict[str, tf.Tensor]  # the scalar summaries by name, each [1] float32
    examples_per_sec: tf.Tensor  # [1] float32, to be fed; goes to the summaries


class LoopState:
    """Holds the StepResult of the graph being trained: hooks are made before the graph and look here when they run."""

    result: StepResult


def wrap_input_fn(input_fn: Callable[..., Any]) -> Callable[..., LoopInput]:
    """Returns an input_fn that yields the iterator over `input_fn`'s dataset, for a model_fn of `wrap_model_fn`."""

    def looped_input_fn(params: Any) -> LoopInput:
        iterator = tf.compat.v1.data.make_initializable_iterator(input_fn(params))
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        return LoopInput(iterator)

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
        spec, state.result = _build_loop(model_fn, features.iterator, params, [*stop_multiples], max_steps)
        if summaries.is_ours(spec.host_call):
            for name, value in {**(constants or {}), EXAMPLES_PER_SEC: state.result.examples_per_sec}.items():
                summaries.add_scalar(spec.host_call, name, value)
        return spec

    return looped_model_fn


def _build_loop(model_fn: Any, iterator: Any, params: Any, stop_multiples: list[int], max_steps: int) -> tuple[Any, StepResult]:
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
    host_values: list[tf.Variable] = []

    def body(i: tf.Tensor, unused_loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features, labels = iterator.get_next()
        spec = model_fn(features, labels, mode, params)
        built.append(spec)
        tensors = tf.nest.flatten(spec.host_call[1]) if spec.host_call else []
        host_values.extend(_make_local_variable(tensor) for tensor in tensors)
        assigns = [variable.assign(tensor).op for variable, tensor in zip(host_values, tensors)]
        with tf.control_dependencies([spec.train_op, *assigns]):
            return i + 1, tf.reshape(tf.cast(spec.loss, tf.float32), [])

    num_done, loss = tf.compat.v1.while_loop(
        lambda i, loss: tf.logical_and(i < num_steps, tf.math.is_finite(loss)),
        body,
        (tf.constant(0, tf.int64), tf.constant(0.0)),
        parallel_iterations=1,
    )
    (spec,) = built
    with tf.control_dependencies([num_done]):
        host_call = _read_host_call(spec.host_call, host_values)
        result = StepResult(
            step=tf.compat.v1.train.get_global_step().read_value(),
            loss=tf.identity(loss),
            scalars=summaries.get_scalars(host_call),
            # Fed by the progress hook with what it measured up to the call before.
            examples_per_sec=tf.compat.v1.placeholder_with_default(tf.zeros([1]), [1], name=EXAMPLES_PER_SEC),
        )
    looped = compat.estimator.tpu.TPUEstimatorSpec(
        mode=mode,
        loss=result.loss,
        train_op=num_done,
        host_call=host_call,
        scaffold_fn=spec.scaffold_fn,
        training_hooks=spec.training_hooks,
    )
    return looped, result


def _make_local_variable(tensor: tf.Tensor) -> tf.Variable:
    """A variable that carries `tensor` out of the loop; loop variables would have to be known before the body is built."""
    shape = [dim or 0 for dim in tensor.shape.as_list()]
    with tf.init_scope():
        return tf.compat.v1.Variable(
            lambda: tf.zeros(shape, tensor.dtype),
            trainable=False,
            use_resource=True,
            shape=tensor.shape,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name='loop/' + tensor.op.name.split('/')[-1],
        )


def _read_host_call(host_call: Any, variables: Sequence[tf.Variable]) -> Any:
    if host_call is None:
        return None
    host_fn, tensors = host_call
    return host_fn, tf.nest.pack_sequence_as(tensors, [variable.read_value() for variable in variables])


class StepsPerCallHook(tf.compat.v1.train.SessionRunHook):
    """Sets how many steps the next session call makes.

    Args:
      steps_per_loop: a fixed number of steps; 0 doubles it until a call takes a quarter of a second.
      clock: seconds, for tests.
    """

    VARIABLE = 'loop/steps_per_call'

    def __init__(self, steps_per_loop: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._fixed = steps_per_loop
        self._clock = clock
        self.steps_per_call = steps_per_loop or 1
        self._started: Optional[float] = None
        self._num_calls = 0

    def begin(self) -> None:
        variables = tf.compat.v1.local_variables()
        (self._variable,) = [variable for variable in variables if variable.op.name == self.VARIABLE]
        self._value = tf.compat.v1.placeholder(tf.int64, [], name='loop/steps_per_call_value')
        self._assign = self._variable.assign(self._value).op

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._assign, {self._value: self.steps_per_call})
        self._num_calls = 0

    def before_run(self, run_context: Any) -> None:
        self._started = self._clock()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        assert self._started is not None
        call_secs = self._clock() - self._started
        self._num_calls += 1
        # The first calls pay for start-up: memory, threads, filling the input's buffers.
        if self._fixed or self._num_calls <= 2 or self.steps_per_call >= MAX_STEPS_PER_CALL:
            return
        if call_secs < TARGET_CALL_SECS / 2:
            growth = max(2, min(10, int(TARGET_CALL_SECS / 2 / call_secs)))
            self.steps_per_call = min(MAX_STEPS_PER_CALL, self.steps_per_call * growth)
            run_context.session.run(self._assign, {self._value: self.steps_per_call})
