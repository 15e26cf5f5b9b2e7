from __future__ import annotations

import collections
import gzip
import logging
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests import shards
from trainer import compat, inputs, manifest, memory, pipeline_choice, pipelines, records
from trainer.config import DataConfig
from trainer.datasets import MNIST, Dataset
from trainer.errors import DataError
from trainer.features import Feature, Schema

RAGGED = Dataset('ragged', Schema({'ids': Feature('int64', None), 'label': Feature('int64')}), 'label', 3)
STREAMS = {'memory': {'cache': 'memory'}, 'blocks': {'cache': 'off'}, 'records': {'cache': 'off'}}


def make(files, *, dataset=MNIST, training=True, batch=10, seed=1, start_step=0, workers=1, worker=0, **settings):
    return inputs.make_input_fn(
        files, dataset, training=training, global_batch_size=batch, seed=seed, config=DataConfig(**settings),
        num_workers=workers, worker_index=worker, start_step=start_step,
    )  # fmt: skip


@pytest.fixture(params=STREAMS)
def stream(request, monkeypatch):
    """Settings that choose each training pipeline in turn."""
    if request.param == 'records':
        monkeypatch.setattr(pipeline_choice, '_SMALL_RECORD_BYTES', 0)
    return request.param, STREAMS[request.param]


def take(input_fn, count, params=None):
    """The numbers of the digits in the next batches: [count][batch]."""
    found = []
    for features, labels in input_fn(params).take(count):
        numbers = shards.numbers_of(features['image'].numpy())
        assert labels.numpy().tolist() == [n % 10 for n in numbers]
        found.append(numbers)
    return found


def flat(batches):
    return [number for batch in batches for number in batch]


def test_training_batches_are_static_uint8_and_endless(tmp_path, stream):
    name, settings = stream
    input_fn = make(shards.write_digits(tmp_path, [7, 6]), **settings)
    assert input_fn.pipeline == name
    features, labels = input_fn().element_spec
    assert features == {'image': tf.TensorSpec([10, 784], tf.uint8)}
    assert labels == tf.TensorSpec([10], tf.int64)
    assert len(take(input_fn, 5)) == 5


