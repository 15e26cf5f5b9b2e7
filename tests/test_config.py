from __future__ import annotations

import dataclasses
import json
import re

import pytest

from trainer import config as config_module
from trainer.config import (
    Config,
    DataConfig,
    EvalConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TuningConfig,
    section_classes,
)
from trainer.errors import UsageError

DATA = DataConfig(train_data_paths='train', eval_data_paths='eval', predict_data_paths='predict')


def message_of(make_config, *args, **kwargs) -> str:
    with pytest.raises(UsageError) as raised:
        make_config(*args, **kwargs)
    assert raised.value.exit_code == 2
    assert '\n' not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ('section', 'values', 'message'),
    [
        (DataConfig, {'batch_size': 0}, '--batch_size=0: expected at least 1'),
        (DataConfig, {'batch_size': -5}, '--batch_size=-5: expected at least 1'),
        (DataConfig, {'eval_batch_size': 0}, '--eval_batch_size=0: expected at least 1'),
        (DataConfig, {'cache_memory_share': 0.0}, '--cache_memory_share=0.0: expected more than 0 and at most 1'),
        (DataConfig, {'cache_memory_share': 1.5}, '--cache_memory_share=1.5: expected more than 0 and at most 1'),
        (DataConfig, {'max_corrupt_records': -1}, '--max_corrupt_records=-1: expected at least 0'),
        (DataConfig, {'shuffle_buffer': 0}, '--shuffle_buffer=0: expected at least 1'),
        (DataConfig, {'cache': 'disk'}, '--cache=disk: expected one of auto, off, memory'),
        (ModelConfig, {'hidden1': 0}, '--hidden1=0: expected at least 1'),
        (OptimizerConfig, {'learning_rate': 0.0}, '--learning_rate=0.0: expected more than 0'),
        (OptimizerConfig, {'learning_rate': float('nan')}, '--learning_rate=nan: expected a finite number'),
        (OptimizerConfig, {'learning_rate': float('inf')}, '--learning_rate=inf: expected a finite number'),
        (OptimizerConfig, {'momentum': 1.0}, '--momentum=1.0: expected at least 0 and less than 1'),
        (
            OptimizerConfig,
            {'optimizer': 'adma'},
            'expected one of sgd, momentum, adagrad, adam, ftrl, lars; did you mean adam?',
        ),
        (LoopConfig, {'max_steps': 0}, '--max_steps=0: expected at least 1'),
        (LoopConfig, {'steps_per_loop': -1}, '--steps_per_loop=-1: expected at least 0'),
        (LoopConfig, {'max_steps': True}, '--max_steps: expected a whole number, got True'),
        (LoopConfig, {'max_steps': 10.0}, '--max_steps: expected a whole number, got 10.0'),
        (LoopConfig, {'max_steps': '10'}, "--max_steps: expected a whole number, got '10'"),
        (EvalConfig, {'export_best': 1}, '--export_best: expected true or false, got 1'),
        (EvalConfig, {'eval_secs': -0.5}, '--eval_secs=-0.5: expected at least 0'),
        (EvalConfig, {'continuous_eval_timeout_secs': 0}, '--continuous_eval_timeout_secs=0: expected more than 0'),
        (RunConfig, {'seed': 2**31}, '--seed=2147483648: expected at least 0 and at most 2147483647'),
        (RunConfig, {'mode': 'trian'}, 'did you mean train?'),
        (TuningConfig, {'metric_tag': None}, '--metric_tag: expected text, got None'),
    ],
)
def test_illegal_value_names_flag_value_and_range(section, values, message) -> None:
    assert message in message_of(section, **values)
    assert message_of(section, **values).startswith(f'--{next(iter(values))}')


def test_whole_number_is_a_fine_float() -> None:
    assert OptimizerConfig(learning_rate=1).learning_rate == 1


@pytest.mark.parametrize(
    ('mode', 'flag'),
    [
        ('train_and_eval', 'train_data_paths'),
        ('train_and_eval', 'eval_data_paths'),
        ('train', 'train_data_paths'),
        ('eval', 'eval_data_paths'),
        ('continuous_eval', 'eval_data_paths'),
        ('predict', 'predict_data_paths'),
    ],
)
def test_mode_needs_its_paths(mode: str, flag: str) -> None:
    run = RunConfig(mode=mode)
    assert Config(run=run, data=DATA).run.mode == mode
    message = message_of(Config, run=run, data=dataclasses.replace(DATA, **{flag: ' , '}))
    assert message.startswith(f'--{flag} is needed by --mode={mode}: give files, globs or folders')


