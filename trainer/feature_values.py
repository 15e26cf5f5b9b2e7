"""The values of one feature: to an Example, checked in one, and from the parsed tensor to what the model sees."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from trainer import images
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.features import Feature

# What fills a vector of variable length up, by dtype.
PADDING = {'bytes': b'', 'int64': 0, 'float': 0.0}


def encode(name: str, feature: Feature, value: Any) -> list[Any]:
    """The values of a feature as an Example holds them.

    Raises:
      DataError: the value has another dtype, shape or length than the schema says.
    """
    if feature.image:
        return [_encode_image(name, value)]
    if feature.raw:
        return [_encode_raw(name, feature, value)]
    if feature.dtype == 'bytes':
        items = [value] if isinstance(value, (str, bytes)) else np.asarray(value, dtype=object).ravel().tolist()
        shape = () if isinstance(value, (str, bytes)) else np.asarray(value, dtype=object).shape
        if not all(isinstance(item, (str, bytes)) for item in items):
            raise DataError(f'feature {name!r} is {value!r}, the schema expects str or bytes')
        values = [item.encode() if isinstance(item, str) else item for item in items]
    else:
        array = np.asarray(value)
        kinds = 'iub' if feature.dtype == 'int64' else 'iubf'
        if array.dtype.kind not in kinds and array.size:
            raise DataError(f'feature {name!r} has dtype {array.dtype}, the schema expects {feature.dtype}')
        shape, values = array.shape, array.ravel().tolist()
    _check_shape(name, feature, shape)
    return values


def _check_shape(name: str, feature: Feature, shape: tuple[int, ...]) -> None:
    if feature.shape is not None and shape != feature.shape:
        raise DataError(f'feature {name!r} has shape {shape}, the schema expects {feature.shape}')
    if feature.shape is None and len(shape) != 1:
        raise DataError(f'feature {name!r} has shape {shape}, the schema expects a vector of variable length')
    if feature.max_length is not None and shape[0] > feature.max_length:
        raise DataError(f'feature {name!r} has {shape[0]} values, the schema allows {feature.max_length} (max_length)')


def _encode_raw(name: str, feature: Feature, value: Any) -> bytes:
    if isinstance(value, bytes):
        if len(value) != feature.raw_bytes:
            raise DataError(_wrong_raw_length(name, feature, len(value)))
        return value
    array = np.asarray(value)
    _check_shape(name, feature, array.shape)
    converted = array.astype(np.dtype(feature.raw).newbyteorder('<'))
    if not np.array_equal(converted, array):
        raise DataError(f'feature {name!r} has values that {feature.raw} cannot hold: {array.min()} to {array.max()}')
    return converted.tobytes()


def _encode_image(name: str, value: Any) -> bytes:
    if isinstance(value, Mapping) and list(value) == ['b64']:
        try:
            value = base64.b64decode(value['b64'], validate=True)
        except (ValueError, TypeError) as error:
            raise DataError(f'feature {name!r} is no base64 ({error})') from None
    if not isinstance(value, bytes):
        raise DataError(f"feature {name!r} is a {type(value).__name__}, expected the bytes of a picture or {{'b64': ...}}")
    _check_image(name, value)
    return value


def _check_image(name: str, value: bytes, *, is_record: bool = False) -> None:
    problem = images.find_problem(value, is_record=is_record)
    if problem:
        raise DataError(f'feature {name!r} is no picture that can be decoded: {problem}')


def _wrong_raw_length(name: str, feature: Feature, length: int) -> str:
    return (
        f'feature {name!r} has {length} bytes, the schema expects {feature.raw_bytes} ({feature.raw} of shape {feature.shape})'
    )


def check(name: str, feature: Feature, values: Any) -> None:
    """Checks the values of a feature that an Example holds; their kind is known to be right.

    Raises:
      DataError: they are too many or too few, or encode something else than the schema says.
    """
    if feature.is_encoded and len(values) != 1:
        raise DataError(f'feature {name!r} has {len(values)} values, the schema expects one bytes value')
    if feature.image:
        _check_image(name, values[0], is_record=True)
    elif feature.raw:
        if len(values[0]) != feature.raw_bytes:
            raise DataError(_wrong_raw_length(name, feature, len(values[0])))
    elif not feature.is_variable and len(values) != feature.size:
        raise DataError(f'feature {name!r} has {len(values)} values, the schema expects {feature.size} (shape {feature.shape})')
    elif feature.max_length is not None and len(values) > feature.max_length:
        raise DataError(f'feature {name!r} has {len(values)} values, the schema allows {feature.max_length} (max_length)')


def decode(name: str, feature: Feature, wire: tf.Tensor) -> tf.Tensor:
    """Turns a parsed feature, [batch, ...], into what the model sees, of a static shape after the batch."""
    if feature.raw:
        decoded = tf.io.decode_raw(wire, tf.as_dtype(feature.raw), little_endian=True)
        decoded = tf.reshape(decoded, [-1, *feature.static_shape])
    elif feature.image:
        decoded = images.decode_central(wire, feature.size_of_picture, feature.image)
    elif feature.max_length is not None:
        # Padding by a negative amount fails, so the assertion only serves to say it well.
        width = tf.shape(wire)[1]
        message = f'feature {name!r} has more than max_length={feature.max_length} values'
        with tf.control_dependencies([tf.debugging.assert_less_equal(width, feature.max_length, message=message)]):
            missing = tf.identity(feature.max_length - width)
        decoded = tf.pad(wire, [[0, 0], [0, missing]], constant_values=PADDING[feature.dtype])
    else:
        decoded = wire
    return tf.ensure_shape(decoded, [wire.shape[0], *feature.static_shape])
