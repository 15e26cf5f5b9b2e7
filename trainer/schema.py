"""Checks of a YAML file against a schema: unknown keys with the nearest known one, values of the wrong kind. Pure Python.

A schema is made of kinds: TEXT and the like below, a tuple for one of several words, a list of one kind for a list of such, a
dictionary for keys and what each may have. Every error is a `UsageError` of one line with file and key.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from trainer import storage
from trainer.errors import UsageError, did_you_mean

TEXT, COUNT, NUMBER, FLAG = 'text', 'a whole number from 0', 'a number', 'true or false'
DURATION, OBJECT = 'seconds such as 3600s', 'keys and values'
_MAX_SHOWN = 60


class _Loader(yaml.SafeLoader):
    """YAML's loader with a key that comes twice being an error, where YAML's own keeps the last of them."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f'{key.value} is there twice', problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> dict[str, Any]:
    """The keys and values in a YAML file.

    Raises:
        UsageError: the file is no YAML, is empty, or holds something else.
        DataError: it cannot be read.
    """
    try:
        document = yaml.load(storage.read_text(path), _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, 'problem_mark', None)
        place = f', line {mark.line + 1}' if mark else ''
        raise UsageError(f'{path}{place}: not YAML: {getattr(error, "problem", None) or error}') from None
    if not isinstance(document, dict):
        raise UsageError(f'{path}: expected {OBJECT}, {describe(document)}')
    return document


def check(value: Any, kind: Any, file: str, key: str = '') -> None:
    """Raises a UsageError unless a value is what the schema says.

    Args:
        value: as the file has it.
        kind: of the schema.
        file: path of the file, for messages.
        key: where the value is in the file, dotted; '' at the top.
    """
    place = f'{file}: {key}' if key else file
    if isinstance(kind, dict):
        _check_keys(value, kind, file, key)
    elif isinstance(kind, list):
        if not isinstance(value, list):
            raise UsageError(f'{place}: expected a list, each item after a "-", {describe(value)}')
        for index, item in enumerate(value):
            check(item, kind[0], file, f'{key}[{index}]')
    elif isinstance(kind, tuple):
        if value not in kind:
            hint = did_you_mean(str(value), kind) or did_you_mean(str(value).upper(), kind)
            raise UsageError(f'{place}: expected one of {", ".join(kind)}, {describe(value)}{hint}')
    elif not _is_of_kind(value, kind):
        raise UsageError(f'{place}: expected {kind}, {describe(value)}{_find_remedy(value, kind)}')


def _check_keys(value: Any, kinds: dict[str, Any], file: str, key: str) -> None:
    if not isinstance(value, dict):
        raise UsageError(f'{file}: {key}: expected {OBJECT}, {describe(value)}')
    for name, member in value.items():
        inner = f'{key}.{name}' if key else str(name)
        if name not in kinds:
            owner = next((outer for outer, kind in kinds.items() if isinstance(kind, dict) and name in kind), None)
            hint = f'; it belongs under {owner}' if owner else did_you_mean(str(name), kinds)
            raise UsageError(f'{file}: {inner}: unknown key{hint or "; expected " + ", ".join(kinds)}')
        check(member, kinds[name], file, inner)


def _is_of_kind(value: Any, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str) and bool(value)
    if kind == COUNT:
        return type(value) is int and value >= 0
    if kind == NUMBER:
        return type(value) in (int, float) and math.isfinite(value)
    if kind == FLAG:
        return isinstance(value, bool)
    if kind == DURATION:
        return isinstance(value, str) and bool(re.fullmatch(r'\d+(\.\d+)?s', value))
    return isinstance(value, dict)


def _find_remedy(value: Any, kind: str) -> str:
    if kind == TEXT and isinstance(value, (int, float)):
        return '; put it in quotes'
    if kind == TEXT and isinstance(value, dict) and len(value) == 1:
        name, setting = next(iter(value.items()))
        return f'; write {name}={setting}'
    if kind == NUMBER and isinstance(value, str) and re.fullmatch(r'[+-]?\d+(\.\d*)?[eE][+-]?\d+', value):
        return f'; write {float(value)}, YAML takes 1e-4 for text'
    if kind == DURATION and type(value) is int:
        return f'; write {value}s'
    return ''


def describe(value: Any) -> str:
    """What a value is, for the end of a message."""
    if value is None:
        return 'it is empty'
    if isinstance(value, bool):
        return f'it is {str(value).lower()}'
    kind = {int: 'the number ', float: 'the number ', dict: 'keys and values ', list: 'the list '}.get(type(value), '')
    text = repr(value) if isinstance(value, str) else str(value)
    return f'it is {kind}{text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."}'
