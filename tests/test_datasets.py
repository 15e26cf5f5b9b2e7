from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import tensorflow as tf

from tests import pictures
from trainer import datasets, images, manifest
from trainer.config import DataConfig
from trainer.datasets import DATASETS, MNIST, Dataset
from trainer.errors import DataError, UsageError
from trainer.features import Feature, Schema

SCHEMA = Schema({'x': Feature('float', (2,)), 'y': Feature('int64')})


@pytest.mark.parametrize('name', DATASETS)
def test_names_in_the_table_resolve(name):
    dataset = datasets.get_dataset(DataConfig(dataset=name))
    assert dataset is DATASETS[name]
    assert dataset.name == name
    assert len(dataset.classes) == dataset.num_classes
    assert dataset.label not in dataset.features_schema


def test_mnist_is_the_classic_record():
    assert MNIST.schema.to_dict() == {
        'image': {'dtype': 'bytes', 'shape': [784], 'raw': 'uint8'},
        'label': {'dtype': 'int64', 'shape': []},
    }


def test_unknown_name_lists_the_table():
    with pytest.raises(
        UsageError, match=r'--dataset=mnits: expected one of mnist, autompg, images, csv, or package.module:NAME'
    ):
        datasets.get_dataset(DataConfig(dataset='mnits'))


def test_own_dataset_is_imported(monkeypatch):
    module = types.ModuleType('own_data')
    module.MINE = Dataset('mine', SCHEMA, 'y', 2)
    module.other = 3
    monkeypatch.setitem(sys.modules, 'own_data', module)
    assert datasets.get_dataset(DataConfig(dataset='own_data:MINE')) is module.MINE
    with pytest.raises(UsageError, match="--dataset=own_data:other: 'other' is no Dataset; own_data has MINE"):
        datasets.get_dataset(DataConfig(dataset='own_data:other'))


def test_module_that_does_not_import_is_named():
    with pytest.raises(UsageError, match=r'--dataset=no.such:X: cannot import no.such \(.*\); is its folder on PYTHONPATH'):
        datasets.get_dataset(DataConfig(dataset='no.such:X'))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'label': 'z'}, "label 'z' is not a feature of its schema"),
        ({'label': 'x'}, 'must be one int64'),
        ({'num_classes': 1}, 'num_classes=1 with 0 class names; expected at least 2'),
        ({'classes': ('a', 'b', 'c')}, 'num_classes=2 with 3 class names'),
        ({'vocabularies': {'w': (1,)}}, "'w' is not a feature of its schema"),
        ({'key': 'id'}, "'id' is not a feature of its schema"),
    ],
)
def test_contradictory_dataset_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(Dataset('d', SCHEMA, 'y', 2), **change)


@pytest.mark.parametrize('label', [-1, 2])
def test_label_out_of_range_is_refused(label):
    dataset = Dataset('d', SCHEMA, 'y', 2)
    dataset.check(SCHEMA.encode({'x': [0.0, 0.0], 'y': 1}))
    with pytest.raises(DataError, match=f"label 'y' is {label}, dataset 'd' has 2 classes"):
        dataset.check(SCHEMA.encode({'x': [0.0, 0.0], 'y': label}))


def test_image_classes_and_sizes_come_from_the_manifest(tmp_path):
    files = pictures.write_records(tmp_path, 'train', [(30, 40)] * 3 + [(20, 50)], classes=('cat', 'dog', 'eel'))
    dataset = datasets.get_dataset(
        DataConfig(dataset='images', train_data_paths=','.join(files), image_size=24, augment='flip', resize_method='bicubic')
    )
    assert (dataset.num_classes, dataset.classes) == (3, ('cat', 'dog', 'eel'))
    feature = dataset.schema['image']
    assert (feature.shape, feature.decoded_dtype, feature.decoded_bytes) == ((24, 24, 3), tf.uint8, 24 * 24 * 3)
    assert feature.image == images.Decoding('flip', 'bicubic', (20, 50), 30)


def test_images_without_a_manifest_say_how_to_get_one(tmp_path):
    files = pictures.write_records(tmp_path, 'train', [(30, 40)])
    (tmp_path / manifest.NAME).unlink()
    with pytest.raises(
        DataError, match=f'no manifest.json, which has the classes, in {tmp_path}; write the records with python'
    ):
        datasets.get_dataset(DataConfig(dataset='images', train_data_paths=files[0]))
    with pytest.raises(UsageError, match='give --train_data_paths or --eval_data_paths'):
        datasets.get_dataset(DataConfig(dataset='images'))


def test_images_of_other_classes_for_evaluation_are_refused(tmp_path):
    train, evaluation = (
        pictures.write_records(tmp_path / split, split, [(30, 40)] * 2, classes=classes)[0]
        for split, classes in (('train', ('cat', 'dog')), ('eval', ('cat', 'eel')))
    )
    with pytest.raises(
        DataError, match=r"/train has classes \['cat', 'dog'\], .*/eval has \['cat', 'eel'\].*; convert both in"
    ):
        datasets.get_dataset(DataConfig(dataset='images', train_data_paths=train, eval_data_paths=evaluation))


def test_a_manifest_of_other_records_is_refused(tmp_path):
    (tmp_path / 'x.tfrecord').write_bytes(b'x')
    manifest.write(str(tmp_path), {'dataset': 'mnist', 'classes': []})
    with pytest.raises(DataError, match=r"manifest.json is of 'mnist' records"):
        datasets.get_dataset(DataConfig(dataset='images', train_data_paths=str(tmp_path)))
