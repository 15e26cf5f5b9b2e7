"""One run put together from a Config: folders, dataset, model, input functions, Estimators, evaluator."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

import tensorflow as tf

import trainer
from trainer import (
    accumulation,
    averages,
    checkpoints,
    compat,
    data_files,
    export,
    hooks,
    inputs,
    job_files,
    records,
    stopping,
    storage,
    tpu,
)
from trainer.cluster import EVALUATOR, Cluster, export_dir, output_dir, output_flag
from trainer.config import TRAINING_MODES, Config
from trainer.data_errors import translate_errors
from trainer.datasets import get_dataset
from trainer.distribute import ONE_DEVICE, PARAMETER_SERVER, TPU, Distribution, make_distribution
from trainer.errors import UsageError
from trainer.evaluation import Evaluator
from trainer.models import get_model, get_serving_dataset, parse_model_params
from trainer.schedules import make_schedule
from trainer.summaries import SummaryParams
from trainer.tuning import make_reporter

logger = logging.getLogger(__name__)

VERSIONS = {'trainer': trainer.__version__, 'tensorflow': tf.__version__, 'python': platform.python_version()}


class Experiment:
    """What every mode needs, put together: folders, dataset, input functions, Estimator.

    Args:
      config: all settings.
      cluster: the place of this process.
      environ: the environment, for the folders that a service names.
    """

    def __init__(self, config: Config, cluster: Cluster, environ: Mapping[str, str]) -> None:
        self.config = config
        self.cluster = cluster
        self.dataset = get_dataset(config.data)
        self.serving_dataset = get_serving_dataset(config.model.model, self.dataset)
        # Updates are counted, and averaged after, once their gradients are complete.
        model_fn = accumulation.wrap_model_fn(get_model(config.model.model), config.optimizer.micro_batches)
        self.output_dir = output_dir(config.run, cluster, environ)
        self.model_fn = averages.wrap_model_fn(model_fn, self._find_ema_decay())
        self.export_dir = export_dir(config.run, cluster, environ)
        strategy = config.distribution.distribution_strategy
        if config.run.mode in TRAINING_MODES or (config.run.mode == 'eval' and strategy == TPU):
            with self.tf_config():
                self.distribution = make_distribution(config.distribution, cluster, environ)
            self.distribution.split_batch(config.data.batch_size)
            if self.distribution.name == TPU:
                self.distribution.split_batch(config.data.eval_batch_size, '--eval_batch_size')
        else:
            self.distribution = Distribution(ONE_DEVICE, f'--mode={config.run.mode} runs in one process')
        self.files = job_files.JobFiles(self.output_dir)
        self._model_params = parse_model_params(config.model.model_params)
        self._environ = environ

    def start(self) -> None:
        """Makes the output folder, writes `config.json` and logs what is about to run.

        Raises:
          DataError: the folder cannot be written.
        """
        self.probe_output()
        if self.cluster.is_chief:
            self._write_config()
        self._log_start()

    @contextlib.contextmanager
    def tf_config(self) -> Iterator[None]:
        """Gives TensorFlow, which reads TF_CONFIG by itself and takes fewer forms of it, the one that it knows; then none.

        Without it this process evaluates and exports alone.
        """
        os.environ.pop('TF_CONFIG', None)
        if self.cluster.is_distributed and self.cluster.role != EVALUATOR:
            os.environ['TF_CONFIG'] = self.cluster.tf_config()
        try:
            yield
        finally:
            os.environ.pop('TF_CONFIG', None)

    def probe_output(self) -> None:
        """Raises DataError when the output folder cannot be written."""
        storage.probe_writable(self.output_dir, output_flag(self.config.run, self._environ))

    def has_evaluator(self) -> bool:
        """Says whether an evaluator task evaluates and reports, so that this one need not."""
        return not self.cluster.evaluates or self.files.has_evaluator()

    def make_session_config(self) -> tf.compat.v1.ConfigProto:
        """Returns what sessions and servers of this task are made with."""
        return tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=self.config.run.intra_op_threads,
            inter_op_parallelism_threads=self.config.run.inter_op_threads,
            allow_soft_placement=True,
            # A session contacts only the tasks that its own work needs; else one that is dead would stall it.
            device_filters=self.cluster.device_filters() if self.distribution.name == PARAMETER_SERVER else [],
        )

    def make_estimator(self, *, model_fn: Optional[Callable[..., Any]] = None) -> Any:
        """Returns an Estimator for this process alone, over `model_fn` (None: the model's own): trains on one device,
        evaluates, predicts, exports."""
        config = self.config
        run_config = compat.estimator.tpu.RunConfig(
            **self._run_settings(),
            session_config=tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=config.run.intra_op_threads,
                inter_op_parallelism_threads=config.run.inter_op_threads,
                allow_soft_placement=True,
            ),
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

    def make_distributed_estimator(self, model_fn: Callable[..., Any]) -> Any:
        """Returns the Estimator that trains `model_fn` on several devices or as a task of the cluster in TF_CONFIG."""
        run_config = compat.estimator.RunConfig(
            **self._run_settings(),
            session_config=self.make_session_config(),
            train_distribute=self.distribution.strategy,
            session_creation_timeout_secs=int(self.config.distribution.step_timeout_secs),
        )
        return compat.estimator.Estimator(
            checkpoints.wrap_model_fn(model_fn, self.output_dir), config=run_config, params=self.make_params()
        )

    def make_tpu_estimator(self, *, model_fn: Optional[Callable[..., Any]] = None) -> Any:
        """Returns the Estimator that trains and evaluates `model_fn` (None: the model's own) on the TPU."""
        # It would save by itself, for it does not see that a hook does.
        run_settings = {**self._run_settings(), 'save_checkpoints_steps': None}
        return tpu.make_estimator(
            checkpoints.wrap_model_fn(model_fn or self.model_fn, self.output_dir),
            name=self.distribution.tpu,
            params=self.make_params(),
            run_settings=run_settings,
            batch_size=self.config.data.batch_size,
            eval_batch_size=self.config.data.eval_batch_size,
            summary_steps=self.config.loop.summary_steps,
        )

    def _find_ema_decay(self) -> float:
        """As set; where nothing is trained, a checkpoint with averages says by itself that they are to be taken."""
        config = self.config
        if config.optimizer.ema_decay or config.run.mode in TRAINING_MODES:
            return config.optimizer.ema_decay
        path = checkpoints.find_latest(self.output_dir)
        return 1.0 if path and averages.are_in(path) else 0.0

    def _run_settings(self) -> dict[str, Any]:
        return {
            'model_dir': self.output_dir,
            'tf_random_seed': self.config.run.seed,
            # Saving, logging and summaries are done by trainer.hooks and host_call; these are Estimator's own.
            'save_checkpoints_steps': self.save_steps or None,
            'save_checkpoints_secs': None,
            'save_summary_steps': 0,
            'log_step_count_steps': None,
            'keep_checkpoint_max': self.config.loop.keep_checkpoint_max,
        }

    def make_params(self) -> dict[str, Any]:
        """Returns `params` of the model_fn: settings of model and optimizer, facts of the dataset, where summaries go."""
        settings = {**dataclasses.asdict(self.config.model), **dataclasses.asdict(self.config.optimizer)}
        del settings['model'], settings['model_params']
        facts = {
            'schedule': make_schedule(self.config),
            'num_classes': self.dataset.num_classes,
            'schema': self.dataset.features_schema,
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
        distribution = self.distribution

        def make(worker_index: int) -> Any:
            return inputs.make_input_fn(
                data_files.resolve(self.config.data.train_data_paths, '--train_data_paths'),
                self.dataset,
                training=True,
                global_batch_size=self.config.data.batch_size,
                batch_size=distribution.split_batch(self.config.data.batch_size),
                seed=self.config.run.seed,
                config=self.config.data,
                num_workers=distribution.num_shards,
                worker_index=worker_index,
                # The hosts of a TPU make every step together too.
                is_lockstep=distribution.is_lockstep or distribution.name == TPU,
                start_step=start_step,
            )

        if distribution.name == TPU:
            return tpu.HostInputs([make(host) for host in range(distribution.num_shards)])
        return make(self.cluster.worker_index)

    def make_eval_input_fn(self) -> Any:
        """Returns the input_fn of evaluation: every record once."""
        data, hosts, batch_size = self.config.data, 1, self.config.data.eval_batch_size
        if self.distribution.name == TPU:
            hosts, batch_size = self.distribution.num_workers, self.distribution.split_batch(batch_size, '--eval_batch_size')
        made = [
            inputs.make_input_fn(
                data_files.resolve(data.eval_data_paths, '--eval_data_paths'),
                self.dataset,
                training=False,
                global_batch_size=data.eval_batch_size,
                batch_size=batch_size,
                seed=self.config.run.seed,
                config=data,
                num_workers=hosts,
                worker_index=host,
            )
            for host in range(hosts)
        ]
        return tpu.HostInputs(made) if self.distribution.name == TPU else made[0]

    def make_evaluator(self, sigterm: Optional[stopping.SigtermGuard] = None) -> Evaluator:
        """Returns the Evaluator over this run's evaluation data; one inside of training ends at SIGTERM."""
        config, distribution = self.config, self.distribution
        input_fn, estimator = self.make_eval_input_fn(), self.make_estimator()
        evaluating, reading, steps = estimator, input_fn, None
        if distribution.name == TPU:
            evaluating, reading = self.make_tpu_estimator(), input_fn.padded()
            steps = input_fn.count_steps(distribution.local_replicas)

        evaluated = ''

        def evaluate(checkpoint: Optional[str]) -> Mapping[str, Any]:
            nonlocal evaluated
            # Named, because Estimator evaluates random weights when it cannot read which checkpoint is the latest.
            evaluated = checkpoint or checkpoints.need_latest(self.output_dir)
            with translate_errors(self.dataset, input_fn.files):
                return evaluating.evaluate(
                    reading,
                    steps=steps,
                    checkpoint_path=evaluated,
                    hooks=[
                        hooks.RecoveryHook(lambda: records.find_compressions(input_fn.files)),
                        *([stopping.StopEvaluationHook(sigterm)] if sigterm else []),
                    ],
                )

        def export_best() -> str:
            path = storage.join(self.output_dir, 'best')
            # While an evaluator works, training saves the next one.
            return export.export_model(estimator, self.serving_dataset, path, checkpoint=evaluated)

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
        logger.info('Model %s on dataset %s to %s', self.config.model.model, self.dataset.name, self.output_dir)
        if self.config.run.mode in TRAINING_MODES:
            batch = self.distribution.describe_batch(self.config.data.batch_size)
            reason = f'{self.distribution.name} ({self.distribution.reason})'
            logger.info('Strategy %s; %s, to step %d', reason, batch, self.config.loop.max_steps)

    def _write_config(self) -> None:
        content = {'config': self.config.to_dict(), 'versions': VERSIONS, 'task': self.cluster.name}
        storage.write_atomic(storage.join(self.output_dir, 'config.json'), json.dumps(content, indent=2) + '\n')


def _list_devices() -> str:
    """Processors that TensorFlow sees, as '1 CPU' or '1 CPU, 2 GPU'."""
    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    return ', '.join(f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds))
