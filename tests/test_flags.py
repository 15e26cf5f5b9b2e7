from __future__ import annotations

import dataclasses
import re

import pytest

import trainer
from trainer import flags
from trainer.config import Config, DataConfig, RunConfig, section_classes
from trainer.errors import UsageError

EXPORT = '--mode=export'  # the mode that needs no paths


def message_of(*argv: str) -> str:
    with pytest.raises(UsageError) as raised:
        flags.parse(argv)
    assert '\n' not in str(raised.value)
    return str(raised.value)


def test_flags_set_their_fields() -> None:
    config = flags.parse(
        ['--train_data_paths=a*,b', '--eval_data_paths', 'c', '--hidden1=300', '--learning_rate', '1e-3', '--max_steps=5000']
    )
    assert config.data == DataConfig(train_data_paths='a*,b', eval_data_paths='c')
    assert (config.model.hidden1, config.model.hidden2) == (300, 32)
    assert config.optimizer.learning_rate == 0.001
    assert config.loop.max_steps == 5000


def test_no_flags_give_the_defaults() -> None:
    assert flags.parse([EXPORT]) == Config(run=RunConfig(mode='export'))


@pytest.mark.parametrize('spelling', ['--job-dir=gs://b/o-1', '--job_dir=gs://b/o-1', '--job-dir gs://b/o-1'])
def test_underscores_and_dashes_are_the_same_in_names_only(spelling: str) -> None:
    assert flags.parse([EXPORT, *spelling.split()]).run.job_dir == 'gs://b/o-1'


def test_values_keep_their_equals_signs_and_may_be_negative_or_empty() -> None:
    config = flags.parse([EXPORT, '--model_params=a=1,b-c=2', '--warm_start_from='])
    assert config.model.model_params == 'a=1,b-c=2'
    assert config.loop.warm_start_from == ''
    assert message_of(EXPORT, '--learning_rate', '-1') == '--learning_rate=-1.0: expected more than 0'


def test_last_of_a_repeated_flag_counts() -> None:
    assert flags.parse([EXPORT, '--job-dir=a', '--job_dir=b']).run.job_dir == 'b'


@pytest.mark.parametrize(
    ('argument', 'expected'),
    [
        ('--debug', True),
        ('--debug=true', True),
        ('--debug=True', True),
        ('--debug=1', True),
        ('--nodebug', False),
        ('--debug=false', False),
        ('--debug=0', False),
    ],
)
def test_spellings_of_true_and_false(argument: str, expected: bool) -> None:
    assert flags.parse([EXPORT, argument]).run.debug is expected


def test_true_by_default_is_turned_off() -> None:
    assert flags.parse([EXPORT]).eval.export_best is True
    assert flags.parse([EXPORT, '--noexport_best']).eval.export_best is False
    assert flags.parse([EXPORT, '--noexport-best']).eval.export_best is False
    assert flags.parse([EXPORT, '--export_best=false']).eval.export_best is False


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--learing_rate=1'], 'unknown flag --learing_rate; did you mean --learning_rate?'),
        (['--learing-rate', '1'], 'unknown flag --learing_rate; did you mean --learning_rate?'),
        (['--batch=3'], 'unknown flag --batch; did you mean --batch_size?'),
        (['--max_step=3'], 'unknown flag --max_step; did you mean --max_steps?'),
        (['--zzz'], 'unknown flag --zzz; --help lists them'),
        (['-x'], 'unknown flag -x; --help lists them'),
        (['train'], "unexpected argument 'train': every setting is a flag, --name=value"),
        (['--batch_size=ten'], "--batch_size: expected a whole number, got 'ten'"),
        (['--batch_size=1e3'], "--batch_size: expected a whole number, got '1e3'"),
        (['--batch_size='], "--batch_size: expected a whole number, got ''"),
        (['--batch_size=value: 3'], "--batch_size: expected a whole number, got 'value: 3'"),
        (['--learning_rate=fast'], "--learning_rate: expected a number, got 'fast'"),
        (['--learning_rate'], '--learning_rate needs a value: --learning_rate=X'),
        (['--max_steps', '--debug'], '--max_steps needs a value: --max_steps=N'),
        (['--mode'], '--mode needs a value: --mode=TEXT'),
        (['--debug=maybe'], "--debug: expected true or false, got 'maybe'"),
        (['--debug', 'maybe'], "--debug: expected true or false, got 'maybe'"),
        (['--nodebug=1'], '--nodebug takes no value'),
        (['--batch_size=0'], '--batch_size=0: expected at least 1'),
        (['--optimizer=adma'], 'expected one of sgd, momentum, adagrad, adam, ftrl, lars; did you mean adam?'),
        (['--mode=train'], '--train_data_paths is needed by --mode=train: give files, globs or folders'),
    ],
)
def test_wrong_flag_is_one_line(argv: list[str], message: str) -> None:
    got = message_of(*argv) if argv == ['--mode=train'] else message_of(EXPORT, *argv)
    assert got.endswith(message)


def test_flag_names_are_all_the_settings() -> None:
    fields = {field.name for section in section_classes().values() for field in dataclasses.fields(section)}
    assert set(flags.flag_names()) == fields
    assert {'train_data_paths', 'job_dir', 'hidden1', 'metric_tag'} <= fields


@pytest.mark.parametrize('width', [80, 100, 120])
def test_help_shows_every_flag_within_the_width(width: int) -> None:
    lines = flags.format_help(width).splitlines()
    assert max(map(len, lines)) <= width
    shown = [match[1] for line in lines if (match := re.match(r'  --(?:\[no\])?(\w+)', line))]
    assert shown == [*flags.flag_names(), 'help', 'version']


def test_help_shows_groups_units_defaults_and_choices() -> None:
    text = flags.format_help(120)
    assert 'Optimizer: how the weights move\n  --optimizer TEXT' in text
    assert '[default 100 examples]' in text
    assert '  --[no]export_best        export the best model so far to <output>/best/ [default true]\n' in text
    assert '[auto, maximize, minimize; default auto]' in text


def test_help_and_version_print_and_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('COLUMNS', '90')
    for argument, printed in (
        ('--help', flags.format_help(90)),
        ('-h', flags.format_help(90)),
        ('--version', f'trainer {trainer.__version__}\n'),
    ):
        with pytest.raises(SystemExit) as ended:
            flags.parse([argument])
        assert ended.value.code == 0
        assert capsys.readouterr().out == printed
