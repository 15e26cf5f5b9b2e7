from __future__ import annotations

import gzip
import pathlib
import zlib

import pytest
import tensorflow as tf

from tests import shards
from trainer import records
from trainer.datasets import MNIST
from trainer.errors import DataError
from trainer.features import Feature, Schema

# Bytes of one record of `shards.make_digits` on disk, and of its parts before the payload.
RECORD = len(records.frame(MNIST.schema.encode(shards.make_digits(1)[0])))
HEAD = 12


def frame_of(digit):
    return records.frame(MNIST.schema.encode(digit))


@pytest.fixture(params=['', 'GZIP'])
def compression(request):
    return request.param


def test_files_are_what_tensorflow_reads(tmp_path, compression):
    payloads = [b'', b'one', bytes(300)]
    path = str(tmp_path / 'f')
    data = records.write_file(path, payloads, compression=compression)
    assert list(tf.data.TFRecordDataset(path, compression).as_numpy_iterator()) == payloads
    assert pathlib.Path(path).read_bytes() == data
    assert [record.payload for record in records.scan(path)] == payloads


def test_scan_reads_what_tensorflow_writes(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / 'f'), 'GZIP') as writer:
        writer.write(b'abc')
        writer.write(b'de')
    found = list(records.scan(str(tmp_path / 'f')))
    assert found == [records.Record(0, 0, b'abc'), records.Record(1, 19, b'de')]


def test_compression_is_found_from_the_bytes_not_the_name(tmp_path):
    plain, packed = str(tmp_path / 'plain.tfrecord.gz'), str(tmp_path / 'packed.tfrecord')
    records.write_file(plain, [b'x'])
    records.write_file(packed, [b'x'], compression='GZIP')
    assert records.find_compressions([plain, packed]) == ['', 'GZIP']


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (b'', 'the file is empty; write it again or leave it out of the data paths'),
        (zlib.compress(records.frame(b'x')), 'not a TFRecord file but ZLIB; expected TFRecords, plain or GZIP'),
        (b'PK\x03\x04 rest', 'not a TFRecord file but a zip archive'),
        (
            b'label,pixel0,pixel1\n',
            r"record 0: not a TFRecord file, or its first record is damaged: it begins with b'label,pixel0'",
        ),
        (b'ab', r"record 0: not a TFRecord file, or its first record is damaged: it begins with b'ab'"),
    ],
)
def test_other_files_are_named(tmp_path, data, message):
    path = tmp_path / 'wrong'
    path.write_bytes(data)
    with pytest.raises(DataError, match=f'^{path}: {message}'):
        records.find_compressions([str(path)])
    assert records.diagnose([str(path)], MNIST).startswith(f'{path}: ')


def test_gzip_of_something_else_fails_at_the_first_record(tmp_path):
    path = tmp_path / 'wrong.gz'
    path.write_bytes(gzip.compress(b'label,pixel0,pixel1\n' * 9))
    with pytest.raises(DataError, match=r'record 0 \(byte 0\): the length of the record fails its checksum; write the file'):
        records.check_first(str(path), MNIST)


def test_gzip_within_gzip_is_no_tfrecord(tmp_path):
    path = tmp_path / 'twice.gz'
    path.write_bytes(gzip.compress(gzip.compress(frame_of(shards.make_digits(1)[0]))))
    with pytest.raises(DataError, match=r'record 0 \(byte 0\): the length of the record fails its checksum'):
        records.check_first(str(path), MNIST)


def test_sound_files_have_no_diagnosis(tmp_path, compression):
    assert records.diagnose(shards.write_digits(tmp_path, [3, 2], compression=compression), MNIST) is None


def test_corrupt_payload_is_named(tmp_path):
    files = shards.write_digits(tmp_path, [3, 5])
    shards.damage(files[1], 2 * RECORD + HEAD + 20)
    assert records.diagnose(files, MNIST) == (
        f'{files[1]}: record 2 (byte {2 * RECORD}): the {RECORD - 16} bytes of the record fail their checksum; '
        'write the file again, or skip it with --max_corrupt_records'
    )


def test_corrupt_length_is_named(tmp_path):
    files = shards.write_digits(tmp_path, [5])
    shards.damage(files[0], 3 * RECORD)
    assert f'record 3 (byte {3 * RECORD}): the length of the record fails its checksum' in records.diagnose(files, MNIST)


def test_huge_length_is_not_read_into_memory(tmp_path):
    path = str(tmp_path / 'f')
    head = (1 << 40).to_bytes(8, 'little')
    data = records.frame(b'x') + head + records.masked_crc(head).to_bytes(4, 'little') + b'short'
    pathlib.Path(path).write_bytes(data)
    assert [r.problem for r in records.scan(path)] == ['', f'the file is cut within a record of {1 << 40} bytes']


@pytest.mark.parametrize(
    ('length', 'message'),
    [
        (RECORD + 5, f'record 1 (byte {RECORD}): the file is cut within the length of the record'),
        (RECORD + 100, f'record 1 (byte {RECORD}): the file is cut within a record of {RECORD - 16} bytes'),
        (2 * RECORD - 1, f'record 1 (byte {RECORD}): the file is cut within a record of {RECORD - 16} bytes'),
    ],
)
def test_cut_file_is_named(tmp_path, length, message):
    files = shards.write_digits(tmp_path, [3])
    shards.cut(files[0], length)
    assert message in records.diagnose(files, MNIST)


@pytest.mark.parametrize('missing', [1, 8, 30])
def test_truncated_gzip_is_named(tmp_path, missing):
    files = shards.write_digits(tmp_path, [4], compression='GZIP')
    shards.cut(files[0], -missing)
    assert 'the GZIP file is cut or damaged here (Compressed file ended' in records.diagnose(files, MNIST)


