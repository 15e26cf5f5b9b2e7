"""The schema of a record: one object that writes, checks, parses and serves tf.train.Examples.

A record passes three stages, and `Schema` knows all of them:

1. `serialized`: [batch] string, what a TFRecord holds.
2. wire tensors: what `tf.io.parse_example` gives; a raw array or an encoded picture is still a string of bytes.
3. decoded tensors: what the model sees, [batch, ...] with a static shape after the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from trainer import feature_values, images
from trainer.errors import DataError, UsageError

# What parse_example knows, by the names of tf.train.Feature's lists.
_WIRE_DTYPES = {'bytes': tf.string, 'int64': tf.int64, 'float': tf.float32}
_KINDS = {'bytes': 'bytes_list', 'int64': 'int64_list', 'float': 'float_list'}
# Dtypes that tf.io.decode_raw can produce.
_RAW_DTYPES = ('uint8', 'int8', 'uint16', 'int16', 'int32', 'int64', 'float16', 'float32', 'float64')
# A tf.string element in memory before its characters.
_STRING_OVERHEAD_BYTES = 24


@dataclasses.dataclass(frozen=True)
class Feature:
    """One named value of an Example.

    Args:
      dtype: 'bytes', 'int64' or 'float' (float32), as tf.train.Feature stores them.
      shape: Shape of one example, row-major; `None` is a vector of variable length, parsed to a dense tensor padded
        with 0 or ''.
      default: Scalar for records that lack the feature, broadcast to `shape`; `None` makes the feature required.
      raw: Dtype of a little-endian array of `shape` held in a single bytes value, e.g. 'uint8' for the images of the
        classic MNIST TFRecords; `None` for a feature that is not such an array.
      image: How an encoded picture (JPEG, or PNG) in a single bytes value becomes uint8 pixels of `shape`, [size, size, 3];
        `None` for a feature that is no picture.
      max_length: Width of the parsed tensor of a variable-length feature, and its limit; `None` is the longest of the
        batch.

    Raises:
      UsageError: The arguments contradict one another.
    """

    dtype: str
    shape: Optional[tuple[int, ...]] = ()
    default: Any = None
    raw: Optional[str] = None
    max_length: Optional[int] = None
    image: Optional[images.Decoding] = None

    def __post_init__(self) -> None:
        if self.dtype not in _WIRE_DTYPES:
            raise UsageError(f'Feature dtype is {self.dtype!r}; expected one of {", ".join(_WIRE_DTYPES)}')
        if self.shape is not None:
            object.__setattr__(self, 'shape', tuple(int(size) for size in self.shape))
            if any(size < 1 for size in self.shape):
                raise UsageError(f'Feature shape is {self.shape}; every size must be positive (None: variable length)')
        if self.raw is not None:
            if self.dtype != 'bytes' or self.shape is None or self.default is not None:
                raise UsageError(f"Feature raw={self.raw!r} needs dtype 'bytes', a fixed shape and no default")
            if self.raw not in _RAW_DTYPES:
                raise UsageError(f'Feature raw is {self.raw!r}; expected one of {", ".join(_RAW_DTYPES)}')
        is_plain = self.dtype == 'bytes' and not self.raw and self.default is None
        if self.image is not None and not (is_plain and _is_square_rgb(self.shape)):
            raise UsageError("Feature image needs dtype 'bytes', a shape (size, size, 3), no raw and no default")
        if self.max_length is not None and (self.shape is not None or self.max_length < 1):
            raise UsageError(f'Feature max_length={self.max_length} needs shape=None and a positive length')
        if self.is_variable and self.default is not None:
            raise UsageError('A variable-length Feature takes no default: a record without it has length 0')
        if isinstance(self.default, str):
            object.__setattr__(self, 'default', self.default.encode())

    @property
    def is_variable(self) -> bool:
        """Whether the length differs between records."""
        return self.shape is None

    @property
    def is_encoded(self) -> bool:
        """Whether the record holds the tensor in a single bytes value, as a raw array or a picture."""
        return self.raw is not None or self.image is not None

    @property
    def is_required(self) -> bool:
        """Whether a record without this feature is an error."""
        return not self.is_variable and self.default is None

    @property
    def size(self) -> int:
        """Number of values in one example; 0 when it varies without a limit."""
        return (self.max_length or 0) if self.shape is None else int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_of_picture(self) -> int:
        """Height and width of a decoded picture, in pixels."""
        assert self.image and self.shape, self
        return self.shape[0]

    @property
    def is_mirrored(self) -> bool:
        """Whether training sees the whole picture, mirrored or not."""
        return self.image is not None and self.image.augment == 'flip'

    @property
    def raw_bytes(self) -> int:
        """Length of the bytes value of a raw array, in bytes."""
        return self.size * np.dtype(self.raw).itemsize

    @property
    def static_shape(self) -> tuple[Optional[int], ...]:
        """Shape of one decoded example; `None` is a width known only at run time."""
        return (self.max_length,) if self.shape is None else self.shape

    @property
    def decoded_dtype(self) -> tf.DType:
        """Dtype of the decoded tensor."""
        if self.image:
            return tf.uint8
        return tf.as_dtype(self.raw) if self.raw else _WIRE_DTYPES[self.dtype]

    @property
    def decoded_bytes(self) -> int:
        """Memory of one decoded example, in bytes; strings count without their characters."""
        return self.size * (_STRING_OVERHEAD_BYTES if self.decoded_dtype == tf.string else self.decoded_dtype.size)

    def parsing_spec(self) -> Any:
        """The feature as `tf.io.parse_example` takes it."""
        wire_dtype = _WIRE_DTYPES[self.dtype]
        if self.is_variable:
            return tf.io.FixedLenSequenceFeature(
                (), wire_dtype, allow_missing=True, default_value=feature_values.PADDING[self.dtype]
            )
        if self.is_encoded:
            return tf.io.FixedLenFeature((), tf.string)
        default = None if self.default is None else np.full(self.shape or (), self.default).tolist()
        return tf.io.FixedLenFeature(self.shape, wire_dtype, default)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults, ready for JSON; `Feature(**feature.to_dict())` is equal to it."""
        values = {'dtype': self.dtype, 'shape': None if self.shape is None else list(self.shape)}
        default = self.default.decode() if isinstance(self.default, bytes) else self.default
        image = dataclasses.asdict(self.image) if self.image else None
        optional = {'default': default, 'raw': self.raw, 'max_length': self.max_length, 'image': image}
        return {**values, **{name: value for name, value in optional.items() if value is not None}}


