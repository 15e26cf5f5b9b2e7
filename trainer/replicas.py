"""A model_fn on several devices or processes.

The model_fn is called once for each replica, in the replica's context. Losses and scalar summaries are averaged over the
replicas in one small all-reduce; one replica, the chief's first, writes summaries. The same all-reduce carries votes:
workers in lockstep must all stop after the same step, or those that go on wait for the others for ever.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import compat, loop, summaries
from trainer.distribute import PARAMETER_SERVER, Distribution

# What a worker may vote for.
TERMINATE, FINISH = range(2)
_NUM_VOTES = 2
_CALLED = 'trainer/replicas'


class SyncReplicas:
    """`params['sync_replicas']`: makes an optimizer wait for the gradients of several workers.

    Args:
      to_aggregate: gradients of an update.
      num_workers: that send them; those above `to_aggregate` are backup (Chen et al. 2016, "Revisiting Distributed Synchronous
        SGD").
    """

    def __init__(self, to_aggregate: int, num_workers: int) -> None:
        self._to_aggregate = to_aggregate
        self._num_workers = num_workers
        self._made: list[Any] = []

    def __deepcopy__(self, memo: Any) -> SyncReplicas:
        return self

    def wrap(self, optimizer: Any) -> Any:
        """Returns the optimizer that updates once for `to_aggregate` gradients of the same step; late ones are dropped."""
        wrapped = tf.compat.v1.train.SyncReplicasOptimizer(optimizer, self._to_aggregate, total_num_replicas=self._num_workers)
        self._made.append(wrapped)
        return wrapped

    def take_hooks(self, is_chief: bool) -> list[Any]:
        """Returns the hooks of the optimizers made in this graph."""
        made, self._made = self._made, []
        return [_ShortGraceHook(), *(optimizer.make_session_run_hook(is_chief) for optimizer in made)]


class _ShortGraceHook(tf.compat.v1.train.SessionRunHook):
    """Ends a session soon and quietly.

    The thread of SyncReplicas that hands out tokens ends only when the session is closed: two minutes would be given to it, and
    its error at the end, long after the session is done, would be printed as a stack trace.
    """

    GRACE_SECS = 3

    def after_create_session(self, session: Any, coord: Any) -> None:
        join = coord.join
        coord.join = lambda threads=None, **settings: join(threads, **{**settings, 'stop_grace_period_secs': self.GRACE_SECS})
        request_stop = coord.request_stop
        coord.request_stop = lambda ex=None: None if coord.should_stop() else request_stop(ex)


def wrap_model_fn(
    model_fn: Callable[..., Any],
    *,
    state: loop.LoopState,
    distribution: Distribution,
    is_chief: bool,
    constants: Optional[Mapping[str, float]] = None,
) -> Callable[..., Any]:
    """Returns a model_fn for Estimator that trains on the replicas of `distribution`: one step a session call, or the loop that
    `model_fn` holds.

    Args:
      model_fn: `(features, labels, mode, params) -> TPUEstimatorSpec`.
      state: gets the StepResult once the graph is built.
      distribution: of this run.
      is_chief: whether this process writes summaries.
      constants: scalar summaries that do not change, by name; None means none.
    """
    sync = SyncReplicas(distribution.sync_replicas, distribution.num_shards) if distribution.sync_replicas else None

    def replicated_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        with tf.variable_creator_scope(_keep_own_averages) if distribution.is_lockstep else contextlib.nullcontext():
            spec = model_fn(features, labels, mode, {**params, 'sync_replicas': sync} if sync else params)
        # Replicas are built one after the other, the first of this process first.
        called = tf.compat.v1.get_collection_ref(_CALLED)
        is_first = not called
        called.append(len(called))
        result = _make_result(spec, distribution)
        hooks = tuple(spec.training_hooks or ())
        if is_first:
            state.result = result
            hooks += tuple(sync.take_hooks(is_chief)) if sync else ()
        writes = is_first and is_chief and spec.host_call is not None
        # Each replica must have as many hooks as the first, of which only those run.
        hooks += () if writes or spec.host_call is None else (tf.compat.v1.train.SessionRunHook(),)
        estimator_spec = compat.estimator.tpu.TPUEstimatorSpec(
            mode=mode,
            loss=spec.loss,
            train_op=spec.train_op,
            host_call=_make_host_call(spec.host_call, result, constants or {}) if writes else None,
            scaffold_fn=spec.scaffold_fn,
            training_hooks=hooks,
        ).as_estimator_spec()
        # Those of training hold for the others too, and would have to be as many on each replica.
        return estimator_spec._replace(evaluation_hooks=(), prediction_hooks=())

    return replicated_model_fn


def _keep_own_averages(next_creator: Callable[..., Any], **settings: Any) -> Any:
    """Lets each worker keep its own of what is averaged over them when it is read, as batch normalisation's averages are.

    A save reads them, in the chief alone, and would wait for ever for the others to take part.
    """
    if settings.get('synchronization') == tf.VariableSynchronization.ON_READ:
        settings['synchronization'] = tf.VariableSynchronization.AUTO
        settings['aggregation'] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return next_creator(**settings)


def _make_result(spec: Any, distribution: Distribution) -> loop.StepResult:
    vote = tf.compat.v1.placeholder_with_default(tf.zeros([_NUM_VOTES]), [_NUM_VOTES], name='vote')
    pace = tf.compat.v1.placeholder_with_default(tf.zeros([1]), [1], name='pace')
    scalars = summaries.get_scalars(spec.host_call)
    parts = [vote, pace, tf.reshape(tf.cast(spec.loss, tf.float32), [1]), *scalars.values()]
    values = tf.concat(parts, axis=0)
    if distribution.strategy is not None and distribution.batch_parts > 1:
        # For the gradient of an all-reduce TensorFlow looks up the variables behind it, and misses those of other replicas.
        values = tf.stop_gradient(values)
        values = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, values)
    with tf.control_dependencies([spec.train_op]):
        step = tf.identity(tf.compat.v1.train.get_global_step().read_value())
    is_shared = distribution.name == PARAMETER_SERVER
    votes, mean_pace, loss = values[:_NUM_VOTES], values[_NUM_VOTES : _NUM_VOTES + 1], values[_NUM_VOTES + 1]
    means = values[_NUM_VOTES + 2 :]
    return loop.StepResult(
        step=step,
        loss=loss,
        scalars={name: means[index : index + 1] for index, name in enumerate(scalars)},
        examples_per_sec=tf.compat.v1.placeholder_with_default(tf.zeros([1]), [1], name=loop.EXAMPLES_PER_SEC),
        seen_step=tf.compat.v1.placeholder_with_default(tf.zeros([1], tf.int64), [1], name='seen_step') if is_shared else None,
        vote=vote,
        votes=votes,
        pace=pace,
        agreed_pace=mean_pace * distribution.batch_parts,
    )


def _make_host_call(host_call: Any, result: loop.StepResult, constants: Mapping[str, float]) -> Any:
    if not summaries.is_ours(host_call):
        return host_call
    host_call = (host_call[0], copy.copy(host_call[1]))
    averages = {**result.scalars, loop.EXAMPLES_PER_SEC: result.examples_per_sec}
    for name, value in {**constants, **averages}.items():
        summaries.add_scalar(host_call, name, value)
    if result.seen_step is not None:
        summaries.add_seen_step(host_call, result.seen_step)
    return host_call
