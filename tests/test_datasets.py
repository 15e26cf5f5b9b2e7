from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from trainer import datasets
from trainer.datasets import DATASETS, MNIST, Dataset
from trainer.errors import DataError, UsageError
from trainer.features import Feature, Schema

SCHEMA = Schema({'x': Feature('float', (2,)), 'y': Feature('int64')})


@pytest.mark.parametrize('name', DATASETS)
def test_names_in_the_table_resolve(name):
    dataset = datasets.get_dataset(name)
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
    with pytest.raises(UsageError, match=r'--dataset=mnits: expected one of mnist, autompg, or package.module:NAME'):
        datasets.get_dataset('mnits')


def test_own_dataset_is_imported(monkeypatch):
    module = types.ModuleType('own_data')
    module.MINE = Dataset('mine', SCHEMA, 'y', 2)
    module.other = 3
    monkeypatch.setitem(sys.modules, 'own_data', module)
    assert datasets.get_dataset('own_data:MINE') is module.MINE
    with pytest.raises(UsageError, match="--dataset=own_data:other: 'other' is no Dataset; own_data has MINE"):
        datasets.get_dataset('own_data:other')


def test_module_that_does_not_import_is_named():
    with pytest.raises(UsageError, match=r"--dataset=no.such:X: cannot import 'no.such': .*; is it on PYTHONPATH"):
        datasets.get_dataset('no.such:X')


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
