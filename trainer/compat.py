"""The same Estimator on every TensorFlow the package runs on; the one place that names it and tests versions.

* TensorFlow 2.15 ships Estimator. It is used as it is.
* TensorFlow 2.16 dropped it and moved `tf.keras` to Keras 3 (release notes of 2.16.1). The library behind it, the
  package tensorflow-estimator 2.15.0, still trains up to TensorFlow 2.21 once it has Keras 2 (tf-keras) and the few
  private modules TensorFlow deleted with it, which `trainer._dropped` supplies.
* Any other TensorFlow is a `UsageError` that lists the versions that work.

Importing this module, in this order: reads the installed versions, turns Keras 2 on, imports TensorFlow, supplies the
deleted modules. Neither Estimator nor Keras is loaded until it is first used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from trainer.errors import UsageError

NATIVE = (2, 15)
NEWEST = (2, 21)
# The one release that pip installs with protobuf 7 and that calls it with an argument 7 dropped (graph_io.write_graph).
PROTOBUF_7_BREAKS = (2, 20)
WORKING_VERSIONS = (
    'TensorFlow 2.15 (Python 3.9-3.11), or TensorFlow 2.16-2.21 (Python 3.10-3.13) with tf-keras of the same version '
    'and tensorflow-estimator 2.15.0'
)

_TENSORFLOW_PACKAGES = ('tensorflow', 'tensorflow-cpu', 'tensorflow-intel', 'tensorflow-macos', 'tensorflow-rocm')
_LEGACY_KERAS = 'TF_USE_LEGACY_KERAS'
_ESTIMATOR_MODULE = 'tensorflow_estimator.python.estimator.api._v1.estimator'


def installed_version(*packages: str) -> str | None:
    """Version of the first of `packages` (names as pip knows them) that is installed, or None."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def tensorflow_version() -> str:
    """Version of TensorFlow, read without importing it where its package metadata allows.

    Raises:
      UsageError: TensorFlow is not installed.
    """
    loaded = sys.modules.get('tensorflow')
    # A container may carry a TensorFlow of its own build, under a package name we do not know.
    version = loaded.__version__ if loaded else installed_version(*_TENSORFLOW_PACKAGES)
    if version is None:
        try:
            version = importlib.import_module('tensorflow').__version__
        except ImportError as error:
            raise UsageError(f'TensorFlow cannot be imported ({error}); install {WORKING_VERSIONS}') from error
    return version


def check_versions(tensorflow: str, estimator_package: str | None, *, has_tf_keras: bool, protobuf: str | None = None) -> bool:
    """Whether this TensorFlow ships Estimator itself.

    Args:
      tensorflow: version of TensorFlow, such as '2.15.1' or '2.17.0+nv24.8'.
      estimator_package: version of tensorflow-estimator, None when it is not installed.
      has_tf_keras: the package tf-keras is installed.
      protobuf: version of protobuf, None when it is not known.

    Returns:
      True on 2.15, False on the versions whose dropped modules must be supplied.

    Raises:
      UsageError: this combination does not work; the message names the one that does.
    """
    release = _release(tensorflow)
    if not NATIVE <= release <= NEWEST:
        raise UsageError(f'TensorFlow {tensorflow} is not supported; install {WORKING_VERSIONS}')
    if estimator_package is None or not estimator_package.startswith('2.15.'):
        found = f'is version {estimator_package}' if estimator_package else 'is not installed'
        raise UsageError(
            f'tensorflow-estimator {found}, TensorFlow {tensorflow} needs 2.15.0: '
            'pip install --no-deps tensorflow-estimator==2.15.0'
        )
    if release == PROTOBUF_7_BREAKS and protobuf is not None and _release(protobuf) >= (7, 0):
        raise UsageError(f'TensorFlow {tensorflow} cannot write a graph with protobuf {protobuf}: pip install "protobuf<7"')
    is_native = release == NATIVE
    if not is_native and not has_tf_keras:
        minor = f'{release[0]}.{release[1]}'
        raise UsageError(
            f'tf-keras is not installed, and Estimator on TensorFlow {tensorflow} needs its Keras 2: '
            f'pip install "tf-keras=={minor}.*"'
        )
    if is_native and not has_tf_keras and _legacy_keras_is_on():
        raise UsageError(
            f'{_LEGACY_KERAS}={os.environ[_LEGACY_KERAS]} without tf-keras keeps TensorFlow {tensorflow} from loading '
            f'Keras: unset {_LEGACY_KERAS}'
        )
    return is_native


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r'(\d+)\.(\d+)', version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _legacy_keras_is_on() -> bool:
    return os.environ.get(_LEGACY_KERAS) in ('1', 'true', 'True')


