"""The rows of a table on their way to shards: read once, divided among files, encoded from there."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import marshal
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from trainer import conversion, examples, tables
from trainer.errors import DataError, UsageError, did_you_mean
from trainer.tables import FLOAT, Column

# Numbers with more values than this are no names of classes.
_MAX_NUMERIC_CLASSES = 100
_ROWS_AT_A_TIME = 1000


@dataclasses.dataclass(frozen=True)
class Settings(conversion.Sharding):
    """What decides the bytes written; the fields of `tables.Format` among them."""

    label: str = ''
    label_bounds: tuple[float, ...] = ()
    key: str = ''
    drop: tuple[str, ...] = ()
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delimiter: str = ''
    encoding: str = 'utf-8'
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.label_bounds) != sorted(set(self.label_bounds)):
            raise UsageError(f'--label_bounds={",".join(map(str, self.label_bounds))}: expected numbers that rise')
        for name, kind in self.types.items():
            if kind not in tables.KINDS:
                raise UsageError(f'--types {name}={kind}: expected one of {", ".join(tables.KINDS)}')

    @property
    def format(self) -> tables.Format:
        """How the files are read."""
        return tables.Format(self.delimiter, self.encoding, self.columns)


class TableJob:
    """Encodes the rows of one shard.

    Args:
      path: of the rows, as `Spill` wrote them.
      features: name, column and its position, of each feature.
      key: position of the key; None has none.
      label: name and position of the label.
      classes: names to labels; {} where `bounds` make classes of numbers.
      bounds: of the classes.
    """

    def __init__(
        self,
        path: str,
        features: Sequence[tuple[str, Column, int]],
        key: Any,
        label: tuple[str, int],
        classes: Any,
        bounds: Any,
    ) -> None:
        self._path, self._features, self._key = path, features, key
        self._label, self._classes, self._bounds = label, classes, bounds

    def encode(self) -> Iterator[conversion.Encoded]:
        """The record of each row, in the order of the hashes."""
        label_name, label_position = self._label
        for _, fields in sorted(read_spill(self._path), key=lambda row: row[0]):
            text = fields[label_position].strip()
            label = self._classes[text] if self._classes else bisect.bisect_right(self._bounds, float(text))
            example: dict[str, Any] = {label_name: label}
            if self._key is not None:
                example['key'] = fields[self._key].encode()
            for name, column, position in self._features:
                value = column.parse(fields[position])
                if value is not None:
                    example[name] = value.encode() if isinstance(value, str) else value
            yield conversion.Encoded(examples.encode_example(example), label)

    def facts(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class Spill:
    """Rows on their way to a shard, in a file, as all may be more than the memory holds."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.num_rows = 0
        self._waiting: list[tuple[bytes, list[str]]] = []

    def add(self, hashed: bytes, fields: list[str]) -> None:
        """Takes a row in."""
        self.num_rows += 1
        self._waiting.append((hashed, fields))
        if len(self._waiting) == _ROWS_AT_A_TIME:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        with open(self.path, 'ab') as file:
            marshal.dump(self._waiting, file)
        self._waiting = []


def read_spill(path: str) -> Iterator[tuple[bytes, list[str]]]:
    file: BinaryIO
    with open(path, 'rb') as file:
        end = os.fstat(file.fileno()).st_size
        while file.tell() < end:
            yield from marshal.load(file)


class Scan:
    """All rows, read once."""

    def __init__(self, sources: Sequence[tables.Table], settings: Settings, folder: str) -> None:
        self._sources, self._settings = sources, settings
        names = sources[0].columns
        for flag, name in (('--label', settings.label), ('--key', settings.key), *(('--drop', name) for name in settings.drop),
                           *(('--types', name) for name in settings.types)):  # fmt: skip
            if name and name not in names:
                raise UsageError(f'{flag}={name}: no such column{did_you_mean(name, names)}; there are {", ".join(names)}')
        self.label, self.key = names.index(settings.label), names.index(settings.key) if settings.key else None
        self.columns = {
            position: Column(name, settings.types.get(name, ''))
            for position, name in enumerate(names)
            if name not in (settings.label, settings.key, *settings.drop)
        }
        if not self.columns:
            raise UsageError(f'--input: no column is left beside --label={settings.label}; there are {", ".join(names)}')
        self._label_column = Column(settings.label, FLOAT if settings.label_bounds else '')
        self._stated = [(position, column) for position, column in self.columns.items() if column.stated]
        self._stated += [(self.label, self._label_column)] if settings.label_bounds else []
        self.labels: collections.Counter[str] = collections.Counter()
        self.bad: list[str] = []
        self.spills = {
            split: [Spill(os.path.join(folder, f'{split}-{index}')) for index in range(settings.count(split))]
            for split in ('train', 'eval')
        }

    def run(self, max_bad: int) -> None:
        """Reads; stops once more than `max_bad` rows are bad."""
        from tqdm import tqdm

        counts = collections.Counter[str]()
        with tqdm(desc='reading', unit='row', disable=None) as bar:
            for table in self._sources:
                for row in table:
                    problem = row if isinstance(row, str) else self._find_problem(row)
                    bar.update()
                    if problem:
                        self.bad.append(problem)
                        if len(self.bad) > max_bad:
                            return
                        continue
                    assert isinstance(row, tables.Row)
                    name = '\x1f'.join(row.fields) if self.key is None else row.fields[self.key]
                    hashed = conversion.digest(name)
                    split = 'eval' if conversion.is_held_out(hashed, self._settings.eval_share) else 'train'
                    spills = self.spills[split]
                    spills[counts[split] % len(spills)].add(hashed, row.fields)
                    counts[split] += 1
                    self.labels[row.fields[self.label].strip()] += 1
                    for position, column in self.columns.items():
                        column.see(row.fields[position], is_held_out=split == 'eval')
        self.spills = {split: spills for split, spills in self.spills.items() if counts[split]}
        for split, spills in self.spills.items():
            self._settings.check_filled(split, counts[split], 'rows')
            for spill in spills:
                spill.flush()

    def _find_problem(self, row: tables.Row) -> str:
        if self._label_column.parse(row.fields[self.label]) is None:
            return f'{row.place}: column {self._label_column.name}, the label, is missing'
        for position, column in self._stated:
            problem = column.find_problem(row.fields[position])
            if problem:
                return f'{row.place}: {problem}'
        return ''

    def find_classes(self) -> list[str]:
        """Names of the classes.

        Raises:
          DataError: the label has one value, or too many.
        """
        name, bounds = self._settings.label, [f'{bound:g}' for bound in self._settings.label_bounds]
        if bounds:
            between = [f'{low} to {high}' for low, high in zip(bounds, bounds[1:])]
            return [f'below {bounds[0]}', *between, f'from {bounds[-1]}']
        classes = tables.sort_classes(list(self.labels))
        are_numbers = all(isinstance(Column(name, FLOAT).parse(value), float) for value in classes)
        if len(classes) < 2:
            raise DataError(f'--label={name}: the column is {classes[0]!r} in every row; expected two classes or more')
        if len(classes) > (_MAX_NUMERIC_CLASSES if are_numbers else tables.MAX_DISTINCT):
            kind, remedy = ('numbers', '; --label_bounds=10,20 makes classes of ranges') if are_numbers else ('values', '')
            raise DataError(f'--label={name}: the column has {len(classes):,} {kind}, too many for classes{remedy}')
        return classes
