"""The input_fn over encoded pictures."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests import pictures
from trainer import inputs, pipeline_choice, records
from trainer.config import DataConfig
from trainer.datasets import get_dataset
from trainer.errors import DataError

WAYS = {
    'memory': {'cache': 'auto', 'augment': 'flip'},
    'encoded': {'cache': 'auto', 'augment': 'crop'},
    'records': {'cache': 'off', 'augment': 'crop'},
}


def make(files, *, training=True, batch=4, seed=1, start_step=0, workers=1, worker=0, **settings):
    config = DataConfig(dataset='images', train_data_paths=','.join(files), image_size=16, **settings)
    return inputs.make_input_fn(
        files, get_dataset(config), training=training, global_batch_size=batch, batch_size=batch // workers, seed=seed,
        config=config, num_workers=workers, worker_index=worker, is_lockstep=workers > 1, start_step=start_step,
    )  # fmt: skip


def take(input_fn, count):
    """Pixels [count, batch, 16, 16, 3] and the pictures' numbers [count, batch]."""
    batches = [(features['image'].numpy(), labels.numpy()) for features, labels in input_fn().take(count)]
    pixels = np.stack([batch[0] for batch in batches])
    numbers = np.rint(pixels[..., 2].mean(axis=(2, 3)) / 10).astype(int)
    assert np.stack([batch[1] for batch in batches]).tolist() == (numbers % 2).tolist()
    return pixels, numbers


@pytest.fixture
def files(tmp_path):
    """12 pictures of 24 x 32 in 2 shards; the blue of picture i is 10 i, its label i modulo 2."""
    return pictures.write_records(tmp_path, 'train', [(24, 32)] * 12, shards=2, blue_step=10)


@pytest.mark.parametrize('name', WAYS)
def test_every_epoch_has_every_picture_once_as_static_uint8(files, name):
    input_fn = make(files, **WAYS[name])
    assert input_fn.pipeline == name
    assert input_fn().element_spec == ({'image': tf.TensorSpec([4, 16, 16, 3], tf.uint8)}, tf.TensorSpec([4], tf.int64))
    _, numbers = take(input_fn, 9)
    epochs = numbers.reshape(3, 12)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3


@pytest.mark.parametrize('name', WAYS)
def test_same_seed_same_pixels_another_seed_others(files, name):
    first, again, other = (take(make(files, seed=seed, **WAYS[name]), 6)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize('name', ['encoded', 'records'])
def test_another_epoch_shows_other_windows(files, name):
    pixels, numbers = take(make(files, **WAYS[name]), 6)
    flat = {number: pixels.reshape(-1, 16, 16, 3)[numbers.ravel() == number] for number in range(12)}
    assert sum((first != second).any() for first, second in flat.values()) >= 11


@pytest.mark.parametrize('name', ['memory', 'encoded'])
def test_a_resumed_run_sees_the_same_windows(files, name):
    whole = take(make(files, **WAYS[name]), 9)[0]
    np.testing.assert_array_equal(take(make(files, start_step=4, **WAYS[name]), 5)[0], whole[4:])


@pytest.mark.parametrize('name', ['memory', 'encoded'])
def test_workers_in_lockstep_see_the_windows_of_one(files, name):
    whole = take(make(files, **WAYS[name]), 6)[0]
    parts = [take(make(files, workers=2, worker=worker, **WAYS[name]), 6)[0] for worker in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_pictures_from_memory_are_those_decoded_each_time(files, monkeypatch):
    kept = take(make(files, **WAYS['memory']), 6)[0]
    monkeypatch.setattr(pipeline_choice, 'choose', lambda *_: 'encoded')
    again = take(make(files, **WAYS['memory']), 6)[0]
    assert np.abs(kept.astype(int) - again).max() <= 3  # one crops before it decodes, one after


def test_what_does_not_fit_is_streamed_or_refused(files, monkeypatch, caplog):
    monkeypatch.setattr(pipeline_choice.memory, 'limit_bytes', lambda: 100)
    assert make(files, augment='flip').pipeline == 'records'
    with pytest.raises(DataError, match=r'--cache=memory: 12 records take .* encoded, --cache_memory_share=0.25 of 100 bytes'):
        make(files, cache='memory')


def test_evaluation_has_every_picture_once_the_same_each_time(files):
    input_fn = make(files, training=False, batch=5)
    batches = [(f['image'].numpy(), f['weights'].numpy(), labels.numpy()) for f, labels in input_fn()]
    assert [weights.tolist() for _, weights, _ in batches] == [[1] * 5, [1] * 5, [1, 1, 0, 0, 0]]
    pixels = np.concatenate([batch for batch, _, _ in batches])[:12]
    assert sorted(np.rint(pixels[..., 2].mean(axis=(1, 2)) / 10).tolist()) == list(range(12))
    again = np.concatenate([f['image'].numpy() for f, _ in input_fn()])[:12]
    np.testing.assert_array_equal(pixels, again)


def test_a_record_that_is_no_jpeg_is_named_or_left_out(files):
    payloads = [record.payload for record in records.scan(files[0])]
    payloads[2] = pictures.WIRE.encode({'image': b'\x89PNG', 'label': 0})
    records.write_file(files[0], payloads)
    found = records.diagnose(files, make(files[1:]).dataset)
    assert f'{files[0]}: record 2 ' in found and 'a record holds JPEG, this begins with' in found
    input_fn = make(files, max_corrupt_records=1)
    assert input_fn.corrupt_records == 1
    assert len(set(take(input_fn, 3)[1].ravel())) >= 10
