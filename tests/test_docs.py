"""What the documents and the job files name exists: flags, commands, scripts and files."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re

import pytest

from tests.conftest import REPOSITORY
from trainer import flags
from trainer.config import section_classes

DOCUMENTS = [
    *(REPOSITORY / name for name in ('README.md', 'CHANGELOG.md', 'config.yaml', 'hptuning.yaml')),
    *sorted((REPOSITORY / 'docs').glob('**/*.md')),
]

# Flags of programs that are not ours; legal where the program's name stands on the same line.
FOREIGN_FLAGS = {
    'gcloud': (
        'config', 'region', 'module-name', 'package-path', 'staging-bucket', 'distributed', 'worker-count', 'display-name',
        'parameter-server-count', 'evaluator-count', 'start-port', 'model-dir', 'json-instances', 'signature-name', 'project',
    ),
    'tensorboard': ('logdir', 'port', 'bind_all', 'load_fast'),
    'pip': ('no-deps', 'constraint', 'editable'),
    'pytest': ('durations',),
    'saved_model_cli': ('dir', 'tag_set', 'signature_def', 'input_examples', 'all'),
}  # fmt: skip


def read_our_flags() -> set[str]:
    booleans = {
        field.name
        for section in section_classes().values()
        for field in dataclasses.fields(section)  # type: ignore[arg-type]
        if isinstance(field.default, bool)
    }
    return {*flags.flag_names(), *(f'no{name}' for name in booleans), 'help', 'version'}


def read_tool_flags(path: pathlib.Path) -> set[str]:
    """The flags that a script of ours declares for itself."""
    return {name.replace('-', '_') for name in re.findall(r"add_argument\(\s*'--([\w-]+)'", path.read_text(encoding='utf-8'))}


# Scripts with flags of their own: legal where the script, or the module behind it, stands on the same line or over the table.
TOOL_FLAGS = {
    'convert': {
        flag
        for name in ('conversion.py', 'convert.py', 'convert_images.py', 'convert_csv.py')
        for flag in read_tool_flags(REPOSITORY / 'trainer' / name)
    },
    'trainer.inputs': read_tool_flags(REPOSITORY / 'trainer' / 'input_speed.py'),
    'launch': read_tool_flags(REPOSITORY / 'trainer' / 'launch.py'),
    'submit': read_tool_flags(REPOSITORY / 'trainer' / 'submit.py'),
    'preflight': {'tpu_topology'},
    'sweep': read_tool_flags(REPOSITORY / 'trainer' / 'sweep.py'),
    **{path.stem: read_tool_flags(path) for path in (REPOSITORY / 'benchmarks').glob('*.py')},
}


def lines_of(path: pathlib.Path) -> list[str]:
    """The lines of a document; those that a backslash continues are one, without comment signs in a YAML file."""
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.yaml':
        text = re.sub(r'^\s*# ?', '', text, flags=re.MULTILINE)
    return re.sub(r'\\\n\s*', ' ', text).splitlines()


def find_unknown_flags(line: str, heading: str = '') -> list[str]:
    legal = read_our_flags()
    for program, names in FOREIGN_FLAGS.items():
        legal |= {name.replace('-', '_') for name in names} if program in line else set()
    for tool, tool_names in TOOL_FLAGS.items():
        legal |= tool_names if tool in heading + line else set()
    return [flag for flag in re.findall(r'(?<![\w-])--(\w[\w-]*)', line) if flag.replace('-', '_') not in legal]


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def document(request: pytest.FixtureRequest) -> pathlib.Path:
    assert request.param.exists(), f'{request.param.name} is missing'
    return request.param


def test_every_flag_exists(document: pathlib.Path) -> None:
    unknown, heading = {}, ''
    for line in lines_of(document):
        is_table = line.startswith('|')
        heading = (heading or line) if is_table else ''
        unknown.update({flag: line.strip() for flag in find_unknown_flags(line, heading)})
    assert unknown == {}


def test_every_module_run_by_name_exists(document: pathlib.Path) -> None:
    modules = set(re.findall(r'(?:python\S* -m |--module-name[ =])(trainer[\w.]*)', '\n'.join(lines_of(document))))
    assert {module for module in modules if importlib.util.find_spec(module.rstrip('.')) is None} == set()


def test_every_file_of_ours_exists(document: pathlib.Path) -> None:
    folders = 'scripts|benchmarks|docs|requirements|tests|trainer|.ci'
    names = re.findall(rf'(?<![\w./-])((?:{folders})/[\w./-]*\w)', '\n'.join(lines_of(document)))
    assert {name for name in names if not (REPOSITORY / name).exists()} == set()


def test_every_link_to_a_file_leads_to_one(document: pathlib.Path) -> None:
    links = re.findall(r'\]\((?!https?://|#)([^)#\s]+)', document.read_text(encoding='utf-8'))
    assert {link for link in links if not (document.parent / link).exists()} == set()


@pytest.mark.parametrize(
    ('line', 'unknown'),
    [
        ('Set `--hidden3` or --job-dir.', ['hidden3']),
        ('gcloud ai-platform local train --module-name trainer.task -- --max-steps=1 --max_step=2', ['max_step']),
        ('use --module-name', ['module-name']),
        ('--noexport_best --nomode', ['nomode']),
        ('a -- b, a---b, |--|', []),
    ],
)
def test_the_check_of_flags_finds_unknown_ones(line: str, unknown: list[str]) -> None:
    assert find_unknown_flags(line) == unknown
