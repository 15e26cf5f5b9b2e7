"""`tensorflow.python.distribute.estimator_training`: Estimator under the Distribute Coordinator.

With a `train_distribute` strategy and a cluster in TF_CONFIG, `train_and_evaluate` does not run the roles of the
classic parameter-server cluster. Every task instead hands a worker function and an evaluation function to
`run_distribute_coordinator`, which TensorFlow kept: it starts the task's server, configures a copy of the strategy for
the task and calls the function that the task's role needs. This module is the part in between: it decides the mode in
which a RunConfig runs, and gives each function a copy of the Estimator that knows its task.

Modes: INDEPENDENT_WORKER, one process a task, told by TF_CONFIG; STANDALONE_CLIENT, one process that drives a
`remote_cluster` of standard servers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorflow.python.distribute import distribute_coordinator, distribute_coordinator_context, multi_worker_util
from tensorflow.python.platform import tf_logging as logging
from tensorflow.python.training import server_lib

CHIEF = 'chief'
EVALUATOR = 'evaluator'
PS = 'ps'
WORKER = 'worker'

_Mode = distribute_coordinator.CoordinatorMode


def init_run_config(config: Any, tf_config: Mapping[str, Any]) -> None:
    """Fills in the distributed half of a RunConfig whose user set a strategy.

    Args:
      config: the RunConfig being built; changed in place.
      tf_config: the parsed TF_CONFIG, {} when there is none.

    Raises:
      ValueError: a strategy or a cluster is given twice.
    """
    experimental = config._experimental_distribute
    for field in ('train_distribute', 'eval_distribute'):
        strategy = experimental and getattr(experimental, field)
        if strategy:
            if getattr(config, f'_{field}'):
                raise ValueError(f'Either `{field}` or `experimental_distribute.{field}` can be set, not both.')
            setattr(config, f'_{field}', strategy)

    cluster_spec = server_lib.ClusterSpec(tf_config.get('cluster', {}))
    config._init_distributed_setting_from_environment_var({})

    if config._train_distribute and experimental and experimental.remote_cluster:
        if cluster_spec:
            raise ValueError('Cannot set both "cluster_spec" of TF_CONFIG and `experimental_distribute.remote_cluster`')
        config._distribute_coordinator_mode = _Mode.STANDALONE_CLIENT
        config._cluster_spec = experimental.remote_cluster
    elif cluster_spec and 'master' not in cluster_spec.jobs and config._train_distribute:
        # The task's own settings come later, from the coordinator.
        config._distribute_coordinator_mode = _Mode.INDEPENDENT_WORKER
        config._cluster_spec = cluster_spec
    else:
        # One process, a cluster of the old kind with a master, or an evaluation strategy alone.
        config._distribute_coordinator_mode = None
        config._init_distributed_setting_from_environment_var(tf_config)
        config._maybe_overwrite_session_config_for_distributed_training()
        logging.info('Not using Distribute Coordinator.')
        return
    logging.info('RunConfig initialized for Distribute Coordinator with %s mode', config._distribute_coordinator_mode)


def should_run_distribute_coordinator(config: Any) -> bool:
    """Whether `train_and_evaluate` with this RunConfig goes through the coordinator."""
    mode = getattr(config, '_distribute_coordinator_mode', None)
    if mode is None:
        logging.info('Not using Distribute Coordinator.')
        return False
    if mode not in (_Mode.STANDALONE_CLIENT, _Mode.INDEPENDENT_WORKER):
        logging.warning('Unexpected distribute_coordinator_mode: %r', mode)
        return False
    if not config.cluster_spec:
        logging.warning('Running `train_and_evaluate` locally, ignoring `experimental_distribute_coordinator_mode`.')
        return False
    return True


def train_and_evaluate(estimator: Any, train_spec: Any, eval_spec: Any, executor_cls: Any) -> None:
    """Trains, or in the evaluator task evaluates until training ends, as this task's role asks.

    Args:
      estimator: the user's Estimator; each role works on a copy.
      train_spec: its TrainSpec.
      eval_spec: its EvalSpec, with the exporters.
      executor_cls: `training._TrainingExecutor`, whose continuous evaluation the evaluator runs.

    Raises:
      ValueError: the RunConfig has no coordinator mode.
    """
    config = estimator.config
    mode = config._distribute_coordinator_mode
    if not mode:
        raise ValueError('Distribute coordinator mode is not specified in `RunConfig`.')

    def train_fn(strategy: Any) -> None:
        local_estimator, is_chief = _for_this_task(estimator, train_distribute=strategy)
        # A standalone client runs all workers as threads of one process: hooks of one thread print enough, and a
        # tensor that a hook fetches belongs to one thread's graph.
        runs_hooks = is_chief or mode == _Mode.INDEPENDENT_WORKER
        hooks = list(train_spec.hooks) if runs_hooks else []
        local_estimator.train(input_fn=train_spec.input_fn, max_steps=train_spec.max_steps, hooks=hooks)

    def evaluate_fn(strategy: Any) -> None:
        local_estimator, _ = _for_this_task(estimator, eval_distribute=strategy)
        executor_cls(local_estimator, train_spec, eval_spec)._start_continuous_evaluation()

    distribute_coordinator.run_distribute_coordinator(
        train_fn,
        config.train_distribute,
        evaluate_fn,
        config.eval_distribute,
        mode=mode,
        # An independent worker's coordinator reads TF_CONFIG by itself.
        cluster_spec=config.cluster_spec if mode == _Mode.STANDALONE_CLIENT else None,
        session_config=config.session_config,
    )


def estimator_train(estimator: Any, train_distributed_fn: Callable[..., Any], hooks: Sequence[Any]) -> Any:
    """Runs `Estimator.train` on the workers of a remote cluster.

    Args:
      estimator: the user's Estimator.
      train_distributed_fn: called as fn(copy of the estimator, strategy, hooks) for each worker.
      hooks: session hooks, given to the chief alone.

    Returns:
      What the coordinator returns: the chief's copy of the estimator.

    Raises:
      ValueError: the mode, the cluster or the strategy allows only `train_and_evaluate`.
    """
    strategy = estimator.config.train_distribute
    cluster_spec = _cluster_of_standalone_client(estimator.config, strategy, method='train')

    def train_fn(strategy: Any) -> Any:
        local_estimator, is_chief = _for_this_task(estimator, train_distribute=strategy)
        train_distributed_fn(local_estimator, strategy, hooks if is_chief else [])
        return local_estimator

    return _run_standalone_client(estimator.config, train_fn, strategy, cluster_spec)


def estimator_evaluate(estimator: Any, evaluate_distributed_fn: Callable[..., Any], hooks: Sequence[Any]) -> Any:
    """Runs `Estimator.evaluate` on the workers of a remote cluster.

    Args:
      estimator: the user's Estimator.
      evaluate_distributed_fn: called as fn(copy of the estimator, strategy, hooks) for each worker.
      hooks: session hooks, given to the chief alone.

    Returns:
      What the coordinator returns: the metrics.

    Raises:
      ValueError: the mode, the cluster or the strategy allows only `train_and_evaluate`.
    """
    strategy = estimator.config.eval_distribute
    cluster_spec = _cluster_of_standalone_client(estimator.config, strategy, method='evaluate')

    def evaluate_fn(strategy: Any) -> Any:
        local_estimator, is_chief = _for_this_task(estimator, eval_distribute=strategy)
        return evaluate_distributed_fn(local_estimator, strategy, hooks if is_chief else [])

    return _run_standalone_client(estimator.config, evaluate_fn, strategy, cluster_spec)


def _cluster_of_standalone_client(config: Any, strategy: Any, *, method: str) -> Any:
    """The ClusterSpec on which `Estimator.<method>` may run, or a ValueError that says why it may not."""
    assert config._distribute_coordinator_mode and config.cluster_spec and strategy
    cluster_spec = multi_worker_util.normalize_cluster_spec(config.cluster_spec)
    if EVALUATOR in cluster_spec.jobs:
        raise ValueError("'evaluator' job is not supported if you don't use `train_and_evaluate`")
    if config._distribute_coordinator_mode != _Mode.STANDALONE_CLIENT:
        raise ValueError(f'Only `STANDALONE_CLIENT` mode is supported when you call `Estimator.{method}`')
    if strategy.extended.experimental_between_graph:
        # Each worker would build a graph and return a result of its own, and nothing merges them.
        name = type(strategy).__name__
        raise ValueError(f'`Estimator.{method}` API is not supported for {name} with `STANDALONE_CLIENT` mode.')
    return cluster_spec


def _run_standalone_client(config: Any, worker_fn: Callable[..., Any], strategy: Any, cluster_spec: Any) -> Any:
    return distribute_coordinator.run_distribute_coordinator(
        worker_fn,
        strategy,
        mode=config._distribute_coordinator_mode,
        cluster_spec=cluster_spec,
        session_config=config.session_config,
    )


def _for_this_task(estimator: Any, **strategies: Any) -> tuple[Any, bool]:
    """A copy of `estimator` for the task the coordinator is calling, and whether that task is the chief.

    Args:
      estimator: the user's Estimator.
      **strategies: `train_distribute` or `eval_distribute`: the strategy configured for the task.
    """
    context = distribute_coordinator_context.get_current_worker_context()
    local_estimator = copy.deepcopy(estimator)
    config = local_estimator._config
    for field, strategy in strategies.items():
        setattr(config, f'_{field}', strategy)
        setattr(local_estimator, '_train_distribution' if field == 'train_distribute' else '_eval_distribution', strategy)
    _adopt_task(config, context)
    # Else the copy's own train() or evaluate() would call the coordinator again.
    config._distribute_coordinator_mode = None
    logging.info('Updated config: %s', vars(config))
    return local_estimator, context.is_chief


def _adopt_task(config: Any, context: Any) -> None:
    """Writes the coordinator's task, master and cluster into a RunConfig, with what follows from them."""
    config._service = None
    config._cluster_spec = context.cluster_spec
    config._task_type = context.task_type
    config._task_id = context.task_id
    config._evaluation_master = context.master_target
    config._master = context.master_target
    config._is_chief = context.is_chief
    if not context.cluster_spec:
        config._num_ps_replicas, config._num_worker_replicas, config._global_id_in_cluster = 0, 1, 0
    elif context.task_type == EVALUATOR:
        # It reads checkpoints and talks to no other task.
        config._cluster_spec = server_lib.ClusterSpec({})
        config._num_ps_replicas, config._num_worker_replicas, config._global_id_in_cluster = 0, 0, None
    else:
        tasks = context.cluster_spec.as_dict()
        config._num_ps_replicas = len(tasks.get(PS, []))
        config._num_worker_replicas = len(tasks.get(WORKER, [])) + len(tasks.get(CHIEF, []))
        config._global_id_in_cluster = _global_id(context)


def _global_id(context: Any) -> int:
    """The task's number in its cluster, counting the chief first, parameter servers last (RunConfig's own order)."""
    if not context.task_type:
        return 0
    rank = {CHIEF: 0, PS: 2}
    tasks = context.cluster_spec.as_dict()
    count = 0
    for job in sorted(tasks, key=lambda job: (rank.get(job, 1), job)):
        if job == context.task_type:
            return count + context.task_id
        count += len(tasks[job])
    raise RuntimeError(f'Internal error: task {context.task_type!r} is not in the cluster {tasks}')
