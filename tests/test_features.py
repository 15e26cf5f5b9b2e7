from __future__ import annotations

import base64
import copy
import json

import numpy as np
import pytest
import tensorflow as tf

from tests import pictures
from trainer import images
from trainer.errors import DataError, UsageError
from trainer.features import Feature, Schema

SCHEMA = Schema(
    {
        'image': Feature('bytes', (2, 3), raw='uint8'),
        'depth': Feature('bytes', (2,), raw='float32'),
        'name': Feature('bytes'),
        'note': Feature('bytes', default='none'),
        'point': Feature('float', (2,)),
        'score': Feature('float', (2,), default=0.5),
        'tags': Feature('int64', None),
        'words': Feature('bytes', None, max_length=3),
        'label': Feature('int64'),
    }
)
FULL = {
    'image': np.arange(6, dtype=np.uint8).reshape(2, 3),
    'depth': np.array([1.5, -2.0], np.float32),
    'name': 'é',
    'note': b'x',
    'point': [1.0, 2.0],
    'score': [3.0, 4.0],
    'tags': [7, 8],
    'words': ['a', 'b'],
    'label': 3,
}
SPARSE = {'image': bytes(6), 'depth': bytes(8), 'name': b'n', 'point': (0, 1), 'label': 1}


def parse(*examples):
    return {name: t.numpy() for name, t in SCHEMA.parse(tf.constant([SCHEMA.encode(e) for e in examples])).items()}


def test_parse_returns_what_encode_was_given():
    parsed = parse(FULL, SPARSE)
    assert parsed['image'].dtype == np.uint8
    assert parsed['image'].tolist() == [[[0, 1, 2], [3, 4, 5]], [[0] * 3] * 2]
    assert parsed['depth'].tolist() == [[1.5, -2.0], [0.0, 0.0]]
    assert parsed['name'].tolist() == ['é'.encode(), b'n']
    assert parsed['point'].tolist() == [[1.0, 2.0], [0.0, 1.0]]
    assert parsed['label'].tolist() == [3, 1]


def test_absent_optional_feature_is_its_default_broadcast():
    parsed = parse(FULL, SPARSE)
    assert parsed['note'].tolist() == [b'x', b'none']
    assert parsed['score'].tolist() == [[3.0, 4.0], [0.5, 0.5]]


def test_variable_length_is_padded_to_the_longest_or_to_max_length():
    parsed = parse(FULL, SPARSE)
    assert parsed['tags'].tolist() == [[7, 8], [0, 0]]
    assert parsed['words'].tolist() == [[b'a', b'b', b''], [b'', b'', b'']]


def test_shapes_are_static_in_a_graph():
    with tf.Graph().as_default():
        parsed = SCHEMA.parse(tf.compat.v1.placeholder(tf.string, [5]))
        shapes = {name: tensor.shape.as_list() for name, tensor in parsed.items()}
    assert shapes == {
        'image': [5, 2, 3], 'depth': [5, 2], 'name': [5], 'note': [5], 'point': [5, 2], 'score': [5, 2],
        'tags': [5, None], 'words': [5, 3], 'label': [5],
    }  # fmt: skip


def test_empty_batch_parses():
    parsed = SCHEMA.parse(tf.constant([], tf.string))
    assert parsed['image'].shape == (0, 2, 3)


def test_encoding_is_the_same_bytes_for_the_same_values():
    assert SCHEMA.encode(FULL) == SCHEMA.encode(dict(reversed(list(FULL.items()))))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'colour': 1}, "feature 'colour' is not in the schema; it has 'depth', 'image'"),
        ({'label': None}, "feature 'label' is missing; the example has"),
        ({'label': 1.5}, "feature 'label' has dtype float64, the schema expects int64"),
        ({'name': 3}, "feature 'name' is 3, the schema expects str or bytes"),
        ({'point': [1.0, 2.0, 3.0]}, r"feature 'point' has shape \(3,\), the schema expects \(2,\)"),
        ({'image': bytes(5)}, r"feature 'image' has 5 bytes, the schema expects 6 \(uint8 of shape \(2, 3\)\)"),
        ({'image': np.full((2, 3), 300)}, "feature 'image' has values that uint8 cannot hold: 300 to 300"),
        ({'image': np.zeros(6, np.uint8)}, r"feature 'image' has shape \(6,\), the schema expects \(2, 3\)"),
        ({'words': list('abcd')}, r"feature 'words' has 4 values, the schema allows 3 \(max_length\)"),
        ({'tags': 3}, r"feature 'tags' has shape \(\), the schema expects a vector of variable length"),
    ],
)
def test_encode_says_what_does_not_fit(change, message):
    with pytest.raises(DataError, match=message):
        SCHEMA.encode({**FULL, **change})


def serialize(**features):
    """An Example of FULL's wire values with some replaced; None leaves one out."""
    proto = tf.train.Example.FromString(SCHEMA.encode(FULL))
    for name, feature in features.items():
        del proto.features.feature[name]
        if feature is not None:
            proto.features.feature[name].CopyFrom(feature)
    return proto.SerializeToString()


def bytes_feature(*values):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def int64_feature(*values):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


