from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests import pictures
from trainer import images


@pytest.mark.parametrize('moments', [images.IMAGENET_MOMENTS, images.UNIT_MOMENTS])
def test_normalize_is_pixel_minus_mean_over_deviation(moments):
    pixels = np.random.default_rng(1).integers(0, 256, [2, 4, 5, 3]).astype(np.uint8)
    expected = (pixels / 255 - moments[0]) / moments[1]
    np.testing.assert_allclose(images.normalize(tf.constant(pixels), moments), expected, atol=1e-5)


def test_normalize_to_bfloat16_rounds_only_the_result():
    pixels = tf.range(256)[None, :, None, None] * tf.ones([1, 1, 1, 3], tf.int32)
    found = images.normalize(tf.cast(pixels, tf.uint8), dtype=tf.bfloat16)
    assert found.dtype == tf.bfloat16
    np.testing.assert_array_equal(found, tf.cast(images.normalize(tf.cast(pixels, tf.uint8)), tf.bfloat16))


def test_the_centre_is_decoded_with_its_share_of_the_shorter_side():
    encoded = tf.constant([pictures.encode(pictures.make_picture(64, 128))])
    whole, cropped = (
        images.decode_central(encoded, 32, images.Decoding(augment=augment)).numpy().astype(int) for augment in ('off', 'crop')
    )
    assert whole.shape == cropped.shape == (1, 32, 32, 3)
    # The central square spans columns 32 to 95 of 128 and all rows; 7/8 of it columns 36 to 91 and rows 4 to 59.
    assert whole[0, 16, [0, -1], 0] == pytest.approx([32.5 * 255 / 128, 94.5 * 255 / 128], abs=3)
    assert whole[0, [0, -1], 16, 1] == pytest.approx([0.5 * 255 / 64, 62.5 * 255 / 64], abs=4)
    assert cropped[0, 16, [0, -1], 0] == pytest.approx([36.4 * 255 / 128, 90.6 * 255 / 128], abs=3)
    assert cropped[0, [0, -1], 16, 1] == pytest.approx([4.4 * 255 / 64, 58.6 * 255 / 64], abs=4)


def test_pictures_stored_at_the_size_asked_for_are_decoded_as_they_are():
    encoded = tf.constant([pictures.encode(pictures.make_picture(24, 24, 7))])
    decoded = images.decode_central(encoded, 24, images.Decoding('flip', stored_sides=(24, 24)))
    np.testing.assert_array_equal(decoded[0], tf.io.decode_jpeg(encoded[0]))


def test_png_and_grey_pictures_decode_to_three_colours():
    picture = pictures.make_picture(24, 24)[:, :, :1]
    encoded = tf.stack([tf.io.encode_png(picture), tf.io.encode_jpeg(picture, format='grayscale')])
    decoded = images.decode_central(encoded, 24, images.Decoding('off'))
    np.testing.assert_array_equal(decoded[0], np.repeat(picture, 3, axis=-1))
    assert decoded.shape == (2, 24, 24, 3)


def test_what_cannot_be_decoded_is_told_from_what_can():
    encoded = pictures.encode(pictures.make_picture(24, 24))
    assert images.find_problem(encoded) == ''
    assert images.find_problem(encoded[:200]) != ''
    assert 'Unknown image file format' in images.find_problem(b'text')


def draw(count, seed=1, start=0, sizes=(64, 96)):
    """Windows, [count, 4] of (top, left, height, width), of pictures of one size at positions from `start` on."""
    shapes = tf.constant([sizes] * count)
    return images._random_windows(shapes, tf.range(start, start + count, dtype=tf.int64), seed).numpy()


def test_random_windows_have_the_areas_and_proportions_of_the_paper():
    windows = draw(20000, sizes=(600, 900))
    top, left, height, width = windows.T
    assert (windows[:, :2] >= 0).all() and (top + height <= 600).all() and (left + width <= 900).all()
    areas, proportions = height * width / (600 * 900), width / height
    assert 0.079 < areas.min() < 0.085 and areas.max() > 0.85  # sides are rounded to pixels
    fitting = proportions[areas < 1]  # the whole picture is taken when none of ten windows fits
    assert len(fitting) > 19900 and 0.745 < fitting.min() < 0.76 and 1.32 < fitting.max() < 1.34
    # Windows that do not fit are drawn again, and fit with a chance that the area decides; small ones are spread evenly.
    small = areas < 0.4
    assert areas[small].mean() == pytest.approx(0.24, abs=0.005)
    assert np.log(proportions[small]).mean() == pytest.approx(0, abs=0.01)
    share = top[small] / (600 - height[small])
    assert share.mean() == pytest.approx(0.5, abs=0.01) and share.std() == pytest.approx(12**-0.5, abs=0.01)


def test_a_picture_too_long_for_any_window_is_used_whole():
    assert draw(3, sizes=(8, 4000)).tolist() == [[0, 0, 8, 4000]] * 3


def test_what_is_drawn_depends_on_seed_and_position_alone():
    whole = draw(10)
    np.testing.assert_array_equal(whole[4:7], draw(3, start=4))
    assert (draw(10, seed=2) != whole).any(axis=1).all()
    assert len({tuple(window) for window in draw(100)}) > 95


def test_half_of_the_pictures_are_mirrored():
    mirrored = images.draw_mirrored(tf.range(10000, dtype=tf.int64), 3).numpy()
    assert mirrored.mean() == pytest.approx(0.5, abs=0.02)
    assert (mirrored[1:] == mirrored[:-1]).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize('method', images.RESIZE_METHODS)
@pytest.mark.parametrize(('height', 'width'), [(64, 96), (300, 400)])
def test_a_decoded_window_is_the_window_of_the_picture(method, height, width):
    decoding = images.Decoding(resize_method=method)
    positions = tf.range(6, dtype=tf.int64)
    encoded = tf.constant([pictures.encode(pictures.make_picture(height, width))] * 6)
    found = images.decode_random(encoded, 24, decoding, positions, 1).numpy().astype(float)
    mirrored = images.draw_mirrored(positions, 1).numpy()
    assert set(mirrored) == {False, True}
    for picture, is_mirrored, (top, left, rows, columns) in zip(found, mirrored, draw(6, sizes=(height, width))):
        across = (left + (np.arange(24) + 0.5) * columns / 24) * 255 / width
        np.testing.assert_allclose(picture[12, :, 0], across[::-1] if is_mirrored else across, atol=6)
        np.testing.assert_allclose(picture[:, 12, 1], (top + (np.arange(24) + 0.5) * rows / 24) * 255 / height, atol=6)


@pytest.mark.parametrize('stored', [(24, 24), (30, 40)])
def test_flip_and_off_give_the_centre_mirrored_or_not(stored):
    positions = tf.range(4, dtype=tf.int64)
    encoded = tf.constant([pictures.encode(pictures.make_picture(*stored, i)) for i in range(4)])
    sides = (min(stored), max(stored))
    central = images.decode_central(encoded, 24, images.Decoding('off', stored_sides=sides)).numpy().astype(int)
    off = images.decode_random(encoded, 24, images.Decoding('off', stored_sides=sides), positions, 1).numpy().astype(int)
    flip = images.decode_random(encoded, 24, images.Decoding('flip', stored_sides=sides), positions, 1).numpy()
    assert np.abs(off - central).max() <= (0 if stored == (24, 24) else 3)
    for one, straight, is_mirrored in zip(flip, off, images.draw_mirrored(positions, 1).numpy()):
        np.testing.assert_array_equal(one, straight[:, ::-1] if is_mirrored else straight)
