"""DCGAN: real updates of both networks, samples for the summaries, and what evaluation, export and prediction make of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import fakes
from trainer import export, predict
from trainer.config import ModelConfig
from trainer.datasets import Dataset
from trainer.errors import UsageError
from trainer.evaluation import tidy_metrics
from trainer.features import Feature, Schema
from trainer.models import dcgan, get_serving_dataset
from trainer.tuning import choose_default_metric

# 16 pixels, flat, as blobs have them.
TINY = Dataset(
    name='tiny',
    schema=Schema({'image': Feature('bytes', (16,), raw='uint8'), 'label': Feature('int64')}),
    label='label',
    num_classes=3,
)


def _params(**settings):
    defaults = {
        'gan_size': 16,
        'gan_filters': 4,
        'gan_shift': 0.0,
        'n_disc': 1,
        'precision': 'float32',
        'schema': TINY.features_schema,
    }
    return fakes.make_params(**{**defaults, 'optimizer': 'adam', 'learning_rate': 0.001, 'adam_beta1': 0.5, **settings})


def _train(folder, *, max_steps=3, batch_size=10, params=None, **settings):
    params = params or _params()
    return fakes.train_looped(
        *(dcgan.model_fn, folder), max_steps=max_steps, steps_per_loop=3, batch_size=batch_size, params=params, **settings
    )[0]


@pytest.mark.parametrize('n_disc', [1, 2, 5])
def test_discriminator_moves_n_disc_times_a_step_and_generator_once(monkeypatch, n_disc):
    """Follows a weight of each network through the updates of one step: each starts from what the one before it wrote."""
    rate, watched = 0.05, {'discriminator': 'discriminator/down1/weights', 'generator': 'generator/up1/weights'}
    optimizer_class = tf.compat.v1.train.GradientDescentOptimizer
    apply_gradients = optimizer_class.apply_gradients
    updates = {'discriminator': [], 'generator': []}

    def apply_and_watch(self, grads_and_vars, global_step=None, name=None):
        pairs = {variable.op.name: (variable.read_value(), gradient) for gradient, variable in grads_and_vars}
        (network,) = [network for network, variable in watched.items() if variable in pairs]
        assert all(variable.startswith(network) for variable in pairs)
        updates[network].append(pairs[watched[network]])
        with tf.control_dependencies([value for value, _ in pairs.values()]):
            return apply_gradients(self, grads_and_vars, global_step, name)

    monkeypatch.setattr(optimizer_class, 'apply_gradients', apply_and_watch)
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(1)
        images = tf.constant(fakes.make_blobs(10)[0])
        spec = dcgan.model_fn({'image': images}, None, 'train', _params(n_disc=n_disc, optimizer='sgd', learning_rate=rate))
        variables = {variable.op.name: variable for variable in tf.compat.v1.global_variables()}
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            before = session.run(variables)
            seen, _ = session.run([updates, spec.train_op])
            after = session.run(variables)
    assert (len(seen['discriminator']), len(seen['generator'])) == (n_disc, 1)
    assert after['global_step'] == before['global_step'] + 1
    for network, name in watched.items():
        weights = before[name]
        for value, gradient in seen[network]:
            np.testing.assert_array_equal(value, weights)
            weights = value - np.float32(rate) * gradient
            assert (weights != value).mean() > 0.9
        np.testing.assert_allclose(after[name], weights, rtol=1e-5, atol=1e-8)


def test_graph_has_no_branches_and_static_shapes():
    with tf.Graph().as_default() as graph:
        images = tf.constant(fakes.make_blobs(10)[0])
        dcgan.model_fn({'image': images}, None, 'train', _params(n_disc=5))
        kinds = {op.type for op in graph.get_operations()}
    assert not kinds & {'If', 'StatelessIf', 'Switch', 'Merge', 'While', 'StatelessWhile', 'Case'}


def test_pictures_have_the_size_and_channels_asked_for():
    for size, shape, channels in ((16, (4, 4, 3), 3), (128, (28, 28, 1), 1), (64, (784,), 1)):
        schema = Schema({'image': Feature('bytes', shape, raw='uint8')})
        params = _params(gan_size=size, schema=schema)
        with tf.Graph().as_default():
            pictures = dcgan.generate(tf.zeros([2, dcgan.NOISE_SIZE]), params, is_training=True)
            assert pictures.shape == [2, size, size, channels]
            assert dcgan.discriminate(pictures, params, is_training=True).shape == [2]


def test_averages_move_once_for_each_update(tmp_path):
    def decay(network, n_disc):
        """How far the first average that the network has is from its start of 1, in updates of momentum 0.9."""
        folder = tmp_path / f'{n_disc}'
        estimator = fakes.make_estimator(dcgan.model_fn, folder, params=_params(n_disc=n_disc, gan_filters=64))
        if not folder.exists():
            estimator.train(fakes.make_blobs_input_fn(10), max_steps=1)
        name = {'generator': 'generator/project_norm', 'discriminator': 'discriminator/down1_norm'}[network]
        # The variance is next to 0 at first: what is left of the 1 tells the updates.
        value = estimator.get_variable_value(f'{name}/moving_variance')
        return round(float(np.log(np.median(value)) / np.log(0.9)))

    assert decay('generator', 1) == decay('generator', 5) == 1
    # Twice for each update: real pictures and fakes.
    assert decay('discriminator', 1) == 2
    assert decay('discriminator', 5) == 10


def test_average_follows_the_generator_and_is_what_is_evaluated(tmp_path):
    def get_values(prefix):
        suffixes = ('weights', 'biases', 'gamma', 'beta', 'moving_mean', 'moving_variance')
        names = [name for name in estimator.get_variable_names() if name.startswith(prefix) and name.endswith(suffixes)]
        return {name[len(prefix) :]: estimator.get_variable_value(name) for name in names}

    estimator = _train(tmp_path / '1', max_steps=1)
    weights, average = get_values('generator/'), get_values('generator_average/')
    assert set(weights) == set(average) and len(weights) == 2 + 4 + 1 * 5 + 2
    for name, value in weights.items():
        np.testing.assert_allclose(average[name], value, atol=1e-7)
    before = average
    estimator = _train(tmp_path / '1', max_steps=2)
    # (step - 1) / (step + 9) is kept.
    for name, value in get_values('generator/').items():
        expected = 1 / 11 * before[name] + 10 / 11 * value
        np.testing.assert_allclose(get_values('generator_average/')[name], expected, rtol=1e-4, atol=1e-6)
    with tf.Graph().as_default():
        dcgan.model_fn({'noise': tf.zeros([2, dcgan.NOISE_SIZE])}, None, 'infer', _params())
        assert {v.op.name.split('/')[0] for v in tf.compat.v1.global_variables()} == {'generator_average'}


def test_pictures_are_shifted_each_by_its_own_pixels():
    images = np.random.RandomState(0).uniform(-1, 1, (50, 8, 8, 2)).astype(np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(1)
        shifted = dcgan.shift(tf.constant(images), 0.25)
        moved = session.run(shifted)
    padded = np.pad(images, [(0, 0), (2, 2), (2, 2), (0, 0)], constant_values=-1)
    found = set()
    for number, picture in enumerate(moved):
        places = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if np.array_equal(padded[number, top : top + 8, left : left + 8], picture)
        ]
        assert len(places) == 1
        found.update(places)
    assert {top for top, _ in found} == {left for _, left in found} == set(range(5))
    same = tf.constant(images)
    assert dcgan.shift(same, 0.0) is same


def test_batch_that_n_disc_does_not_divide_is_an_error():
    with tf.Graph().as_default(), pytest.raises(UsageError, match=r'--n_disc=3: .* 10 examples .* Expected a --batch_size'):
        dcgan.model_fn({'image': tf.zeros([10, 16], tf.uint8)}, None, 'train', _params(n_disc=3))


def test_dataset_of_no_pictures_is_an_error_even_to_export():
    schema = Schema({'weight': Feature('float'), 'year': Feature('int64')})
    with tf.Graph().as_default(), pytest.raises(UsageError, match=r'--model=dcgan takes one feature, .* has weight, year'):
        dcgan.model_fn({'noise': tf.zeros([2, dcgan.NOISE_SIZE])}, None, 'infer', _params(schema=schema))


def test_size_that_is_no_power_of_two_is_an_error():
    with pytest.raises(UsageError, match='--gan_size=100: expected a power of two'):
        ModelConfig(gan_size=100)


def test_synchronous_parameter_servers_are_an_error():
    with tf.Graph().as_default(), pytest.raises(UsageError, match=r'--sync_replicas awaits .* --model=dcgan'):
        dcgan.model_fn({'image': tf.zeros([10, 16], tf.uint8)}, None, 'train', _params(sync_replicas=object()))


def test_training_in_the_loop_writes_losses_and_a_grid_of_samples(tmp_path):
    _train(tmp_path, max_steps=6, summary_steps=3)
    events = fakes.read_events(tmp_path / 'train')
    assert sorted(events['samples']) == [3, 6]
    # 10 samples: one row of 8 is whole, 16 pixels each.
    assert events['samples'][6][:2].tolist() == [b'128', b'16']
    for name in ('loss', 'discriminator_loss', 'generator_loss', 'learning_rate'):
        assert sorted(events[name]) == [3, 6]
    assert events['loss'][6] == pytest.approx(events['discriminator_loss'][6] + events['generator_loss'][6], rel=1e-5)


def test_evaluation_does_not_count_padding_and_repeats(tmp_path):
    estimator = _train(tmp_path)
    images = fakes.make_blobs(10, seed=2)[0]

    def padded(params):
        features = {'image': np.concatenate([images, np.full((6, 16), 255, np.uint8)])}
        features['weights'] = np.array([1.0] * 10 + [0.0] * 6, np.float32)
        return tf.data.Dataset.from_tensors((features, np.zeros(16, np.int64)))

    metrics, again = estimator.evaluate(padded), estimator.evaluate(padded)
    assert metrics == again
    assert metrics['average_loss'] == pytest.approx(metrics['discriminator_loss'] + metrics['generator_loss'], rel=1e-5)

    def other_padding(params):
        features = {'image': np.concatenate([images, np.zeros((6, 16), np.uint8)])}
        features['weights'] = np.array([1.0] * 10 + [0.0] * 6, np.float32)
        return tf.data.Dataset.from_tensors((features, np.zeros(16, np.int64)))

    for name, value in estimator.evaluate(other_padding).items():
        assert value == pytest.approx(metrics[name], rel=1e-5) or name == 'loss'


def test_lower_distance_decides_the_best_export(tmp_path):
    # Neither loss of a GAN does: the discriminator's is lowest where the generator is worst.
    metrics = tidy_metrics(_train(tmp_path).evaluate(fakes.make_blobs_input_fn(10), steps=2))
    assert set(metrics) == {'loss', 'discriminator_loss', 'generator_loss', 'frechet_distance', 'global_step'}
    assert choose_default_metric(metrics) == 'frechet_distance'
    assert choose_default_metric(['loss', 'accuracy']) == 'accuracy'
    assert choose_default_metric(['f1', 'loss']) == 'loss'


def test_frechet_distance_is_that_of_the_two_normal_distributions():
    # Independent channels: the sum over them of (m1 - m2)^2 + (s1 - s2)^2.
    random = np.random.RandomState(0)
    first = random.normal([0.0, 1.0], [1.0, 2.0], (50000, 2)).astype(np.float32)
    second = random.normal([3.0, 1.0], [2.0, 0.5], (50000, 2)).astype(np.float32)

    def moments(values):
        return tf.constant(np.concatenate([values.mean(axis=0)[None], values.T @ values / len(values)]))

    distance = float(dcgan.compute_frechet_distance(moments(first), moments(second)))
    assert distance == pytest.approx(9 + 1 + 1.5**2, rel=0.02)
    assert float(dcgan.compute_frechet_distance(moments(first), moments(first))) == pytest.approx(0, abs=1e-4)


def test_export_and_prediction_take_noise(tmp_path):
    estimator = _train(tmp_path / 'run')
    dataset = get_serving_dataset('dcgan', TINY)
    assert get_serving_dataset('mlp', TINY) is TINY
    model = tf.saved_model.load(export.export_model(estimator, dataset, str(tmp_path / 'model')))
    assert sorted(model.signatures) == ['examples', 'serving_default']
    noise = np.random.RandomState(0).normal(size=(3, dcgan.NOISE_SIZE)).astype(np.float32)
    by_name = model.signatures['serving_default'](noise=tf.constant(noise), key=tf.constant(['a', 'b', 'c']))
    assert by_name['image'].dtype == tf.uint8 and by_name['image'].shape == (3, 16, 16, 1)
    assert by_name['key'].numpy().tolist() == [b'a', b'b', b'c']
    examples = [dataset.features_schema.encode({'noise': row}) for row in noise]
    by_example = model.signatures['examples'](examples=tf.constant(examples))
    np.testing.assert_array_equal(by_name['image'], by_example['image'])
    path = tmp_path / 'noise.jsonl'
    path.write_text(''.join(json.dumps({'noise': row.tolist()}) + '\n' for row in noise))
    (written,) = predict.predict_shards(
        estimator,
        dataset,
        [str(path)],
        output_dir=str(tmp_path / 'predictions'),
        batch_size=2,
        checkpoint=tf.train.latest_checkpoint(str(tmp_path / 'run')),
    )
    with open(written) as lines:
        images = [json.loads(line)['image'] for line in lines]
    np.testing.assert_array_equal(images, by_name['image'])


def test_bfloat16_trains_and_is_exported_as_float32(tmp_path):
    estimator = _train(tmp_path / 'run', params=_params(precision='bfloat16'))
    assert {estimator.get_variable_value(name).dtype.name for name in estimator.get_variable_names()} == {'float32', 'int64'}
    path = export.export_model(estimator, get_serving_dataset('dcgan', TINY), str(tmp_path / 'model'))
    graph = tf.saved_model.load(path).signatures['serving_default'].graph
    assert 'DT_BFLOAT16' not in str(graph.as_graph_def())
