"""Whether there is a TPU, told within seconds."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import tensorflow as tf

# Of the TPU that this process's own machine has.
LOCAL = 'local'
_DEVICE_FILES = ('/dev/accel0', '/dev/vfio/0')
_PROBE_SECS = 5.0


@dataclasses.dataclass(frozen=True)
class System:
    """A TPU that answers."""

    name: str
    """For TPUClusterResolver: 'local', a grpc:// address, or the name of a Cloud TPU."""
    cores: int
    hosts: int
    """Machines that feed it."""

    @property
    def host_cores(self) -> int:
        """Cores of each host."""
        return self.cores // self.hosts


def find(name: str, environ: Mapping[str, str]) -> tuple[System | None, str]:
    """Looks for a TPU in the flag, the environment and on this machine; takes seconds at most.

    TensorFlow itself would resolve an address behind which nobody answers and then wait for hours.

    Args:
      name: of `--tpu`.
      environ: TPU_NAME, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS and TPU_CONFIG are read.

    Returns:
      The TPU and ''; or None and why there is none.
    """
    named = name or environ.get('TPU_NAME', '') or environ.get('KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS', '').split(',')[0]
    if not named and environ.get('TPU_CONFIG'):
        named = environ['TPU_CONFIG']
    has_chip = any(os.path.exists(path) for path in _DEVICE_FILES)
    if not named and not has_chip:
        return None, 'none named by --tpu or TPU_NAME, no device file'
    if named == LOCAL and not has_chip:
        return None, f'this machine has no TPU device file ({_DEVICE_FILES[0]})'
    if has_chip and not named.startswith('grpc://'):
        # The chips of a TPU VM are device files, and a name is that of the VM.
        return _ask(LOCAL, '')
    if named.startswith('grpc://'):
        return _reach(named, named)
    try:
        resolver = resolve(named)
        address = resolver.master()
    except Exception as error:  # the client of the TPU service raises what its HTTP library raises
        reason = ' '.join(str(error).split())[:200]
        return None, f'{named} is no grpc:// address, and as the name of a Cloud TPU it cannot be resolved ({reason})'
    return _reach(named, address)


def resolve(name: str) -> Any:
    """Returns the TPUClusterResolver of `System.name`."""
    # What the environment says in TPU_CONFIG is JSON, which the resolver reads there itself.
    return tf.distribute.cluster_resolver.TPUClusterResolver('' if name.startswith('{') else name)


def _reach(name: str, address: str) -> tuple[System | None, str]:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or '', parts.port or 8470), timeout=_PROBE_SECS).close()
    except (OSError, ValueError) as error:
        at = '' if name == address else f' at {address}'
        return None, f'{name} does not answer{at} ({error})'
    return _ask(name, address)


def _ask(name: str, address: str) -> tuple[System | None, str]:
    """Asks a TensorFlow server, or this machine's own runtime, for its devices."""
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=int(_PROBE_SECS * 1000))
    try:
        with tf.Graph().as_default(), tf.compat.v1.Session(address, config=config) as session:
            devices = [device.name for device in session.list_devices()]
    except tf.errors.OpError as error:
        waited = (
            f'nothing within {_PROBE_SECS:g} seconds' if isinstance(error, tf.errors.DeadlineExceededError) else error.message
        )
        return None, f'{name} listens, but is no TPU that works ({waited})'
    hosts = [re.sub(r'/device:TPU:\d+$', '', device) for device in devices if re.search(r'/device:TPU:\d+$', device)]
    if not hosts:
        return None, f'{name} has no TPU: TensorFlow finds {", ".join(devices)} there'
    return System(name, cores=len(hosts), hosts=len(set(hosts))), ''
