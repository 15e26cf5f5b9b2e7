"""CSV files to records: kinds of columns, classes, splits, what is bad, and that `--dataset=csv` trains on the result."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import REPOSITORY
from trainer import convert, convert_csv, records
from trainer.config import DataConfig
from trainer.datasets import get_dataset
from trainer.errors import DataError, UsageError
from trainer.table_rows import Settings
from trainer.tables import INT, Column

HEADER = 'id,age,height (m),town,zip,note,species'


def make_rows(count):
    for number in range(count):
        age = '' if number % 10 == 3 else str(number % 50)
        species = ('cat', 'dog', 'owl')[number % 3]
        yield f'r{number},{age},{1.5 + number % 7 / 10:.1f},"town, {number % 4}",0{number % 9}123,,{species}'


def write(path, lines, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(lines) + '\n', **options)
    return str(path)


def make_settings(**changes):
    return Settings(**{'label': 'species', 'key': 'id', 'shards': 3, 'eval_shards': 1, 'eval_share': 0.2, **changes})


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / 'animals.csv', [HEADER, *make_rows(200)])


def read_all(folder, content, split):
    examples = []
    for name in content['splits'][split]['files']:
        for record in records.scan(f'{folder}/{name}'):
            features = tf.train.Example.FromString(record.payload).features.feature
            examples.append({key: next(iter(value.ListFields()))[1].value[0] for key, value in features.items()})
    return examples


def test_every_row_is_in_one_split_with_the_values_that_it_has(table, tmp_path):
    content = convert_csv.convert(table, str(tmp_path / 'out'), make_settings(), workers=2)
    train, held_out = (read_all(tmp_path / 'out', content, split) for split in ('train', 'eval'))
    assert sorted(row['key'] for row in train + held_out) == sorted(f'r{number}'.encode() for number in range(200))
    assert 20 < len(held_out) < 60
    (row,) = [row for row in train + held_out if row['key'] == b'r5']
    assert row == {'key': b'r5', 'age': 5, 'height_m': np.float32(2.0), 'town': b'town, 1', 'zip': b'05123', 'species': 2}
    (row,) = [row for row in train + held_out if row['key'] == b'r3']
    assert 'age' not in row
    sizes = [facts['records'] for facts in content['splits']['train']['files'].values()]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == len(train)


def test_columns_are_described(table, tmp_path):
    content = convert_csv.convert(table, str(tmp_path / 'out'), make_settings(), workers=1)
    train = read_all(tmp_path / 'out', content, 'train')
    ages = [row['age'] for row in train if 'age' in row]
    assert content['moments']['age'] == pytest.approx([np.mean(ages), np.std(ages)])
    assert content['schema']['age'] == {'dtype': 'int64', 'shape': [], 'default': round(np.mean(ages))}
    assert content['schema']['height_m'] == {'dtype': 'float', 'shape': []}
    assert sorted(content['vocabularies']['town']) == [f'town, {number}' for number in range(4)]
    assert sorted(content['vocabularies']) == ['town', 'zip']  # zeros in front: codes, not numbers
    assert content['columns']['height_m'] == {'column': 'height (m)', 'kind': 'float', 'missing': 0}
    assert content['columns']['age']['missing'] == 20
    assert 'note' not in content['schema']  # it has no value at all
    assert (content['classes'], content['label']) == (['cat', 'dog', 'owl'], 'species')


def test_new_rows_move_no_old_one(table, tmp_path):
    longer = write(tmp_path / 'longer.csv', [HEADER, *make_rows(300)])
    keys = []
    for path, out in ((table, 'old'), (longer, 'new')):
        content = convert_csv.convert(path, str(tmp_path / out), make_settings(), workers=1)
        keys.append({row['key'] for row in read_all(tmp_path / out, content, 'eval')})
    assert keys[0] == {key for key in keys[1] if int(key[1:]) < 200}


@pytest.mark.parametrize(
    ('text', 'options'),
    [
        ('a,b\n1,x\n2,y\n', {}),
        ('a;b\n1;x\n2;y\n', {}),
        ('a\tb\r\n1\tx\r\n\r\n2\ty\r\n', {}),
        ('\ufeffa,b\n1,x\n2,y\n', {}),
        ('1,x\n2,y\n', {'columns': ('a', 'b')}),
        ('a b\n1 x\n2 y\n', {'delimiter': ' '}),
        ('a,b\n1,"x"\n"2",y', {}),
    ],
    ids=['plain', 'semicolon', 'tab', 'mark', 'no_header', 'space', 'quotes'],
)
@pytest.mark.parametrize('is_gzip', [False, True])
def test_dialects(tmp_path, text, options, is_gzip):
    path = tmp_path / 'table.csv'
    path.write_bytes(gzip.compress(text.encode()) if is_gzip else text.encode())
    settings = Settings(label='b', shards=1, eval_share=0, **options)
    content = convert_csv.convert(str(path), str(tmp_path / 'out'), settings, workers=1)
    assert sorted((row['a'], row['b']) for row in read_all(tmp_path / 'out', content, 'train')) == [(1, 0), (2, 1)]


def test_several_files_and_an_encoding(tmp_path):
    for number, town in enumerate(('Zürich', 'Genève')):
        write(tmp_path / f'{number}.csv', ['town,label', f'{town},{number}'], encoding='latin-1')
    settings = Settings(label='label', shards=1, eval_share=0, encoding='latin-1')
    content = convert_csv.convert(f'{tmp_path}/*.csv', str(tmp_path / 'out'), settings, workers=1)
    assert content['vocabularies']['town'] == ['Genève', 'Zürich']
    with pytest.raises(
        DataError, match=r"0.csv: byte 0xfc after 'town,label.nZ' is no utf-8; give --encoding, such as latin-1"
    ):
        convert_csv.convert(f'{tmp_path}/*.csv', str(tmp_path / 'x'), Settings(label='label', shards=1))


def test_bounds_make_classes_of_numbers(tmp_path):
    path = write(tmp_path / 'cars.csv', ['weight,mpg', '1,18.9', '2,19', '3,26.5', '4,27', '5,40'])
    settings = Settings(label='mpg', label_bounds=(19.0, 27.0), shards=1, eval_share=0)
    content = convert_csv.convert(path, str(tmp_path / 'out'), settings, workers=1)
    labels = {row['weight']: row['mpg'] for row in read_all(tmp_path / 'out', content, 'train')}
    assert labels == {1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert content['classes'] == ['below 19', '19 to 27', 'from 27']


BAD = ['r200,1,1.5,here', 'r201,x,1.5,here,1,,cat', 'r202,1,1.5,here,1,,', 'r203,1e999,1.5,here,1,,cat']


def test_bad_rows_are_listed_and_left_out(tmp_path):
    path = write(tmp_path / 'animals.csv', [HEADER, *make_rows(40), *BAD])
    settings = make_settings(types={'age': 'float'})
    content = convert_csv.convert(path, str(tmp_path / 'out'), settings, max_bad=4, workers=1)
    listed = (tmp_path / 'out' / 'bad_rows.txt').read_text().splitlines()
    assert listed == [
        f'{path}:42: 4 fields, the 7 columns are {HEADER.replace(",", ", ")}',
        f"{path}:43: column age is 'x', stated as float",
        f'{path}:44: column species, the label, is missing',
        f"{path}:45: column age is '1e999', stated as float",
    ]
    assert content['bad_rows'] == listed
    assert sum(split['records'] for split in content['splits'].values()) == 40
    with pytest.raises(DataError, match=r'at least 4 rows cannot be read, more than --max_bad=3; .*bad_rows.txt lists'):
        convert_csv.convert(path, str(tmp_path / 'other'), settings, max_bad=3, workers=1)
    # The same command with the smaller budget does not take what is there for well.
    with pytest.raises(DataError, match=r'at least 4 rows cannot be read, more than --max_bad=0'):
        convert_csv.convert(path, str(tmp_path / 'out'), settings, max_bad=0, workers=1)


@pytest.mark.parametrize(
    ('lines', 'settings', 'message'),
    [
        (
            [HEADER, *make_rows(9)],
            {'label': 'specie'},
            r'--label=specie: no such column; did you mean species\?; there are',
        ),
        ([HEADER, *make_rows(9)], {'label': ''}, r'--label: missing; expected the column to be told from the others: id, age'),
        ([HEADER, *make_rows(9)], {'drop': ('twn',)}, r'--drop=twn: no such column; did you mean town\?'),
        ([HEADER, *make_rows(9)], {'shards': 50}, r'train: \d rows cannot fill 50 shards; ask for fewer \(--shards\)'),
        (
            ['a,species', '1,cat', '2,cat'],
            {'key': '', 'shards': 1},
            r"--label=species: the column is 'cat' in every row; expected two classes",
        ),
        (
            ['a,species', *(f'1,{n}' for n in range(101))],
            {'key': '', 'shards': 1},
            r'has 101 numbers, too many for classes; --label_b',
        ),
        (['a,a,species', '1,2,cat'], {}, r"the header has 'a' twice; rename one, or is there no header\? Then give --columns"),
        (['a,,species', '1,2,cat'], {}, r'column 2 has no name in the header'),
        (
            ['a b,a-b,species', '1,2,cat', '1,2,dog'],
            {'key': '', 'shards': 1},
            r"columns 'a b' and 'a-b' would both be feature a_b; re",
        ),
        ([''], {}, r'table.csv: empty; expected a header and rows'),
        (['a,species', '1,"cat'], {'key': '', 'shards': 1}, r'in every row; expected two classes or more'),
        (['species', 'cat', 'dog'], {'key': '', 'shards': 1}, r'no column is left beside --label=species'),
    ],
)
def test_wrong_input_is_told(tmp_path, lines, settings, message):
    path = write(tmp_path / 'table.csv', lines)
    with pytest.raises((DataError, UsageError), match=message):
        convert_csv.convert(path, str(tmp_path / 'out'), make_settings(eval_share=0, **settings), workers=1)


def test_files_that_differ_are_told(tmp_path, table):
    other = write(tmp_path / 'other.csv', ['id,species', 'a,cat'])
    with pytest.raises(DataError, match=r'other.csv: the columns are id, species; in .*animals.csv they are id, age'):
        convert_csv.convert(f'{table},{other}', str(tmp_path / 'out'), make_settings())
    damaged = tmp_path / 'damaged.csv.gz'
    damaged.write_bytes(gzip.compress(b'id,age,species\n' + b'a,1,cat\n' * 9999)[:-40])
    with pytest.raises(DataError, match=r'damaged.csv.gz:\d+: the GZIP file is damaged'):
        convert_csv.convert(str(damaged), str(tmp_path / 'out'), make_settings())
    with pytest.raises(UsageError, match=r'--encoding=utf9: unknown encoding: utf9; expected utf-8, latin-1'):
        convert_csv.convert(table, str(tmp_path / 'out'), make_settings(encoding='utf9'))


def test_the_same_command_goes_on_and_a_complete_conversion_stays(table, tmp_path, monkeypatch):
    whole, out = tmp_path / 'whole', tmp_path / 'out'
    expected = convert_csv.convert(table, str(whole), make_settings(), workers=1)
    # What a run leaves that was killed after one shard.
    name = 'train-00001-of-00003.tfrecord'
    (out / '.progress').mkdir(parents=True)
    (out / name).write_bytes(b'x' * (whole / name).stat().st_size)
    (out / '.progress' / 'settings.json').write_text(json.dumps(expected['settings']))
    labels = {'labels': {'0': expected['splits']['train']['files'][name]['records']}}
    facts = {**expected['splits']['train']['files'][name], 'bad': [], **labels}
    (out / '.progress' / f'{name}.json').write_text(json.dumps(facts))
    content = convert_csv.convert(table, str(out), make_settings(), workers=1)
    assert (out / name).read_bytes()[:2] == b'xx'  # not written again
    assert content['splits']['train']['files'] == expected['splits']['train']['files']
    monkeypatch.setattr(convert_csv, 'Scan', None)  # would be needed to read a row
    assert convert_csv.convert(table, str(whole), make_settings(), workers=1) == expected
    with pytest.raises(DataError, match='made of other files or with other settings'):
        monkeypatch.undo()
        convert_csv.convert(table, str(whole), make_settings(drop=('town',)), workers=1)


@pytest.mark.parametrize(
    ('values', 'kind'),
    [
        (['1', '-2', ''], 'int'),
        (['1', '2.5', 'NA'], 'float'),
        (['1', '.5e3', 'nan'], 'float'),
        (['1', 'inf'], 'string'),
        (['1_000'], 'string'),
        (['007', '7'], 'string'),
        (['0.5', '0'], 'float'),
        (['1' * 19], 'float'),
        (['1', '2.5', 'x'], 'string'),
    ],
)
def test_kind_is_the_narrowest_that_holds_every_value(values, kind):
    column = Column('c')
    for value in values:
        column.see(value, is_held_out=False)
    assert column.kind == kind


def test_stated_string_keeps_what_else_is_no_value():
    column = Column('country', 'string')
    for value in ('NA', 'CH', ''):
        column.see(value, is_held_out=False)
    assert (column.vocabulary(), column.num_missing) == (['CH', 'NA'], 1)
    assert Column('n', INT).find_problem('2.5') == "column n is '2.5', stated as int"


@pytest.mark.slow
def test_a_model_learns_from_it_with_no_code(tmp_path):
    generator = np.random.RandomState(1)
    numbers = generator.normal(size=(600, 2))
    lines = [f'{a:.3f},{b:.3f},{"pq"[i % 2]},{("low", "high")[int(a + b > 0)]}' for i, (a, b) in enumerate(numbers)]
    path = write(tmp_path / 'table.csv', ['a,b,letter,level', *lines])
    out = tmp_path / 'out'
    command = ['csv', '--input', path, '--output', str(out), '--label', 'level', '--shards', '2', '--eval_shards', '1']
    assert convert.main(command) == 0
    dataset = get_dataset(DataConfig(dataset='csv', train_data_paths=f'{out}/train-*'))
    assert (dataset.classes, dataset.vocabularies) == (('high', 'low'), {'letter': (b'p', b'q')})
    flags = [f'--train_data_paths={out}/train-*', f'--eval_data_paths={out}/eval-*', f'--output_path={tmp_path}/run']
    program = [sys.executable, '-m', 'trainer.task', '--dataset=csv', '--model=dnn', '--max_steps=300', *flags]
    run = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads((tmp_path / 'run' / 'final_metrics.json').read_text())['accuracy'] > 0.93
