from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import tarfile

import pytest

import trainer
from tests.conftest import REPOSITORY
from trainer import sdist
from trainer.errors import UsageError


def test_the_package_is_whole_and_the_same_for_the_same_sources(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sdist.build(str(tmp_path / 'first'))
    monkeypatch.setenv('TZ', 'Asia/Tokyo')
    umask = os.umask(0o077)
    try:
        second = sdist.build(str(tmp_path / 'second'))
    finally:
        os.umask(umask)
    assert pathlib.Path(first).name == f'trainer-{trainer.__version__}.tar.gz'
    assert pathlib.Path(first).read_bytes() == pathlib.Path(second).read_bytes()
    assert sdist.digest(first) == hashlib.sha256(pathlib.Path(first).read_bytes()).hexdigest()[:12]
    with tarfile.open(first) as package:
        assert {member.mtime for member in package} == {315532800}
    modules = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / 'trainer').rglob('*.py')}
    others = {'setup.py', 'setup.cfg', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE', 'PKG-INFO'}
    assert list_package(first) == modules | others


def list_package(path: str) -> set[str]:
    """The files in an sdist but those in which setuptools describes it."""
    with tarfile.open(path) as package:
        names = {member.name.partition('/')[2] for member in package if member.isfile()}
    return {name for name in names if not name.startswith('trainer.egg-info/')}


def test_what_tools_leave_beside_the_sources_is_not_sent(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / 'checkout'
    (root / 'trainer' / '__pycache__').mkdir(parents=True)
    shutil.copy(REPOSITORY / 'setup.py', root)
    shutil.copy(REPOSITORY / 'MANIFEST.in', root)
    shutil.copy(REPOSITORY / 'trainer' / '__init__.py', root / 'trainer')
    for name in ('vocabulary.txt', 'a.py~', 'a.py.orig', 'a.pyc', '.a.py.swp', '__pycache__/a.cpython-311.pyc'):
        (root / 'trainer' / name).write_text('x')
    monkeypatch.setattr(sdist, 'ROOT', root)
    package = list_package(sdist.build(str(tmp_path / 'build')))
    assert {name for name in package if name.startswith('trainer/')} == {'trainer/__init__.py', 'trainer/vocabulary.txt'}


def test_a_package_that_cannot_be_built_says_why(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / 'checkout'
    (root / 'trainer').mkdir(parents=True)
    (root / 'setup.py').write_text('import no_such_package')
    monkeypatch.setattr(sdist, 'ROOT', root)
    with pytest.raises(UsageError) as error:
        sdist.build(str(tmp_path / 'build'))
    assert str(error.value) == "the package could not be built: ModuleNotFoundError: No module named 'no_such_package'"


def test_an_installed_package_has_no_sources_to_send(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdist, 'ROOT', tmp_path)
    with pytest.raises(UsageError) as error:
        sdist.build(str(tmp_path))
    assert str(error.value) == f'{tmp_path} has no setup.py: the package is installed; submit from a checkout of its sources'
