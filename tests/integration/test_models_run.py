"""Large models make a step under the strategies that differ most, in processes of their own as a user would start them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.integration.test_cluster_run import run
from trainer import records
from trainer.config import DataConfig
from trainer.datasets import get_dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope='module')
def noise(tmp_path_factory):
    """Records of synthetic digits: what is learnt of them does not matter."""
    folder = tmp_path_factory.mktemp('noise')
    random = np.random.RandomState(0)
    schema = get_dataset(DataConfig()).schema
    examples = [
        schema.encode({'image': random.randint(0, 256, 784).astype(np.uint8), 'label': number % 10}) for number in range(32)
    ]
    for index in range(2):
        records.write_file(str(folder / f'train-{index:05d}-of-00002.tfrecord'), examples[index::2])
    return folder


@pytest.mark.parametrize(
    ('processes', 'settings'),
    [
        ([], {'distribution_strategy': 'mirrored', 'num_cpu_replicas': 2}),
        (['--workers=1'], {}),
        (['--workers=2', '--ps=1'], {'sync_replicas': True, 'replicas_to_aggregate': 2}),
    ],
    ids=['mirrored', 'multi_worker', 'sync_replicas'],
)
def test_resnet50_makes_a_step(noise, tmp_path, processes, settings):
    checkpoint = _train(noise, tmp_path, processes, model='resnet50', optimizer='lars', label_smoothing=0.1, **settings)
    # A worker with parameter servers may have begun a second step when the first was done.
    assert checkpoint.get_tensor('global_step') in ((1, 2) if '--ps=1' in processes else (1,))
    # At first gamma is 0 at the end of each block: by then it has moved, and all behind it is finite.
    gamma = checkpoint.get_tensor('stage1/block1/conv3_norm/gamma')
    assert gamma.any() and np.isfinite(gamma).all()


def test_gan_keeps_its_averages_on_replicas(noise, tmp_path):
    strategy = {'distribution_strategy': 'mirrored', 'num_cpu_replicas': 2}
    checkpoint = _train(noise, tmp_path, [], model='dcgan', gan_size=16, gan_filters=4, **strategy)
    weights, average = (checkpoint.get_tensor(f'{name}/up1/weights') for name in ('generator', 'generator_average'))
    np.testing.assert_allclose(average, weights, rtol=1e-6)


def _train(noise, folder, processes, **settings):
    """The checkpoint of a step of four examples."""
    flags = {'mode': 'train', 'batch_size': 4, 'max_steps': 1, 'train_data_paths': f'{noise}/train-*', **settings}
    arguments = [f'--{name}={value}' for name, value in {**flags, 'output_path': folder / 'out'}.items()]
    code, text = run(processes, arguments, folder / 'logs')
    assert code == 0, text[-6000:]
    return tf.train.load_checkpoint(str(folder / 'out'))
