"""Every model of the table trains in the loop, evaluates exactly, predicts and exports; one's own are found by name."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer import compat, export, models
from trainer.datasets import Dataset
from trainer.errors import UsageError
from trainer.features import Feature, Schema
from trainer.models import premade

CARS = Dataset(
    name='cars',
    schema=Schema(
        {
            'weight': Feature('float'),
            'year': Feature('int64'),
            'origin': Feature('bytes'),
            'maker': Feature('bytes', default=''),
            'label': Feature('int64'),
        }
    ),
    label='label',
    num_classes=3,
    vocabularies={'origin': ('usa', 'japan')},
    moments={'weight': (3000.0, 800.0), 'year': (76.0, 3.5)},
)


def _make_cars(count):
    random = np.random.RandomState(0)
    weight = random.uniform(1500, 5000, count).astype(np.float32)
    features = {
        'weight': weight,
        'year': random.randint(70, 83, count).astype(np.int64),
        'origin': random.choice(['usa', 'japan', 'europe'], count),
        'maker': random.choice(['ford', 'honda', ''], count),
    }
    return features, np.digitize(weight, [2500, 3500]).astype(np.int64)


def _cars_input_fn(params):
    return tf.data.Dataset.from_tensor_slices(_make_cars(300)).shuffle(300, seed=1).repeat().batch(30, drop_remainder=True)


def _params(**settings):
    facts = {'vocabularies': CARS.vocabularies, 'moments': CARS.moments}
    return fakes.make_params(**facts, **settings)


# Columns: 2 numbers, 2 origins in the vocabulary, 100 buckets of makers.
COLUMNS = 104
WEIGHTS = {
    'mlp': 16 * 8 + 8 + 8 * 6 + 6 + 6 * 3 + 3,
    'convnet': (25 * 32 + 32) + (25 * 32 * 64 + 64) + (64 * 8 + 8) + (8 * 3 + 3),
    'linear': COLUMNS * 3 + 3,
    'dnn': COLUMNS * 8 + 8 + 8 * 6 + 6 + 6 * 3 + 3,
    'wide_deep': COLUMNS * 3 + 3 + COLUMNS * 8 + 8 + 8 * 6 + 6 + 6 * 3 + 3,
}


def test_every_model_of_the_table_is_tested():
    # The larger ones have files of their own.
    assert {*WEIGHTS, 'resnet50', 'dcgan'} == set(models.MODELS)


@pytest.mark.parametrize('name', WEIGHTS)
def test_model_trains_and_has_its_weights(tmp_path, name):
    blobs = name in ('mlp', 'convnet')
    estimator, seen = fakes.train_looped(
        models.get_model(name),
        tmp_path,
        max_steps=150,
        steps_per_loop=50,
        batch_size=8 if blobs else 30,
        params=_params(),
        input_fn=None if blobs else _cars_input_fn,
    )
    assert seen[-1][0] == 150
    trained = [n for n in estimator.get_variable_names() if n.endswith(('weights', 'biases'))]
    assert sum(estimator.get_variable_value(n).size for n in trained) == WEIGHTS[name]
    evaluate = fakes.make_blobs_input_fn(8) if blobs else _cars_input_fn
    metrics = estimator.evaluate(evaluate, steps=10)
    assert metrics['accuracy'] > 0.85, metrics
    assert metrics['average_loss'] < 0.6


@pytest.mark.parametrize('name', ['linear', 'dnn', 'wide_deep'])
def test_tabular_export_takes_named_columns_and_examples(tmp_path, name):
    estimator, _ = fakes.train_looped(
        models.get_model(name), tmp_path / 'run', max_steps=2, steps_per_loop=2, params=_params(), input_fn=_cars_input_fn
    )
    model = tf.saved_model.load(export.export_model(estimator, CARS, str(tmp_path / 'model')))
    assert sorted(model.signatures) == ['examples', 'serving_default']
    features, _ = _make_cars(4)
    examples = [CARS.features_schema.encode({key: values[i] for key, values in features.items()}) for i in range(4)]
    by_name = model.signatures['serving_default'](
        key=tf.constant([''] * 4), **{key: tf.constant(values) for key, values in features.items()}
    )
    by_example = model.signatures['examples'](examples=tf.constant(examples))
    np.testing.assert_allclose(by_name['probabilities'], by_example['probabilities'], rtol=1e-5)


def test_wide_part_moves_by_ftrl_and_deep_part_by_its_own_optimizer(tmp_path):
    params = _params(optimizer='momentum')
    estimator, _ = fakes.train_looped(
        models.get_model('wide_deep'), tmp_path, max_steps=3, steps_per_loop=3, params=params, input_fn=_cars_input_fn
    )
    names = estimator.get_variable_names()
    assert estimator.get_variable_value('global_step') == 3
    assert [n for n in names if n.startswith('linear/') and n.endswith('Ftrl')] and not [
        n for n in names if 'linear' in n and 'Momentum' in n
    ]
    assert [n for n in names if n.startswith('deep/') and n.endswith('Momentum')] and not [
        n for n in names if 'deep' in n and 'Ftrl' in n
    ]


def test_columns_are_normalised_one_hot_and_hashed():
    features = {
        'weight': tf.constant([3800.0, 3000.0]),
        'origin': tf.constant(['japan', 'mars']),
        'maker': tf.constant(['ford', 'ford']),
        'weights': tf.constant([1.0, 0.0]),
        'key': tf.constant(['a', 'b']),
    }
    numbers, categories = premade.make_columns(features, {'vocabularies': CARS.vocabularies, 'moments': CARS.moments})
    assert [number.numpy().tolist() for number in numbers] == [[[1.0], [0.0]]]
    makers, origins = categories
    assert origins.numpy().tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert makers.shape == (2, 100) and makers.numpy().sum(axis=1).tolist() == [1.0, 1.0]
    assert makers.numpy().argmax(axis=1).tolist()[0] == makers.numpy().argmax(axis=1).tolist()[1]


def test_padding_counts_neither_in_metrics_nor_in_loss(tmp_path):
    estimator, _ = fakes.train_looped(models.get_model('mlp'), tmp_path, max_steps=20, steps_per_loop=20)
    images, labels = fakes.make_blobs(10, seed=2)

    def padded(params):
        features = {'image': np.concatenate([images, np.zeros((6, 16), np.uint8)])}
        features['weights'] = np.array([1.0] * 10 + [0.0] * 6, np.float32)
        return tf.data.Dataset.from_tensors((features, np.concatenate([labels, np.full(6, 2)])))

    def exact(params):
        return tf.data.Dataset.from_tensors(({'image': images}, labels))

    with_padding, without = estimator.evaluate(padded), estimator.evaluate(exact)
    assert with_padding['accuracy'] == without['accuracy']
    np.testing.assert_allclose(with_padding['average_loss'], without['average_loss'], rtol=1e-6)
    np.testing.assert_allclose(with_padding['loss'], without['loss'], rtol=1e-6)


def test_dropout_is_for_training_only(tmp_path):
    params = fakes.make_params(dropout=0.5)
    estimator, _ = fakes.train_looped(models.get_model('mlp'), tmp_path, max_steps=5, steps_per_loop=5, params=params)
    input_fn = fakes.make_blobs_input_fn(8)
    assert estimator.evaluate(input_fn, steps=2) == estimator.evaluate(input_fn, steps=2)
    other, _ = fakes.train_looped(models.get_model('mlp'), tmp_path / 'other', max_steps=5, steps_per_loop=5)
    assert not np.array_equal(estimator.get_variable_value('logits/weights'), other.get_variable_value('logits/weights'))


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / 'mine.py').write_text(
        textwrap.dedent("""
            import tensorflow as tf
            from trainer import compat
            from trainer.models import mlp

            def model_fn(features, labels, mode, params):
                return mlp.model_fn(features, labels, mode, params)

            def make_model(params):
                layers = compat.keras.layers
                return compat.keras.Sequential([layers.Rescaling(1 / 255), layers.Dense(params['units'], activation='relu'),
                                                layers.Dense(params['num_classes'])])

            def make_wrong(params):
                return compat.keras.Sequential([compat.keras.layers.Rescaling(1 / 255), compat.keras.layers.Dense(7)])

            def neither(x, y):
                return x

            NUMBER = 5
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop('mine', None)


