"""The datasets by name: schema, label, classes, and the facts about columns that tabular models need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Callable, Optional

import tensorflow as tf

from trainer import data_files, images, manifest, plugins, storage
from trainer.config import DataConfig
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
      unread: Features that records hold beside the schema's and no model is given, such as a picture's path; the key may be
        one of them.
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
    unread: tuple[str, ...] = ()

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
        columns = {self.key} - set(self.unread) if self.key else set()
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
IMAGES, CSV = 'images', 'csv'
NAMES = (*DATASETS, IMAGES, CSV)


def get_dataset(config: DataConfig) -> Dataset:
    """The dataset that `--dataset` names.

    Args:
      config: `dataset` is a name in `NAMES`, or `package.module:NAME` of a `Dataset` on the Python path. For 'images' and
        'csv' the classes, and the columns of 'csv', come from the manifest.json beside the data paths; for 'images'
        `image_size`, `augment` and `resize_method` count.

    Raises:
      UsageError: There is none of that name; the message lists the names there are.
      DataError: No manifest.json, or none that the image converter wrote, or several that differ.
    """
    spec = config.dataset
    if spec == IMAGES:
        return _make_images(config)
    if spec == CSV:
        return _make_table(config)
    if ':' not in spec:
        if spec not in DATASETS:
            raise UsageError(f'--dataset={spec}: expected one of {", ".join(NAMES)}, or package.module:NAME of your own')
        return DATASETS[spec]
    module, dataset = plugins.load(spec, '--dataset')
    if not isinstance(dataset, Dataset):
        names = [key for key, value in vars(module).items() if isinstance(value, Dataset)]
        name = spec.partition(':')[2]
        raise UsageError(f'--dataset={spec}: {name!r} is no Dataset; {module.__name__} has {", ".join(names) or "none"}')
    return dataset


def _make_images(config: DataConfig) -> Dataset:
    """Pictures in class folders, as `python -m trainer.convert images` wrote them."""
    found = _find_manifests(config, IMAGES)
    first = next(iter(found.values()))
    sides = [content['pictures'] for content in found.values()]
    decoding = images.Decoding(
        augment=config.augment,
        resize_method=config.resize_method,
        stored_sides=(min(facts['shortest_side'] for facts in sides), max(facts['longest_side'] for facts in sides)),
        stored_square=max(facts['largest_square'] for facts in sides),
    )
    shape = (config.image_size, config.image_size, 3)
    return Dataset(
        name=IMAGES,
        schema=Schema({'image': Feature('bytes', shape, image=decoding), 'label': Feature('int64')}),
        label='label',
        num_classes=len(first['classes']),
        classes=tuple(first['classes']),
        key='path',
        unread=('path',),
    )


def _make_table(config: DataConfig) -> Dataset:
    """Rows of tables, as `python -m trainer.convert csv` wrote them."""
    found = _find_manifests(config, CSV)
    folder, first = next(iter(found.items()))
    for other, content in found.items():
        if content['schema'] != first['schema']:
            raise DataError(f'--dataset={CSV}: the columns in {folder} and {other} differ; convert both in one run')
    return Dataset(
        name=CSV,
        schema=Schema.from_dict(first['schema']),
        label=first['label'],
        num_classes=len(first['classes']),
        classes=tuple(first['classes']),
        key=first['key'],
        vocabularies={name: tuple(value.encode() for value in values) for name, values in first['vocabularies'].items()},
        moments={name: (mean, deviation) for name, (mean, deviation) in first['moments'].items()},
        unread=tuple(filter(None, (first['key'],))),
    )


def _find_manifests(config: DataConfig, name: str) -> dict[str, dict[str, Any]]:
    """Folder to manifest, for the folders of all data paths that are given; all are of this dataset, with the same classes."""
    folders: dict[str, None] = {}
    for flag in ('train_data_paths', 'eval_data_paths', 'predict_data_paths'):
        if getattr(config, flag).strip(', '):
            files = data_files.resolve(getattr(config, flag), f'--{flag}')
            folders.update(dict.fromkeys(storage.split(path)[0] for path in files))
    found = {folder: content for folder, content in ((folder, manifest.read(folder)) for folder in folders) if content}
    if not found and not folders:
        raise UsageError(f'--dataset={name}: give --train_data_paths or --eval_data_paths, the manifest there has the classes')
    if not found:
        raise DataError(
            f'--dataset={name}: no {manifest.NAME}, which has the classes, in {", ".join(folders)}; write the records with '
            f'python -m trainer.convert {name}'
        )
    first_folder, first = next(iter(found.items()))
    for folder, content in found.items():
        if content.get('dataset') != name:
            raise DataError(f'--dataset={name}: {storage.join(folder, manifest.NAME)} is of {content.get("dataset")!r} records')
        if content['classes'] != first['classes']:
            raise DataError(
                f'--dataset={name}: {first_folder} has classes {first["classes"][:5]}, {folder} has {content["classes"][:5]} '
                f'({len(first["classes"])} and {len(content["classes"])}); convert both in one run'
            )
    return found
