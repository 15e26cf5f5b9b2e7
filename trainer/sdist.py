"""The package as the sdist that a service installs, the same bytes for the same sources."""

from __future__ import annotations

import gzip
import hashlib
import io
import pathlib
import shutil
import subprocess
import sys
import tarfile

import trainer
from trainer import storage
from trainer.errors import UsageError

ROOT = pathlib.Path(trainer.__file__).resolve().parent.parent
# What setup.py reads and what it packs; tests and documents are of no use to a service.
_FILES = ('setup.py', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE')
# What Python, editors and tools leave beside the sources.
_LEFT_OUT = shutil.ignore_patterns('__pycache__', '*.py[cod]', '*~', '*.orig', '*.rej', '.*')
_EPOCH = 315532800  # 1980-01-01: a time of 0 is more than some archive tools take


def build(folder: str) -> str:
    """Builds the sdist of this checkout and returns its path; the checkout itself is left alone.

    Args:
        folder: for the result and the files of the build; there already.

    Raises:
        UsageError: this is no checkout, setuptools is missing, or setup.py fails.
    """
    if not (ROOT / 'setup.py').exists():
        raise UsageError(f'{ROOT} has no setup.py: the package is installed; submit from a checkout of its sources')
    sources, output = pathlib.Path(folder) / 'sources', pathlib.Path(folder) / 'dist'
    shutil.copytree(ROOT / 'trainer', sources / 'trainer', ignore=_LEFT_OUT)
    for name in _FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, sources / name)
    command = [sys.executable, 'setup.py', '--quiet', 'sdist', '--formats=gztar', f'--dist-dir={output}']
    done = subprocess.run(command, cwd=sources, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ['no output'])[-1]
        remedy = f'; {sys.executable} -m pip install "setuptools<81" installs it' if "'setuptools'" in last else ''
        raise UsageError(f'the package could not be built: {last}{remedy}')
    (path,) = output.iterdir()
    storage.write_atomic(str(path), _normalise(storage.read_bytes(str(path))))
    return str(path)


def digest(path: str) -> str:
    """The start of the file's SHA-256, enough to tell packages apart."""
    return hashlib.sha256(storage.read_bytes(path)).hexdigest()[:12]


def _normalise(data: bytes) -> bytes:
    """A .tar.gz with its members in order of their names, and no times, owners or umask of the machine."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data), mode='r:gz') as source:
        # gzip itself writes the time too.
        with gzip.GzipFile(fileobj=packed, mode='wb', filename='', mtime=_EPOCH) as stream:
            with tarfile.open(fileobj=stream, mode='w', format=tarfile.PAX_FORMAT) as target:
                for member in sorted(source.getmembers(), key=lambda member: member.name):
                    member.mtime, member.uid, member.gid, member.uname, member.gname = _EPOCH, 0, 0, '', ''
                    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                    member.pax_headers = {}
                    target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return packed.getvalue()