def test_damaged_gzip_is_named(tmp_path):
    files = shards.write_digits(tmp_path, [4], compression='GZIP')
    shards.damage(files[0], -12, b'\xff' * 4)
    assert f'{files[0]}: record ' in records.diagnose(files, MNIST)


def example(**features):
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


LABEL = tf.train.Feature(int64_list=tf.train.Int64List(value=[3]))
IMAGE = tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(784)]))
MISFITS = {
    'missing': (example(label=LABEL), "feature 'image' is missing; the record has 'label'"),
    'dtype': (example(label=IMAGE, image=IMAGE), "feature 'label' holds bytes_list, the schema expects int64_list"),
    'shape': (
        example(label=LABEL, image=tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(700)]))),
        "feature 'image' has 700 bytes, the schema expects 784 (uint8 of shape (784,))",
    ),
    'label': (
        example(label=tf.train.Feature(int64_list=tf.train.Int64List(value=[10])), image=IMAGE),
        "label 'label' is 10, dataset 'mnist' has 10 classes (0 to 9)",
    ),
    'negative': (
        example(label=tf.train.Feature(int64_list=tf.train.Int64List(value=[-1])), image=IMAGE),
        "label 'label' is -1, dataset 'mnist' has 10 classes (0 to 9)",
    ),
    'noise': (b'\x0a\x7fnoise', 'is not a tf.train.Example (7 bytes that do not parse)'),
}


@pytest.mark.parametrize('kind', MISFITS)
def test_record_that_does_not_fit_is_named(tmp_path, kind):
    payload, message = MISFITS[kind]
    path = str(tmp_path / 'f')
    records.write_file(path, [example(label=LABEL, image=IMAGE), payload])
    assert records.diagnose([path], MNIST) == (
        f'{path}: record 1 (byte {RECORD}): {message}; mend the schema (--dataset) or the converter'
    )


def test_first_record_is_checked(tmp_path):
    path = str(tmp_path / 'f')
    records.write_file(path, [MISFITS['shape'][0]])
    with pytest.raises(DataError, match=r'f: record 0 \(byte 0\): feature .image. has 700 bytes'):
        records.check_first(path, MNIST)
    pathlib.Path(path).write_bytes(gzip.compress(b''))
    with pytest.raises(DataError, match='f: the file holds no record; write it again'):
        records.check_first(path, MNIST)


def numbers(path):
    parsed = [MNIST.schema.parse(tf.constant([r.payload]))['image'].numpy() for r in records.scan(path)]
    return [shards.numbers_of(image)[0] for image in parsed]


def test_corrupt_payload_loses_that_record_only(tmp_path, compression):
    path = str(tmp_path / 'f')
    raw = bytearray(b''.join(map(frame_of, shards.make_digits(5))))
    raw[RECORD + HEAD + 30] ^= 1
    raw = bytes(raw)
    pathlib.Path(path).write_bytes(gzip.compress(raw) if compression else raw)
    before = pathlib.Path(path).read_bytes()
    target = str(tmp_path / 'target')
    found = records.salvage(path, MNIST, target)
    assert (found.good, found.corrupt, found.is_count_exact) == (4, 1, True)
    assert f'{path}: record 1 (byte {RECORD})' in found.first_problem
    assert numbers(target) == [0, 2, 3, 4]
    assert pathlib.Path(path).read_bytes() == before


@pytest.mark.parametrize(('expected', 'corrupt', 'is_exact'), [(None, 1, False), (5, 3, True)])
def test_corrupt_length_loses_the_rest_counted_by_the_manifest(tmp_path, expected, corrupt, is_exact):
    [path] = shards.write_digits(tmp_path, [5])
    shards.damage(path, 2 * RECORD)
    found = records.salvage(path, MNIST, str(tmp_path / 'target'), expected=expected)
    assert (found.good, found.corrupt, found.is_count_exact) == (2, corrupt, is_exact)
    assert numbers(str(tmp_path / 'target')) == [0, 1]


def test_file_cut_between_records_is_noticed_by_the_manifest(tmp_path):
    [path] = shards.write_digits(tmp_path, [5])
    shards.cut(path, 3 * RECORD)
    assert records.salvage(path, MNIST, str(tmp_path / 'target')) is None
    found = records.salvage(path, MNIST, str(tmp_path / 'target'), expected=5)
    assert (found.good, found.corrupt) == (3, 2)
    assert found.first_problem == f'{path}: record 3: the file ends here, the manifest states 5 records'


def test_records_that_do_not_fit_count_as_corrupt(tmp_path):
    path = str(tmp_path / 'f')
    good = [MNIST.schema.encode(digit) for digit in shards.make_digits(2)]
    records.write_file(path, [good[0], MISFITS['shape'][0], MISFITS['label'][0], good[1]])
    found = records.salvage(path, MNIST, str(tmp_path / 'target'))
    assert (found.good, found.corrupt) == (2, 2)
    assert numbers(str(tmp_path / 'target')) == [0, 1]


def test_sound_file_is_not_copied(tmp_path):
    [path] = shards.write_digits(tmp_path, [2])
    assert records.salvage(path, MNIST, str(tmp_path / 'target'), expected=2) is None
    assert not (tmp_path / 'target').exists()


def test_a_schema_alone_judges_too(tmp_path):
    path = str(tmp_path / 'f')
    records.write_file(path, [Schema({'x': Feature('int64')}).encode({'x': 3})])
    assert "feature 'x' holds int64_list" in records.diagnose([path], Schema({'x': Feature('float')}))
