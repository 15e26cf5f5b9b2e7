"""SavedModels for serving: signatures from the schema that wrote the records.

`serving_default` takes named features (JSON), `examples` serialized tf.train.Examples, and `<feature>_bytes`, for a feature
that is a raw array, its bytes (base64 in JSON, `{"b64": ...}`). All give classes, probabilities and the key that came with
the instance.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any, Optional

import tensorflow as tf

from trainer import compat, storage
from trainer.datasets import Dataset
from trainer.models.classifier import KEY

DEFAULT_SIGNATURE = 'serving_default'
EXAMPLES = 'examples'
# No reader takes a folder of this name for an export: TensorFlow Serving wants numbers.
_UNFINISHED = 'temp-export'
_MODEL_FILE = 'saved_model.pb'


def export_model(estimator: Any, dataset: Dataset, directory: str, checkpoint: Optional[str] = None) -> str:
    """Writes `<directory>/<timestamp>/` and returns its path; `saved_model.pb`, without which no reader takes it, comes last.

    Args:
      estimator: an Estimator or TPUEstimator.
      dataset: its schema gives the signatures' inputs.
      directory: of all exports.
      checkpoint: path of one; None takes the latest.

    Raises:
      DataError: the folder cannot be written.
    """
    with _unfinished_folder(directory) as unfinished:
        written = estimator.export_saved_model(
            unfinished, make_serving_input_receiver_fn(dataset), checkpoint_path=checkpoint, as_text=False
        )
        path = written.decode() if isinstance(written, bytes) else written
        _name_signatures(path)
        timestamp = int(path.rstrip('/').rsplit('/', 1)[-1])
        # Estimator keeps its exports apart by the second, but knows of none that has been moved away.
        while storage.exists(storage.join(directory, str(timestamp))):
            timestamp += 1
        target = storage.join(directory, str(timestamp))
        storage.publish_tree(path, target, last=_MODEL_FILE)
    return target


@contextlib.contextmanager
def _unfinished_folder(directory: str) -> Iterator[str]:
    """Where an export is put together: beside the others, to be renamed, or, if they are remote, here, to be sent once."""
    if storage.is_remote(directory):
        with tempfile.TemporaryDirectory(prefix='trainer-export-') as folder:
            yield folder
        return
    unfinished = storage.join(directory, _UNFINISHED)
    storage.remove_tree(unfinished)
    storage.make_dirs(unfinished)
    yield unfinished
    storage.remove_tree(unfinished)


def make_serving_input_receiver_fn(dataset: Dataset) -> Any:
    """Returns the function that builds the receivers of all signatures in the graph of an export."""

    def serving_input_receiver_fn() -> Any:
        receiver = dataset.schema.serving_receiver(exclude=(dataset.label,))
        batch = tf.shape(next(iter(receiver.features.values())))[0]
        features = dict(receiver.features)
        # A key is passed through when there is one: feeding it is optional.
        if KEY not in features:
            features[KEY] = tf.compat.v1.placeholder_with_default(tf.fill([batch], ''), [None], name=KEY)
        key = {KEY: features[KEY]}
        alternatives: dict[str, Any] = {EXAMPLES: {EXAMPLES: receiver.serialized}}
        for name, tensor in receiver.wire.items():
            others = {other: value for other, value in features.items() if other != name}
            alternatives[f'{name}_bytes'] = {f'{name}_bytes': tensor, **others}
        model_features = dataset.features_fn(dict(receiver.features)) if dataset.features_fn else receiver.features
        return compat.estimator.export.ServingInputReceiver(
            {**model_features, **key}, {**features}, receiver_tensors_alternatives=alternatives
        )

    return serving_input_receiver_fn


def _name_signatures(path: str) -> None:
    """Renames what Estimator calls 'examples:serving_default' to 'examples'."""
    from tensorflow.core.protobuf import saved_model_pb2

    name = storage.join(path, _MODEL_FILE)
    model = saved_model_pb2.SavedModel.FromString(storage.read_bytes(name))
    for meta_graph in model.meta_graphs:
        signatures = meta_graph.signature_def
        for old in [key for key in signatures if key.endswith(f':{DEFAULT_SIGNATURE}')]:
            signatures[old.partition(':')[0]].CopyFrom(signatures[old])
            del signatures[old]
    storage.write_atomic(name, model.SerializeToString())