def test_own_model_fn_is_found(own_module, tmp_path):
    estimator, _ = fakes.train_looped(models.get_model('mine:model_fn'), tmp_path / 'run', max_steps=2, steps_per_loop=2)
    assert estimator.get_variable_value('hidden1/weights').shape == (16, 8)


def test_own_keras_model_trains_evaluates_and_exports(own_module, tmp_path):
    from tests.test_export import BLOBS

    params = fakes.make_params(units=12)
    estimator, _ = fakes.train_looped(
        models.get_model('mine:make_model'), tmp_path / 'run', max_steps=100, steps_per_loop=50, params=params
    )
    assert estimator.evaluate(fakes.make_blobs_input_fn(8), steps=10)['accuracy'] > 0.9
    model = tf.saved_model.load(export.export_model(estimator, BLOBS, str(tmp_path / 'model')))
    images, labels = fakes.make_blobs(20, seed=3)
    result = model.signatures['serving_default'](image=tf.constant(images), key=tf.constant([''] * 20))
    assert (result['classes'].numpy() == labels).mean() > 0.9


def test_keras_model_of_another_width_is_an_error(own_module, tmp_path):
    with pytest.raises(UsageError, match=r'--model: the Keras model returns .*7.*; expected logits \[batch, 3\]'):
        fakes.train_looped(models.get_model('mine:make_wrong'), tmp_path / 'run', max_steps=2, steps_per_loop=2)


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        (
            'nosuch',
            '--model=nosuch: expected one of mlp, convnet, resnet50, dcgan, linear, dnn, wide_deep, or package.module:function',
        ),
        ('no.such.module:f', 'cannot import no.such.module .*; is its folder on PYTHONPATH'),
        ('mine:missing', 'module mine has no missing'),
        ('mine:NUMBER', 'expected a function, it is a int'),
        ('mine:neither', r'expected a model_fn\(features, labels, mode, params\) or .*, it takes \(x, y\)'),
    ],
)
def test_model_that_is_not_there_is_an_error(own_module, spec, message):
    with pytest.raises(UsageError, match=message):
        models.get_model(spec)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('', {}),
        ('filters=16,rate=0.5, name = conv ,deep=true', {'filters': 16, 'rate': 0.5, 'name': 'conv', 'deep': True}),
        ('{"sizes": [3, 4]}', {'sizes': [3, 4]}),
    ],
)
def test_model_params(text, expected):
    assert models.parse_model_params(text) == expected


@pytest.mark.parametrize('text', ['filters', '{"a": 1', 'a=1,b'])
def test_bad_model_params_are_an_error(text):
    with pytest.raises(UsageError, match=r'--model_params=.*expected name=value,name=value or a JSON object'):
        models.parse_model_params(text)


def test_as_estimator_spec_trains_under_plain_estimator(tmp_path):
    estimator = compat.estimator.Estimator(
        lambda features, labels, mode, params: models.get_model('mlp')(features, labels, mode, params).as_estimator_spec(),
        params=fakes.make_params(),
        config=compat.estimator.RunConfig(model_dir=str(tmp_path), tf_random_seed=1),
    )
    estimator.train(fakes.make_blobs_input_fn(8), max_steps=200)
    assert estimator.evaluate(fakes.make_blobs_input_fn(8), steps=10)['accuracy'] > 0.85