def test_export_needs_no_paths() -> None:
    assert Config(run=RunConfig(mode='export')).data.train_data_paths == ''


def test_every_mode_says_what_it_reads() -> None:
    assert tuple(config_module.PATHS_OF_MODE) == config_module.MODES


def test_early_stopping_needs_evaluations() -> None:
    patience = EvalConfig(early_stopping_steps=100)
    assert Config(data=DATA, eval=patience).eval.early_stopping_steps == 100
    assert message_of(Config, data=DATA, eval=dataclasses.replace(patience, eval_steps=0)) == (
        '--early_stopping_steps=100: --eval_steps=0 and --eval_secs=0 never evaluate before the end,'
        ' so nothing would stop it; expected one of them above 0'
    )
    assert Config(data=DATA, eval=dataclasses.replace(patience, eval_steps=0, eval_secs=30)).eval.eval_secs == 30
    assert message_of(Config, run=RunConfig(mode='train'), data=DATA, eval=patience) == (
        '--early_stopping_steps=100: --mode=train never evaluates, so nothing would stop it;'
        ' expected --mode=train_and_eval, or 0'
    )


@pytest.mark.parametrize(('save_steps', 'eval_steps'), [(0, 1000), (500, 1000), (1000, 1000)])
def test_legal_relations_of_saving_and_evaluating(save_steps: int, eval_steps: int) -> None:
    loop = LoopConfig(save_checkpoints_steps=save_steps)
    assert Config(data=DATA, loop=loop, eval=EvalConfig(eval_steps=eval_steps)).loop == loop


@pytest.mark.parametrize(('save_steps', 'eval_steps'), [(2000, 1000), (300, 1000)])
def test_evaluation_needs_a_checkpoint_of_its_step(save_steps: int, eval_steps: int) -> None:
    loop, evaluation = LoopConfig(save_checkpoints_steps=save_steps), EvalConfig(eval_steps=eval_steps)
    assert message_of(Config, data=DATA, loop=loop, eval=evaluation) == (
        f'--save_checkpoints_steps={save_steps}: an evaluation needs a checkpoint of its step;'
        f' expected 0 or a divisor of --eval_steps={eval_steps}'
    )
    assert Config(run=RunConfig(mode='train'), data=DATA, loop=loop, eval=evaluation).loop == loop
    assert Config(data=DATA, loop=loop, eval=EvalConfig(eval_steps=0)).loop == loop


def test_settings_survive_json() -> None:
    config = Config(
        data=DATA, optimizer=OptimizerConfig(learning_rate=1e-3), eval=EvalConfig(export_best=False), run=RunConfig(seed=7)
    )
    text = json.dumps(config.to_dict())
    assert Config.from_dict(json.loads(text)) == config
    expected = {'optimizer': 'sgd', 'learning_rate': 0.001, 'momentum': 0.9, 'adam_beta1': 0.9}
    assert expected.items() <= json.loads(text)['optimizer'].items()


def test_settings_left_out_take_their_defaults() -> None:
    assert Config.from_dict({'run': {'mode': 'export'}}) == Config(run=RunConfig(mode='export'))


def test_unknown_settings_are_errors() -> None:
    assert message_of(Config.from_dict, {'modell': {}}).startswith(
        "unknown section 'modell' of settings; expected one of run, data"
    )
    assert message_of(Config.from_dict, {'model': {'hiden1': 3}}) == 'unknown setting model.hiden1; did you mean hidden1?'


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DATA.batch_size = 3  # type: ignore[misc]


def test_every_setting_has_a_unique_name_a_help_and_a_legal_default() -> None:
    names = [field.name for section in section_classes().values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names)), 'two sections would make the same flag'
    for section in section_classes().values():
        assert re.fullmatch(r'[A-Z]\w+: .+\.', section.__doc__ or ''), section
        section()  # checks the defaults
        for field in dataclasses.fields(section):
            assert not field.name.startswith('no'), 'would be taken for the negation of a flag'
            assert field.metadata['help'], field.name
            assert not field.metadata['help'].endswith('.'), field.name
            assert field.type == type(field.default).__name__, field.name
