"""Every setting of a run, declared once: frozen dataclasses from which the flags are generated.

A field carries its type, default, help and unit. A wrong value is a `UsageError` when the Config is built, before
TensorFlow is imported. `flags.py` makes the command line from these classes; nothing else declares a flag.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MODES = ('train_and_eval', 'train', 'eval', 'continuous_eval', 'predict', 'export')


def setting(default: Any, help: str, *, unit: str = '', choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its help text, unit and legal values (any when empty) for the flag made from it."""
    return dataclasses.field(default=default, metadata={'help': help, 'unit': unit, 'choices': choices})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Run: what to do and where the results go."""

    mode: str = setting('train_and_eval', 'what to do', choices=MODES)
    output_path: str = setting('', 'results go here; in a tuning job the trial id is appended')
    job_dir: str = setting('', 'results go here as given (AI Platform sets it, per trial already); beats --output_path')
    seed: int = setting(1, 'same seed, same initial weights and batches')
    debug: bool = setting(False, 'show the stack trace of an error')
    intra_op_threads: int = setting(0, 'threads inside one operation; 0 chooses by the size of the step', unit='threads')
    inter_op_threads: int = setting(0, 'operations run at once; 0 chooses', unit='threads')


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data: where the records are and how they are read."""

    train_data_paths: str = setting('', 'training TFRecord shards: comma-separated files, globs or folders, local or gs://')
    eval_data_paths: str = setting('', 'evaluation TFRecord shards, written the same way')
    predict_data_paths: str = setting('', 'TFRecord or JSON-lines shards for --mode=predict')
    dataset: str = setting('mnist', 'a name in trainer/datasets.py, or package.module:NAME')
    batch_size: int = setting(100, 'training batch over all replicas together', unit='examples')
    eval_batch_size: int = setting(1000, 'evaluation and prediction batch over all replicas together', unit='examples')
    cache: str = setting(
        'auto', 'keep the parsed training set in memory; auto does when it fits', choices=('auto', 'off', 'memory')
    )
    cache_memory_share: float = setting(0.25, 'largest share of the memory that the parsed set may take', unit='0 to 1')
    shuffle_buffer: int = setting(10000, 'records held for shuffling when the set is streamed', unit='records')
    max_corrupt_records: int = setting(0, 'corrupt records skipped and counted before the run stops', unit='records')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Model: the network and its sizes."""

    model: str = setting('mlp', 'a name in trainer/models/__init__.py, or package.module:function')
    hidden1: int = setting(128, 'first hidden layer (mlp, dnn, wide_deep)', unit='units')
    hidden2: int = setting(32, 'second hidden layer (mlp, dnn, wide_deep)', unit='units')
    model_params: str = setting('', 'settings of your own model: name=value,... or a JSON object; they join params')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer: how the weights move."""

    optimizer: str = setting(
        'sgd', 'the update rule', choices=('sgd', 'momentum', 'adagrad', 'adam', 'ftrl')
    )
    learning_rate: float = setting(0.1, 'stated for the global batch')
    momentum: float = setting(0.9, 'for --optimizer=momentum', unit='0 to 1')


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Loop: how long to train, when to save, log and stop."""

    max_steps: int = setting(5000, 'train to this global step', unit='steps')
    steps_per_loop: int = setting(0, 'steps of one session call, run inside the graph; 0 chooses', unit='steps')
    save_checkpoints_steps: int = setting(0, 'save this often; 0 saves when an evaluation is due', unit='steps')
    keep_checkpoint_max: int = setting(5, 'newest checkpoints kept', unit='checkpoints')
    log_secs: float = setting(5.0, 'print a Train line this often', unit='seconds')
    summary_steps: int = setting(100, 'write summaries through host_call this often; 0 never', unit='steps')
    warm_start_from: str = setting('', 'a checkpoint or a folder with one: take every weight that fits by name and shape')


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation: how often, on what, and what follows from it."""

    eval_steps: int = setting(1000, 'evaluate each time so many training steps are done; 0 never by steps', unit='steps')
    eval_secs: float = setting(0.0, 'evaluate each time so many seconds have gone by; 0 never by time', unit='seconds')
    best_metric: str = setting('', 'metric that decides the best export and early stopping; empty takes accuracy, else loss')
    best_goal: str = setting('auto', 'auto minimizes names with loss or error in them', choices=('auto', 'maximize', 'minimize'))
    export_best: bool = setting(True, 'export the best model so far to <output>/best/')
    early_stopping_steps: int = setting(0, 'stop when --best_metric has not improved for so many steps; 0 never', unit='steps')
    continuous_eval_timeout_secs: float = setting(
        600.0, 'in --mode=continuous_eval: end when no new checkpoint came for so long', unit='seconds'
    )


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tuning: the metric reported to the hyperparameter service."""

    metric_tag: str = setting('', 'metric reported through hypertune; empty takes CLOUD_ML_HP_METRIC_TAG, else --best_metric')


@dataclasses.dataclass(frozen=True)
class Config:
    """All sections together: the only thing `experiment.run` takes from the command line."""

    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loop: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    tuning: TuningConfig = dataclasses.field(default_factory=TuningConfig)
