"""CSV files to TFRecord shards: `python -m trainer.convert csv`.

Steps: read every row once, to find what the columns hold, what is bad, and to which shard it goes: a hash of the row, or of its
key, decides about split and order, so that new rows move no old one from training to evaluation; `conversion.py` writes the
shards. `--dataset=csv` finds schema, classes, vocabularies, and means and deviations of the numbers in the manifest.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer import conversion, storage, tables
from trainer.errors import DataError, UsageError
from trainer.table_rows import Scan, Settings, Spill, TableJob
from trainer.tables import FLOAT, INT, STRING, Column

DATASET = 'csv'
BAD_ROWS = 'bad_rows.txt'
_CONVERTER_VERSION = 1
_DTYPES = {FLOAT: 'float', INT: 'int64', STRING: 'bytes'}
# Taken by the trainer itself beside the features of a dataset.
_RESERVED = ('weights', 'key')
_MAX_SHOWN = 40


def convert(patterns: str, folder: str, settings: Settings, *, max_bad: int = 0, workers: int = 0) -> dict[str, Any]:
    """Writes shards of records and manifest.json; returns the manifest.

    A record has a feature for each column: float, int64 or bytes, none where the value is missing; the label, int64 in
    [0, classes); and 'key', bytes, where a column identifies the rows.

    Args:
      patterns: Comma-separated globs of CSV files with the same columns; plain or GZIP, local or remote.
      folder: Where the shards go, local or remote. A complete conversion of the same files with the same settings is left.
      settings: What to write.
      max_bad: Rows that may be left out; they are listed in `bad_rows.txt`.
      workers: Processes; 0 takes the processors.

    Raises:
      UsageError: A setting is out of range, or names no column.
      DataError: No files, more than `max_bad` bad rows, too few for the shards, or the folder holds another conversion.
    """
    sources = tables.find_tables(patterns, settings.format)
    if not settings.label:
        raise UsageError(f'--label: missing; expected the column to be told from the others: {", ".join(sources[0].columns)}')
    stated = _describe_conversion(sources, settings)
    run = conversion.Conversion(folder, stated, noun='rows', bad_file=BAD_ROWS, max_bad=max_bad, workers=workers)
    complete = run.find_complete()
    if complete:
        return complete
    with tempfile.TemporaryDirectory(prefix='trainer-rows-') as rows:
        scan = Scan(sources, settings, rows)
        scan.run(max_bad)
        run.list_bad(scan.bad)
        run.check_bad(scan.bad)
        classes = scan.find_classes()
        features = _name_features(scan.columns, settings)
        label = _clean(settings.label)
        by_name = {} if settings.label_bounds else {name: index for index, name in enumerate(classes)}

        def plan(spill: Spill) -> TableJob:
            return TableJob(
                spill.path,
                features=features,
                key=scan.key,
                label=(label, scan.label),
                classes=by_name,
                bounds=settings.label_bounds,
            )

        done = run.write(
            [
                conversion.Shard(settings.path(folder, split, index), plan(spill), spill.num_rows)
                for split, spills in scan.spills.items()
                for index, spill in enumerate(spills)
            ]
        )
        return run.finish(done, classes, _describe_columns(features, label, settings), scan.bad)


def _describe_conversion(sources: Sequence[tables.Table], settings: Settings) -> dict[str, Any]:
    files = '\n'.join(f'{storage.split(table.path)[1]} {storage.size(table.path)}' for table in sources)
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(settings).items()}
    return {
        'dataset': DATASET, 'converter_version': _CONVERTER_VERSION, 'files': len(sources),
        'files_sha256': hashlib.sha256(files.encode()).hexdigest(), **lists,
    }  # fmt: skip


def _clean(name: str) -> str:
    """A column's name as that of a feature: an export's inputs are named by it, and TensorFlow takes few characters."""
    cleaned = re.sub(r'\W+', '_', name, flags=re.ASCII).strip('_') or 'column'
    cleaned = cleaned if cleaned[0].isalpha() else f'column_{cleaned}'
    return f'{cleaned}_' if cleaned in _RESERVED else cleaned


def _name_features(columns: Mapping[int, Column], settings: Settings) -> list[tuple[str, Column, int]]:
    features: dict[str, tuple[str, Column, int]] = {}
    for position, column in columns.items():
        name = _clean(column.name)
        other = settings.label if name == _clean(settings.label) else features[name][1].name if name in features else ''
        if other:
            raise UsageError(f'columns {other!r} and {column.name!r} would both be feature {name}; rename one, or --drop it')
        # A column without a value tells nothing.
        if column.vocabulary() or column.distinct is None:
            features[name] = (name, column, position)
    if not features:
        raise DataError('every column but the label is empty')
    return list(features.values())


def _describe_columns(features: Sequence[tuple[str, Column, int]], label: str, settings: Settings) -> dict[str, Any]:
    """What the manifest states for `--dataset=csv`."""
    schema: dict[str, Any] = {label: {'dtype': 'int64', 'shape': []}}
    columns, vocabularies, moments = {}, {}, {}
    for name, column, _ in features:
        schema[name] = {'dtype': _DTYPES[column.kind], 'shape': []}
        mean, deviation = column.moments
        if column.num_missing:
            schema[name]['default'] = {FLOAT: mean, INT: round(mean), STRING: ''}[column.kind]
        if column.kind == STRING:
            vocabularies[name] = column.vocabulary()
        else:
            moments[name] = [mean, deviation]
        columns[name] = {'column': column.name, 'kind': column.kind, 'missing': column.num_missing}
    return {
        'dataset': DATASET,
        'schema': {name: schema[name] for name in sorted(schema)},
        'label': label,
        'key': 'key' if settings.key else None,
        'columns': columns,
        'vocabularies': {name: values for name, values in vocabularies.items() if values},
        'moments': moments,
    }


def describe_columns(manifest: Mapping[str, Any]) -> Iterator[str]:
    """A line for each column of a manifest, and one for the label."""
    for name, facts in list(manifest['columns'].items())[:_MAX_SHOWN]:
        if name in manifest['moments']:
            values = 'mean {:.4g}, deviation {:.4g}'.format(*manifest['moments'][name])
        elif name in manifest['vocabularies']:
            values = f'{len(manifest["vocabularies"][name])} values'
        else:
            values = f'more than {tables.MAX_DISTINCT} values: hashed'
        missing = f', {facts["missing"]:,} missing' if facts['missing'] else ''
        yield f'{name:20} {facts["kind"]:7} {values}{missing}'
    hidden = len(manifest['columns']) - _MAX_SHOWN
    if hidden > 0:
        yield f'... and {hidden} more columns'
    counts: collections.Counter[str] = collections.Counter()
    for split in manifest['splits'].values():
        counts.update(split['classes'])
    shown = ', '.join(f'{name}: {counts[name]:,}' for name in manifest['classes'][:10])
    shown += ', ...' * (len(manifest['classes']) > 10)
    yield f'{manifest["label"]:20} label   {len(manifest["classes"])} classes: {shown}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    parser.add_argument('--input', required=True, help="globs, comma-separated, such as 'tables/*.csv'; GZIP too")
    parser.add_argument('--label', default='', help='column with the class')
    parser.add_argument(
        '--label_bounds', type=_split(float), default=(), help='numbers that divide a numeric label into classes: 10,20'
    )
    parser.add_argument('--key', default='', help='column that identifies a row in predictions, and decides about its split')
    parser.add_argument('--drop', type=_split(str), default=(), help='columns to leave out, comma-separated')
    parser.add_argument(
        '--types', type=_parse_types, default={}, help='kinds of columns that are not to be found: zip=string,age=float'
    )
    parser.add_argument('--columns', type=_split(str), default=(), help='names of all columns, for files without a header')
    parser.add_argument('--delimiter', default='', help="between fields, or 'tab'; found in the first line (default)")
    parser.add_argument('--encoding', default='utf-8', help='of the text (default: %(default)s)')
    conversion.add_arguments(parser, noun='rows')


def _split(kind: Any) -> Any:
    def split(text: str) -> tuple[Any, ...]:
        return tuple(kind(item.strip()) for item in text.split(',') if item.strip())

    split.__name__ = 'list of numbers' if kind is float else 'list'  # argparse names it in its error
    return split


def _parse_types(text: str) -> dict[str, str]:
    pairs = [item.partition('=') for item in text.split(',') if item.strip()]
    if not all(kind for _, _, kind in pairs):
        raise argparse.ArgumentTypeError(
            f'{text!r}: expected column=kind, comma-separated; kinds are {", ".join(tables.KINDS)}'
        )
    return {name.strip(): kind.strip() for name, _, kind in pairs}


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Converts as the flags say; returns the manifest."""
    if flags.delimiter in ('tab', '\\t'):
        flags.delimiter = '\t'
    settings = Settings(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(Settings)})
    manifest = convert(flags.input, flags.output, settings, max_bad=flags.max_bad, workers=flags.workers)
    for line in describe_columns(manifest):
        print(line)
    return manifest
