"""Scores the samples of a GAN of digits by a classifier: how many does it recognise, and does it see all ten digits?

The classifier, `--model=convnet` trained on the same records, sees the pictures as it knows them, 28 pixels a side. Real digits
of the evaluation set, enlarged and reduced as the samples are, say what share could be expected at best.

    python benchmarks/score_samples.py --gan output_gan/model --classifier output_convnet/model \
      --eval_data_paths='data/mnist/eval-*' --grid samples.png

Prints one JSON line. Exits with 1 when fewer than `--min_share` of the samples are recognised.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

CONFIDENCE = 0.9
_SIDE = 28
_BATCH = 100


def main() -> int:
    import tensorflow as tf

    from benchmarks.measure import describe_machine

    args = _parse_args()
    noise = np.random.RandomState(args.seed).normal(size=(args.count, 100)).astype(np.float32)
    gan, classifier = _load(args.gan), _load(args.classifier)
    samples = np.concatenate([gan(noise=tf.constant(part), key=_keys(part))['image'] for part in _split(noise)])
    real, labels = _read_digits(args.eval_data_paths)
    size = samples.shape[1]
    enlarged = _resize(real.reshape(-1, _SIDE, _SIDE, 1), size, antialias=False)
    classes, confidences = _classify(classifier, samples)
    real_classes, real_confidences = _classify(classifier, enlarged)
    share = float(np.mean(confidences > CONFIDENCE))
    result = {
        'samples': args.count,
        'share_recognised': round(share, 4),
        'share_recognised_of_real': round(float(np.mean(real_confidences > CONFIDENCE)), 4),
        'accuracy_on_real': round(float(np.mean(real_classes == labels)), 4),
        'recognised_by_digit': np.bincount(classes[confidences > CONFIDENCE], minlength=10).tolist(),
        'machine': describe_machine(),
    }
    if args.grid:
        _write_grid(args.grid, samples)
    print(json.dumps(result))
    return 0 if share >= args.min_share else 1


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--gan', required=True, help='folder of exports of --model=dcgan, or one of them')
    parser.add_argument('--classifier', required=True, help='folder of exports of --model=convnet, or one of them')
    parser.add_argument('--eval_data_paths', required=True, help='digits that neither has been trained on')
    parser.add_argument('--count', type=int, default=1000, help='samples')
    parser.add_argument('--seed', type=int, default=1, help='of the noise')
    parser.add_argument('--min_share', type=float, default=0.8, help='of samples to be recognised with confidence over 0.9')
    parser.add_argument('--grid', default='', help='PNG to write, with the first 64 samples')
    return parser.parse_args()


def _load(path: str) -> Any:
    """The default signature of an export, the newest in a folder of several."""
    import tensorflow as tf

    from trainer import storage

    if not storage.exists(storage.join(path, 'saved_model.pb')):
        path = storage.join(path, max(name.rstrip('/') for name in storage.list_dir(path)))
    return tf.saved_model.load(path).signatures['serving_default']


def _read_digits(paths: str) -> tuple[np.ndarray, np.ndarray]:
    """[count, 784] uint8 and [count] int64."""
    import tensorflow as tf

    from trainer import data_files
    from trainer.datasets import MNIST

    files = data_files.resolve(paths, '--eval_data_paths')
    batch = MNIST.schema.parse(tf.constant(list(tf.data.TFRecordDataset(files).as_numpy_iterator())))
    return batch['image'].numpy(), batch['label'].numpy()


def _classify(classifier: Any, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Class and its probability, [count] each, of [count, size, size, 1] uint8."""
    import tensorflow as tf

    pixels = _resize(images, _SIDE, antialias=True).reshape(-1, _SIDE * _SIDE)
    probabilities = np.concatenate(
        [classifier(image=tf.constant(part), key=_keys(part))['probabilities'] for part in _split(pixels)]
    )
    return probabilities.argmax(axis=1), probabilities.max(axis=1)


def _resize(images: np.ndarray, size: int, *, antialias: bool) -> np.ndarray:
    import tensorflow as tf

    return np.concatenate(
        [
            tf.cast(tf.round(tf.image.resize(part, [size, size], antialias=antialias)), tf.uint8).numpy()
            for part in _split(images)
        ]
    )


def _write_grid(path: str, images: np.ndarray) -> None:
    import tensorflow as tf

    from trainer import storage
    from trainer.summaries import tile

    storage.write_atomic(path, tf.io.encode_png(tile(tf.constant(images), 8)[0]).numpy())


def _split(values: np.ndarray) -> list[np.ndarray]:
    return np.array_split(values, max(1, len(values) // _BATCH))


def _keys(values: np.ndarray) -> Any:
    import tensorflow as tf

    return tf.constant([''] * len(values))


if __name__ == '__main__':
    sys.exit(main())
