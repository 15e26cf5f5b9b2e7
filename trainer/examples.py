"""tf.train.Examples serialized without TensorFlow, whose import takes a converter's every process seconds.

The format is Protocol Buffers' (https://protobuf.dev/programming-guides/encoding): an Example holds Features, Features a map
from name to Feature, a Feature one of three lists.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Union

Values = Union[bytes, int, float, Sequence[bytes], Sequence[int], Sequence[float]]

# Field numbers of Feature's lists; each list's values are its field 1.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_LENGTH_DELIMITED = 2
_SMALL = tuple(bytes([value]) for value in range(0x80))


def encode_example(example: Mapping[str, Values]) -> bytes:
    """Serializes one tf.train.Example, byte for byte as TensorFlow's deterministic serialization does.

    Args:
      example: Name to bytes, int (64 bits) or float (stored in 32), or a sequence of one of these that is not empty.
    """
    entries = [
        _field(1, _encode_name(name) + _field(2, _encode_feature(example[name]))) for name in sorted(example, key=str.encode)
    ]
    return _field(1, b''.join(entries))


@functools.cache
def _encode_name(name: str) -> bytes:
    return _field(1, name.encode())


def _encode_feature(value: Values) -> bytes:
    values = [value] if isinstance(value, (bytes, int, float)) else list(value)
    if isinstance(values[0], bytes):
        return _field(_BYTES_LIST, b''.join(_field(1, item) for item in values))  # type: ignore[arg-type]
    if isinstance(values[0], float):
        return _field(_FLOAT_LIST, _field(1, struct.pack(f'<{len(values)}f', *values)))
    return _field(_INT64_LIST, _field(1, b''.join(_varint(item & (2**64 - 1)) for item in values)))  # type: ignore[operator]


def _field(number: int, payload: bytes) -> bytes:
    return _SMALL[number << 3 | _LENGTH_DELIMITED] + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SMALL[value]
    pieces = bytearray()
    while value > 0x7F:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)
