"""One run, from a Config to its results.

The order of work of the default mode:
  1. the output folder is made and probed, and `config.json` written; a run that is finished says so and ends.
  2. model, dataset, input functions and Estimator are put together.
  3. training resumes from the last checkpoint, if there is one; evaluations and best exports happen as checkpoints are saved.
  4. the last evaluation, the export and `final_metrics.json` come before the process ends: a service stops everything then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import tensorflow as tf

import trainer
from trainer import checkpoints, compat, export, hooks, inputs, loop, predict, records, storage, warm_start
from trainer.cluster import EVALUATOR, Cluster, export_dir, output_dir, output_flag
from trainer.config import Config
from trainer.datasets import Dataset, get_dataset
from trainer.errors import DataError, UsageError
from trainer.evaluation import EvaluationListener, Evaluator, read_best
from trainer.models import get_model, parse_model_params
from trainer.summaries import SummaryParams
from trainer.tuning import make_reporter

logger = logging.getLogger(__name__)

FINAL_FILE = 'final_metrics.json'
VERSIONS = {'trainer': trainer.__version__, 'tensorflow': tf.__version__, 'python': platform.python_version()}
# How often a continuous evaluation looks for a checkpoint; on a remote store a look is some seven requests.
POLL_SECS, REMOTE_POLL_SECS = 2.0, 10.0


def run(config: Config, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> None:
    """Does what `--mode` says.

    Raises:
      UsageError: a setting is wrong.
      DataError: a file is wrong, or training cannot go on.
    """
    experiment = Experiment(config, cluster, environ)
    mode = config.run.mode
    # A cluster's evaluator gets the flags of those that train.
    if cluster.role == EVALUATOR and mode == 'train_and_eval':
        mode = 'continuous_eval'
    with storage.reporting_remote_errors():
        experiment.start()
        MODES[mode](experiment)


class Experiment:
    """What every mode needs, put together: folders, dataset, input functions, Estimator.

    Args:
      config: all settings.
      cluster: the place of this process.
      environ: the environment, for the folders that a service names.
    """

    def __init__(self, config: Config, cluster: Cluster, environ: Mapping[str, str]) -> None:
        if cluster.is_distributed:
            raise UsageError(f'TF_CONFIG: a cluster of several tasks, {dict(cluster.spec)}; this version trains on one task')
        self.config = config
        self.cluster = cluster
        self.dataset = get_dataset(config.data.dataset)
        self.model_fn = get_model(config.model.model)
        self.output_dir = output_dir(config.run, cluster, environ)
        self.export_dir = export_dir(config.run, cluster, environ)
        self._model_params = parse_model_params(config.model.model_params)
        self._environ = environ

    def start(self) -> None:
        """Makes the output folder, writes `config.json` and logs what is about to run.

        Raises:
          DataError: the folder cannot be written.
        """
        self.probe_output()
        self._write_config()
        self._set_tf_config()
        self._log_start()

    def probe_output(self) -> None:
        """Raises DataError when the output folder cannot be written."""
        storage.probe_writable(self.output_dir, output_flag(self.config.run, self._environ))

    def _set_tf_config(self) -> None:
        """Gives Estimator, which reads TF_CONFIG by itself and takes fewer forms of it, the one that it knows."""
        os.environ.pop('TF_CONFIG', None)
        if self.cluster.tf_config():
            os.environ['TF_CONFIG'] = self.cluster.tf_config()

    def make_estimator(self, *, model_fn: Optional[Callable[..., Any]] = None) -> Any:
        """Returns the Estimator of this run, over `model_fn` (None: the model's own)."""
        config = self.config
        session_config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=config.run.intra_op_threads,
            inter_op_parallelism_threads=config.run.inter_op_threads,
            allow_soft_placement=True,
        )
        run_config = compat.estimator.tpu.RunConfig(
            model_dir=self.output_dir,
            tf_random_seed=config.run.seed,
            session_config=session_config,
            # Saving, logging and summaries are done by trainer.hooks and host_call; these are Estimator's own.
            save_checkpoints_steps=self.save_steps or None,
            save_checkpoints_secs=None,
            save_summary_steps=0,
            log_step_count_steps=None,
            keep_checkpoint_max=config.loop.keep_checkpoint_max,
        )
        return compat.estimator.tpu.TPUEstimator(
            model_fn=checkpoints.wrap_model_fn(model_fn or self.model_fn, self.output_dir),
            config=run_config,
            params=self.make_params(),
            use_tpu=False,
            eval_on_tpu=False,
            export_to_tpu=False,
            train_batch_size=config.data.batch_size,
            eval_batch_size=config.data.eval_batch_size,
            predict_batch_size=config.data.eval_batch_size,
        )

    def make_params(self) -> dict[str, Any]:
        """Returns `params` of the model_fn: settings of model and optimizer, facts of the dataset, where summaries go."""
        settings = {**dataclasses.asdict(self.config.model), **dataclasses.asdict(self.config.optimizer)}
        del settings['model'], settings['model_params']
        facts = {
            'num_classes': self.dataset.num_classes,
            'vocabularies': self.dataset.vocabularies,
            'moments': self.dataset.moments,
            'summaries': SummaryParams(storage.join(self.output_dir, 'train'), self.config.loop.summary_steps),
        }
        taken = sorted(set(self._model_params) & {*facts, 'batch_size', 'use_tpu', 'context'})
        if taken:
            raise UsageError(f'--model_params: {taken[0]} is set by the trainer; choose another name')
        return {**settings, **facts, **self._model_params}

    def make_train_input_fn(self, start_step: int) -> Any:
        """Returns the input_fn of training, from the batch of `start_step` on."""
        return inputs.make_input_fn(
            storage.resolve_files(self.config.data.train_data_paths, '--train_data_paths'),
            self.dataset,
            training=True,
            global_batch_size=self.config.data.batch_size,
            seed=self.config.run.seed,
            config=self.config.data,
            num_workers=self.cluster.num_workers,
            worker_index=self.cluster.worker_index,
            start_step=start_step,
        )

    def make_eval_input_fn(self) -> Any:
        """Returns the input_fn of evaluation: every record once."""
        return inputs.make_input_fn(
            storage.resolve_files(self.config.data.eval_data_paths, '--eval_data_paths'),
            self.dataset,
            training=False,
            global_batch_size=self.config.data.eval_batch_size,
            seed=self.config.run.seed,
            config=self.config.data,
        )

    def make_evaluator(self, estimator: Any) -> Evaluator:
        """Returns the Evaluator over this run's evaluation data."""
        input_fn = self.make_eval_input_fn()
        config = self.config

        def evaluate(checkpoint: Optional[str]) -> Mapping[str, Any]:
            with translate_errors(self.dataset, input_fn.files):
                # Named, because Estimator evaluates random weights when it cannot read which checkpoint is the latest.
                return estimator.evaluate(
                    input_fn,
                    checkpoint_path=checkpoint or _need_checkpoint(self),
                    hooks=[hooks.RecoveryHook(lambda: records.find_compressions(input_fn.files))],
                )

        def export_best() -> str:
            path = storage.join(self.output_dir, 'best')
            return export.export_model(estimator, self.dataset, path, checkpoint=_need_checkpoint(self))

        return Evaluator(
            evaluate=evaluate,
            export_best=export_best if config.eval.export_best else None,
            config=config.eval,
            output_dir=self.output_dir,
            reporter=make_reporter(config, self.cluster, self._environ),
        )

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints: as set, or as an evaluation needs them."""
        return self.config.loop.save_checkpoints_steps or self.config.eval.eval_steps or self.config.loop.max_steps

    def find_checkpoint(self) -> tuple[Optional[str], int]:
        """Returns the latest checkpoint and its step; (None, 0) when there is none."""
        path = checkpoints.find_latest(self.output_dir)
        if path is None:
            return None, 0
        match = re.search(r'-(\d+)$', path)
        return path, int(match.group(1)) if match else 0

    def _log_start(self) -> None:
        logger.info('Original job data: %s', dict(self.cluster.job))
        logger.info('%s; devices: %s', ', '.join(f'{name} {number}' for name, number in VERSIONS.items()), _list_devices())
        data, loop_config = self.config.data, self.config.loop
        logger.info(
            'Model %s on dataset %s to %s; global batch %d = 1 replica x %d, to step %d',
            *(self.config.model.model, self.dataset.name, self.output_dir),
            *(data.batch_size, data.batch_size, loop_config.max_steps),
        )

    def _write_config(self) -> None:
        content = {'config': self.config.to_dict(), 'versions': VERSIONS, 'task': self.cluster.name}
        storage.write_atomic(storage.join(self.output_dir, 'config.json'), json.dumps(content, indent=2) + '\n')


def train_and_eval(experiment: Experiment) -> None:
    """Trains, evaluates as checkpoints come, exports, and leaves `final_metrics.json`."""
    if _is_finished(experiment):
        return
    estimator = experiment.make_estimator()
    evaluator = experiment.make_evaluator(estimator)
    step = _train(experiment, [EvaluationListener(evaluator)])
    # The last evaluation may have been done when the last checkpoint was saved.
    metrics = evaluator.metrics if evaluator.last_step == step else evaluator.evaluate()
    _finish(experiment, estimator, metrics)


def train(experiment: Experiment) -> None:
    """Trains and exports without evaluating."""
    if _is_finished(experiment):
        return
    step = _train(experiment, [])
    _finish(experiment, experiment.make_estimator(), {'global_step': step})


def evaluate(experiment: Experiment) -> None:
    """Evaluates the latest checkpoint once."""
    _need_checkpoint(experiment)
    experiment.make_evaluator(experiment.make_estimator()).evaluate()


def continuous_eval(experiment: Experiment) -> None:
    """Evaluates every new checkpoint until training has ended or none came within the time limit."""
    config = experiment.config
    evaluator = experiment.make_evaluator(experiment.make_estimator())
    waiting_since = time.monotonic()
    while True:
        # Looked up first: a checkpoint that came with it is then still evaluated.
        is_over = storage.exists(storage.join(experiment.output_dir, FINAL_FILE))
        checkpoint, step = experiment.find_checkpoint()
        if checkpoint and step != evaluator.last_step:
            evaluator.evaluate(checkpoint)
            waiting_since = time.monotonic()
        if step >= config.loop.max_steps or is_over:
            logger.info('Evaluation ends: training is done at step %d', step)
            return
        if time.monotonic() - waiting_since > config.eval.continuous_eval_timeout_secs:
            logger.info(
                'Evaluation ends: no new checkpoint in %s for %g seconds (--continuous_eval_timeout_secs)',
                *(experiment.output_dir, config.eval.continuous_eval_timeout_secs),
            )
            return
        time.sleep(REMOTE_POLL_SECS if storage.is_remote(experiment.output_dir) else POLL_SECS)


def export_latest(experiment: Experiment) -> None:
    """Exports the latest checkpoint."""
    _need_checkpoint(experiment)
    _export(experiment, experiment.make_estimator())


def predict_shards(experiment: Experiment) -> None:
    """Writes predictions for every shard of `--predict_data_paths`."""
    checkpoint = _need_checkpoint(experiment)
    step = experiment.find_checkpoint()[1]
    predict.predict_shards(
        experiment.make_estimator(),
        experiment.dataset,
        storage.resolve_files(experiment.config.data.predict_data_paths, '--predict_data_paths'),
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


def _train(experiment: Experiment, listeners: list[Any]) -> int:
    """Trains from the last checkpoint to the last step, and returns the step that was reached."""
    config = experiment.config
    checkpoints.recover(experiment.output_dir)
    checkpoint, start_step = experiment.find_checkpoint()
    if start_step >= config.loop.max_steps:
        logger.info('Already trained to step %d; evaluating and exporting what is there', start_step)
        return start_step
    if checkpoint:
        logger.info('Resuming from %s', checkpoint)
    input_fn = experiment.make_train_input_fn(start_step)
    state = loop.LoopState()
    model_fn = loop.wrap_model_fn(
        experiment.model_fn,
        state=state,
        stop_multiples=[config.loop.summary_steps, experiment.save_steps],
        max_steps=config.loop.max_steps,
        constants={'corrupt_records': input_fn.corrupt_records} if config.data.max_corrupt_records else {},
    )
    if config.loop.warm_start_from and not checkpoint:
        model_fn = warm_start.wrap_model_fn(model_fn, config.loop.warm_start_from)
    try:
        with translate_errors(experiment.dataset, input_fn.files):
            estimator = experiment.make_estimator(model_fn=model_fn)
            threads = hooks.ThreadsHook(compat.get_session_config(estimator), config.data.batch_size)
            run_hooks = make_hooks(experiment, state, listeners, files=input_fn.files)
            estimator.train(loop.wrap_input_fn(input_fn), hooks=[threads, *run_hooks])
    except hooks.NanLossError as error:
        raise DataError(
            f'{error}; stopped. The last good checkpoint is {experiment.find_checkpoint()[0]}: lower --learning_rate '
            f'(now {config.optimizer.learning_rate}) and run again, or look for bad values in {config.data.train_data_paths}'
        ) from error
    return experiment.find_checkpoint()[1]


def make_hooks(experiment: Experiment, state: loop.LoopState, listeners: list[Any], *, files: Sequence[str]) -> list[Any]:
    """The hooks of training in their order: the clock of the loop first, saving (and evaluating) after the checks."""
    config = experiment.config

    def check_store() -> None:
        records.find_compressions(files)
        experiment.probe_output()

    return [
        hooks.RestoredStepHook(lambda: experiment.find_checkpoint()[1]),
        hooks.RecoveryHook(check_store),
        loop.StepsPerCallHook(config.loop.steps_per_loop),
        hooks.StopOnNanHook(state),
        hooks.ProgressHook(
            state,
            task=experiment.cluster.name,
            global_batch_size=config.data.batch_size,
            max_steps=config.loop.max_steps,
            log_secs=config.loop.log_secs,
        ),
        hooks.SaveHook(
            state,
            experiment.output_dir,
            save_steps=experiment.save_steps,
            save_secs=config.eval.eval_secs,
            listeners=listeners,
        ),
        hooks.StopAtStepHook(state, config.loop.max_steps),
    ]


def _is_finished(experiment: Experiment) -> bool:
    """Says, and logs, whether an earlier run has done all that this one is asked for."""
    path = storage.join(experiment.output_dir, FINAL_FILE)
    if not storage.exists(path):
        return False
    final = storage.read_json(path)
    step, export_path = int(final.get('global_step', 0)), final.get('export', '')
    config = experiment.config
    if step < config.loop.max_steps:
        patience, best = config.eval.early_stopping_steps, read_best(experiment.output_dir)
        if not (final.get('stopped_early') and patience and best and step - best.step >= patience):
            return False
        remedy = f'raise --early_stopping_steps (now {patience}, the best is of step {best.step}), or set it to 0'
    else:
        remedy = f'raise --max_steps (now {config.loop.max_steps})'
    logger.info('Already trained to step %d and exported to %s; nothing to do', step, export_path)
    logger.info('To train on, %s; to start anew, choose another folder', remedy)
    return True


def _finish(experiment: Experiment, estimator: Any, metrics: Mapping[str, float]) -> None:
    """Exports and writes `final_metrics.json`, the sign that the run is complete."""
    path = _export(experiment, estimator)
    step = int(metrics['global_step'])
    final = {**metrics, 'export': path, 'stopped_early': step < experiment.config.loop.max_steps}
    storage.write_atomic(storage.join(experiment.output_dir, FINAL_FILE), json.dumps(final, indent=2) + '\n')
    numbers = ', '.join(f'{name}: {value:.3f}' for name, value in metrics.items() if name != 'global_step')
    logger.info('Final metrics after %d steps, %s', step, numbers or 'none (no evaluation)')


def _export(experiment: Experiment, estimator: Any) -> str:
    logger.info('Exporting prediction graph to %s', experiment.export_dir)
    checkpoint = _need_checkpoint(experiment)
    return export.export_model(estimator, experiment.dataset, experiment.export_dir, checkpoint=checkpoint)


def _need_checkpoint(experiment: Experiment) -> str:
    checkpoint = experiment.find_checkpoint()[0]
    if checkpoint is None:
        raise DataError(f'no checkpoint in {experiment.output_dir}: train first, or give the folder of a run that has one')
    damage = checkpoints.find_damage(checkpoint)
    if damage:
        raise DataError(f'{damage}; run --mode=train_and_eval again, which goes on from the one before')
    return checkpoint


@contextlib.contextmanager
def translate_errors(dataset: Dataset, files: Sequence[str]) -> Iterator[None]:
    """Turns an error of TensorFlow that a bad record causes into a DataError that names the file and the record."""
    try:
        yield
    # UnicodeDecodeError: TensorFlow quotes the bytes of a record that does not parse, which Python takes for text.
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, UnicodeDecodeError) as error:
        culprit = records.diagnose(files, dataset)
        if culprit is None:
            raise
        raise DataError(culprit) from error


def _list_devices() -> str:
    """Processors that TensorFlow sees, as '1 CPU' or '1 CPU, 2 GPU'."""
    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    return ', '.join(f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds))
