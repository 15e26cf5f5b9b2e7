"""What a setting is: a field of a frozen dataclass with all that its flag needs, checked when the dataclass is built."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from trainer.errors import UsageError, did_you_mean

_TYPE_NAMES = {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'text'}
_LIMITS = {
    'at_least': (lambda value, limit: value >= limit, 'at least {}'),
    'above': (lambda value, limit: value > limit, 'more than {}'),
    'at_most': (lambda value, limit: value <= limit, 'at most {}'),
    'below': (lambda value, limit: value < limit, 'less than {}'),
}


def setting(default: Any, help: str, *, unit: str = '', choices: tuple[str, ...] = (), **limits: float) -> Any:
    """A dataclass field with all that the flag made from it needs.

    Args:
        default: the value when the flag is not given; its type is the flag's type (bool, int, float or str).
        help: one line, lower case.
        unit: of the value, '' for none.
        choices: legal values, any when empty.
        **limits: the legal range of a number: `at_least`, `above`, `at_most`, `below`.
    """
    assert limits.keys() <= _LIMITS.keys(), limits
    return dataclasses.field(default=default, metadata={'help': help, 'unit': unit, 'choices': choices, 'limits': limits})


class Section:
    """A group of settings; building one checks the type, the choices and the range of each value."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            _check_value(field, getattr(self, field.name))


def _check_value(field: dataclasses.Field, value: Any) -> None:
    kind: Any = type(field.default)
    choices, limits = field.metadata['choices'], field.metadata['limits']
    # bool is an int to Python, and a step count of True is a mistake; a whole number is a fine float.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UsageError(f'--{field.name}: expected {_TYPE_NAMES[kind]}, got {value!r}')
    if choices and value not in choices:
        raise UsageError(f'--{field.name}={value}: expected one of {", ".join(choices)}{did_you_mean(value, choices)}')
    if kind is float and not math.isfinite(value):
        raise UsageError(f'--{field.name}={value}: expected a finite number')
    if not all(_LIMITS[name][0](value, limit) for name, limit in limits.items()):
        raise UsageError(f'--{field.name}={value}: expected {describe_limits(field)}')


def describe_limits(field: dataclasses.Field) -> str:
    """The legal range of a setting in words, such as 'more than 0 and at most 1'; '' when there is none."""
    return ' and '.join(_LIMITS[name][1].format(limit) for name, limit in field.metadata['limits'].items())
