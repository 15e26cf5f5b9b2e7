"""`tensorflow.python.tpu.tpu_embedding`: the names TPUEstimator imports, each of which refuses to be used.

TPU embedding tables are out of scope: 3,000 lines that only a TPU can run. TPUEstimator without an
`embedding_config_spec` never touches them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tensorflow._api.v2.compat.v1.tpu import experimental as tpu_experimental

from trainer.errors import UsageError

_CLASSES = (
    'AdagradParameters',
    'AdamParameters',
    'FeatureConfig',
    'FtrlParameters',
    'MomentumParameters',
    'ProximalAdagradParameters',
    'RMSPropParameters',
    'StochasticGradientDescentParameters',
    'TPUEmbedding',
    'TableConfig',
)
# Those that users know as tf.compat.v1.tpu.experimental.*.
_PUBLIC_CLASSES = ('AdagradParameters', 'AdamParameters', 'FtrlParameters', 'StochasticGradientDescentParameters')


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises the UsageError that says TPU embedding is not there."""
    del args, kwargs
    raise UsageError(
        'TPU embedding (embedding_config_spec of TPUEstimator) needs TensorFlow 2.15, later ones dropped it: '
        'install TensorFlow 2.15, or make the embedding an ordinary variable of the model'
    )


class _Refusing(type):
    """A class that can be imported and named, but neither called nor tested against.

    TPUEstimator tests the user's optimization parameters with isinstance before it makes anything; that test would
    otherwise end in a message about types.
    """

    __call__ = refuse
    __instancecheck__ = refuse


globals().update({name: _Refusing(name, (), {'__module__': __name__}) for name in _CLASSES})


def supply_public_names() -> None:
    """Puts the dropped names back into tf.compat.v1.tpu.experimental, so that they too say why not."""
    for name in _PUBLIC_CLASSES:
        if not hasattr(tpu_experimental, name):
            setattr(tpu_experimental, name, globals()[name])
