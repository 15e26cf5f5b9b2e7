"""The files that a flag names: comma-separated files, globs and folders, local or remote."""

from __future__ import annotations

import os

from trainer import gcs, storage
from trainer.errors import DataError, UsageError

_MAX_NAMES_SHOWN = 5


def resolve(spec: str, flag: str) -> list[str]:
    """The files that a flag names.

    Args:
        spec: comma-separated files, globs and folders, local or remote. Globs and folders leave out what is no data:
            sub-folders, manifest.json, hidden and temporary files.
        flag: the flag's name for the message, such as '--train_data_paths'.

    Returns:
        Paths in order, each once.

    Raises:
        UsageError: the spec is empty.
        DataError: an entry matches nothing; says what its folder holds.
    """
    entries = [entry.strip() for entry in spec.split(',') if entry.strip()]
    if not entries:
        raise UsageError(f'{flag} is empty: give files, globs or folders')
    files = [path for entry in entries for path in _resolve_entry(entry, flag)]
    return sorted({path if storage.is_remote(path) else os.path.normpath(path) for path in files})


def _resolve_entry(entry: str, flag: str) -> list[str]:
    is_pattern = any(character in entry for character in gcs.WILDCARDS)
    # Names on gs:// are looked up in the listing that the pattern needs.
    if not (is_pattern and gcs.is_gs(entry)):
        if storage.is_dir(entry):
            files = [storage.join(entry, name) for name in storage.list_files(entry) if _is_data_name(name)]
            if not files:
                raise DataError(f'{flag}: no data files in the folder {entry}; {_describe_folder(entry)}')
            return files
        if storage.exists(entry):
            return [entry]
    files = [path for path in storage.glob(entry, files_only=True) if _is_data_name(storage.split(path)[1])]
    if not files:
        problem = f'no file matches {entry}' if is_pattern else f'there is no {entry}'
        raise DataError(f'{flag}: {problem}; {_describe_folder(storage.split(entry)[0])}')
    return files


def _is_data_name(name: str) -> bool:
    return not (name.startswith(('.', '_')) or name.endswith(('.tmp', '~')) or name == 'manifest.json')


def _describe_folder(folder: str) -> str:
    """What a folder holds, for a message; of one that is not there, what the nearest folder above it holds."""
    missing = ''
    while not storage.is_dir(folder):
        parent = storage.split(folder.rstrip('/'))[0]
        if parent == folder or parent.endswith('://'):
            return f'there is no folder {folder}'
        missing = missing or f'there is no folder {folder}; '
        folder = parent
    names = storage.list_dir(folder)
    shown = ', '.join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f'{missing}{folder} holds {shown or "nothing"}' + (f' and {more} more' if more > 0 else '')
