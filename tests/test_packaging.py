"""The package as others get it: the sdist, the wheel made from it, and the job files."""

from __future__ import annotations

import ast
import os
import pathlib
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
from typing import Any
from unittest import mock

import pytest
import yaml

import trainer
from tests.conftest import REPOSITORY
from trainer import flags

# What a working copy holds beside the sources.
GENERATED = {'__pycache__', 'build', 'dist', 'data', 'output'}
SHIPPED_FOLDERS = ('trainer', 'scripts', 'requirements', 'docs', 'tests')
SHIPPED_FILES = ('LICENSE', 'CHANGELOG.md', 'pyproject.toml', 'setup.py', 'MANIFEST.in', 'config.yaml', 'hptuning.yaml')


def run(*command: str, cwd: pathlib.Path, **environ: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_python_without_packages(folder: pathlib.Path) -> str:
    """A Python that has this one's setuptools and, like the one inside gcloud, nothing else."""
    venv.create(folder, with_pip=False)
    (site_packages,) = folder.glob('lib/python*/site-packages')
    import pkg_resources
    import setuptools

    for module in (setuptools, pkg_resources):
        source = pathlib.Path(module.__file__ or '').parent
        (site_packages / source.name).symlink_to(source)
    (site_packages / '_distutils_hack').symlink_to(pathlib.Path(setuptools.__file__).parent.parent / '_distutils_hack')
    return str(folder / 'bin' / 'python')


@pytest.fixture(scope='module')
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_python_without_packages(tmp_path_factory.mktemp('python') / 'env')
    for package in ('numpy', 'tensorflow'):
        assert subprocess.run([path, '-c', f'import {package}'], stderr=subprocess.DEVNULL, check=False).returncode != 0
    return path


@pytest.fixture(scope='module')
def sources(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the tree, so that building leaves nothing in it."""
    target = tmp_path_factory.mktemp('sources')
    for name in SHIPPED_FILES:
        shutil.copy(REPOSITORY / name, target)
    if (REPOSITORY / 'README.md').exists():
        shutil.copy(REPOSITORY / 'README.md', target)
    for name in SHIPPED_FOLDERS:
        if (REPOSITORY / name).exists():
            shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns(*GENERATED, '*.egg-info', '.*'))
    return target


@pytest.fixture(scope='module')
def sdist(python: str, sources: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built as gcloud does it."""
    folder = tmp_path_factory.mktemp('sdist')
    run(python, 'setup.py', 'sdist', '--dist-dir', str(folder), cwd=sources)
    (path,) = folder.iterdir()
    assert path.name == f'trainer-{trainer.__version__}.tar.gz'
    return path


def list_tree(root: pathlib.Path, names: tuple[str, ...]) -> set[str]:
    paths = [path for name in names for path in [root / name, *(root / name).rglob('*')]]
    return {path.relative_to(root).as_posix() for path in paths if path.is_file()}


def test_sdist_holds_all_of_the_tree(sdist: pathlib.Path, sources: pathlib.Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {member.name.split('/', 1)[1] for member in archive.getmembers() if member.isfile()}
    wanted = list_tree(sources, SHIPPED_FILES + SHIPPED_FOLDERS)
    assert wanted - packed == set()
    made_by_setuptools = {'PKG-INFO', 'setup.cfg', 'README.md'}
    assert {name for name in packed - wanted - made_by_setuptools if not name.startswith('trainer.egg-info/')} == set()
    assert {'trainer/task.py', 'trainer/models/__init__.py', 'scripts/train_local', 'config.yaml'} <= packed


def test_scripts_keep_their_executable_bit(sdist: pathlib.Path) -> None:
    with tarfile.open(sdist) as archive:
        modes = {pathlib.Path(m.name).name: m.mode for m in archive.getmembers() if '/scripts/' in m.name and m.isfile()}
    assert {name for name, mode in modes.items() if not name.startswith('_') and not mode & 0o100} == set()
    assert {'train_local', 'test', 'convert_mnist'} <= set(modes)


@pytest.mark.slow
def test_installed_elsewhere_every_module_and_data_file_is_there(
    sdist: pathlib.Path, python: str, tmp_path: pathlib.Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / 'unpacked')
    (unpacked,) = (tmp_path / 'unpacked').iterdir()
    installed = tmp_path / 'installed'
    run(python, 'setup.py', '-q', 'build', '--build-lib', str(installed), cwd=unpacked)
    assert list_tree(installed, ('trainer',)) == {
        name for name in list_tree(REPOSITORY, ('trainer',)) if '__pycache__' not in name
    }
    # Imported by the Python of this test, which has TensorFlow, from a folder where the repository is out of sight.
    code = (
        'import importlib, pkgutil, trainer\n'
        'for module in pkgutil.walk_packages(trainer.__path__, "trainer."):\n'
        '    if "._dropped." not in module.name: importlib.import_module(module.name)\n'
        'print(trainer.__file__)'
    )
    printed = run(
        sys.executable, '-P' if sys.version_info >= (3, 11) else '-s', '-c', code, cwd=tmp_path, PYTHONPATH=str(installed)
    )
    assert printed.splitlines()[-1] == str(installed / 'trainer' / '__init__.py')


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in (REPOSITORY / 'trainer').rglob('*.py')}
    assert {folder for folder in folders if not (folder / '__init__.py').exists()} == set()


def read_setup() -> dict[str, Any]:
    with mock.patch('setuptools.setup') as setup:
        runpy.run_path(str(REPOSITORY / 'setup.py'))
    return setup.call_args.kwargs


def test_tensorflow_is_an_extra_and_no_requirement() -> None:
    kwargs = read_setup()
    names = [re.split(r'[<>=; ]', requirement)[0] for requirement in kwargs['install_requires']]
    assert names == ['cloudml-hypertune', 'google-cloud-storage', 'google-crc32c', 'pyyaml', 'tqdm']
    assert set(kwargs['extras_require']) == {'tensorflow', 'images', 'sweep', 'test', 'dev'}
    assert kwargs['python_requires'] == '>=3.9,<3.14'
    assert kwargs['version'] == trainer.__version__


def test_setup_imports_only_setuptools_and_the_standard_library() -> None:
    tree = ast.parse((REPOSITORY / 'setup.py').read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or '' for node in imported if isinstance(node, ast.ImportFrom)}
    assert names == {'pathlib', 're', 'setuptools'}


@pytest.mark.parametrize('name', ['tf215.txt', 'tf221.txt'])
def test_every_requirement_is_pinned(name: str) -> None:
    lines = [line for line in (REPOSITORY / 'requirements' / name).read_text().splitlines() if not line.startswith('#')]
    assert [line for line in lines if not re.fullmatch(r'[\w.-]+==[\w.]+( ; .+)?', line)] == []
    pinned = {line.split('==')[0] for line in lines}
    kwargs = read_setup()
    requirements = [*kwargs['install_requires'], *(name for extra in kwargs['extras_require'].values() for name in extra)]
    other = 'python_version >= "3.12"' if name == 'tf215.txt' else 'python_version < "3.12"'
    wanted = {re.split(r'[<>=; ]', line)[0].lower() for line in requirements if other not in line}
    assert wanted | {'mlxtend'} <= pinned


# The job files: what they name exists, and what gcloud takes for text only is text.


@pytest.fixture(params=['config.yaml', 'hptuning.yaml'])
def training_input(request: pytest.FixtureRequest) -> dict:
    return yaml.safe_load((REPOSITORY / request.param).read_text())['trainingInput']


def test_versions_are_quoted(training_input: dict) -> None:
    assert training_input['runtimeVersion'] == '2.11'
    assert training_input['pythonVersion'] == '3.7'


def test_args_of_the_job_files_are_legal_flags(training_input: dict) -> None:
    assert all(isinstance(argument, str) for argument in training_input['args'])
    config = flags.parse([*training_input['args'], '--job-dir=gs://BUCKET/job'])
    assert config.data.train_data_paths == 'gs://BUCKET/mnist/train-*'
    assert config.loop.max_steps == 5000


def test_tuned_parameters_are_flags_that_take_their_bounds() -> None:
    spec = yaml.safe_load((REPOSITORY / 'hptuning.yaml').read_text())['trainingInput']['hyperparameters']
    assert (spec['goal'], spec['hyperparameterMetricTag']) == ('MAXIMIZE', 'accuracy')
    bounds = {p['parameterName']: (p['type'], p['minValue'], p['maxValue'], p['scaleType']) for p in spec['params']}
    assert bounds == {
        'hidden1': ('INTEGER', 40, 400, 'UNIT_LINEAR_SCALE'),
        'hidden2': ('INTEGER', 5, 250, 'UNIT_LINEAR_SCALE'),
        'learning_rate': ('DOUBLE', 1e-4, 0.5, 'UNIT_LOG_SCALE'),
    }
    for name, (_, low, high, _) in bounds.items():
        for value in (low, high):
            flags.parse(['--mode=export', f'--{name}={value}'])


def test_modules_are_found() -> None:
    assert {module.name for module in pkgutil.iter_modules(trainer.__path__)} >= {'config', 'flags', 'models', 'task'}


@pytest.mark.parametrize('script', ['convert_mnist', 'convert_autompg', 'submit_vertex', 'submit_ai_platform'])
def test_script_without_what_it_needs_says_so_in_one_line(script: str) -> None:
    command = [sys.executable, '-S', str(REPOSITORY / 'scripts' / script)]  # -S: no packages
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"No module named '\w+' for .*: python -m pip install -e \. installs what is needed\n", done.stderr)
