"""Training from the last checkpoint to the last step, on one device, on several, or as one task of a cluster.

On one device TPUEstimator (`use_tpu=False`) trains the loop of `loop.py`, on a TPU (`use_tpu=True`) its own; see `tpu.py`. On
several devices or processes an Estimator trains `replicas.py`, one step a session call, or the loop where a worker in lockstep
has one replica:
  mirrored, central_storage: `Estimator.train` under the strategy.
  multi_worker_mirrored: `train_and_evaluate`, for the coordinator inside it starts the servers; it evaluates nothing here.
  parameter_server: a server is started, then `Estimator.train`; each worker updates the variables on the parameter servers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import tensorflow as tf

from trainer import checkpoints, compat, distribute, hooks, loop, peers, records, replicas, stopping, tpu, warm_start, watchdog
from trainer.data_errors import translate_errors
from trainer.errors import DataError, Terminated
from trainer.evaluation import EvaluationListener, Evaluator
from trainer.experiment import Experiment

logger = logging.getLogger(__name__)


def train(experiment: Experiment, evaluator: Evaluator | None, sigterm: stopping.SigtermGuard) -> tuple[int, str]:
    """Trains from the last checkpoint to the last step, or to an earlier one when something ends training.

    Args:
      experiment: the run.
      evaluator: evaluates checkpoints as they are saved; None: nobody does in this process.
      sigterm: entered.

    Returns:
      The step that was reached, and why training ended.

    Raises:
      DataError: a file is bad, or the loss is not finite.
      Terminated: SIGTERM came; the checkpoint is saved.
    """
    max_steps = experiment.config.loop.max_steps
    if experiment.cluster.is_chief:
        checkpoints.recover(experiment.output_dir)
    checkpoint, start_step = experiment.find_checkpoint()
    if start_step >= max_steps:
        logger.info('Already trained to step %d; evaluating and exporting what is there', start_step)
        return start_step, 'max_steps reached'
    if checkpoint:
        logger.info('Resuming from %s', checkpoint)
    input_fn = experiment.make_train_input_fn(start_step)
    while True:
        step, reason = _train_on(experiment, evaluator, sigterm, input_fn)
        if reason != EvaluationListener.PAUSE:
            return step, reason
        assert evaluator is not None
        evaluator.evaluate()
        early = evaluator.find_stop_reason(step)
        if early or step >= max_steps:
            return step, early or 'max_steps reached'
        input_fn = input_fn.starting_at(step)


def _train_on(
    experiment: Experiment, evaluator: Evaluator | None, sigterm: stopping.SigtermGuard, input_fn: Any
) -> tuple[int, str]:
    """Trains from the last checkpoint until something ends the session; returns as `train`, or the reason is `PAUSE`."""
    config, cluster, distribution = experiment.config, experiment.cluster, experiment.distribution
    state = loop.LoopState()
    stop = stopping.StopHook(
        state,
        sigterm,
        is_lockstep=distribution.is_lockstep,
        find_reason=_make_reason_finder(experiment),
        poll_secs=experiment.files.poll_secs,
    )
    listeners = []
    if evaluator and cluster.is_chief:
        is_needed = lambda: not experiment.has_evaluator()  # noqa: E731
        # A TPU has room for one session.
        pauses = distribution.name == distribute.TPU
        listeners = [EvaluationListener(evaluator, stop.finish, is_needed, pauses=pauses)]
    constants = {'corrupt_records': input_fn.corrupt_records} if config.data.max_corrupt_records else {}
    model_fn = _wrap_model_fn(experiment, state, input_fn, constants)
    if config.loop.warm_start_from and not experiment.find_checkpoint()[0]:
        model_fn = warm_start.wrap_model_fn(model_fn, config.loop.warm_start_from)
    last = hooks.StopAtStepHook(state, config.loop.max_steps)
    run_hooks = [last, *make_hooks(experiment, state, listeners, files=input_fn.files), stop]
    try:
        with translate_errors(experiment.dataset, input_fn.files):
            _ESTIMATOR_RUNS[distribution.name](experiment, model_fn, input_fn, run_hooks)
    except hooks.NanLossError as error:
        raise DataError(
            f'{error}; stopped. The last good checkpoint is {experiment.find_checkpoint()[0]}: lower --learning_rate '
            f'(now {config.optimizer.learning_rate}) and run again, or look for bad values in {config.data.train_data_paths}'
        ) from error
    saved_step = experiment.find_checkpoint()[1]
    stop.raise_if_terminated(saved_step if cluster.is_chief else None)
    return saved_step if cluster.is_chief else last.step, stop.reason or 'max_steps reached'


def make_hooks(experiment: Experiment, state: loop.LoopState, listeners: list[Any], *, files: Sequence[str]) -> list[Any]:
    """The hooks of training in their order: the clock of the loop first, saving (and evaluating) after the checks."""
    config, distribution = experiment.config, experiment.distribution
    is_chief = experiment.cluster.is_chief

    def check_store() -> None:
        records.find_compressions(files)
        experiment.probe_output()

    chosen: list[Any] = []
    if distribution.name == distribute.TPU:
        multiples = [experiment.save_steps]
        chosen += [
            tpu.IterationsHook(state, config.loop.steps_per_loop, stop_multiples=multiples, max_steps=config.loop.max_steps)
        ]
    if is_chief or distribution.is_lockstep:  # the others of a cluster get their variables from the parameter servers
        chosen += [hooks.RestoredStepHook(lambda: experiment.find_checkpoint()[1])]
    chosen += [hooks.RecoveryHook(check_store)]
    if distribution.is_looped:
        lockstep = state if distribution.is_lockstep else None
        chosen += [loop.StepsPerCallHook(config.loop.steps_per_loop, lockstep=lockstep, is_chief=is_chief)]
    chosen += [
        hooks.StopOnNanHook(state),
        hooks.ProgressHook(
            state,
            task=experiment.cluster.name,
            global_batch_size=config.data.batch_size,
            max_steps=config.loop.max_steps,
            log_secs=config.loop.log_secs,
            is_shared=distribution.name == distribute.PARAMETER_SERVER,
        ),
    ]
    if is_chief:
        chosen += [
            hooks.SaveHook(
                state,
                experiment.output_dir,
                save_steps=experiment.save_steps,
                save_secs=config.eval.eval_secs,
                listeners=listeners,
            )
        ]
    return chosen


def _make_reason_finder(experiment: Experiment) -> Callable[[], str | None] | None:
    """What another task may want of this one: the chief obeys the evaluator, the others follow the chief."""
    if experiment.cluster.is_chief:
        return experiment.files.find_stop_request
    if experiment.distribution.is_lockstep:
        return None
    return lambda: experiment.files.find_over(experiment.config.loop.max_steps)


def _wrap_model_fn(
    experiment: Experiment, state: loop.LoopState, input_fn: Any, constants: dict[str, float]
) -> Callable[..., Any]:
    config, distribution = experiment.config, experiment.distribution
    stops: dict[str, Any] = {
        'stop_multiples': [config.loop.summary_steps, experiment.save_steps],
        'max_steps': config.loop.max_steps,
    }
    if distribution.name == distribute.TPU:
        return tpu.wrap_model_fn(experiment.model_fn, constants)
    if distribution.name == distribute.ONE_DEVICE:
        return loop.wrap_model_fn(experiment.model_fn, state=state, constants=constants, **stops)
    model_fn = experiment.model_fn
    if distribution.is_looped:
        model_fn = loop.wrap_lockstep_model_fn(model_fn, input_fn, **stops)
    return replicas.wrap_model_fn(
        model_fn, state=state, distribution=distribution, is_chief=experiment.cluster.is_chief, constants=constants
    )


def _train_on_one_device(experiment: Experiment, model_fn: Any, input_fn: Any, run_hooks: list[Any]) -> None:
    estimator = experiment.make_estimator(model_fn=model_fn)
    threads = hooks.ThreadsHook(compat.get_session_config(estimator), experiment.config.data.batch_size)
    estimator.train(loop.wrap_input_fn(input_fn), hooks=[threads, *run_hooks])


def _train_on_devices(experiment: Experiment, model_fn: Any, input_fn: Any, run_hooks: list[Any]) -> None:
    experiment.make_distributed_estimator(model_fn).train(input_fn, hooks=run_hooks)


def _train_on_tpu(experiment: Experiment, model_fn: Any, input_fn: Any, run_hooks: list[Any]) -> None:
    with tpu.translate_nan(run_hooks[0]):
        estimator = experiment.make_tpu_estimator(model_fn=model_fn)
        estimator.train(input_fn, hooks=run_hooks, max_steps=experiment.config.loop.max_steps)


def _train_in_lockstep(experiment: Experiment, model_fn: Any, input_fn: Any, run_hooks: list[Any]) -> None:
    peers.await_port(experiment.cluster)
    dog = peers.make_watchdog(experiment)
    if experiment.distribution.is_looped:
        input_fn = loop.idle_input_fn
    with experiment.tf_config():
        dog.start()
        estimator = experiment.make_distributed_estimator(model_fn)
        with _ending_with_others():
            compat.estimator.train_and_evaluate(
                estimator,
                compat.estimator.TrainSpec(input_fn, max_steps=experiment.config.loop.max_steps, hooks=_watch(run_hooks, dog)),
                compat.estimator.EvalSpec(input_fn),
            )


def _watch(run_hooks: list[Any], dog: watchdog.Watchdog) -> list[Any]:
    """The hooks with the watchdog right after the first, which knows the last step: saving and evaluating come later."""
    return [run_hooks[0], dog, *run_hooks[1:]]


@contextlib.contextmanager
def _ending_with_others() -> Iterator[None]:
    """Ends with the code that means "try again" when the all-reduce fails because another worker has left it."""
    try:
        yield
    except (
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
        tf.errors.InternalError,
        tf.errors.UnavailableError,
    ) as error:
        if 'ollective' not in str(error):
            raise
        raise Terminated(
            f'another worker has ended or hangs ({type(error).__name__} in the all-reduce); ending with code '
            f'{watchdog.EXIT_CODE}, to be started again from the last checkpoint',
            watchdog.EXIT_CODE,
        ) from error


def _train_with_parameter_servers(experiment: Experiment, model_fn: Any, input_fn: Any, run_hooks: list[Any]) -> None:
    dog = peers.make_watchdog(experiment)
    with experiment.tf_config(), compat.short_session_waits():
        dog.start()
        peers.start_server(experiment)
        experiment.make_distributed_estimator(model_fn).train(input_fn, hooks=_watch(run_hooks, dog))


_ESTIMATOR_RUNS: dict[str, Callable[..., None]] = {
    distribute.ONE_DEVICE: _train_on_one_device,
    distribute.TPU: _train_on_tpu,
    distribute.MIRRORED: _train_on_devices,
    distribute.CENTRAL_STORAGE: _train_on_devices,
    distribute.MULTI_WORKER: _train_in_lockstep,
    distribute.PARAMETER_SERVER: _train_with_parameter_servers,
}