@pytest.mark.parametrize('compression', ['', 'GZIP'])
def test_every_epoch_holds_every_record_once_and_batches_span_epochs(tmp_path, stream, compression):
    files = shards.write_digits(tmp_path, [9, 5, 3], compression=compression)
    numbers = flat(take(make(files, **stream[1]), 17))
    epochs = [numbers[i : i + 17] for i in range(0, 170, 17)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10


def test_same_seed_same_batches_another_seed_others(tmp_path, stream):
    files = shards.write_digits(tmp_path, [30, 30])
    first, again, other = (take(make(files, seed=seed, **stream[1]), 12) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_from_memory_a_resumed_run_goes_on_exactly(tmp_path):
    files = shards.write_digits(tmp_path, [13, 10])
    all_batches = take(make(files, cache='memory'), 20)
    for step in (1, 2, 7, 14):
        assert take(make(files, cache='memory', start_step=step), 20 - step) == all_batches[step:]
    assert take(make(files, cache='memory').starting_at(7), 13) == all_batches[7:]


@pytest.mark.parametrize('start_step', [0, 5])
def test_in_lockstep_workers_take_parts_of_the_same_steps(tmp_path, start_step):
    files = shards.write_digits(tmp_path, [13, 10])
    whole = take(make(files, batch=12, cache='memory', start_step=start_step), 9)
    parts = [
        take(
            inputs.make_input_fn(
                files, MNIST, training=True, global_batch_size=12, batch_size=2, seed=1, config=DataConfig(cache='memory'),
                num_workers=3, worker_index=worker, is_lockstep=True, start_step=start_step,
            ),
            18,
        )
        for worker in range(3)
    ]  # fmt: skip
    # Each worker has two replicas, which take a batch of two each.
    steps = [flat(batches[2 * step] + batches[2 * step + 1] for batches in parts) for step in range(9)]
    assert steps == whole


def test_in_lockstep_workers_that_stream_have_shards_of_their_own(tmp_path):
    files = shards.write_digits(tmp_path, [6, 6])
    seen = []
    for worker in range(2):
        input_fn = inputs.make_input_fn(
            files, MNIST, training=True, global_batch_size=4, batch_size=2, seed=1, config=DataConfig(cache='off'),
            num_workers=2, worker_index=worker, is_lockstep=True,
        )  # fmt: skip
        assert input_fn.files == (files[worker],)
        seen.append(set(flat(take(input_fn, 3))))
    assert seen == [set(range(6)), set(range(6, 12))]


@pytest.mark.parametrize('name', ['blocks', 'records'])
def test_streaming_a_resumed_run_does_not_repeat_the_start(tmp_path, monkeypatch, name):
    if name == 'records':
        monkeypatch.setattr(pipeline_choice, '_SMALL_RECORD_BYTES', 0)
    files = shards.write_digits(tmp_path, [40, 40])
    started, resumed, again = (take(make(files, cache='off', start_step=step), 8) for step in (0, 100, 100))
    assert started != resumed
    assert resumed == again


def test_streaming_mixes_over_files_and_blocks(tmp_path):
    files = shards.write_digits(tmp_path, [300, 300, 300, 300])
    numbers = flat(take(make(files, batch=100, cache='off', shuffle_buffer=400), 12))
    assert sorted(numbers) == list(range(1200))
    sources = [collections.Counter(n // 300 for n in numbers[i : i + 200]) for i in range(0, 1200, 200)]
    assert sum(len(source) >= 2 for source in sources) >= 4
    displacement = np.abs(np.argsort(numbers) - np.arange(1200)).mean()
    assert displacement > 200


def test_batch_larger_than_the_set_repeats_it(tmp_path, stream):
    [batch] = take(make(shards.write_digits(tmp_path, [4]), batch=10, **stream[1]), 1)
    assert sorted(batch[:4]) == sorted(batch[4:8]) == [0, 1, 2, 3]


def test_batch_size_of_params_wins(tmp_path, stream):
    input_fn = make(shards.write_digits(tmp_path, [9]), batch=10, **stream[1])
    assert [len(batch) for batch in take(input_fn, 2, {'batch_size': 3})] == [3, 3]
    assert [len(batch) for batch in take(input_fn, 2, {})] == [10, 10]


def test_workers_share_files_and_batch(tmp_path, stream, caplog):
    files = shards.write_digits(tmp_path, [4, 5, 6])
    with caplog.at_level(logging.INFO):
        parts = [flat(take(make(files, batch=6, workers=2, worker=worker, **stream[1]), 10)) for worker in (0, 1)]
    assert set(parts[0]) == {*range(4), *range(9, 15)}
    assert set(parts[1]) == set(range(4, 9))
    assert 'Reading all records of 2 files (0 GZIP): about 10 records' in caplog.text


def test_worker_with_no_file_of_its_own_reads_by_record(tmp_path, stream, caplog):
    files = shards.write_digits(tmp_path, [4, 5])
    with caplog.at_level(logging.INFO):
        parts = [flat(take(make(files, batch=6, workers=3, worker=worker, **stream[1]), 9)) for worker in range(3)]
    assert sorted(map(sorted, map(set, parts))) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert 'Reading every 3. record from 2 of 2 files' in caplog.text


def test_fewer_records_than_workers_is_an_error(tmp_path):
    files = shards.write_digits(tmp_path, [2])
    with pytest.raises(DataError, match='2 records for 3 workers; use fewer workers or more data'):
        make(files, batch=3, workers=3, worker=2)


@pytest.mark.parametrize('batch', [1, 4, 10, 23, 24, 1500])
def test_evaluation_reads_every_record_once_in_order_padded(tmp_path, batch):
    files = shards.write_digits(tmp_path, [9, 8, 6], compression='GZIP')
    found = list(make(files, training=False, batch=batch)())
    weights = np.concatenate([features['weights'].numpy() for features, _ in found])
    images = np.concatenate([features['image'].numpy() for features, _ in found])
    labels = np.concatenate([labels.numpy() for _, labels in found])
    assert len(found) == -(-23 // batch)
    assert all(features['image'].shape == (batch, 784) for features, _ in found)
    assert weights.dtype == np.float32
    assert weights.tolist() == [1.0] * 23 + [0.0] * (len(weights) - 23)
    assert shards.numbers_of(images[:23]) == list(range(23))
    assert not images[23:].any()
    assert not labels[23:].any()


def test_evaluation_shapes_are_static(tmp_path):
    features, labels = make(shards.write_digits(tmp_path, [3]), training=False)().element_spec
    assert features == {'image': tf.TensorSpec([10, 784], tf.uint8), 'weights': tf.TensorSpec([10], tf.float32)}
    assert labels == tf.TensorSpec([10], tf.int64)


def write_ragged(folder, lengths):
    examples = [{'ids': list(range(1, n + 1)), 'label': n % 3} for n in lengths]
    return shards.write_examples(folder, RAGGED, [examples])


def test_variable_length_is_streamed_and_says_so(tmp_path, caplog):
    files = write_ragged(tmp_path, [1, 2, 3, 4, 0])
    with caplog.at_level(logging.INFO):
        input_fn = make(files, dataset=RAGGED, batch=5)
    features, _ = next(iter(input_fn()))
    assert input_fn.pipeline == 'records'
    assert 'Not kept in memory: features of variable length without max_length' in caplog.text
    assert 'a buffer of 10000 records is shuffled' in caplog.text
    assert sorted(features['ids'].numpy().astype(bool).sum(axis=1)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match='--cache=memory: features of variable length without max_length'):
        make(files, dataset=RAGGED, cache='memory')


def test_variable_length_is_evaluated_exactly(tmp_path):
    found = list(make(write_ragged(tmp_path, [1, 4, 2]), dataset=RAGGED, training=False, batch=2)())
    assert [features['ids'].numpy().tolist() for features, _ in found] == [[[1, 0, 0, 0], [1, 2, 3, 4]], [[1, 2], [0, 0]]]
    assert found[1][0]['weights'].numpy().tolist() == [1.0, 0.0]


def test_features_fn_changes_features_in_every_pipeline(tmp_path, stream):
    dataset = Dataset('m', MNIST.schema, 'label', 10, features_fn=lambda f: {'mean': tf.reduce_mean(f['image'], axis=1)})
    files = shards.write_digits(tmp_path, [5])
    for training in (True, False):
        features, _ = next(iter(make(files, dataset=dataset, training=training, batch=5, **stream[1])()))
        assert features['mean'].shape == (5,)
        assert 'image' not in features


def test_strings_are_kept_in_memory_and_padded(tmp_path):
    dataset = Dataset('s', Schema({'name': Feature('bytes', (2,)), 'y': Feature('int64')}), 'y', 2)
    files = shards.write_examples(tmp_path, dataset, [[{'name': [str(i), 'x' * i], 'y': i % 2} for i in range(5)]])
    training = make(files, dataset=dataset, batch=5, cache='memory')
    features, labels = next(iter(training()))
    assert sorted(zip(features['name'].numpy()[:, 0].tolist(), labels.numpy().tolist())) == [
        (b'0', 0), (b'1', 1), (b'2', 0), (b'3', 1), (b'4', 0),
    ]  # fmt: skip
    features, _ = next(iter(make(files, dataset=dataset, training=False, batch=6)()))
    assert features['name'].numpy()[4:].tolist() == [[b'4', b'xxxx'], [b'', b'']]


def test_set_that_does_not_fit_is_streamed_or_refused_with_the_numbers(tmp_path, monkeypatch, caplog):
    files = shards.write_digits(tmp_path, [50, 50])
    monkeypatch.setattr(memory, 'limit_bytes', lambda: 200_000)
    numbers = r'100 records take 79.2 KB parsed, --cache_memory_share=0.25 of 200.0 KB allows 50.0 KB'
    with caplog.at_level(logging.INFO):
        assert make(files).pipeline == 'blocks'
    assert f'Not kept in memory: {numbers}' in caplog.text
    with pytest.raises(DataError, match=f'--cache=memory: {numbers}; use --cache=auto or off to stream the set'):
        make(files, cache='memory')
    assert make(files, cache_memory_share=0.5).pipeline == 'memory'


def test_buffers_and_pipeline_are_logged(tmp_path, stream, caplog):
    name, settings = stream
    with caplog.at_level(logging.INFO):
        make(shards.write_digits(tmp_path, [50], compression='GZIP'), shuffle_buffer=20, **settings)
    assert {
        'memory': 'Training from memory: the parsed set takes 39.6 KB (twice that while it loads)',
        'blocks': 'chunks of up to 256 records are shuffled, then the records of blocks of 10; the buffers take 24.1 KB',
        'records': 'a buffer of 20 records is shuffled; it takes 16.4 KB',
    }[name] in caplog.text
    assert 'Reading all records of 1 files (1 GZIP): about 50 records of 822 bytes, batch 10' in caplog.text


def test_files_are_not_part_of_the_graph_as_constants(tmp_path):
    files = shards.write_digits(tmp_path, [200])
    with tf.Graph().as_default() as graph:
        tf.compat.v1.data.make_initializable_iterator(make(files, cache='memory')()).get_next()
        assert len(graph.as_graph_def().SerializeToString()) < 50_000


def run_in_session(input_fn, count):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        iterator = tf.compat.v1.data.make_initializable_iterator(input_fn({}))
        features, _ = iterator.get_next()
        session.run(iterator.initializer)
        return [shards.numbers_of(session.run(features['image'])) for _ in range(count)]


def test_a_v1_graph_gives_the_same_batches_each_time(tmp_path, stream):
    input_fn = make(shards.write_digits(tmp_path, [15, 15]), **stream[1])
    assert run_in_session(input_fn, 9) == run_in_session(input_fn, 9)
    assert sorted(flat(run_in_session(input_fn, 3))) == list(range(30))


@pytest.mark.parametrize('use_tpu_estimator', [False, True])
def test_estimators_take_the_input_fn(tmp_path, use_tpu_estimator):
    files = shards.write_digits(tmp_path, [15, 15])

    def model_fn(features, labels, mode, params):
        images = tf.cast(features['image'], tf.float32)
        weights = features.get('weights', tf.ones([images.shape[0]]))
        scale = tf.compat.v1.get_variable('scale', [], initializer=tf.compat.v1.zeros_initializer())
        loss = tf.reduce_sum(weights * (tf.reduce_mean(images, axis=1) * scale - tf.cast(labels, tf.float32)) ** 2)
        train_op = tf.compat.v1.train.GradientDescentOptimizer(1e-9).minimize(loss, tf.compat.v1.train.get_global_step())
        spec = compat.estimator.tpu.TPUEstimatorSpec(
            mode, loss=loss, train_op=train_op,
            eval_metrics=(lambda weights: {'count': tf.compat.v1.metrics.mean(weights)}, [weights]),
        )  # fmt: skip
        return spec if use_tpu_estimator else spec.as_estimator_spec()

    if use_tpu_estimator:
        estimator = compat.estimator.tpu.TPUEstimator(
            model_fn, str(tmp_path / 'out'), compat.estimator.tpu.RunConfig(), use_tpu=False, train_batch_size=6,
            eval_batch_size=8,
        )  # fmt: skip
    else:
        estimator = compat.estimator.Estimator(model_fn, str(tmp_path / 'out'), params={})
    estimator.train(make(files, batch=6), steps=3)
    metrics = estimator.evaluate(make(files, training=False, batch=8))
    assert metrics['global_step'] == 3
    assert metrics['count'] == pytest.approx(30 / 32)


# What is wrong with the data: found before the graph runs, or afterwards by a diagnosis of `input_fn.files`.

RECORD = len(records.frame(MNIST.schema.encode(shards.make_digits(1)[0])))
OTHER = Schema({'image': Feature('bytes', (700,), raw='uint8'), 'label': Feature('int64')})


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (b'', 'part-00000.tfrecord: the file is empty; write it again or leave it out of the data paths'),
        (b'PK\x03\x04zip', 'part-00000.tfrecord: not a TFRecord file but a zip archive; expected TFRecords, plain or GZIP'),
        (b'1,2,3\n4,5,6\n', 'part-00000.tfrecord: record 0: not a TFRecord file, or its first record is damaged'),
        (gzip.compress(b''), 'part-00000.tfrecord: the file holds no record'),
        (gzip.compress(b'x')[:15], 'part-00000.tfrecord: the GZIP file is cut: it has 15 bytes; write it again'),
        (
            records.frame(OTHER.encode({'image': bytes(700), 'label': 1})),
            r"part-00000.tfrecord: record 0 \(byte 0\): feature 'image' has 700 bytes, the schema expects 784 \(uint8 of shape "
            r'\(784,\)\); mend the schema \(--dataset\) or the converter',
        ),
        (
            records.frame(MNIST.schema.encode({'image': bytes(784), 'label': 12})),
            r"part-00000.tfrecord: record 0 \(byte 0\): label 'label' is 12, dataset 'mnist' has 10 classes \(0 to 9\)",
        ),
    ],
    ids=['empty', 'zip', 'csv', 'gzip-of-nothing', 'gzip-cut', 'image-too-small', 'label-too-large'],
)
@pytest.mark.parametrize('training', [True, False])
def test_wrong_first_file_stops_before_the_graph(tmp_path, data, message, training):
    files = shards.write_digits(tmp_path, [3, 3])
    pathlib.Path(files[0]).write_bytes(data)
    with pytest.raises(DataError, match=message):
        make(files, training=training)


def test_empty_file_among_others_is_named(tmp_path):
    files = shards.write_digits(tmp_path, [3, 3])
    pathlib.Path(files[1]).write_bytes(b'')
    with pytest.raises(DataError, match=r'part-00001.tfrecord: the file is empty'):
        make(files)


def put(path, payload):
    """Appends a record that is sound as such."""
    with open(path, 'ab') as file:
        file.write(records.frame(payload))


LATER_FAULTS = {
    'corrupt payload': (lambda path: shards.damage(path, RECORD + 50), 'record 1 (byte', 'bytes of the record fail'),
    'corrupt length': (lambda path: shards.damage(path, 2 * RECORD), 'record 2 (byte', 'the length of the record fails'),
    'cut': (lambda path: shards.cut(path, -9), 'record 4 (byte', 'the file is cut within a record'),
    'missing feature': (
        lambda path: put(path, Schema({'label': Feature('int64')}).encode({'label': 1})), 'record 5', "'image' is missing",
    ),
    'wrong dtype': (
        lambda path: put(path, Schema({'image': Feature('int64'), 'label': Feature('int64')}).encode({'image': 1, 'label': 1})),
        'record 5', "feature 'image' holds int64_list, the schema expects bytes_list",
    ),
    'wrong shape': (
        lambda path: put(path, OTHER.encode({'image': bytes(700), 'label': 1})), 'record 5', "'image' has 700 bytes",
    ),
    'label out of range': (
        lambda path: put(path, MNIST.schema.encode({'image': bytes(784), 'label': 10})), 'record 5', "label 'label' is 10",
    ),
}  # fmt: skip


@pytest.mark.parametrize('fault', LATER_FAULTS)
@pytest.mark.parametrize('pipeline', ['memory', 'blocks', 'records', 'exact'])
def test_later_fault_fails_and_is_diagnosed(tmp_path, monkeypatch, fault, pipeline):
    if pipeline == 'records':
        monkeypatch.setattr(pipeline_choice, '_SMALL_RECORD_BYTES', 0)
    break_file, place, message = LATER_FAULTS[fault]
    files = shards.write_digits(tmp_path, [5, 5])
    break_file(files[1])
    input_fn = make(files, training=pipeline != 'exact', cache='memory' if pipeline == 'memory' else 'off')
    assert input_fn.pipeline == pipeline
    with pytest.raises((tf.errors.DataLossError, tf.errors.InvalidArgumentError)):
        run_in_session(input_fn, 5)
    diagnosis = records.diagnose(input_fn.files, input_fn.dataset)
    assert diagnosis.startswith(f'{files[1]}: {place}')
    assert message in diagnosis
    assert '\n' not in diagnosis


def test_truncated_gzip_fails_and_is_diagnosed(tmp_path):
    files = shards.write_digits(tmp_path, [5, 5], compression='GZIP')
    shards.cut(files[1], -30)
    input_fn = make(files, training=False)
    with pytest.raises(tf.errors.DataLossError):
        run_in_session(input_fn, 5)
    assert 'the GZIP file is cut or damaged here' in records.diagnose(input_fn.files, MNIST)


def write_manifest(folder, files, counts):
    stated = {
        pathlib.Path(path).name: {'records': count, 'bytes': pathlib.Path(path).stat().st_size, 'sha256': ''}
        for path, count in zip(files, counts)
    }
    manifest.write(str(folder), {'splits': {'train': {'records': sum(counts), 'files': stated}}})


def test_file_cut_between_records_is_found_by_the_manifest(tmp_path):
    files = shards.write_digits(tmp_path, [5, 5])
    write_manifest(tmp_path, files, [5, 5])
    shards.cut(files[1], 3 * RECORD)
    with pytest.raises(DataError, match=r'part-00001.tfrecord: record 3: the file ends here .* states 5 records'):
        make(files)
    shards.cut(files[1], 3 * RECORD - 1)
    with pytest.raises(DataError, match=r'part-00001.tfrecord: record 2 \(byte \d+\): the file is cut within a record'):
        make(files)


def test_rewritten_file_with_as_many_records_is_fine(tmp_path):
    files = shards.write_digits(tmp_path, [5, 5])
    write_manifest(tmp_path, files, [5, 5])
    records.write_file(files[1], [r.payload for r in records.scan(files[1])], compression='GZIP')
    assert len(flat(take(make(files, training=False, batch=5), 9))) == 10


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('compression', ['', 'GZIP'])
def test_corrupt_records_are_left_out_and_counted(tmp_path, training, compression, caplog):
    files = shards.write_digits(tmp_path, [5, 5])
    shards.damage(files[0], 50)
    shards.damage(files[1], 3 * RECORD + 50)
    put(files[1], OTHER.encode({'image': bytes(700), 'label': 1}))
    if compression:
        pathlib.Path(files[1]).write_bytes(gzip.compress(pathlib.Path(files[1]).read_bytes()))
    before = [pathlib.Path(path).read_bytes() for path in files]
    with caplog.at_level(logging.INFO):
        input_fn = make(files, training=training, batch=8, max_corrupt_records=3)
    assert input_fn.corrupt_records == 3
    assert set(flat(take(input_fn, 1))) == set(range(10)) - {0, 8}
    assert [pathlib.Path(path).read_bytes() for path in files] == before
    assert f'{files[1]}: 2 corrupt records left out, 4 sound ones kept; the first: {files[1]}: record 3' in caplog.text
    assert '3 corrupt records left out of 2 files (--max_corrupt_records=3)' in caplog.text
    assert records.diagnose(input_fn.files, MNIST) is None


def test_more_corrupt_records_than_allowed_is_an_error(tmp_path):
    files = shards.write_digits(tmp_path, [5, 5])
    shards.damage(files[0], 50)
    shards.damage(files[1], 50)
    with pytest.raises(
        DataError, match=rf'2 corrupt records, more than --max_corrupt_records=1; the first: {files[0]}: record 0'
    ):
        make(files, max_corrupt_records=1)


def test_corrupt_length_loses_the_rest_of_the_file_and_says_so(tmp_path, caplog):
    files = shards.write_digits(tmp_path, [5, 5])
    shards.damage(files[1], RECORD)
    input_fn = make(files, training=False, batch=6, max_corrupt_records=5)
    assert input_fn.corrupt_records == 1
    assert flat(take(input_fn, 2)) == list(range(6))
    assert '1 corrupt records or more (the rest of the file is lost, and no manifest counts it)' in caplog.text
    write_manifest(tmp_path, files, [5, 5])
    assert make(files, max_corrupt_records=5).corrupt_records == 4
    with pytest.raises(DataError, match='4 corrupt records, more than --max_corrupt_records=3'):
        make(files, max_corrupt_records=3)


def test_file_lost_from_its_first_byte_counts_when_the_manifest_lists_it(tmp_path):
    files = shards.write_digits(tmp_path, [5, 5])
    shards.damage(files[0], 0)
    with pytest.raises(DataError, match=r'part-00000.tfrecord: record 0: not a TFRecord file, or its first record is damaged'):
        make(files, max_corrupt_records=9)
    write_manifest(tmp_path, files, [5, 5])
    input_fn = make(files, max_corrupt_records=9, batch=5)
    assert input_fn.corrupt_records == 5
    assert set(flat(take(input_fn, 1))) == set(range(5, 10))


def test_nothing_sound_is_an_error(tmp_path):
    files = shards.write_digits(tmp_path, [1])
    shards.damage(files[0], 50)
    with pytest.raises(
        DataError, match=r'part-00000.tfrecord: no sound record in it nor in the 0 other files; write them again'
    ):
        make(files, max_corrupt_records=9)


def test_memory_is_the_smaller_of_machine_and_container(tmp_path):
    machine = memory.limit_bytes(())
    (tmp_path / 'unlimited').write_text('max\n')
    (tmp_path / 'small').write_text('123456\n')
    assert memory.limit_bytes((str(tmp_path / 'none'), str(tmp_path / 'unlimited'))) == machine
    assert memory.limit_bytes((str(tmp_path / 'small'),)) == 123456
    assert [memory.describe(n) for n in (999, 3_136_000, 2.5e12)] == ['999 bytes', '3.1 MB', '2500.0 GB']


@pytest.mark.parametrize(('cores', 'threads'), [(1, None), (2, None), (3, None), (4, 2), (8, 4), (64, 8)])
def test_parsing_threads_follow_the_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(pipelines.os, 'sched_getaffinity', lambda _: set(range(cores)), raising=False)
    assert pipelines._parallel_calls() == threads
