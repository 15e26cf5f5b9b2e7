"""The datasets by name: schema, label, classes, and the facts about columns that tabular models need."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Callable, Optional

import tensorflow as tf

from trainer.errors import DataError, UsageError
from trainer.features import Feature, Schema

FeaturesFn = Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What a set of records holds and what is to be learnt from it.

    Args:
      name: What logs, config.json and manifests call it.
      schema: The features of a record, the label among them.
      label: The schema's feature that is the label: one int64 in [0, num_classes).
      num_classes: Number of classes; predictions have this many probabilities.
      classes: Names of the classes in the order of the labels; empty when they have none.
      key: Feature that identifies a record in predictions; `None` identifies it by file and position.
      features_fn: Changes the features of a parsed batch, [batch, ...] to [batch, ...], in training, evaluation,
        prediction and serving alike; `None` leaves them. TensorFlow operations only (AutoGraph does not convert it). It
        runs on the host: what can be done on the device (casts, normalising) belongs in the model.
      vocabularies: Known values of categorical features, for the feature columns of tabular models; bytes or int.
      moments: Mean and standard deviation of numeric features over the training split, for normalising.
    """

    name: str
    schema: Schema
    label: str
    num_classes: int
    classes: tuple[str, ...] = ()
    key: Optional[str] = None
    features_fn: Optional[FeaturesFn] = None
    vocabularies: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    moments: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.label not in self.schema:
            raise UsageError(f'Dataset {self.name!r}: label {self.label!r} is not a feature of its schema')
        label = self.schema[self.label]
        if label.dtype != 'int64' or label.shape != ():
            raise UsageError(f'Dataset {self.name!r}: label {self.label!r} must be one int64, Feature("int64")')
        if self.num_classes < 2 or (self.classes and len(self.classes) != self.num_classes):
            raise UsageError(
                f'Dataset {self.name!r}: num_classes={self.num_classes} with {len(self.classes)} class names; '
                'expected at least 2 classes and a name for each or none'
            )
        columns = {self.key} if self.key else set()
        unknown = (columns | set(self.vocabularies) | set(self.moments)) - set(self.schema.features)
        if unknown:
            raise UsageError(f'Dataset {self.name!r}: {sorted(unknown)[0]!r} is not a feature of its schema')

    @property
    def features_schema(self) -> Schema:
        """The schema without the label: what a model is given when it serves."""
        return self.schema.without([self.label])

    def check(self, serialized: bytes) -> None:
        """Checks one serialized Example: the schema, and the label's range.

        Raises:
          DataError: What is wrong with it.
        """
        self.schema.check(serialized)
        found = tf.train.Example.FromString(serialized).features.feature
        if self.label in found and found[self.label].int64_list.value:
            value = found[self.label].int64_list.value[0]
            if not 0 <= value < self.num_classes:
                raise DataError(
                    f'label {self.label!r} is {value}, dataset {self.name!r} has {self.num_classes} classes '
                    f'(0 to {self.num_classes - 1})'
                )


# The classic MNIST TFRecords: 28 x 28 pixels, row by row, 0 (background) to 255 (ink).
MNIST = Dataset(
    name='mnist',
    schema=Schema({'image': Feature('bytes', (784,), raw='uint8'), 'label': Feature('int64')}),
    label='label',
    num_classes=10,
    classes=tuple('0123456789'),
)

# Cars of 1970 to 1982 by fuel economy: label 0 below 19 miles per gallon, 1 below 27, 2 from there on.
AUTOMPG = Dataset(
    name='autompg',
    schema=Schema(
        {
            'cylinders': Feature('int64'),
            'displacement': Feature('float'),  # cubic inches
            'horsepower': Feature('float', default=95.0),  # unknown for some cars; the default is the median
            'weight': Feature('float'),  # pounds
            'acceleration': Feature('float'),  # seconds from 0 to 60 miles per hour
            'year': Feature('int64'),  # 70 to 82
            'origin': Feature('bytes'),
            'maker': Feature('bytes', default=''),
            'label': Feature('int64'),
        }
    ),
    label='label',
    num_classes=3,
    classes=('thirsty', 'medium', 'economical'),
    vocabularies={
        'origin': (b'usa', b'europe', b'japan'),
        'cylinders': (3, 4, 5, 6, 8),
        'maker': (
            b'ford', b'chevrolet', b'plymouth', b'toyota', b'amc', b'dodge', b'datsun', b'volkswagen', b'buick', b'pontiac',
            b'honda', b'mercury', b'oldsmobile', b'mazda', b'peugeot', b'fiat', b'volvo', b'chrysler', b'opel', b'audi',
        ),
    },
    moments={
        'displacement': (196.4, 103.8),
        'horsepower': (105.3, 37.8),
        'weight': (2995.0, 843.0),
        'acceleration': (15.47, 2.71),
        'year': (75.96, 3.67),
    },
)  # fmt: skip

DATASETS = {'mnist': MNIST, 'autompg': AUTOMPG}


def get_dataset(spec: str) -> Dataset:
    """The dataset that `--dataset` names.

    Args:
      spec: A name in `DATASETS`, or `package.module:NAME` of a `Dataset` on the Python path.

    Raises:
      UsageError: There is none of that name; the message lists the names there are.
    """
    if ':' not in spec:
        if spec not in DATASETS:
            raise UsageError(f'--dataset={spec}: expected one of {", ".join(DATASETS)}, or package.module:NAME of your own')
        return DATASETS[spec]
    module_name, _, name = spec.partition(':')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f'--dataset={spec}: cannot import {module_name!r}: {error}; is it on PYTHONPATH?') from error
    dataset = getattr(module, name, None)
    if not isinstance(dataset, Dataset):
        names = [key for key, value in vars(module).items() if isinstance(value, Dataset)]
        raise UsageError(f'--dataset={spec}: {name!r} is no Dataset; {module_name} has {", ".join(names) or "none"}')
    return dataset
