"""CSV files: their rows one by one, and what each column holds. Pure Python, as a converter's processes are to start fast."""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import gzip
import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, Optional, Union, cast

from trainer import storage
from trainer.errors import DataError, UsageError

FLOAT, INT, STRING = 'float', 'int', 'string'
KINDS = (INT, FLOAT, STRING)
_WIDER = {INT: FLOAT, FLOAT: STRING}
# What stands for no value, in any case of letters, unless a column is stated to be a string.
MISSING = frozenset(('', 'na', 'n/a', 'nan', 'null', 'none', '?'))
# Distinct values of a column that are kept; a column with more has no vocabulary.
MAX_DISTINCT = 1000
_DELIMITERS = (',', '\t', ';', '|')
_GZIP_MAGIC = b'\x1f\x8b'
# With zeros in front it is a code, such as that of a post office.
_NUMBER = re.compile(r'[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?')
_WHOLE = re.compile(r'[+-]?(0|[1-9]\d{0,17})')


@dataclasses.dataclass(frozen=True)
class Format:
    """How the files are to be read.

    Args:
      delimiter: between fields; '' takes what the first line has most of.
      encoding: of the text.
      columns: names, for files without a header; () reads the header.
    """

    delimiter: str = ''
    encoding: str = 'utf-8'
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.delimiter) > 1:
            raise UsageError(f'--delimiter={self.delimiter}: expected one character, or tab')
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise UsageError(f'--encoding={self.encoding}: {error}; expected utf-8, latin-1, cp1252 or the like') from error


class Row(NamedTuple):
    """A line of a table, or several where a field in quotes has line breaks."""

    place: str
    """File and line, for messages."""
    fields: list[str]


class Table:
    """A CSV file, plain or GZIP, local or remote.

    Args:
      path: of the file.
      settings: how to read it.

    Raises:
      DataError: it is empty, or its header names a column twice or not at all.
    """

    def __init__(self, path: str, settings: Format) -> None:
        self.path = path
        self._settings = settings
        with self._open() as text:
            first = self._read_line(text)
        delimiter = settings.delimiter or max(_DELIMITERS, key=first.count)
        self._delimiter = delimiter
        header = settings.columns or tuple(name.strip() for name in next(csv.reader([first], delimiter=delimiter), []))
        if not first.strip():
            raise DataError(f'{path}: empty; expected a header and rows')
        unnamed = [str(number) for number, name in enumerate(header, 1) if not name]
        if unnamed:
            raise DataError(f'{path}: column {unnamed[0]} has no name in the header; name it, or give --columns for all')
        double = next((name for name in header if header.count(name) > 1), None)
        if double:
            raise DataError(f'{path}: the header has {double!r} twice; rename one, or is there no header? Then give --columns')
        self.columns = header

    def __iter__(self) -> Iterator[Union[Row, str]]:
        """The rows; for one with another number of fields than columns, what is wrong with it. Empty lines are passed over."""
        with self._open() as text:
            reader = csv.reader(text, delimiter=self._delimiter)
            if not self._settings.columns:
                next(reader, None)
            while True:
                try:
                    fields = next(reader, None)
                except (csv.Error, UnicodeDecodeError, EOFError, OSError) as error:
                    raise DataError(self._explain(error, reader.line_num + 1)) from error
                if fields is None:
                    return
                if not fields:
                    continue
                place = f'{self.path}:{reader.line_num}'
                if len(fields) == len(self.columns):
                    yield Row(place, fields)
                else:
                    yield f'{place}: {len(fields)} fields, the {len(self.columns)} columns are {", ".join(self.columns)}'

    @contextlib.contextmanager
    def _open(self) -> Iterator[io.TextIOWrapper]:
        # A spreadsheet writes a mark in front.
        encoding = 'utf-8-sig' if self._settings.encoding.lower() in ('utf-8', 'utf8') else self._settings.encoding
        with storage.open_read(self.path) as binary:
            is_gzip = binary.read(2) == _GZIP_MAGIC
            binary.seek(0)
            yield io.TextIOWrapper(cast(BinaryIO, gzip.GzipFile(fileobj=binary)) if is_gzip else binary, encoding, newline='')

    def _read_line(self, text: io.TextIOWrapper) -> str:
        try:
            return text.readline()
        except (UnicodeDecodeError, EOFError, OSError) as error:
            raise DataError(self._explain(error, 1)) from error

    def _explain(self, error: Exception, line: int) -> str:
        if isinstance(error, UnicodeDecodeError):
            # Text is decoded ahead of the line that is read.
            before, byte = error.object[max(0, error.start - 20) : error.start], error.object[error.start]
            at = f'byte 0x{byte:02x} after {bytes(before).decode("ascii", "replace")!r}'
            return f'{self.path}: {at} is no {self._settings.encoding}; give --encoding, such as latin-1'
        if isinstance(error, (EOFError, OSError)):
            return f'{self.path}:{line}: the GZIP file is damaged ({error})'
        return f'{self.path}:{line}: {error}'


