from __future__ import annotations

import pytest

from trainer import examples
from trainer.features import Feature, Schema

SCHEMA = Schema(
    {
        'b': Feature('bytes'),
        'é': Feature('bytes', None),
        'i': Feature('int64', (4,)),
        'f': Feature('float', (2,)),
        'n': Feature('int64'),
    }
)


@pytest.mark.parametrize('size', [0, 1, 200, 70000])
def test_bytes_are_those_of_tensorflow(size):
    example = {'b': b'x' * size, 'é': [b'one', b''], 'i': [0, -1, 2**62, -(2**63)], 'f': [0.5, -3e8], 'n': 300}
    assert examples.encode_example(example) == SCHEMA.encode(example)
