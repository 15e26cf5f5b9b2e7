"""Training and evaluation on a TPU: TPUEstimator with `use_tpu=True`, driven by one process for all hosts of the TPU.

What differs from other devices:
  The loop of many steps a session call is TPUEstimator's own and runs on the TPU. `IterationsHook` says how many steps a call
  makes, so that none runs past a step to be saved.
  Each host of the TPU reads its own part of the records, a batch for each of its cores a step (PER_HOST_V2).
  Summaries come out of the TPU through host_call, every `--summary_steps` steps of a call; what the host alone knows is added
  there.
  An evaluation has a fixed number of steps: the records are counted first, and padded to whole steps with weight 0.
  One session at a time has the TPU: training ends at a checkpoint to be evaluated, and goes on from it.
Export and predictions run on the host's CPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer import compat, hooks, inputs, loop, manifest, records, sharding, summaries, tpu_system

# Of TPUEstimator.
_ITERATIONS = 'tpu_estimator/iterations_per_loop'
_RATE, _SEEN_STEP = 'loop/' + loop.EXAMPLES_PER_SEC, 'loop/seen_step'


class HostInputs:
    """The input_fn for all hosts: each asks for its own.

    Args:
      input_fns: one for each host, in order.
    """

    def __init__(self, input_fns: Sequence[Any]) -> None:
        self._input_fns = tuple(input_fns)

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read."""
        return tuple(dict.fromkeys(path for input_fn in self._input_fns for path in input_fn.files))

    @property
    def corrupt_records(self) -> int:
        """Records left out."""
        return sum(input_fn.corrupt_records for input_fn in self._input_fns)

    def __call__(self, params: Mapping[str, Any]) -> tf.data.Dataset:
        """Builds the pipeline of the host that `params['context']` names."""
        return self._input_fns[params['context'].current_host](params)

    def starting_at(self, step: int) -> HostInputs:
        """The same from another step on; the files are not looked at again."""
        return HostInputs([input_fn.starting_at(step) for input_fn in self._input_fns])

    def padded(self) -> Callable[[Mapping[str, Any]], tf.data.Dataset]:
        """Returns an input_fn of evaluation that never ends: after its records come batches of weight 0."""

        def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
            dataset = self(params)
            return dataset.concatenate(dataset.take(1).map(_weigh_nothing).repeat())

        return input_fn

    def count_steps(self, host_cores: int) -> int:
        """Steps in which every host has given all of its records, a batch to each of its `host_cores` cores a step."""
        counts = [sharding.count_batches(_count_records(each), each.batch_size * host_cores) for each in self._input_fns]
        return max(counts)


