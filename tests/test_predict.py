"""Batch prediction: every record of every shard once, in order, under its key; what is done is not done again."""

from __future__ import annotations

import gzip
import json
import os
import pathlib

import numpy as np
import pytest

from tests import fakes
from tests.test_export import BLOBS
from trainer import predict, records
from trainer.datasets import Dataset
from trainer.errors import DataError, UsageError
from trainer.features import Feature, Schema
from trainer.models import mlp

KEYED = Dataset(
    name='keyed',
    schema=Schema({**BLOBS.schema.features, 'id': Feature('int64')}),
    label='label',
    num_classes=3,
    key='id',
    features_fn=lambda features: {'image': features['image']},
)


@pytest.fixture(scope='module')
def estimator(tmp_path_factory):
    return fakes.train_looped(mlp.model_fn, tmp_path_factory.mktemp('run'), max_steps=60, steps_per_loop=20)[0]


def _write_shards(folder, counts):
    """TFRecord shards of blobs; returns their paths and all labels in order."""
    images, labels = fakes.make_blobs(sum(counts), seed=4)
    paths, start = [], 0
    for index, count in enumerate(counts):
        path = str(folder / f'part-{index}.tfrecord')
        rows = range(start, start + count)
        records.write_file(path, [BLOBS.schema.encode({'image': images[i], 'label': labels[i]}) for i in rows])
        paths.append(path)
        start += count
    return paths, labels.tolist()


def _predict(estimator, paths, folder, *, dataset=BLOBS, batch_size=4):
    outputs = predict.predict_shards(
        estimator,
        dataset,
        paths,
        output_dir=str(folder),
        batch_size=batch_size,
        checkpoint=estimator.latest_checkpoint(),
    )
    return [[json.loads(line) for line in pathlib.Path(path).read_text().splitlines()] for path in outputs]


def test_shards_in_input_order_with_file_and_position_as_key(estimator, tmp_path):
    paths, labels = _write_shards(tmp_path, [5, 0, 0, 11, 4, 0])
    shards = _predict(estimator, paths, tmp_path / 'out')
    assert [len(shard) for shard in shards] == [5, 0, 0, 11, 4, 0]
    lines = [line for shard in shards for line in shard]
    assert [line['class'] for line in lines] == labels
    assert [line['key'] for line in shards[3][:3]] == ['part-3.tfrecord:0', 'part-3.tfrecord:1', 'part-3.tfrecord:2']
    assert all(abs(sum(line['probabilities']) - 1) < 1e-5 and len(line['probabilities']) == 3 for line in lines)
    assert list(lines[0]) == ['key', 'class', 'probabilities']


@pytest.mark.parametrize('compress', [False, True])
def test_json_lines_with_keys_give_the_same_as_records(estimator, tmp_path, compress):
    images, _ = fakes.make_blobs(6, seed=4)
    text = '\n'.join(json.dumps({'image': image.tolist(), 'key': f'n{i}'}) for i, image in enumerate(images)) + '\n\n'
    path = tmp_path / ('in.jsonl.gz' if compress else 'in.jsonl')
    path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
    (lines,) = _predict(estimator, [str(path)], tmp_path / 'out')
    assert [line['key'] for line in lines] == ['n0', 'n1', 'n2', 'n3', 'n4', 'n5']
    paths, _ = _write_shards(tmp_path, [6])
    (from_records,) = _predict(estimator, paths, tmp_path / 'out2')
    for line, other in zip(lines, from_records):
        np.testing.assert_allclose(line['probabilities'], other['probabilities'], rtol=1e-5)


def test_key_feature_of_the_dataset_is_the_key(estimator, tmp_path):
    images, _ = fakes.make_blobs(3)
    path = str(tmp_path / 'keyed.tfrecord')
    schema = KEYED.features_schema
    records.write_file(path, [schema.encode({'image': image, 'id': 70 + i}) for i, image in enumerate(images)])
    (lines,) = _predict(estimator, [path], tmp_path / 'out', dataset=KEYED)
    assert [line['key'] for line in lines] == ['70', '71', '72']


def test_second_run_does_only_what_is_missing(estimator, tmp_path):
    paths, _ = _write_shards(tmp_path, [3, 4, 5])
    first = _predict(estimator, paths, tmp_path / 'out')
    outputs = sorted(os.listdir(tmp_path / 'out'))
    assert outputs == [f'part-{i}.tfrecord.predictions.jsonl' for i in range(3)]
    os.remove(tmp_path / 'out' / outputs[1])
    (tmp_path / 'out' / outputs[2]).write_text('{"kept": 1}\n')
    again = _predict(estimator, paths, tmp_path / 'out')
    assert again[1] == first[1] and again[2] == [{'kept': 1}]


def test_failure_keeps_the_shards_before_it_and_names_the_record(estimator, tmp_path):
    paths, _ = _write_shards(tmp_path, [20, 20, 6])
    damaged = pathlib.Path(paths[2])
    data = bytearray(damaged.read_bytes())
    data[-10] ^= 255
    damaged.write_bytes(data)
    with pytest.raises(Exception, match=r'part-2.tfrecord: record 5 .*fail their checksum'):
        _predict(estimator, paths, tmp_path / 'out')
    assert 'part-0.tfrecord.predictions.jsonl' in os.listdir(tmp_path / 'out')
    assert 'part-2.tfrecord.predictions.jsonl' not in os.listdir(tmp_path / 'out')


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('{"image": [1, 2', 'in.jsonl: line 2: '),
        ('[1, 2]', 'in.jsonl: line 2: expected a JSON object with image'),
        ('{"image": [1, 2]}', r"in.jsonl: line 2: feature 'image' has shape \(2,\), the schema expects \(16,\)"),
        ('{"picture": [1]}', "in.jsonl: line 2: feature 'picture' is not in the schema; it has 'image'"),
    ],
)
def test_bad_line_is_named(estimator, tmp_path, line, message):
    path = tmp_path / 'in.jsonl'
    path.write_text(json.dumps({'image': [0] * 16}) + '\n' + line + '\n')
    with pytest.raises(DataError, match=message):
        _predict(estimator, [str(path)], tmp_path / 'out')


def test_two_shards_of_one_name_are_refused(estimator, tmp_path):
    with pytest.raises(UsageError, match=r'several shards would be written to .*a.tfrecord.predictions.jsonl'):
        _predict(estimator, [str(tmp_path / 'x' / 'a.tfrecord'), str(tmp_path / 'y' / 'a.tfrecord')], tmp_path / 'out')
