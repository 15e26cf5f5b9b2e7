"""What `--mode` and a task's role ask for: the order of training, evaluation, export and reports in one process.

Who does what in a job:
  the evaluator, where there is one, evaluates every checkpoint, reports, and keeps the best export; else the chief does.
  the chief trains, saves, exports at the end and writes `final_metrics.json`, for services stop every process when it ends.
  workers train; parameter servers hold the variables.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import checkpoints, data_files, export, job_files, peers, predict, storage, training
from trainer.cluster import EVALUATOR, PS, Cluster
from trainer.config import TRAINING_MODES, Config
from trainer.evaluation import Evaluator, read_best
from trainer.experiment import Experiment
from trainer.stopping import SigtermGuard

logger = logging.getLogger(__name__)


def run(config: Config, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> None:
    """Does what `--mode` says.

    Raises:
      UsageError: a setting is wrong.
      DataError: a file is wrong, or training cannot go on.
      Terminated: SIGTERM came while training; the checkpoint is saved.
    """
    experiment = Experiment(config, cluster, environ)
    with storage.reporting_remote_errors():
        experiment.start()
        _find_work(config.run.mode, cluster)(experiment)


def _find_work(mode: str, cluster: Cluster) -> Callable[[Experiment], None]:
    # The tasks of a cluster all get the flags of those that train.
    if mode in TRAINING_MODES:
        if cluster.role == EVALUATOR:
            return evaluate_for_job
        if cluster.role == PS:
            return peers.serve
        return MODES[mode] if cluster.is_chief else work
    if cluster.is_chief or mode == 'continuous_eval':
        return MODES[mode]
    return lambda experiment: logger.info('--mode=%s is done by the chief; %s has nothing to do', mode, cluster.name)


def train_and_eval(experiment: Experiment) -> None:
    """Trains, evaluates as checkpoints come, exports, and leaves `final_metrics.json`."""
    if _is_finished(experiment):
        return
    with SigtermGuard() as sigterm:
        evaluator = experiment.make_evaluator(sigterm)
        experiment.files.announce_start()
        step, reason = training.train(experiment, evaluator, sigterm)
    experiment.files.announce_over(step, reason)
    _finish(experiment, _evaluate_last(experiment, evaluator, step))


def train(experiment: Experiment) -> None:
    """Trains and exports without evaluating."""
    if _is_finished(experiment):
        return
    with SigtermGuard() as sigterm:
        experiment.files.announce_start()
        step, reason = training.train(experiment, None, sigterm)
    experiment.files.announce_over(step, reason)
    _finish(experiment, {'global_step': step})


def work(experiment: Experiment) -> None:
    """A worker of a cluster: trains; the chief does the rest."""
    if _is_finished(experiment):
        return
    with SigtermGuard() as sigterm:
        step, reason = training.train(experiment, None, sigterm)
        peers.await_end(experiment, sigterm)
    logger.info('Worker done at step %d: %s', step, reason)


def evaluate(experiment: Experiment) -> None:
    """Evaluates the latest checkpoint once."""
    checkpoints.need_latest(experiment.output_dir)
    experiment.make_evaluator().evaluate()


def continuous_eval(experiment: Experiment) -> None:
    """Evaluates every new checkpoint until training has ended or none came within the time limit."""
    _evaluate_as_they_come(experiment, experiment.make_evaluator())


def evaluate_for_job(experiment: Experiment) -> None:
    """The evaluator of a cluster: as `continuous_eval`; the chief awaits its last evaluation and obeys its early stop."""
    if _is_finished(experiment):
        return
    files = experiment.files
    evaluator = experiment.make_evaluator()

    def tell() -> None:
        assert evaluator.last_step is not None
        files.write_evaluation(evaluator.metrics)
        reason = evaluator.find_stop_reason(evaluator.last_step)
        if reason:
            files.request_stop(evaluator.last_step, reason)

    try:
        _evaluate_as_they_come(experiment, evaluator, look=files.announce_evaluator, tell=tell)
    finally:
        files.withdraw_evaluator()


def _evaluate_as_they_come(
    experiment: Experiment,
    evaluator: Evaluator,
    *,
    look: Callable[[], None] = lambda: None,
    tell: Callable[[], None] = lambda: None,
) -> None:
    """Calls `look` before each look for a checkpoint, and `tell` after each evaluation."""
    config, files = experiment.config, experiment.files
    waiting_since = time.monotonic()
    while True:
        look()
        # Looked up first: a checkpoint that came with it is then still evaluated.
        over = files.find_over(config.loop.max_steps) or _find_final(experiment)
        checkpoint, step = experiment.find_checkpoint()
        if checkpoint and step != evaluator.last_step:
            waiting_since = time.monotonic()
            try:
                evaluator.evaluate(checkpoint)
            except (ValueError, tf.errors.OpError):
                if storage.exists(checkpoint + '.index'):
                    raise
                logger.info('%s has been removed meanwhile (--keep_checkpoint_max); taking a later one', checkpoint)
                continue
            tell()
            waiting_since = time.monotonic()
        if over or step >= config.loop.max_steps:
            logger.info('Evaluation ends: training is done at step %d', step)
            return
        if time.monotonic() - waiting_since > config.eval.continuous_eval_timeout_secs:
            logger.info(
                'Evaluation ends: no new checkpoint in %s for %g seconds (--continuous_eval_timeout_secs)',
                *(experiment.output_dir, config.eval.continuous_eval_timeout_secs),
            )
            return
        time.sleep(files.poll_secs)


def export_latest(experiment: Experiment) -> None:
    """Exports the latest checkpoint."""
    _export(experiment)


def predict_shards(experiment: Experiment) -> None:
    """Writes predictions for every shard of `--predict_data_paths`."""
    checkpoint = checkpoints.need_latest(experiment.output_dir)
    step = experiment.find_checkpoint()[1]
    predict.predict_shards(
        experiment.make_estimator(),
        experiment.serving_dataset,
        data_files.resolve(experiment.config.data.predict_data_paths, '--predict_data_paths'),
        # Predictions of another checkpoint are other predictions.
        output_dir=storage.join(experiment.output_dir, 'predictions', f'step-{step}'),
        batch_size=experiment.config.data.eval_batch_size,
        checkpoint=checkpoint,
    )


MODES: dict[str, Callable[[Experiment], None]] = {
    'train_and_eval': train_and_eval,
    'train': train,
    'eval': evaluate,
    'continuous_eval': continuous_eval,
    'predict': predict_shards,
    'export': export_latest,
}


def _evaluate_last(experiment: Experiment, evaluator: Evaluator, step: int) -> Mapping[str, float]:
    """The metrics of the last checkpoint: from the evaluator task, or by an evaluation here."""
    if experiment.has_evaluator():
        timeout = experiment.config.distribution.evaluator_timeout_secs
        logger.info('Waiting up to %g seconds for the last evaluation of the evaluator (--evaluator_timeout_secs)', timeout)
        metrics = experiment.files.await_evaluation(step, timeout)
        if metrics:
            return {**metrics, 'global_step': int(metrics['global_step'])}
        logger.warning('The evaluator has not evaluated step %d; the chief does', step)
    # It may have been done when the last checkpoint was saved.
    return evaluator.metrics if evaluator.last_step == step else evaluator.evaluate()


def _find_final(experiment: Experiment) -> Optional[Mapping[str, Any]]:
    """What a run that is complete has left, when it has done all that this one is asked for."""
    path = storage.join(experiment.output_dir, job_files.FINAL)
    if not storage.exists(path):
        return None
    final = storage.read_json(path)
    if int(final.get('global_step', 0)) < experiment.config.loop.max_steps:
        patience, best = experiment.config.eval.early_stopping_steps, read_best(experiment.output_dir)
        step = int(final.get('global_step', 0))
        if not (final.get('stopped_early') and patience and best and step - best.step >= patience):
            return None
    return final


def _is_finished(experiment: Experiment) -> bool:
    """Says, and logs, whether an earlier run has done all that this one is asked for."""
    final = _find_final(experiment)
    if final is None:
        return False
    config, step = experiment.config, int(final.get('global_step', 0))
    remedy = f'raise --max_steps (now {config.loop.max_steps})'
    best = read_best(experiment.output_dir)
    if step < config.loop.max_steps and best:
        patience = config.eval.early_stopping_steps
        remedy = f'raise --early_stopping_steps (now {patience}, the best is of step {best.step}), or set it to 0'
    logger.info('Already trained to step %d and exported to %s; nothing to do', step, final.get('export', ''))
    logger.info('To train on, %s; to start anew, choose another folder', remedy)
    return True


def _finish(experiment: Experiment, metrics: Mapping[str, float]) -> None:
    """Exports and writes `final_metrics.json`, the sign that the run is complete."""
    path = _export(experiment)
    step = int(metrics['global_step'])
    final = {**metrics, 'export': path, 'stopped_early': step < experiment.config.loop.max_steps}
    storage.write_atomic(storage.join(experiment.output_dir, job_files.FINAL), json.dumps(final, indent=2) + '\n')
    numbers = ', '.join(f'{name}: {value:.3f}' for name, value in metrics.items() if name != 'global_step')
    logger.info('Final metrics after %d steps, %s', step, numbers or 'none (no evaluation)')


def _export(experiment: Experiment) -> str:
    logger.info('Exporting prediction graph to %s', experiment.export_dir)
    checkpoint = checkpoints.need_latest(experiment.output_dir)
    return export.export_model(
        experiment.make_estimator(), experiment.serving_dataset, experiment.export_dir, checkpoint=checkpoint
    )
