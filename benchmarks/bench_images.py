"""Pictures per CPU-second and per second of the input pipelines: JPEG to batches of 128 x 224 x 224 x 3.

    python -m pip install simplejpeg; python -m pip install --no-deps scikit-image
    python benchmarks/bench_input.py images [--rounds 3] [--secs 4] [--save benchmarks/results/images_....md]

Pictures are cut from the photographs that scikit-image ships, at random, to 500 x 375 pixels (quality 90), in 16 TFRecord
shards, and once more at 224 x 224. Every run is a process of its own, all with the same settings of the allocator (memory that
is freed is kept: batches of 77 MB of float32 would cost page faults each time). All pipelines of a table do the same work: a
random window (Szegedy et al. 2014), resized by the same kernel, mirrored or not; of those stored at 224 x 224 only decoding.

  limit    libjpeg-turbo alone, by simplejpeg in as many Python threads as there are processors: whole pictures, nothing else
  naive    files listed and read, decoded, cut and resized one at a time
  codelab  records parsed, decoded, cut and resized by a parallel map, then shuffled as pictures, batched
  newest   the algorithm of tensorflow/tpu's ResNet input, written anew: whole pictures decoded, then cut
  fused    the same as its release 1.15 had it: only the window is decoded
  ours     this package's input_fn
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import bench_input
from benchmarks.measure import compare, describe_machine, run_child

SIZE, BATCH, NUM_SHARDS = 224, 128, 16
MEANS, DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTOGRAPHS = ('astronaut.png', 'chelsea.png', 'coffee.png', 'motorcycle_left.png', 'retina.jpg', 'rocket.jpg')
ALLOCATOR = {'MALLOC_TRIM_THRESHOLD_': str(1 << 30), 'MALLOC_MMAP_THRESHOLD_': str(1 << 30)}
# Table: pipelines, what ours is compared with. A name is pipeline, output and kernel.
TABLES = {
    '500 x 375, bilinear': (
        'limit',
        *(
            f'{name}:{kind}:bilinear'
            for kind in ('float32', 'uint8')
            for name in ('naive', 'codelab', 'newest', 'fused', 'ours')
        ),
    ),
    '500 x 375, bicubic': (
        'limit',
        *(f'{name}:{kind}:bicubic' for kind in ('float32', 'uint8') for name in ('newest', 'fused', 'ours')),
    ),
    'stored at 224 x 224': (
        'limit',
        *('codelab:float32:none', 'codelab:uint8:none', 'ours:float32:none', 'ours:uint8:none', 'memory:uint8:none'),
    ),
}


def write_pictures(folder: pathlib.Path, count: int) -> None:
    """Writes `count` JPEGs of 500 x 375 to `folder`/files, and both sets of shards with their manifests."""
    import numpy as np
    from PIL import Image

    from trainer import convert_images

    package = importlib.util.find_spec('skimage')
    assert package is not None and package.origin, 'scikit-image, which ships the photographs, is not installed'
    data = pathlib.Path(package.origin).parent / 'data'
    photographs = [Image.open(data / name).convert('RGB') for name in PHOTOGRAPHS]
    random = np.random.RandomState(1)
    for index in range(count):
        photograph = photographs[index % len(photographs)]
        width = int(min(photograph.width, photograph.height * 4 / 3) * random.uniform(0.6, 1.0))
        height = width * 3 // 4
        left, top = random.randint(photograph.width - width + 1), random.randint(photograph.height - height + 1)
        box = (left, top, left + width, top + height)
        place = f'{index % len(photographs):02d}/{index:05d}.jpg'
        for name, size in (('files', (500, 375)), ('small', (SIZE, SIZE))):
            path = folder / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            photograph.crop(box).resize(size, Image.BICUBIC).save(path, quality=90)
    settings = convert_images.Settings(shards=NUM_SHARDS, eval_share=0.0)
    for name in ('files', 'small'):
        convert_images.convert(
            str(folder / name / '*' / '*.jpg'), str(folder / f'{name}_shards'), settings, max_bad=0, workers=0
        )


def make_ours(files: Sequence[str], *, method: str, cache: str, is_float: bool) -> Any:
    """Our input_fn's dataset; float32 made on the host, for the comparison alone: otherwise the device does it."""
    import tensorflow as tf

    from trainer import images, inputs
    from trainer.config import DataConfig
    from trainer.datasets import get_dataset

    settings = {'augment': 'off'} if method == 'none' else {'augment': 'crop', 'resize_method': method}
    config = DataConfig(
        dataset='images', train_data_paths=','.join(files), cache=cache, shuffle_buffer=1024, image_size=SIZE, **settings
    )
    dataset = inputs.make_input_fn(files, get_dataset(config), training=True, global_batch_size=BATCH, seed=1, config=config)()
    if not is_float:
        return dataset
    normalized = dataset.map(
        lambda features, labels: ({'image': images.normalize(features['image'], (MEANS, DEVIATIONS))}, labels)
    )
    return normalized.prefetch(tf.data.AUTOTUNE)


