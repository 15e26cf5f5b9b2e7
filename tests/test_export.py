"""Exports load and predict in a fresh process, by every signature, with the same numbers as the Estimator."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes, pictures
from trainer import export, images
from trainer.datasets import Dataset
from trainer.features import Feature, Schema
from trainer.models import classifier, mlp

BLOBS = Dataset(
    name='blobs',
    schema=Schema({'image': Feature('bytes', (16,), raw='uint8'), 'label': Feature('int64')}),
    label='label',
    num_classes=3,
)

# Runs in a process of its own: nothing of the package may be needed to serve.
_PREDICT = """
import json, sys
import tensorflow as tf
path, instances = sys.argv[1], json.load(sys.stdin)
model = tf.saved_model.load(path)
results = {}
for name, inputs in instances.items():
    signature = model.signatures[name]
    types = {key: spec.dtype for key, spec in signature.structured_input_signature[1].items()}
    decoded = {key: [bytes.fromhex(v) if isinstance(v, str) else v for v in values] for key, values in inputs.items()}
    outputs = signature(**{key: tf.constant(values, types[key]) for key, values in decoded.items()})
    results[name] = {key: [v.decode() if isinstance(v, bytes) else v for v in value.numpy().tolist()]
                     for key, value in outputs.items()}
print(json.dumps(results))
"""


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('export')
    estimator, _ = fakes.train_looped(mlp.model_fn, folder / 'run', max_steps=60, steps_per_loop=20)
    return estimator, export.export_model(estimator, BLOBS, str(folder / 'model'))


def _predict_in_fresh_process(path, instances):
    environment = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    child = subprocess.run(
        [sys.executable, '-c', _PREDICT, path],
        input=json.dumps(instances),
        capture_output=True,
        text=True,
        cwd='/',
        env={**environment, 'TF_CPP_MIN_LOG_LEVEL': '3'},
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


def test_every_signature_predicts_in_a_fresh_process(trained):
    estimator, path = trained
    blobs, labels = fakes.make_blobs(5, seed=9)
    keys = [f'k{i}'.encode().hex() for i in range(5)]
    # An Example to be predicted has no label.
    serialized = [BLOBS.features_schema.encode({'image': image}).hex() for image in blobs]
    results = _predict_in_fresh_process(
        path,
        {
            'serving_default': {'image': blobs.tolist(), 'key': keys},
            'image_bytes': {'image_bytes': [image.tobytes().hex() for image in blobs], 'key': keys},
            'examples': {'examples': serialized},
        },
    )

    def input_fn(params):
        return tf.data.Dataset.from_tensor_slices({'image': blobs}).batch(5)

    expected = [prediction['probabilities'] for prediction in estimator.predict(input_fn)]
    for name, result in results.items():
        np.testing.assert_allclose(result['probabilities'], expected, rtol=1e-5, err_msg=name)
        assert result['classes'] == labels.tolist()
    assert results['serving_default']['key'] == results['image_bytes']['key'] == ['k0', 'k1', 'k2', 'k3', 'k4']


def test_export_is_float32_with_exactly_three_signatures(trained):
    _, path = trained
    model = tf.saved_model.load(path)
    assert sorted(model.signatures) == ['examples', 'image_bytes', 'serving_default']
    signature = model.signatures['serving_default']
    outputs = {name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.structured_outputs.items()}
    assert outputs == {
        'classes': (tf.int64, [None]),
        'probabilities': (tf.float32, [None, 3]),
        'key': (tf.string, [None]),
    }
    assert all(variable.dtype.base_dtype in (tf.float32, tf.int64) for variable in model.variables)


def test_exports_stand_in_folders_named_by_numbers_and_nothing_else_is_left(trained, tmp_path):
    estimator, _ = trained
    first = export.export_model(estimator, BLOBS, str(tmp_path))
    second = export.export_model(estimator, BLOBS, str(tmp_path))
    names = sorted(os.listdir(tmp_path))
    assert names == sorted({os.path.basename(first), os.path.basename(second)}) and len(names) == 2
    assert all(name.isdigit() for name in names)


def test_json_instances_of_an_exported_model_may_leave_the_key_out(trained):
    # As `gcloud ai-platform local predict` does it: a session fed with what the instances hold.
    _, path = trained
    blobs, labels = fakes.make_blobs(4, seed=5)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta_graph = tf.compat.v1.saved_model.load(session, ['serve'], path)
        signature = meta_graph.signature_def['serving_default']
        classes = session.run(signature.outputs['classes'].name, {signature.inputs['image'].name: blobs})
        image_bytes = meta_graph.signature_def['image_bytes']
        decoded = [base64.b64decode(base64.b64encode(image.tobytes())) for image in blobs]
        again = session.run(image_bytes.outputs['classes'].name, {image_bytes.inputs['image_bytes'].name: decoded})
    assert classes.tolist() == again.tolist() == labels.tolist()


def test_features_fn_runs_in_the_export_too(tmp_path):
    def invert(features):
        return {'image': 255 - features['image']}

    inverted = Dataset(name='i', schema=BLOBS.schema, label='label', num_classes=3, features_fn=invert)
    estimator = fakes.make_estimator(mlp.model_fn, tmp_path / 'run', params=fakes.make_params())
    estimator.train(fakes.make_blobs_input_fn(8), max_steps=2)
    plain = tf.saved_model.load(export.export_model(estimator, BLOBS, str(tmp_path / 'plain')))
    other = tf.saved_model.load(export.export_model(estimator, inverted, str(tmp_path / 'inverted')))
    blobs, _ = fakes.make_blobs(3)
    key = tf.constant(['', '', ''])
    expected = plain.signatures['serving_default'](image=tf.constant(255 - blobs), key=key)['probabilities']
    found = other.signatures['serving_default'](image=tf.constant(blobs), key=key)['probabilities']
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_exports_of_picture_datasets_take_encoded_pictures(tmp_path):
    dataset = pictures.make_dataset(24)

    def model_fn(features, labels, mode, params):
        net = tf.reshape(images.normalize(features['image']), [-1, 24 * 24 * 3])
        logits = mlp.dense(net, 10, name='logits', stddev=0.05)
        return classifier.make_classifier_spec(logits, features, labels, mode, params)

    encoded = [pictures.encode(pictures.make_picture(30, 40, number)) for number in range(0, 250, 50)]
    decoded = images.decode_central(tf.constant(encoded), 24, images.Decoding()).numpy()

    def input_fn(params=None):
        return tf.data.Dataset.from_tensors(({'image': decoded}, np.arange(5))).repeat()

    estimator = fakes.make_estimator(model_fn, tmp_path / 'run', params=fakes.make_params())
    estimator.train(input_fn, max_steps=1)
    model = tf.saved_model.load(export.export_model(estimator, dataset, str(tmp_path / 'model')))
    serialized = [pictures.WIRE.encode({'image': one, 'label': 0}) for one in encoded]
    key = tf.constant([f'k{i}' for i in range(5)])
    results = [
        model.signatures['serving_default'](image=tf.constant(decoded), key=key),
        model.signatures['image_bytes'](image_bytes=tf.constant(encoded), key=key),
        model.signatures['examples'](examples=tf.constant(serialized)),
    ]
    assert results[1]['key'].numpy().tolist() == key.numpy().tolist()
    for result in results[1:]:
        np.testing.assert_array_equal(result['probabilities'], results[0]['probabilities'])
    assert np.ptp(results[0]['probabilities'].numpy(), axis=0).max() > 0.01
