from __future__ import annotations

import hashlib
import io
import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests import pictures
from trainer import convert, convert_images, manifest, picture_files, records
from trainer.errors import DataError, UsageError


def encode(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def rgb(height=30, width=40, number=0):
    return Image.fromarray(pictures.make_picture(height, width, number))


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(rgb(), 'JPEG', quality=95, exif=exif)


def decode(picture):
    return np.asarray(Image.open(io.BytesIO(picture.jpeg))).astype(int)


JPEG = encode(rgb(), 'JPEG', quality=90)
ODD = {
    'cmyk.jpg': encode(rgb().convert('CMYK'), 'JPEG'),
    'deep.png': encode(Image.fromarray((np.arange(1200, dtype=np.uint16) * 54).reshape(30, 40)), 'PNG'),
    'grey.jpg': encode(rgb().convert('L'), 'JPEG'),
    'palette.png': encode(rgb().convert('P'), 'PNG'),
    'plain.png': encode(rgb(), 'PNG'),
    'clear.png': encode(rgb().convert('RGBA'), 'PNG'),
    'photo.webp': encode(rgb(), 'WEBP'),
    'turned.jpg': turned(6),
    'progressive.jpg': encode(rgb(), 'JPEG', progressive=True),
}
BAD = {
    'empty.jpg': b'',
    'cut.jpg': JPEG[: len(JPEG) // 2],
    'no_end.jpg': JPEG[:-2],
    'text.jpg': b'hello',
    'cut.png': ODD['plain.png'][:90],
}


def write_folder(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


@pytest.fixture
def photos(tmp_path):
    """20 plain pictures in each of 2 classes."""
    files = {f'{c}/{i}.jpg': encode(rgb(30, 40, 20 * n + i), 'JPEG') for n, c in enumerate(('cat', 'dog')) for i in range(20)}
    return write_folder(tmp_path / 'photos', files)


def read_records(folder, split):
    payloads = [r.payload for path in sorted(folder.glob(f'{split}-*')) for r in records.scan(str(path))]
    return [{k: t.numpy() for k, t in pictures.WIRE.parse([payload]).items()} for payload in payloads]


def make_settings(**changes):
    return convert_images.Settings(**{'shards': 3, 'eval_shards': 1, 'eval_share': 0.2, **changes})


def test_every_picture_is_in_one_split_with_its_folder_as_class(photos, tmp_path):
    out = tmp_path / 'out'
    content = convert_images.convert(photos, str(out), make_settings(), workers=2)
    found = [record for split in ('train', 'eval') for record in read_records(out, split)]
    assert sorted(r['path'][0].decode() for r in found) == sorted(f'{c}/{i}.jpg' for c in ('cat', 'dog') for i in range(20))
    for record in found:
        path = record['path'][0].decode()
        assert content['classes'][record['label'][0]] == path.split('/')[0]
        assert record['image'][0] == (tmp_path / 'photos' / path).read_bytes()
    assert content['pictures'] == {'shortest_side': 30, 'longest_side': 40, 'largest_square': 30}
    assert json.loads((out / manifest.NAME).read_text()) == content
    for split in ('train', 'eval'):
        assert sum(content['splits'][split]['classes'].values()) == content['splits'][split]['records']
        for name, facts in content['splits'][split]['files'].items():
            assert hashlib.sha256((out / name).read_bytes()).hexdigest() == facts['sha256']
    counts = [facts['records'] for facts in content['splits']['train']['files'].values()]
    assert len(counts) == 3 and max(counts) - min(counts) <= 1
    assert 2 <= content['splits']['eval']['records'] <= 14


def test_new_files_move_no_old_one_to_another_split(photos):
    sources, _ = convert_images.find_sources(photos)
    old, new = (convert_images.split_by_hash(part, 0.3) for part in (sources[::2], sources))
    for split in ('train', 'eval'):
        assert set(old[split]) <= set(new[split])


@pytest.mark.parametrize('name', ODD)
def test_odd_files_become_rgb_or_grey_jpegs_that_tensorflow_decodes(name):
    picture = picture_files.read_picture(ODD[name])
    decoded = tf.io.decode_jpeg(picture.jpeg, channels=3).numpy().astype(int)
    assert decoded.shape == (picture.height, picture.width, 3)
    assert picture.is_unchanged == (name in ('grey.jpg', 'progressive.jpg'))
    if name == 'deep.png':
        expected = np.repeat((np.arange(1200) * 54 // 257).reshape(30, 40, 1), 3, axis=-1)
    elif name == 'turned.jpg':
        expected = np.rot90(pictures.make_picture(30, 40), -1)
    elif name == 'grey.jpg':
        expected = np.repeat(np.asarray(rgb().convert('L'))[..., None], 3, axis=-1)
    else:
        expected = pictures.make_picture(30, 40)
    limit = 40 if name == 'palette.png' else 8
    assert np.abs(decoded - expected).mean() < limit


def test_transparent_pixels_become_white():
    image = rgb().convert('RGBA')
    image.putalpha(0)
    assert decode(picture_files.read_picture(encode(image, 'PNG'))).min() >= 253


def test_stored_pictures_are_resized_by_the_shorter_side_and_cut():
    data = encode(rgb(60, 90), 'JPEG')
    assert picture_files.read_picture(data, resize=30)[1:3] == (45, 30)
    assert picture_files.read_picture(data, resize=200)[1:3] == (90, 60)
    assert picture_files.read_picture(data, resize=24, crop=True)[1:3] == (24, 24)
    assert picture_files.read_picture(data, resize=100, crop=True)[1:3] == (100, 100)
    assert picture_files.read_picture(turned(6), resize=15)[1:3] == (15, 20)
    cut = decode(picture_files.read_picture(data, resize=30, crop=True))
    # The central square of 90 x 60 spans columns 15 to 74.
    assert cut[15, [0, -1], 0] == pytest.approx([16 * 255 / 90, 74 * 255 / 90], abs=6)


@pytest.mark.parametrize('name', BAD)
def test_bad_files_are_named_with_the_reason(name):
    with pytest.raises(DataError) as caught:
        picture_files.read_picture(BAD[name])
    if name == 'empty.jpg':
        assert str(caught.value) == 'the file is empty'


def test_bad_files_within_the_budget_are_listed_and_left_out(photos, tmp_path):
    write_folder(tmp_path / 'photos', {f'cat/{name}': data for name, data in {**BAD, **ODD}.items()})
    out = tmp_path / 'out'
    content = convert_images.convert(photos, str(out), make_settings(), max_bad=len(BAD), workers=2)
    listed = (out / convert_images.BAD_FILES).read_text().splitlines()
    assert sorted(line.split(': ')[0] for line in listed) == sorted(f'{photos}/cat/{name}' for name in BAD)
    assert content['bad_files'] == listed
    assert sum(split['records'] for split in content['splits'].values()) == 40 + len(ODD)


def test_too_many_bad_files_fail_the_run_and_are_listed(photos, tmp_path, capsys):
    write_folder(tmp_path / 'photos', {f'cat/{name}': data for name, data in BAD.items()})
    out = tmp_path / 'out'
    command = [
        'images',
        '--input',
        f'{photos}/*/*',
        '--output',
        str(out),
        '--shards',
        '2',
        '--eval_share',
        '0',
        '--max_bad',
        '1',
    ]
    assert convert.main(command) == 1
    error = capsys.readouterr().err
    assert 'files cannot be read, more than --max_bad=1' in error and 'bad_files.txt' in error
    assert not (out / manifest.NAME).exists()
    assert len((out / convert_images.BAD_FILES).read_text().splitlines()) >= 2


def test_the_same_command_goes_on_and_a_complete_conversion_stays(photos, tmp_path):
    whole, out = tmp_path / 'whole', tmp_path / 'out'
    expected = convert_images.convert(photos, str(whole), make_settings(), workers=1)
    # What a run leaves that was killed after one shard.
    name = 'train-00001-of-00003.tfrecord'
    progress = out / '.progress'
    progress.mkdir(parents=True)
    (out / name).write_bytes(b'x' * (whole / name).stat().st_size)
    sources, _ = convert_images.find_sources(photos)
    (progress / 'settings.json').write_text(json.dumps(convert_images._describe_conversion(sources, make_settings())))
    facts = {
        **expected['splits']['train']['files'][name],
        'bad': [],
        'shortest_side': 30,
        'longest_side': 40,
        'largest_square': 30,
        'labels': {'0': 1},
    }
    (progress / f'{name}.json').write_text(json.dumps(facts))
    content = convert_images.convert(photos, str(out), make_settings(), workers=1)
    assert (out / name).read_bytes()[:2] == b'xx'  # not written again
    assert content['splits']['train']['files'] == expected['splits']['train']['files']
    assert not progress.exists()
    (tmp_path / 'photos' / 'cat' / '0.jpg').write_bytes(b'')  # would be found bad
    assert convert_images.convert(photos, str(whole), make_settings(), workers=1) == expected
    with pytest.raises(DataError, match=r'holds other records \(.*made of other files or with other settings'):
        convert_images.convert(photos, str(whole), make_settings(quality=50), workers=1)


def test_wrong_input_is_told(photos, tmp_path):
    for patterns, message in [
        (f'{photos}/*/*.gif', 'matches no file'),
        (f'{photos}/cat/*', r"all 20 files are in \['cat'\]; expected a folder for each class"),
    ]:
        with pytest.raises(DataError, match=message):
            convert_images.convert(patterns, str(tmp_path / 'out'), make_settings())
    with pytest.raises(DataError, match=r'train: \d+ files cannot fill 99 shards; ask for fewer \(--shards\)'):
        convert_images.convert(photos, str(tmp_path / 'out'), make_settings(shards=99))
    with pytest.raises(UsageError, match=r'--eval_share=1.5: expected 0 to 0.9'):
        make_settings(eval_share=1.5)
