"""Encoded pictures to tensors: decoding, central and random crops, and what the device does with the result.

On the host a picture is decoded, cut to a window, and resized to [size, size, 3] uint8. Pixels leave the host as uint8, a
quarter of the bytes of float32: `normalize` belongs into the model, where the device does it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from trainer.errors import UsageError

AUGMENTATIONS = ('crop', 'flip', 'off')
RESIZE_METHODS = ('bilinear', 'bicubic')
# Mean and standard deviation of each colour over the ImageNet training set, of pixels in [0, 1], as most published ImageNet
# models take them.
IMAGENET_MOMENTS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Pixels to [0, 1]. Anything in [-1, 1] is ((0.5,) * 3, (0.5,) * 3).
UNIT_MOMENTS = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
# Random windows: shares of the area, width to height, and how often to draw until one fits into the picture.
_AREAS = (0.08, 1.0)
_PROPORTIONS = (3 / 4, 4 / 3)
_TRIES = 10
# Taken for the side of a picture when the manifest does not say: every scaled decoding may then be worth it.
_UNKNOWN_SIDE = 1 << 16
_GOLDEN = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
# Share of the shorter side that evaluation looks at when training crops: 224 of 256 pixels, as ImageNet is evaluated.
_CENTRAL_SHARE = 224 / 256


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How an encoded picture becomes a tensor of its feature's shape.

    Args:
      augment: 'crop' trains on random windows and their mirror images and evaluates the centre; 'flip' trains on mirror
        images; 'off' on the pictures as they are. The last two take the largest central square.
      resize_method: 'bilinear' or 'bicubic', without antialiasing.
      stored_sides: (shortest, longest) side of the stored pictures in pixels; (0, 0) when nobody has looked.
      stored_square: Side of the largest square in any of them, in pixels; 0 when nobody has looked.
    """

    augment: str = 'crop'
    resize_method: str = 'bilinear'
    stored_sides: tuple[int, int] = (0, 0)
    stored_square: int = 0

    def __post_init__(self) -> None:
        if self.augment not in AUGMENTATIONS or self.resize_method not in RESIZE_METHODS:
            raise UsageError(
                f'augment={self.augment!r}, resize_method={self.resize_method!r}: expected one of '
                f'{", ".join(AUGMENTATIONS)} and one of {", ".join(RESIZE_METHODS)}'
            )

    @property
    def central_share(self) -> float:
        """Share of the shorter side that evaluation, prediction and serving see, up to 1."""
        return _CENTRAL_SHARE if self.augment == 'crop' else 1.0

    def is_stored_at(self, size: int) -> bool:
        """Whether all pictures are stored with this height and width, and used whole: then decoding is all there is to do."""
        return self.stored_sides == (size, size) and self.augment != 'crop'