def find_tables(patterns: str, settings: Format) -> list[Table]:
    """The files of comma-separated globs, in order.

    Raises:
      DataError: a pattern matches nothing, or two files differ in their columns.
    """
    paths: dict[str, None] = {}
    for pattern in filter(None, (item.strip() for item in patterns.split(','))):
        found = storage.glob(pattern)
        if not found:
            raise DataError(f"--input={pattern}: matches no file; expected a file or a glob such as 'tables/*.csv'")
        paths.update(dict.fromkeys(found))
    tables = [Table(path, settings) for path in sorted(paths)]
    if not tables:
        raise DataError(f'--input={patterns}: names no file')
    for table in tables[1:]:
        if table.columns != tables[0].columns:
            raise DataError(
                f'{table.path}: the columns are {", ".join(table.columns)}; in {tables[0].path} they are '
                f'{", ".join(tables[0].columns)}; convert them one by one, or make them alike'
            )
    return tables


class Column:
    """What has been seen of a column.

    Args:
      name: in the header.
      stated: its kind, where the user states one; '' finds it: the narrowest of `KINDS` that holds every value.
    """

    def __init__(self, name: str, stated: str = '') -> None:
        self.name = name
        self.stated = stated
        self.kind = stated or INT
        self.num_missing = 0
        self.distinct: Optional[dict[str, int]] = {}
        """Value to count; None: there are too many."""
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def parse(self, text: str) -> Union[int, float, str, None]:
        """The value of a field: None when it is missing, and a `str` for what is not of the column's kind."""
        text = text.strip()
        if not text or (self.stated != STRING and text.lower() in MISSING):
            return None
        if self.kind == INT and _WHOLE.fullmatch(text):
            return int(text)
        if self.kind == FLOAT and _NUMBER.fullmatch(text) and math.isfinite(float(text)):
            return float(text)
        return text

    def find_problem(self, text: str) -> str:
        """What is wrong with a value of a column whose kind is stated, '' when nothing is."""
        if self.stated in (INT, FLOAT) and isinstance(self.parse(text), str):
            return f'column {self.name} is {text.strip()!r}, stated as {self.stated}'
        return ''

    def see(self, text: str, *, is_held_out: bool) -> None:
        """Takes a value in; those held out count for the kind, and as missing, alone."""
        value = self.parse(text)
        while isinstance(value, str) and self.kind != STRING:
            self.kind = _WIDER[self.kind]
            value = self.parse(text)
        if value is None:
            self.num_missing += 1
        if value is None or is_held_out:
            return
        if self.distinct is not None:
            key = text.strip()
            self.distinct[key] = self.distinct.get(key, 0) + 1
            if len(self.distinct) > MAX_DISTINCT:
                self.distinct = None
        if not isinstance(value, str):
            # Welford 1962: no large sums whose difference would be lost.
            self._count += 1
            delta = value - self._mean
            self._mean += delta / self._count
            self._squares += delta * (value - self._mean)

    @property
    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of a column of numbers."""
        return self._mean, math.sqrt(self._squares / self._count) if self._count else 0.0

    def vocabulary(self) -> list[str]:
        """The values, the most frequent first; [] when there are too many."""
        return sorted(self.distinct or {}, key=lambda value: (-(self.distinct or {})[value], value))


def sort_classes(values: Sequence[str]) -> list[str]:
    """Names of classes in the order of their numbers, where they are numbers, else of the alphabet."""
    if all(_NUMBER.fullmatch(value) for value in values):
        return sorted(values, key=lambda value: (float(value), value))
    return sorted(values)
