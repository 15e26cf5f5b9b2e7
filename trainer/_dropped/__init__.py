"""What TensorFlow 2.16 deleted and tensorflow-estimator 2.15.0 still imports, written anew and put under the old names.

Only `trainer.compat` imports this package, on TensorFlow >= 2.16 alone. docs/tensorflow_versions.md has the reasons.
"""

from __future__ import annotations

import importlib
import sys

from tensorflow.python.util import tf_export

from trainer._dropped import estimator_training, session_support, tpu_embedding, tpu_embedding_gradient

_MODULES = {
    'tensorflow.python.distribute.estimator_training': estimator_training,
    'tensorflow.python.tpu.session_support': session_support,
    'tensorflow.python.tpu.tpu_embedding': tpu_embedding,
    'tensorflow.python.tpu.tpu_embedding_gradient': tpu_embedding_gradient,
}


def supply() -> None:
    """Registers every dropped module and name; what TensorFlow has of its own stays."""
    for name, module in _MODULES.items():
        parent, _, child = name.rpartition('.')
        # The parent's attribute is what `from tensorflow.python.tpu import session_support` reads.
        setattr(importlib.import_module(parent), child, sys.modules.setdefault(name, module))
    _supply_export_name()
    tpu_embedding.supply_public_names()


def _supply_export_name() -> None:
    """Lets `@estimator_export` label symbols: tf_export lost the name and its rows in the two attribute tables."""
    if hasattr(tf_export, 'ESTIMATOR_API_NAME'):
        return
    attributes = type(tf_export.API_ATTRS[tf_export.TENSORFLOW_API_NAME])
    tf_export.ESTIMATOR_API_NAME = 'estimator'
    tf_export.API_ATTRS['estimator'] = attributes('_estimator_api_names', '_estimator_api_constants')
    tf_export.API_ATTRS_V1['estimator'] = attributes('_estimator_api_names_v1', '_estimator_api_constants_v1')
    tf_export.SUBPACKAGE_NAMESPACES.append('estimator')