def normalize(
    images: tf.Tensor,
    moments: tuple[Sequence[float], Sequence[float]] = IMAGENET_MOMENTS,
    *,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Standardises pixels, (images / 255 - mean) / standard deviation, on the device.

    Args:
      images: [batch, height, width, 3] uint8 in [0, 255].
      moments: Mean and standard deviation of each of the 3 colours, of pixels in [0, 1]: `IMAGENET_MOMENTS`, `UNIT_MOMENTS`
        for [0, 1], or one's own.
      dtype: tf.float32 or tf.bfloat16; the arithmetic is done in float32.

    Returns:
      [batch, height, width, 3] of `dtype`.
    """
    means, deviations = moments
    width = images.shape[2]
    # One multiplication and one addition with the constants repeated to a whole row: over a last dimension of 3 they take
    # four times as long on a CPU, and a division longer still.
    scale = tf.constant([1.0 / (255.0 * deviation) for deviation in deviations] * width, tf.float32)
    offset = tf.constant([-mean / deviation for mean, deviation in zip(means, deviations)] * width, tf.float32)
    rows = tf.reshape(tf.cast(images, tf.float32), [-1, images.shape[1], width * 3])
    return tf.reshape(tf.cast(rows * scale + offset, dtype), [-1, *images.shape[1:]])


def decode_central(encoded: tf.Tensor, size: int, decoding: Decoding) -> tf.Tensor:
    """Decodes the centre of every picture, the same each time: for evaluation, prediction and serving.

    Args:
      encoded: [batch] string: JPEG, or PNG.
      size: Height and width of the result, in pixels.
      decoding: How.

    Returns:
      [batch, size, size, 3] uint8.
    """

    def decode(one: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_jpeg(one, channels=3)
        if decoding.is_stored_at(size):
            return tf.ensure_shape(image, [size, size, 3])
        top, left, height, width = tf.unstack(_central_windows(tf.shape(image)[None, :2], decoding.central_share)[0])
        return _resize(image[top : top + height, left : left + width], size, decoding.resize_method)

    return tf.map_fn(decode, encoded, fn_output_signature=tf.TensorSpec([size, size, 3], tf.uint8))


def decode_random(encoded: tf.Tensor, size: int, decoding: Decoding, positions: tf.Tensor, seed: int) -> tf.Tensor:
    """Decodes pictures for training: random windows, mirrored or not, as `decoding.augment` says.

    The window is that of Szegedy et al. 2014 (arXiv:1409.4842, section 6): an area and proportions drawn at random. Only the
    window is decoded, and at 1/2, 1/4 or 1/8 of the resolution where it is so much larger than the result.

    Args:
      encoded: [batch] string: JPEG; the batch is static.
      size: Height and width of the result, in pixels.
      decoding: How.
      positions: [batch] int64, the position of each record in the order of the run.
      seed: With the position it decides what is drawn; nothing else does.

    Returns:
      [batch, size, size, 3] uint8.
    """
    # Unrolled, not mapped: the operations of all pictures are spread over the threads, without a loop's bookkeeping.
    ones = tf.unstack(encoded)
    if decoding.is_stored_at(size):
        decoded = [tf.ensure_shape(tf.io.decode_jpeg(one, channels=3), [size, size, 3]) for one in ones]
    else:
        shapes = tf.stack([tf.image.extract_jpeg_shape(one)[:2] for one in ones])
        if decoding.augment == 'crop':
            windows = _random_windows(shapes, positions, seed)
        else:
            windows = _central_windows(shapes, decoding.central_share)
        decoded = [_decode_window(one, window, size, decoding) for one, window in zip(ones, tf.unstack(windows))]
    if decoding.augment != 'off':
        decoded = [_mirror_if(mirrored, image) for image, mirrored in zip(decoded, tf.unstack(draw_mirrored(positions, seed)))]
    return tf.stack(decoded)


def _mirror_if(mirrored: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
    # A branch costs a tenth of the operation with its axes as a tensor, which copies where there is nothing to reverse.
    return tf.ensure_shape(tf.cond(mirrored, lambda: tf.reverse(image, [1]), lambda: image), image.shape)


def draw_mirrored(positions: tf.Tensor, seed: int) -> tf.Tensor:
    """[batch] bool, whether the picture at each position of the run's order is mirrored, left to right."""
    return _draw(positions, seed, 1, stream=1)[:, 0] < 0.5


def _random_windows(shapes: tf.Tensor, positions: tf.Tensor, seed: int) -> tf.Tensor:
    """[batch, 4] int32 (top, left, height, width) of windows with the area and the proportions below.

    Args:
      shapes: [batch, 2] int32, height and width.
      positions: [batch] int64.
      seed: Of the run.
    """
    drawn = tf.reshape(_draw(positions, seed, 2 * _TRIES, stream=2), [-1, _TRIES, 2])
    heights, widths = (tf.cast(shapes[:, i : i + 1], tf.float32) for i in (0, 1))
    areas = heights * widths * (_AREAS[0] + (_AREAS[1] - _AREAS[0]) * drawn[:, :, 0])
    low, high = (math.log(proportion) for proportion in _PROPORTIONS)
    proportions = tf.exp(low + (high - low) * drawn[:, :, 1])
    sides = tf.stack([tf.round(tf.sqrt(areas / proportions)), tf.round(tf.sqrt(areas * proportions))], axis=-1)
    fits = (sides[:, :, 0] <= heights) & (sides[:, :, 1] <= widths)
    # The first that fits; for a very long picture none may, and then it is used whole.
    first = tf.argmax(tf.cast(fits, tf.int32), axis=1)
    sides = tf.gather(sides, first, batch_dims=1)
    whole = tf.cast(shapes, tf.float32)
    sides = tf.where(tf.reduce_any(fits, axis=1, keepdims=True), tf.maximum(sides, 1.0), whole)
    offsets = tf.floor((whole - sides + 1) * _draw(positions, seed, 2, stream=3))
    return tf.cast(tf.concat([tf.minimum(offsets, whole - sides), sides], axis=1), tf.int32)


def _central_windows(shapes: tf.Tensor, share: float) -> tf.Tensor:
    """[batch, 4] int32 (top, left, height, width) of the central squares, `share` of the shorter side."""
    sides = tf.reduce_min(shapes, axis=1, keepdims=True)
    sides = tf.maximum(1, tf.cast(tf.cast(sides, tf.float32) * share, tf.int32))
    return tf.concat([(shapes - sides) // 2, sides, sides], axis=1)


def _decode_window(encoded: tf.Tensor, window: tf.Tensor, size: int, decoding: Decoding) -> tf.Tensor:
    """[size, size, 3] uint8 of a window, (top, left, height, width) int32."""

    def decode_at(ratio: int) -> Callable[[], tf.Tensor]:
        # The window is in pixels of the scaled picture. Edges are rounded, not the size, so that none lies outside of it.
        edges = tf.stack([window[:2], window[:2] + window[2:]])
        edges = (edges + ratio // 2) // ratio
        scaled = tf.concat([edges[0], edges[1] - edges[0]], axis=0)
        return lambda: tf.image.decode_and_crop_jpeg(encoded, scaled, channels=3, ratio=ratio)

    largest = decoding.stored_square or _UNKNOWN_SIDE
    ratios = [ratio for ratio in (1, 2, 4, 8) if ratio == 1 or largest >= ratio * size]
    if len(ratios) == 1:
        image = decode_at(1)()
    else:
        fitting = tf.reduce_min(window[2:]) // size
        index = tf.reduce_sum(tf.cast(fitting >= ratios[1:], tf.int32))
        image = tf.switch_case(index, {i: decode_at(ratio) for i, ratio in enumerate(ratios)})
    return _resize(image, size, decoding.resize_method)


def _resize(image: tf.Tensor, size: int, method: str) -> tf.Tensor:
    """Resizes one picture, [height, width, 3] uint8, to [size, size, 3] uint8, rounded."""
    # Of uint8 the kernels convert every pixel as often as they look at it, which takes them up to twice as long.
    resized = tf.image.resize(tf.cast(image, tf.float32), [size, size], method)
    if method == 'bicubic':  # leaves the range of its input
        resized = tf.clip_by_value(resized, 0.0, 255.0)
    # A cast cuts; half more before it takes less time than tf.round and a saturating cast.
    return tf.cast(resized + 0.5, tf.uint8)


def _draw(positions: tf.Tensor, seed: int, count: int, *, stream: int) -> tf.Tensor:
    """[batch, count] float32 in [0, 1), each a function of (seed, position, stream) alone.

    SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators") of a counter: one call for a whole
    batch, and the numbers of a picture are the same in whichever batch it comes. TensorFlow's stateless generators give
    one stream to a whole tensor.
    """
    start = _mix_in_python(_mix_in_python(seed) + stream)
    counters = positions[:, None] * count + tf.range(count, dtype=tf.int64)
    state = tf.cast(counters, tf.uint64) * tf.constant(_GOLDEN, tf.uint64) + tf.constant(start, tf.uint64)
    for shift, factor in _MIXERS:
        state = tf.bitwise.bitwise_xor(state, tf.bitwise.right_shift(state, tf.constant(shift, tf.uint64)))
        state *= tf.constant(factor, tf.uint64)
    return tf.cast(tf.bitwise.right_shift(state, tf.constant(40, tf.uint64)), tf.float32) / 2**24


def _mix_in_python(value: int) -> int:
    """The same for one number."""
    state = (value * _GOLDEN + _GOLDEN) % 2**64
    for shift, factor in _MIXERS:
        state = (state ^ state >> shift) * factor % 2**64
    return state ^ state >> 31


def find_problem(encoded: bytes, *, is_record: bool = False) -> str:
    """Why a picture cannot be decoded, in a few words; '' when it can. Records hold JPEG, of which training decodes parts."""
    if is_record and not encoded.startswith(b'\xff\xd8\xff'):
        return f'a record holds JPEG, this begins with {encoded[:4]!r}'
    try:
        _decoder()(encoded)
    except tf.errors.InvalidArgumentError as error:
        # The reason stands before the node's name; what else there is tells of the graph.
        return error.message.split('[[')[0].strip().splitlines()[-1][:200]
    return ''


@functools.lru_cache(maxsize=1)
def _decoder() -> Callable[[bytes], Any]:
    """Decodes outside of whatever graph is being built."""
    with tf.Graph().as_default() as graph:
        encoded = tf.compat.v1.placeholder(tf.string, [])
        decoded = tf.io.decode_jpeg(encoded, channels=3).op
    return tf.compat.v1.Session(graph=graph).make_callable(decoded, [encoded])