def _weigh_nothing(features: Mapping[str, tf.Tensor], labels: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    return {**features, inputs.WEIGHTS: tf.zeros_like(features[inputs.WEIGHTS])}, labels


def _count_records(input_fn: Any) -> int:
    facts = manifest.facts_of(input_fn.files)
    total = sum(facts[path].records if path in facts else sum(1 for _ in records.scan(path)) for path in input_fn.files)
    return input_fn.source.shard.count(total)


def make_estimator(
    model_fn: Callable[..., Any],
    *,
    name: str,
    params: Mapping[str, Any],
    run_settings: Mapping[str, Any],
    batch_size: int,
    eval_batch_size: int,
    summary_steps: int,
) -> Any:
    """Returns the TPUEstimator that trains and evaluates on the TPU.

    Args:
      model_fn: `(features, labels, mode, params) -> TPUEstimatorSpec`.
      name: of `tpu_system.System`; '' for a graph that no TPU will get.
      params: for the model_fn.
      run_settings: for RunConfig.
      batch_size: records of a step over all cores.
      eval_batch_size: the same of an evaluation.
      summary_steps: steps of a call of which one goes through host_call; 0 is each.
    """
    tpu = compat.estimator.tpu
    run_config = tpu.RunConfig(
        **run_settings,
        cluster=tpu_system.resolve(name) if name else None,
        session_config=tf.compat.v1.ConfigProto(allow_soft_placement=True),
        tpu_config=tpu.TPUConfig(
            per_host_input_for_training=tpu.InputPipelineConfig.PER_HOST_V2,
            # What goes to the host every step is pictures and histograms, mostly for nothing.
            experimental_host_call_every_n_steps=max(1, summary_steps),
        ),
    )
    return tpu.TPUEstimator(
        model_fn=model_fn,
        config=run_config,
        params=params,
        use_tpu=True,
        # tf.saved_model.load cannot open what is exported for a TPU.
        export_to_tpu=False,
        train_batch_size=batch_size,
        eval_batch_size=eval_batch_size,
    )


def wrap_model_fn(model_fn: Callable[..., Any], constants: Mapping[str, float] | None = None) -> Callable[..., Any]:
    """Returns a model_fn for a TPU, to whose summaries the host adds what it knows.

    Args:
      model_fn: `(features, labels, mode, params) -> TPUEstimatorSpec`.
      constants: scalar summaries that do not change, by name; None means none.
    """

    def tpu_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        spec = model_fn(features, labels, mode, params)
        if mode != compat.estimator.ModeKeys.TRAIN or not summaries.is_ours(spec.host_call):
            return spec
        write_fn, tensors = spec.host_call
        return spec._replace(host_call=(_on_host(write_fn, constants or {}), tensors))

    return tpu_model_fn


def _on_host(write_fn: Callable[..., Any], constants: Mapping[str, float]) -> Callable[..., Any]:
    """The function of a host_call, with what the host knows, written when a multiple of `--summary_steps` has been passed."""

    def host_fn(**tensors: tf.Tensor) -> Any:
        rate = _make_local(_RATE, lambda: tf.constant(0.0))
        seen_step = _make_local(_SEEN_STEP, tf.compat.v1.train.get_global_step().read_value)
        seen, step = seen_step.read_value(), tf.cast(tensors[summaries.STEP_KEY][0], tf.int64)
        for name, value in {**constants, loop.EXAMPLES_PER_SEC: rate.read_value()}.items():
            summaries.add_scalar((None, tensors), name, value)
        summaries.add_seen_step((None, tensors), tf.reshape(seen, [1]))
        with tf.control_dependencies([seen]):
            noted = seen_step.assign(step).op
        # The host is no TPU; of branches that are nodes TensorFlow would say that what they check is never used.
        with compat.control_flow(in_functions=True):
            return [*write_fn(**tensors), noted]

    return host_fn


def _make_local(name: str, initial_value: Callable[[], tf.Tensor]) -> Any:
    return tf.compat.v1.Variable(
        initial_value,
        name=name,
        trainable=False,
        use_resource=True,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
    )


class IterationsHook(loop.StepsPerCallHook):
    """Sets how many steps the next session call makes on the TPU, and makes the StepResult that the other hooks read.

    It must come before them, and TPUEstimator's own, which hand the number to infeed and outfeed.

    Args:
      state: gets the StepResult.
      steps_per_loop: as for StepsPerCallHook.
      stop_multiples: no call runs past a multiple of any of these steps; zeros are passed over.
      max_steps: no call runs past this step.
    """

    VARIABLE = _ITERATIONS
    # A call costs a round trip to the TPU's host, and starts infeed and outfeed anew.
    TARGET_SECS = 2.0

    def __init__(self, state: loop.LoopState, steps_per_loop: int, *, stop_multiples: Sequence[int], max_steps: int) -> None:
        super().__init__(steps_per_loop)
        self._state = state
        self._stop_multiples = stop_multiples
        self._max_steps = max_steps
        self._step = 0

    def begin(self) -> None:
        super().begin()
        # That of the first core; TPUEstimator gives no other way to it. The summaries have the mean over all.
        loss = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)[-1]
        self._global_step = tf.compat.v1.train.get_global_step()
        with tf.control_dependencies([loss]):
            step = self._global_step.read_value()
        examples_per_sec = tf.compat.v1.placeholder_with_default(tf.zeros([1]), [1], name=loop.EXAMPLES_PER_SEC)
        local = {variable.op.name: variable for variable in tf.compat.v1.local_variables()}
        # There is none where the model has no summaries.
        self._note_rate = local[_RATE].assign(examples_per_sec[0]).op if _RATE in local else None
        self._state.result = loop.StepResult(step=step, loss=loss, scalars={}, examples_per_sec=examples_per_sec)

    def after_create_session(self, session: Any, coord: Any) -> None:
        super().after_create_session(session, coord)
        self._step = int(session.run(self._global_step))

    def before_run(self, run_context: Any) -> Any:
        super().before_run(run_context)
        ends = [self._step + self.steps_per_call, self._max_steps]
        ends += [(self._step // every + 1) * every for every in self._stop_multiples if every]
        self._load(run_context.session, max(1, min(ends) - self._step))
        fetches = [self._state.result.step, *([self._note_rate] if self._note_rate is not None else [])]
        return tf.compat.v1.train.SessionRunArgs(fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        super().after_run(run_context, run_values)
        self._step = int(run_values.results[0])

    def _load(self, session: Any, steps: int) -> None:
        # TPUEstimator's own hook has loaded another number meanwhile.
        session.run(self._assign, {self._value: steps})


@contextlib.contextmanager
def translate_nan(last: hooks.StopAtStepHook) -> Iterator[None]:
    """Raises NanLossError where TPUEstimator finds that a weight is no number any more, at the end of a session call.

    Args:
      last: knows the step before that call.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(r'Gradient for (\S+) is NaN', str(error))
        if not found:
            raise
        raise hooks.NanLossError(last.step, f'{found.group(1)} is not finite in the loop after step {last.step}') from error