def make_peer(files: Sequence[str], name: str, *, method: str, is_float: bool) -> Any:
    """One of the others."""
    import tensorflow as tf

    wanted = {'image': tf.io.FixedLenFeature((), tf.string), 'label': tf.io.FixedLenFeature((), tf.int64)}

    def decode(encoded: tf.Tensor) -> tf.Tensor:
        if method == 'none':
            image = tf.ensure_shape(tf.io.decode_jpeg(encoded, channels=3), [SIZE, SIZE, 3])
            return finish(image)
        shape = tf.io.extract_jpeg_shape(encoded)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            min_object_covered=0.1,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        (top, left, _), (height, width, _) = tf.unstack(begin), tf.unstack(size)
        if name == 'fused':
            image = tf.image.decode_and_crop_jpeg(encoded, tf.stack([top, left, height, width]), channels=3)
        else:
            image = tf.image.crop_to_bounding_box(tf.io.decode_jpeg(encoded, channels=3), top, left, height, width)
        image = tf.image.random_flip_left_right(tf.image.resize(image, [SIZE, SIZE], method))
        return finish(tf.ensure_shape(image, [SIZE, SIZE, 3]))

    def finish(image: tf.Tensor) -> tf.Tensor:
        if is_float:
            return (tf.cast(image, tf.float32) - [255 * mean for mean in MEANS]) / [255 * one for one in DEVIATIONS]
        return tf.cast(tf.clip_by_value(tf.cast(image, tf.float32), 0.0, 255.0) + 0.5, tf.uint8) if method != 'none' else image

    def parse(serialized: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        parsed = tf.io.parse_single_example(serialized, wanted)
        return {'image': decode(parsed['image'])}, parsed['label']

    if name == 'naive':

        def read(path: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            label = tf.strings.to_number(tf.strings.split(path, os.sep)[-2], tf.int64)
            return {'image': decode(tf.io.read_file(path))}, label

        return tf.data.Dataset.from_tensor_slices(list(files)).shuffle(len(files)).repeat().map(read).batch(BATCH, True)
    records = tf.data.Dataset.from_tensor_slices(list(files)).shuffle(len(files))
    if name == 'codelab':
        pictures = records.interleave(tf.data.TFRecordDataset, cycle_length=16, num_parallel_calls=tf.data.AUTOTUNE)
        pictures = pictures.map(parse, num_parallel_calls=tf.data.AUTOTUNE).repeat().shuffle(2048)
        return pictures.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    records = records.interleave(tf.data.TFRecordDataset, cycle_length=16, num_parallel_calls=tf.data.AUTOTUNE)
    pictures = records.shuffle(1024).repeat().map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = False
    options.threading.max_intra_op_parallelism = 1
    options.threading.private_threadpool_size = 48
    return pictures.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE).with_options(options)


def measure(name: str, folder: str, *, is_small: bool, secs: float) -> dict[str, float]:
    """Draws batches for `secs` seconds in this process; pictures per CPU-second and per second."""
    files = sorted(map(str, pathlib.Path(folder).glob(f'{"small" if is_small else "files"}/*/*.jpg')))
    if name == 'limit':
        return measure_limit(files, secs)
    import tensorflow as tf

    pipeline, kind, method = name.split(':')
    shards = sorted(map(str, pathlib.Path(folder).glob(f'{"small" if is_small else "files"}_shards/train-*')))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        if pipeline in ('ours', 'memory'):
            cache = 'memory' if pipeline == 'memory' else 'off'
            dataset = make_ours(shards, method=method, cache=cache, is_float=kind == 'float32')
        else:
            dataset = make_peer(files if pipeline == 'naive' else shards, pipeline, method=method, is_float=kind == 'float32')
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        features, labels = iterator.get_next()
        assert features['image'].shape == (BATCH, SIZE, SIZE, 3) and features['image'].dtype.name == kind
        draw = session.make_callable(tf.group(features['image'].op, labels.op))
        session.run(iterator.initializer)
        bench_input.draw_for(draw, secs / 2)
        cpu, clock = bench_input.cpu_secs(), time.perf_counter()
        count = bench_input.draw_for(draw, secs) * BATCH
        return {'per_cpu_sec': count / (bench_input.cpu_secs() - cpu), 'per_sec': count / (time.perf_counter() - clock)}


def measure_limit(files: Sequence[str], secs: float) -> dict[str, float]:
    """The same of decoding alone."""
    import concurrent.futures

    import simplejpeg

    encoded = [pathlib.Path(path).read_bytes() for path in files[:512]]
    threads = os.cpu_count() or 1

    def decode(first: int) -> int:
        end, count = time.perf_counter() + secs, 0
        while time.perf_counter() < end:
            simplejpeg.decode_jpeg(encoded[(first + count * threads) % len(encoded)])
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        cpu, clock = bench_input.cpu_secs(), time.perf_counter()
        count = sum(pool.map(decode, range(threads)))
        return {'per_cpu_sec': count / (bench_input.cpu_secs() - cpu), 'per_sec': count / (time.perf_counter() - clock)}


def describe(title: str, results: dict[str, list[dict[str, float]]]) -> list[str]:
    """A Markdown table: medians, and what ours is to each, by the clock, with the least and greatest of a round."""
    lines = [
        f'## {title}',
        '',
        '| pipeline | output | pictures/s | per CPU-second | ours, uint8, to it | ours, float32, to it |',
        '|---|---|---|---|---|---|',
    ]
    mine = {
        kind: rounds for name, rounds in results.items() for kind in ('uint8', 'float32') if name.startswith(f'ours:{kind}')
    }
    for name, rounds in results.items():
        pipeline, _, rest = name.partition(':')
        medians = {key: statistics.median(result[key] for result in rounds) for key in rounds[0]}
        ratios = [
            compare([one['per_sec'] for one in mine[kind]], [one['per_sec'] for one in rounds]) for kind in ('uint8', 'float32')
        ]
        kind = rest.partition(':')[0] or '-'
        lines.append(
            f'| {pipeline} | {kind} | {medians["per_sec"]:,.0f} | {medians["per_cpu_sec"]:,.0f} | {" | ".join(ratios)} |'
        )
    return [*lines, '']


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark, or one measurement of it as a child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--pictures', type=int, default=2048, help='of the set')
    parser.add_argument('--rounds', type=int, default=3, help='runs of each pipeline')
    parser.add_argument('--secs', type=float, default=4.0, help='seconds of a run that count, after half as many')
    parser.add_argument('--tables', nargs='+', choices=TABLES, default=list(TABLES), help='which tables')
    parser.add_argument('--save', default='', help='also write the report to this file')
    parser.add_argument('--child', help=argparse.SUPPRESS)
    parser.add_argument('--folder', help=argparse.SUPPRESS)
    parser.add_argument('--small', action='store_true', help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.child:
        print(json.dumps(measure(flags.child, flags.folder, is_small=flags.small, secs=flags.secs)))
        return
    os.environ.update(ALLOCATOR)
    results: dict[str, dict[str, list[dict[str, float]]]]
    results = {table: {name: [] for name in TABLES[table]} for table in flags.tables}
    with tempfile.TemporaryDirectory(prefix='bench-images-') as folder:
        write_pictures(pathlib.Path(folder), flags.pictures)
        num_bytes = statistics.mean(path.stat().st_size for path in pathlib.Path(folder).glob('files/*/*.jpg'))
        for _ in range(flags.rounds):
            for table, names in results.items():
                small = ['--small'] if table.startswith('stored') else []
                for name, rounds in names.items():
                    arguments = ['--child', name, '--folder', folder, '--secs', str(flags.secs), *small]
                    rounds.append(run_child(__file__, arguments, timeout_secs=600))
                    print(table, name, json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    report = io.StringIO()
    print('# Input pipelines, pictures', '', sep='\n', file=report)
    print(f'`python benchmarks/bench_input.py images {" ".join(argv)}`', '', sep='\n', file=report)
    print(
        f'{describe_machine()}; load {os.getloadavg()[0]:.1f} at the end. {flags.pictures:,} pictures of {num_bytes / 1e3:.0f} '
        f'kB; {flags.rounds} rounds, interleaved: medians, and of ratios also the least and the greatest of a round. Each run '
        f'is a process of its own, {flags.secs:g} s after {flags.secs / 2:g} s of warming up; CPU is user + system of the '
        'whole process.',
        '',
        sep='\n',
        file=report,
    )
    for table, names in results.items():
        print(*describe(table, names), sep='\n', file=report)
    print('```json', json.dumps(results), '```', sep='\n', file=report)
    print(report.getvalue())
    if flags.save:
        pathlib.Path(flags.save).write_text(report.getvalue())


if __name__ == '__main__':
    main(sys.argv[1:])
