"""Every setting of a run, declared once: frozen dataclasses from which the flags are generated.

A field carries its type, default, help, unit and legal range. A wrong value is a `UsageError` when the Config is
built, before TensorFlow is imported. `flags.py` makes the command line from these classes; nothing else declares a flag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer.cluster_config import ClusterConfig, DistributionConfig
from trainer.errors import UsageError, did_you_mean
from trainer.settings import Section, setting

TRAINING_MODES = ('train_and_eval', 'train')
MODES = ('train_and_eval', 'train', 'eval', 'continuous_eval', 'predict', 'export')

# What each mode reads, checked when the Config is built: a glob is tried later, a flag that was forgotten is known now.
PATHS_OF_MODE = {
    'train_and_eval': ('train_data_paths', 'eval_data_paths'),
    'train': ('train_data_paths',),
    'eval': ('eval_data_paths',),
    'continuous_eval': ('eval_data_paths',),
    'predict': ('predict_data_paths',),
    'export': (),
}


@dataclasses.dataclass(frozen=True)
class RunConfig(Section):
    """Run: what to do and where the results go."""

    mode: str = setting('train_and_eval', 'what to do', choices=MODES)
    output_path: str = setting('', 'results go here; in a tuning job the trial id is appended')
    job_dir: str = setting('', 'results go here as given (AI Platform sets it, per trial already); beats --output_path')
    seed: int = setting(1, 'same seed, same initial weights and batches', at_least=0, at_most=2**31 - 1)
    debug: bool = setting(False, 'show the stack trace of an error')
    intra_op_threads: int = setting(
        0, 'threads inside one operation; 0: one for a small step, else TensorFlow chooses', unit='threads', at_least=0
    )
    inter_op_threads: int = setting(
        0, 'operations run at once; 0: one for a small step, else TensorFlow chooses', unit='threads', at_least=0
    )


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """Data: where the records are and how they are read."""

    train_data_paths: str = setting('', 'training TFRecord shards: comma-separated files, globs or folders, local or gs://')
    eval_data_paths: str = setting('', 'evaluation TFRecord shards, written the same way')
    predict_data_paths: str = setting('', 'TFRecord or JSON-lines shards for --mode=predict')
    dataset: str = setting('mnist', 'a name in trainer/datasets.py, or package.module:NAME')
    image_size: int = setting(
        224, 'height and width that pictures are given to the model in (--dataset=images)', unit='pixels', at_least=8
    )
    augment: str = setting(
        'crop', 'training pictures: random windows and mirror images, mirror images, or as they are',
        choices=('crop', 'flip', 'off'),
    )  # fmt: skip
    resize_method: str = setting('bilinear', 'how pictures are resized', choices=('bilinear', 'bicubic'))
    batch_size: int = setting(
        100, 'training batch over all replicas together: examples of one update', unit='examples', at_least=1
    )
    eval_batch_size: int = setting(
        1000, 'evaluation and prediction batch over all replicas together', unit='examples', at_least=1
    )
    cache: str = setting(
        'auto', 'keep the parsed training set in memory; auto does when it fits', choices=('auto', 'off', 'memory')
    )
    cache_memory_share: float = setting(
        0.25, 'largest share of the memory that the parsed set may take, up to 1', above=0, at_most=1
    )
    shuffle_buffer: int = setting(10000, 'records held for shuffling when the set is streamed', unit='records', at_least=1)
    max_corrupt_records: int = setting(
        0, 'corrupt records skipped and counted before the run stops', unit='records', at_least=0
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
    """Model: the network and its sizes."""

    model: str = setting('mlp', 'a name in trainer/models/__init__.py, or package.module:function')
    hidden1: int = setting(128, 'first hidden layer (mlp, convnet, dnn, wide_deep)', unit='units', at_least=1)
    hidden2: int = setting(32, 'second hidden layer (mlp, dnn, wide_deep)', unit='units', at_least=1)
    dropout: float = setting(
        0.0, 'hidden units left out at random in training (all but linear)', unit='of 1', at_least=0, below=1
    )
    label_smoothing: float = setting(
        0.0, 'of classifiers: in training, so much of each label is spread evenly over all classes', unit='of 1', at_least=0,
        below=1,
    )  # fmt: skip
    precision: str = setting(
        'float32',
        'in training convolutions are computed with these numbers (resnet50, dcgan); weights stay float32',
        choices=('float32', 'bfloat16'),
    )
    gan_size: int = setting(
        64, 'side of the pictures that dcgan makes: a power of two', unit='pixels', at_least=16, at_most=256
    )
    gan_filters: int = setting(
        64, 'at half of that side; doubled each time that the side is halved', unit='channels', at_least=1
    )
    gan_shift: float = setting(
        0.0, "dcgan's discriminator sees pictures shifted at random, by at most this share of the side; 0 as they are",
        at_least=0, at_most=0.5,
    )  # fmt: skip
    n_disc: int = setting(1, "updates of dcgan's discriminator for each of its generator", unit='updates', at_least=1)
    model_params: str = setting('', 'settings of your own model: name=value,... or a JSON object; they join params')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gan_size & (self.gan_size - 1):
            raise UsageError(f'--gan_size={self.gan_size}: expected a power of two, such as 64 or 128')
        if self.label_smoothing and self.model == 'dcgan':
            raise UsageError(f'--label_smoothing={self.label_smoothing}: --model=dcgan uses no labels; leave it out')


# Which schedules read a setting; with another it would change nothing.
_SCHEDULES_OF = {
    'decay_steps': ('exponential', 'polynomial', 'cosine'),
    'decay_rate': ('exponential', 'piecewise'),
    'decay_power': ('polynomial',),
    'decay_end': ('polynomial', 'cosine'),
    'decay_boundaries': ('piecewise',),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer: how the weights move."""

    optimizer: str = setting('sgd', 'the update rule', choices=('sgd', 'momentum', 'adagrad', 'adam', 'ftrl', 'lars'))
    learning_rate: float = setting(0.1, 'stated for the global batch', above=0)
    learning_rate_batch: int = setting(
        0, '--learning_rate is for a batch of this size, and grows in proportion to --batch_size; 0: it is taken as given',
        unit='examples', at_least=0,
    )  # fmt: skip
    learning_rate_schedule: str = setting(
        'constant',
        'how the learning rate changes over the steps; what it starts from is --learning_rate',
        choices=('constant', 'exponential', 'polynomial', 'cosine', 'piecewise'),
    )
    warmup_steps: int = setting(0, 'the learning rate rises in equal parts in so many steps', unit='steps', at_least=0)
    decay_steps: int = setting(
        0, 'after warm-up: exponential falls by --decay_rate, polynomial and cosine end; 0: these end at --max_steps',
        unit='steps', at_least=0,
    )  # fmt: skip
    decay_rate: float = setting(0.1, 'what exponential and piecewise multiply the learning rate by', above=0, at_most=1)
    decay_power: float = setting(1.0, 'of polynomial: 1 is a straight line', above=0)
    decay_end: float = setting(
        0.0, 'of polynomial and cosine: where they end, as a share of the learning rate', unit='of 1', at_least=0, at_most=1
    )
    decay_boundaries: str = setting('', 'of piecewise: steps, comma-separated, from which on --decay_rate applies once more')
    momentum: float = setting(0.9, 'kept of the last update, for --optimizer=momentum and lars', at_least=0, below=1)
    adam_beta1: float = setting(0.9, 'kept of the mean gradient, for --optimizer=adam; 0.5 for dcgan', at_least=0, below=1)
    lars_coefficient: float = setting(
        0.001, 'of --optimizer=lars: a step as a share of the norm of the weights of a layer, before the learning rate', above=0
    )
    weight_decay: float = setting(
        0.0, 'of weights, not of biases or normalisations: so much of them joins their gradient', at_least=0
    )
    clip_norm: float = setting(
        0.0, 'gradients of the whole batch are scaled down to this norm over all weights; 0: never', at_least=0
    )
    micro_batches: int = setting(
        1, 'a replica works on its part of --batch_size in so many parts, one after the other, and adds up their gradients',
        unit='parts', at_least=1,
    )  # fmt: skip
    ema_decay: float = setting(
        0.0, 'evaluate and export averages of the weights, of which so much is kept in a step, such as 0.999; 0: the weights',
        unit='of 1', at_least=0, below=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.learning_rate_schedule
        for field in dataclasses.fields(self):
            value, schedules = getattr(self, field.name), _SCHEDULES_OF.get(field.name, (kind,))
            if value != field.default and kind not in schedules:
                raise UsageError(
                    f'--{field.name}={value} is for --learning_rate_schedule={" or ".join(schedules)}; it is {kind}'
                )
        if self.optimizer != 'lars' and self.lars_coefficient != OptimizerConfig.lars_coefficient:
            raise UsageError(f'--lars_coefficient={self.lars_coefficient} is for --optimizer=lars; it is {self.optimizer}')
        if kind == 'exponential' and not self.decay_steps:
            raise UsageError(
                '--learning_rate_schedule=exponential needs --decay_steps: in how many steps it falls by --decay_rate'
            )
        if kind == 'piecewise' and not self.boundaries:
            raise UsageError('--learning_rate_schedule=piecewise needs --decay_boundaries: steps such as 30000,60000,80000')

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Steps of `decay_boundaries`."""
        try:
            steps = tuple(int(part) for part in self.decay_boundaries.split(',')) if self.decay_boundaries else ()
        except ValueError:
            steps = (0,)
        if any(later <= step for step, later in zip((0, *steps), steps)):
            raise UsageError(f'--decay_boundaries={self.decay_boundaries}: expected rising steps above 0, such as 30000,60000')
        return steps


@dataclasses.dataclass(frozen=True)
class LoopConfig(Section):
    """Loop: how long to train, when to save, log and stop."""

    max_steps: int = setting(5000, 'train to this global step', unit='steps', at_least=1)
    steps_per_loop: int = setting(0, 'steps of one session call, run inside the graph; 0 chooses', unit='steps', at_least=0)
    save_checkpoints_steps: int = setting(0, 'save this often; 0 saves when an evaluation is due', unit='steps', at_least=0)
    keep_checkpoint_max: int = setting(5, 'newest checkpoints kept; 0 keeps all', unit='checkpoints', at_least=0)
    log_secs: float = setting(5.0, 'print a Train line this often', unit='seconds', at_least=0)
    summary_steps: int = setting(100, 'write summaries through host_call this often; 0 never', unit='steps', at_least=0)
    warm_start_from: str = setting('', 'a checkpoint or a folder with one: take every weight that fits by name and shape')


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section):
    """Evaluation: how often, on what, and what follows from it."""

    eval_steps: int = setting(
        1000, 'evaluate each time so many training steps are done; 0 never by steps', unit='steps', at_least=0
    )
    eval_secs: float = setting(
        0.0, 'evaluate each time so many seconds have gone by; 0 never by time', unit='seconds', at_least=0
    )
    best_metric: str = setting(
        '', 'decides the best export and early stopping; empty takes accuracy, else frechet_distance, else loss'
    )
    best_goal: str = setting('auto', 'auto minimizes a loss, error or distance', choices=('auto', 'maximize', 'minimize'))
    export_best: bool = setting(True, 'export the best model so far to <output>/best/')
    early_stopping_steps: int = setting(
        0, 'stop when --best_metric has not improved for so many steps; 0 never', unit='steps', at_least=0
    )
    continuous_eval_timeout_secs: float = setting(
        600.0, 'in --mode=continuous_eval: end when no new checkpoint came for so long', unit='seconds', above=0
    )


@dataclasses.dataclass(frozen=True)
class TuningConfig(Section):
    """Tuning: the metric reported to the hyperparameter service."""

    metric_tag: str = setting('', 'metric reported through hypertune; empty takes CLOUD_ML_HP_METRIC_TAG, else --best_metric')


@dataclasses.dataclass(frozen=True)
class Config:
    """All sections together: the only thing `modes.run` takes from the command line."""

    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loop: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    tuning: TuningConfig = dataclasses.field(default_factory=TuningConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    distribution: DistributionConfig = dataclasses.field(default_factory=DistributionConfig)

    def __post_init__(self) -> None:
        self._check_paths()
        self._check_evaluation()
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        warmup_steps, max_steps = self.optimizer.warmup_steps, self.loop.max_steps
        if warmup_steps >= max_steps:
            raise UsageError(f'--warmup_steps={warmup_steps} never ends: --max_steps={max_steps}; expected fewer')
        micro_batches, ema_decay = self.optimizer.micro_batches, self.optimizer.ema_decay
        if micro_batches > 1 and self.model.model == 'dcgan':
            raise UsageError(
                f'--micro_batches={micro_batches}: --model=dcgan makes several updates of a step, each on its part of the '
                'batch already (--n_disc); leave it out'
            )
        if ema_decay and self.model.model == 'dcgan':
            raise UsageError(f'--ema_decay={ema_decay}: --model=dcgan averages its generator in any case; leave it out')
        if ema_decay and self.distribution.sync_replicas:
            raise UsageError(
                f'--ema_decay={ema_decay}: with --sync_replicas each worker would move the averages for every update; expected '
                '0, or another --distribution_strategy'
            )

    def _check_paths(self) -> None:
        for name in PATHS_OF_MODE[self.run.mode]:
            if not getattr(self.data, name).strip(', '):
                remedy = ', or --mode=train to train without evaluation' if name == 'eval_data_paths' else ''
                raise UsageError(f'--{name} is needed by --mode={self.run.mode}: give files, globs or folders{remedy}')

    def _check_evaluation(self) -> None:
        patience, evaluations = self.eval.early_stopping_steps, self.eval.eval_steps or self.eval.eval_secs
        if patience and self.run.mode == 'train':
            raise UsageError(
                f'--early_stopping_steps={patience}: --mode=train never evaluates, so nothing would stop it;'
                ' expected --mode=train_and_eval, or 0'
            )
        if self.run.mode != 'train_and_eval':
            return
        if patience and not evaluations:
            raise UsageError(
                f'--early_stopping_steps={patience}: --eval_steps=0 and --eval_secs=0 never evaluate before the end,'
                ' so nothing would stop it; expected one of them above 0'
            )
        save_steps, eval_steps = self.loop.save_checkpoints_steps, self.eval.eval_steps
        # An evaluation reads a checkpoint: one that falls between two saves would measure weights of long ago.
        if save_steps and eval_steps % save_steps:
            raise UsageError(
                f'--save_checkpoints_steps={save_steps}: an evaluation needs a checkpoint of its step;'
                f' expected 0 or a divisor of --eval_steps={eval_steps}'
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """All settings as `{section: {name: value}}`, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, sections: Mapping[str, Mapping[str, Any]]) -> Config:
        """The Config that `to_dict` came from; settings left out take their defaults.

        Raises:
            UsageError: a section or setting that does not exist, or an illegal value.
        """
        classes = section_classes()
        for name in sections:
            if name not in classes:
                raise UsageError(f'unknown section {name!r} of settings; expected one of {", ".join(classes)}')
        return cls(**{name: _section_from_dict(classes[name], name, values) for name, values in sections.items()})


def section_classes() -> dict[str, type[Section]]:
    """The sections of Config in their order, by field name."""
    return {field.name: field.default_factory for field in dataclasses.fields(Config)}  # type: ignore[misc]


def _section_from_dict(section: type[Section], name: str, values: Mapping[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UsageError(f'unknown setting {name}.{key}{did_you_mean(key, known)}')
    return section(**values)