BAD_RECORDS = [
    (serialize(label=None), "feature 'label' is missing; the record has 'depth', 'image', 'name'"),
    (serialize(label=bytes_feature(b'3')), "feature 'label' holds bytes_list, the schema expects int64_list"),
    (serialize(label=int64_feature(1, 2)), r"feature 'label' has 2 values, the schema expects 1 \(shape \(\)\)"),
    (serialize(label=int64_feature()), "feature 'label' has 0 values, the schema expects 1"),
    (serialize(score=tf.train.Feature(float_list=tf.train.FloatList())), "feature 'score' has 0 values"),
    (serialize(point=int64_feature(1, 2)), "feature 'point' holds int64_list, the schema expects float_list"),
    (serialize(image=bytes_feature(bytes(5))), r"feature 'image' has 5 bytes, the schema expects 6 \(uint8 of shape"),
    (serialize(image=bytes_feature(bytes(6), bytes(6))), "feature 'image' has 2 values, the schema expects one bytes value"),
    (serialize(words=bytes_feature(*[b'w'] * 4)), r"feature 'words' has 4 values, the schema allows 3 \(max_length\)"),
    (serialize(tags=bytes_feature(b't')), "feature 'tags' holds bytes_list, the schema expects int64_list"),
    (b'\x0a\x7f', r'is not a tf.train.Example \(2 bytes that do not parse\)'),
]


@pytest.mark.parametrize(('serialized', 'message'), BAD_RECORDS)
def test_check_and_parse_refuse_the_same_records(serialized, message):
    with pytest.raises(DataError, match=message):
        SCHEMA.check(serialized)
    with pytest.raises(tf.errors.InvalidArgumentError):
        SCHEMA.parse(tf.constant([SCHEMA.encode(FULL), serialized]))


@pytest.mark.parametrize(
    'serialized',
    [SCHEMA.encode(FULL), SCHEMA.encode(SPARSE), serialize(note=tf.train.Feature()), serialize(tags=int64_feature())],
)
def test_check_and_parse_accept_the_same_records(serialized):
    SCHEMA.check(serialized)
    SCHEMA.parse(tf.constant([serialized]))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'dtype': 'string'}, "dtype is 'string'; expected one of bytes, int64, float"),
        ({'dtype': 'int64', 'shape': (0,)}, 'every size must be positive'),
        ({'dtype': 'int64', 'raw': 'uint8'}, "raw='uint8' needs dtype 'bytes'"),
        ({'dtype': 'bytes', 'raw': 'bfloat'}, "raw is 'bfloat'; expected one of uint8"),
        ({'dtype': 'int64', 'shape': None, 'default': 1}, 'takes no default'),
        ({'dtype': 'int64', 'max_length': 3}, 'max_length=3 needs shape=None'),
    ],
)
def test_contradictory_feature_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Feature(**arguments)


def test_schema_survives_json_and_deepcopy():
    assert Schema.from_dict(json.loads(json.dumps(SCHEMA.to_dict()))) == SCHEMA
    assert copy.deepcopy(SCHEMA) == SCHEMA


def test_memory_of_an_example():
    schema = Schema({'image': Feature('bytes', (784,), raw='uint8'), 'label': Feature('int64'), 'x': Feature('float', (3,))})
    assert schema.bytes_per_example == 784 + 8 + 12
    assert schema.has_static_shapes
    assert not SCHEMA.has_static_shapes


def test_any_stage_of_serving_can_be_fed():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        receiver = SCHEMA.serving_receiver(exclude=('label', 'absent'))
        unlabelled = SCHEMA.without(['label']).encode({k: v for k, v in FULL.items() if k != 'label'})
        image = receiver.features['image']
        assert sorted(receiver.wire) == ['depth', 'image']
        assert 'label' not in receiver.features
        assert image.dtype == tf.uint8
        from_serialized = session.run(receiver.features, {receiver.serialized: [unlabelled, unlabelled]})
        assert from_serialized['image'].tolist() == [FULL['image'].tolist()] * 2
        assert from_serialized['words'].tolist() == [[b'a', b'b', b'']] * 2
        assert session.run(image, {receiver.wire['image']: [bytes([9] * 6)]}).tolist() == [[[9] * 3] * 2]
        assert session.run(image + 1, {image: np.zeros((1, 2, 3), np.uint8)}).tolist() == [[[1] * 3] * 2]


def test_a_picture_is_written_from_bytes_or_base64_and_parsed_to_pixels():
    schema = Schema({'image': Feature('bytes', (24, 24, 3), image=images.Decoding('off'))})
    encoded = pictures.encode(pictures.make_picture(24, 24))
    plain = schema.encode({'image': encoded})
    assert schema.encode({'image': {'b64': base64.b64encode(encoded).decode()}}) == plain
    schema.check(plain)
    parsed = schema.parse(tf.constant([plain, plain]))['image']
    assert (parsed.shape, parsed.dtype) == ((2, 24, 24, 3), tf.uint8)
    np.testing.assert_array_equal(parsed[1], images.decode_central(tf.constant([encoded]), 24, images.Decoding('off'))[0])


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        (b'text', "feature 'image' is no picture that can be decoded: Unknown image file format"),
        ({'b64': '*'}, "feature 'image' is no base64"),
        ([[1, 2]], "feature 'image' is a list, expected the bytes of a picture or {'b64': ...}"),
    ],
)
def test_what_is_no_picture_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        Schema({'image': Feature('bytes', (24, 24, 3), image=images.Decoding())}).encode({'image': value})


@pytest.mark.parametrize('shape', [(24, 24), (24, 12, 3), (24, 24, 1)])
def test_a_picture_feature_needs_a_square_of_three_colours(shape):
    with pytest.raises(UsageError, match='Feature image needs'):
        Feature('bytes', shape, image=images.Decoding())
