"""Pictures per second of `trainer.convert images`, against a plain copy of the same files.

    python -m pip install --no-deps scikit-image
    python benchmarks/bench_convert.py [--pictures 2000] [--rounds 5] [--save benchmarks/results/convert_....md]

The pictures are those of `bench_images.py`: JPEGs of 500 x 375 in class folders, in the page cache. Each run is a process of
its own and writes to an empty folder; the clock runs from the first file to the last, starts of processes included.

  copy     every file read and written, one at a time
  script   what a page of documentation shows: files read, Examples by TensorFlow, TFRecordWriter, nothing looked at
  stored   ours: each picture looked at to its end, stored as it is, in 16 shards with checksums and a manifest
  resized  ours, decoded and written anew with a shorter side of 256 pixels
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.bench_images import write_pictures
from benchmarks.measure import compare, describe_machine, run_child

KINDS = ('copy', 'script', 'stored', 'resized')
_TIMEOUT_SECS = 300


def run(kind: str, source: pathlib.Path, target: pathlib.Path) -> dict[str, float]:
    """Converts once; returns pictures per second and the bytes written."""
    from trainer import convert_images

    files = sorted(source.glob('*/*.jpg'))
    if kind == 'script':
        import tensorflow as tf  # not part of what is timed
    started = time.perf_counter()
    if kind == 'copy':
        for path in files:
            (target / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.parent.name / path.name)
    elif kind == 'script':
        target.mkdir()
        with tf.io.TFRecordWriter(str(target / 'train.tfrecord')) as writer:
            for path in files:
                feature = {
                    'image': tf.train.Feature(bytes_list=tf.train.BytesList(value=[path.read_bytes()])),
                    'label': tf.train.Feature(int64_list=tf.train.Int64List(value=[int(path.parent.name)])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    else:
        settings = convert_images.Settings(eval_share=0.0, resize=256 if kind == 'resized' else 0)
        convert_images.convert(str(source / '*' / '*.jpg'), str(target), settings)
    secs = time.perf_counter() - started
    written = sum(path.stat().st_size for path in target.rglob('*') if path.is_file())
    return {'per_sec': len(files) / secs, 'mb': written / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--pictures', type=int, default=2000)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--save', default='', help='Markdown file for the table')
    parser.add_argument('--child', nargs=3, metavar=('KIND', 'SOURCE', 'TARGET'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, source, target = args.child
        print(json.dumps(run(kind, pathlib.Path(source), pathlib.Path(target))))
        return 0
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        write_pictures(folder, args.pictures)
        for number in range(args.rounds):
            for kind in KINDS:
                target = folder / 'out'
                results[kind].append(
                    run_child(__file__, ['--child', kind, str(folder / 'files'), str(target)], timeout_secs=_TIMEOUT_SECS)
                )
                shutil.rmtree(target)
            print(f'round {number + 1} of {args.rounds} done', file=sys.stderr)
    rates = {kind: [result['per_sec'] for result in runs] for kind, runs in results.items()}
    lines = [
        f'{args.pictures:,} JPEGs of 500 x 375, {args.rounds} rounds in turn; {describe_machine()}',
        '',
        '| | pictures/s, median | MB written | of copy, median (lowest-highest) | of script |',
        '| --- | --- | --- | --- | --- |',
    ]
    for kind in KINDS:
        ratios = ' | '.join(compare(rates[kind], rates[other]) for other in ('copy', 'script'))
        lines.append(f'| {kind} | {statistics.median(rates[kind]):,.0f} | {results[kind][0]["mb"]:.1f} | {ratios} |')
    text = '\n'.join(lines)
    print(text)
    if args.save:
        pathlib.Path(args.save).write_text(
            f'# Converting pictures\n\n{text}\n\n`python benchmarks/bench_convert.py --rounds {args.rounds}`\n',
            encoding='utf-8',
        )
    return 0


if __name__ == '__main__':
    sys.exit(main())