def _use_keras_2(tensorflow: Any) -> None:
    """Makes a TensorFlow >= 2.16 that was imported before us route tf.keras to tf-keras, like one imported after."""
    # tf.keras decides between Keras 2 and 3 at its first use; `from tensorflow.keras import` reads __path__.
    state = vars(tensorflow.keras)
    if state.get('_tfll_keras_version') == 'keras_3' or state.get('__name__') == 'keras._tf_keras.keras':
        raise UsageError(
            'tf.keras was used as Keras 3 before `trainer` was imported, and Estimator needs Keras 2: '
            f'import trainer.compat first, or set {_LEGACY_KERAS}=1 before Python starts'
        )
    spec = importlib.util.find_spec('tf_keras')
    assert spec is not None and spec.submodule_search_locations
    keras_dir = os.path.join(spec.submodule_search_locations[0], 'api', '_v2')
    if keras_dir not in tensorflow.__path__:
        tensorflow.__path__.insert(0, keras_dir)


def _load() -> tuple[Any, Any]:
    """The namespaces of Estimator and of Keras 2, both loaded at their first use."""
    is_native = check_versions(
        tensorflow_version(),
        installed_version('tensorflow-estimator'),
        has_tf_keras=importlib.util.find_spec('tf_keras') is not None,
        protobuf=installed_version('protobuf'),
    )
    if is_native:
        tensorflow = importlib.import_module('tensorflow')
        return tensorflow.compat.v1.estimator, tensorflow.keras

    # TensorFlow reads it while it is imported (it would load Keras 3 otherwise) and again at the first use of tf.keras.
    os.environ[_LEGACY_KERAS] = '1'
    tensorflow = importlib.import_module('tensorflow')
    _use_keras_2(tensorflow)
    importlib.import_module('trainer._dropped').supply()
    lazy_loader = importlib.import_module('tensorflow.python.util.lazy_loader')
    return lazy_loader.LazyLoader('estimator', globals(), _ESTIMATOR_MODULE), tensorflow.keras


estimator, keras = _load()


def get_session_config(made_estimator: Any) -> Any:
    """Returns the ConfigProto from which an Estimator makes its sessions; a change of it reaches the next one.

    The attribute is private, but tensorflow-estimator 2.15.0 is the last release there will be, and a RunConfig hands out
    copies only.
    """
    return made_estimator._session_config


@contextlib.contextmanager
def short_session_waits(secs: int = 1) -> Iterator[None]:
    """Sessions made meanwhile look every `secs` seconds whether the chief has initialized the variables.

    TensorFlow's 30 are the default of an argument that Estimator passes on nowhere; in them a chief trains a small model alone.
    """
    tensorflow = importlib.import_module('tensorflow')
    manager = tensorflow.compat.v1.train.SessionManager
    original = manager.__init__
    manager.__init__ = functools.partialmethod(original, recovery_wait_secs=secs)
    try:
        yield
    finally:
        manager.__init__ = original


@contextlib.contextmanager
def control_flow(*, in_functions: bool) -> Iterator[None]:
    """Loops and branches built meanwhile are functions (control flow version 2), or nodes of the graph itself (version 1)."""
    v1 = importlib.import_module('tensorflow').compat.v1
    switches = {True: v1.enable_control_flow_v2, False: v1.disable_control_flow_v2}
    before = v1.control_flow_v2_enabled()
    switches[in_functions]()
    try:
        yield
    finally:
        switches[before]()