class ServingReceiver(NamedTuple):
    """The stages of a record as tensors of one v1 graph; any stage can be fed, and what comes before is then not run."""

    serialized: tf.Tensor
    """[batch] string placeholder: serialized Examples."""
    wire: dict[str, tf.Tensor]
    """[batch] string for each raw array or picture: its bytes before decoding, e.g. what base64 JSON carries."""
    features: dict[str, tf.Tensor]
    """[batch, ...] decoded tensor for each feature, in the dtype that the model sees."""


@dataclasses.dataclass(frozen=True)
class Schema:
    """The features of a record by name: encodes, checks, parses and serves it.

    Args:
      features: Name to `Feature`.
    """

    features: Mapping[str, Feature]

    def __post_init__(self) -> None:
        if not self.features:
            raise UsageError('A Schema needs at least one feature')
        # An own copy in a fixed order: parsing, encoding and the manifest then never depend on the caller's dict.
        object.__setattr__(self, 'features', {name: self.features[name] for name in sorted(self.features)})

    def __getitem__(self, name: str) -> Feature:
        return self.features[name]

    def __contains__(self, name: object) -> bool:
        return name in self.features

    @property
    def pictures(self) -> dict[str, Feature]:
        """The features that are encoded pictures, by name."""
        return {name: feature for name, feature in self.features.items() if feature.image}

    @property
    def bytes_per_example(self) -> int:
        """Memory of one decoded example, in bytes; without the characters of strings and lengths that have no limit."""
        return sum(feature.decoded_bytes for feature in self.features.values())

    @property
    def has_static_shapes(self) -> bool:
        """Whether every decoded tensor has a shape known beforehand, apart from the batch."""
        return all(None not in feature.static_shape for feature in self.features.values())

    def without(self, names: Iterable[str]) -> Schema:
        """The schema without `names`; names that it does not have are ignored."""
        excluded = set(names)
        return Schema({name: feature for name, feature in self.features.items() if name not in excluded})

    def encode(self, example: Mapping[str, Any]) -> bytes:
        """Serializes one example.

        Args:
          example: Name to value: numbers or arrays of the feature's shape; `str` or `bytes` for bytes; an array or its
            bytes for raw features; the file's bytes, or `{'b64': ...}` with them in base64, for a picture. Optional and
            variable-length features may be absent or `None`.

        Returns:
          A serialized tf.train.Example, the same bytes for the same values.

        Raises:
          DataError: A name is unknown or missing, or a value has another dtype, shape or length.
        """
        unknown = sorted(set(example) - set(self.features))
        if unknown:
            raise DataError(f'feature {unknown[0]!r} is not in the schema; it has {self._names()}')
        proto = tf.train.Example()
        for name, feature in self.features.items():
            value = example.get(name)
            if value is None:
                if feature.is_required:
                    raise DataError(f'feature {name!r} is missing; the example has {_quoted(example)}')
                continue
            values = feature_values.encode(name, feature, value)
            getattr(proto.features.feature[name], _KINDS[feature.dtype]).value.extend(values)
        return proto.SerializeToString(deterministic=True)

    def check(self, serialized: bytes) -> None:
        """Checks one serialized Example against the schema, without a graph.

        Raises:
          DataError: It is no Example, or a feature is missing or has another dtype, length or shape; the message says
            which, what was expected and what was found.
        """
        try:
            proto = tf.train.Example.FromString(serialized)
        except Exception as error:  # protobuf's DecodeError, whose module differs between its implementations
            raise DataError(f'is not a tf.train.Example ({len(serialized)} bytes that do not parse)') from error
        found = proto.features.feature
        for name, feature in self.features.items():
            # `in` first: indexing a protobuf map adds the key.
            kind = found[name].WhichOneof('kind') if name in found else None
            if kind is None:
                if feature.is_required:
                    raise DataError(f'feature {name!r} is missing; the record has {_quoted(found)}')
                continue
            if kind != _KINDS[feature.dtype]:
                raise DataError(f'feature {name!r} holds {kind}, the schema expects {_KINDS[feature.dtype]}')
            feature_values.check(name, feature, getattr(found[name], kind).value)

    def parse(self, serialized: tf.Tensor, *, decode_pictures: bool = True) -> dict[str, tf.Tensor]:
        """Parses a batch of serialized Examples at once, which costs far less than one at a time.

        Args:
          serialized: [batch] string.
          decode_pictures: Decode the centre of pictures; else they stay [batch] strings.

        Returns:
          Name to [batch, ...] tensor: string, int64, float32, or the dtype of a raw array.
        """
        wire = self.parse_wire(serialized)
        encoded = {} if decode_pictures else {name: wire[name] for name in self.pictures}
        rest = self if decode_pictures else self.without(self.pictures)
        return {**rest.decode(wire), **encoded}

    def parse_wire(self, serialized: tf.Tensor) -> dict[str, tf.Tensor]:
        """Parses [batch] serialized Examples to wire tensors: raw arrays and pictures stay [batch] strings."""
        specs = {name: feature.parsing_spec() for name, feature in self.features.items()}
        return tf.io.parse_example(serialized, specs)

    def decode(self, wire: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Turns wire tensors into decoded ones with static shapes after the batch."""
        return {name: feature_values.decode(name, feature, wire[name]) for name, feature in self.features.items()}

    def serving_receiver(self, exclude: Iterable[str] = ('label',)) -> ServingReceiver:
        """Builds the stages of a record in the current v1 graph, for export.

        Args:
          exclude: Features that only training has; serialized Examples need not hold them.

        Returns:
          The placeholders of every stage. `features` derives from `wire`, and both from `serialized`, unless fed.
        """
        schema = self.without(exclude)
        serialized = tf.compat.v1.placeholder(tf.string, [None], name='examples')
        parsed = schema.parse_wire(serialized)
        wire = {
            name: tf.compat.v1.placeholder_with_default(parsed[name], [None], name=f'{name}_bytes')
            for name, feature in schema.features.items()
            if feature.is_encoded
        }
        decoded = schema.decode({**parsed, **wire})
        features = {
            name: tf.compat.v1.placeholder_with_default(tensor, tensor.shape, name=name) for name, tensor in decoded.items()
        }
        return ServingReceiver(serialized, wire, features)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The schema ready for JSON, as the manifest of a converted dataset holds it."""
        return {name: feature.to_dict() for name, feature in self.features.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Any]]) -> Schema:
        """The schema that `to_dict` described."""
        return cls({name: Feature(**fields) for name, fields in values.items()})

    def _names(self) -> str:
        return _quoted(self.features)


def _quoted(names: Iterable[str]) -> str:
    return ', '.join(repr(name) for name in sorted(names)) or 'nothing'


def _is_square_rgb(shape: Optional[tuple[int, ...]]) -> bool:
    return shape is not None and len(shape) == 3 and shape[0] == shape[1] and shape[2] == 3
