"""The command line, made from the settings in `config.py`: one flag a field, in the groups of its sections.

Underscores and dashes are the same (`--job-dir`, `--job_dir`); a true-or-false setting is `--debug`, `--nodebug` or
`--debug=false`. A flag is never shortened and never ignored: an unknown one is an error that names the nearest. Every
error is a `UsageError` of one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import trainer
from trainer.config import Config, Section, section_classes
from trainer.errors import UsageError, did_you_mean

_USAGE = 'usage: python -m trainer.task --FLAG=VALUE ...'
_EPILOG = 'Underscores and dashes are the same in a flag: --job-dir, --job_dir. Paths are local or gs://.'
_EXPECTED = {int: 'a whole number', float: 'a number'}
_METAVARS = {bool: '', int: 'N', float: 'X', str: 'TEXT'}
_TRUE, _FALSE = ('true', 't', 'yes', '1'), ('false', 'f', 'no', '0')
_MAX_HELP_WIDTH = 120
_NO_BREAK = '\xa0'  # a space that textwrap leaves alone
_INDENT = 27  # columns of the flags; a longer flag has its own line


def parse(argv: Sequence[str]) -> Config:
    """The settings of a command line (without the program's name).

    Raises:
        UsageError: an unknown flag, a value that cannot be read, or settings that do not go together.
        SystemExit: `--help` or `--version` was asked for and has been printed.
    """
    try:
        values, unknown = _make_parser().parse_known_args(with_underscores(argv))
    except argparse.ArgumentError as error:
        raise UsageError(_explain(error)) from None
    if unknown:
        raise UsageError(_explain_unknown(unknown[0]))
    return Config.from_dict(
        {
            name: {field.name: getattr(values, field.name) for field in _settings(section)}
            for name, section in section_classes().items()
        }
    )


def flag_names() -> tuple[str, ...]:
    """The names of all flags that set something, with underscores and without '--', in the order of the help."""
    return tuple(field.name for section in section_classes().values() for field in _settings(section))


def format_help(width: int) -> str:
    """The help text: a group for each section, and for each flag its meaning, unit, default and choices.

    Args:
        width: of the terminal, in columns.
    """
    blocks = [_USAGE, textwrap.fill((trainer.__doc__ or '').strip(), width)]
    for section in section_classes().values():
        blocks.append('\n'.join([(section.__doc__ or '').rstrip('.'), *(_describe(f, width) for f in _settings(section))]))
    others = [_two_columns('--help', 'print this', width), _two_columns('--version', 'print the version', width)]
    blocks += ['\n'.join(['Other:', *others]), textwrap.fill(_EPILOG, width)]
    return '\n\n'.join(blocks) + '\n'


class _Parser(argparse.ArgumentParser):
    """argparse with our help text, and with errors raised, not printed under a page of usage."""

    def format_help(self) -> str:
        return format_help(min(shutil.get_terminal_size().columns, _MAX_HELP_WIDTH))

    def error(self, message: str) -> NoReturn:  # before Python 3.12, some errors come here in spite of exit_on_error
        raise UsageError(message)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument('--help', '-h', action='help')
    parser.add_argument('--version', action='version', version=f'trainer {trainer.__version__}')
    for section in section_classes().values():
        for field in _settings(section):
            kind: Any = type(field.default)
            if kind is bool:
                # Without a value it means true; the value has to follow a '=' or be one of the words below.
                parser.add_argument(f'--{field.name}', nargs='?', const=True, default=field.default, type=_parse_bool)
                parser.add_argument(f'--no{field.name}', dest=field.name, action='store_false', default=argparse.SUPPRESS)
            else:
                parser.add_argument(f'--{field.name}', default=field.default, type=kind)
    return parser


def _settings(section: type[Section]) -> Iterable[dataclasses.Field]:
    return dataclasses.fields(section)  # type: ignore[arg-type]  # every section is a dataclass


def with_underscores(argv: Sequence[str]) -> list[str]:
    """The arguments with `-` turned into `_` in the names of flags, never in values."""
    normalised = []
    for argument in argv:
        name, equals, value = argument.partition('=')
        if name.startswith('--'):
            name = '--' + name[2:].replace('-', '_')
        normalised.append(name + equals + value)
    return normalised


def _parse_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def _explain(error: argparse.ArgumentError) -> str:
    """One line: the flag, what was expected, what came."""
    name = (error.argument_name or '').split('/')[0]
    field = {f'--{field.name}': field for section in section_classes().values() for field in _settings(section)}.get(name)
    message = error.message or ''
    got = message.split('value: ', 1)[-1]  # argparse quotes it
    if field is None:  # --no..., --help or --version with a value
        return f'{name} takes no value'
    if message.startswith('expected'):
        return f'{name} needs a value: {name}={_METAVARS[type(field.default)]}'
    return f'{name}: expected {_EXPECTED.get(type(field.default), "true or false")}, got {got}'


def _explain_unknown(argument: str) -> str:
    if not argument.startswith('-'):
        return f'unexpected argument {argument!r}: every setting is a flag, --name=value'
    name = argument.partition('=')[0]
    names = [f'--{flag}' for flag in flag_names()]
    return f'unknown flag {name}{did_you_mean(name, names) or "; --help lists them"}'


def _describe(field: dataclasses.Field, width: int) -> str:
    default, unit, choices = field.default, field.metadata['unit'], field.metadata['choices']
    flag = f'--[no]{field.name}' if isinstance(default, bool) else f'--{field.name} {_METAVARS[type(default)]}'
    notes = [', '.join(choices)] if choices else []
    if default != '':
        shown = str(default).lower() if isinstance(default, bool) else f'{default:g}' if isinstance(default, float) else default
        notes.append(f'default {shown} {unit}'.rstrip().replace(' ', _NO_BREAK))
    text = field.metadata['help'] + (f' [{"; ".join(notes)}]' if notes else '')
    return _two_columns(flag, text, width)


def _two_columns(flag: str, text: str, width: int) -> str:
    lines = textwrap.wrap(text, max(width - _INDENT, 20), break_on_hyphens=False, break_long_words=False)
    lines = [line.replace(_NO_BREAK, ' ') for line in lines]
    first = f'  {flag}'
    if len(first) >= _INDENT:
        lines.insert(0, '')
    return '\n'.join([f'{first:{_INDENT}}{lines[0]}'.rstrip(), *(' ' * _INDENT + line for line in lines[1:])])
