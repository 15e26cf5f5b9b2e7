"""manifest.json: what a converter wrote beside its shards; input pipelines compare the files with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainer import storage
from trainer.errors import DataError

NAME = 'manifest.json'


class FileFacts(NamedTuple):
    """What the manifest states of one file."""

    records: int
    bytes: int


def read(folder: str) -> dict[str, Any]:
    """The manifest in the folder; empty when there is none.

    Raises:
      DataError: It is not JSON.
    """
    path = storage.join(folder, NAME)
    if not storage.exists(path):
        return {}
    text = storage.read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f'{path}: not JSON: {error}; convert the data again') from error


def write(folder: str, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest: the last file of a conversion, and the mark that it is complete."""
    storage.write_atomic(storage.join(folder, NAME), json.dumps(manifest, indent=2) + '\n')


def file_facts(manifest: Mapping[str, Any]) -> dict[str, FileFacts]:
    """File name to what the manifest states of it."""
    splits = manifest.get('splits', {}).values()
    return {name: FileFacts(f['records'], f['bytes']) for split in splits for name, f in split['files'].items()}


def facts_of(paths: Iterable[str]) -> dict[str, FileFacts]:
    """What the manifests beside the files state of them; files that no manifest lists are left out."""
    by_folder: dict[str, dict[str, FileFacts]] = {}
    found = {}
    for path in paths:
        folder, name = storage.split(path)
        if folder not in by_folder:
            by_folder[folder] = file_facts(read(folder))
        if name in by_folder[folder]:
            found[path] = by_folder[folder][name]
    return found
