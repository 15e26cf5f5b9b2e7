"""Whether there is a TPU: against real sockets and a real TensorFlow server."""

from __future__ import annotations

import socket
import time

import pytest
import tensorflow as tf

from trainer import tpu_system
from trainer.tpu_system import System


def test_nobody_at_the_address_is_known_at_once():
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(('127.0.0.1', 0))
        address = f'grpc://127.0.0.1:{taken.getsockname()[1]}'
        found, problem = tpu_system.find(address, {})
    assert (found, problem.startswith(f'{address} does not answer (')) == (None, True)


def test_silent_listener_is_given_seconds(monkeypatch):
    monkeypatch.setattr(tpu_system, '_PROBE_SECS', 1.0)
    started = time.monotonic()
    with socket.create_server(('127.0.0.1', 0)) as server:
        address = f'grpc://127.0.0.1:{server.getsockname()[1]}'
        found, problem = tpu_system.find('', {'KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS': f'{address},grpc://10.0.0.2:8470'})
    assert (found, problem) == (None, f'{address} listens, but is no TPU that works (nothing within 1 seconds)')
    assert 1 <= time.monotonic() - started < 10


@pytest.fixture(scope='module')
def server():
    return tf.distribute.Server.create_local_server()


def test_server_without_a_tpu_says_what_it_has(server):
    found, problem = tpu_system.find('', {'TPU_NAME': server.target})
    assert found is None
    assert problem == f'{server.target} has no TPU: TensorFlow finds /job:localhost/replica:0/task:0/device:CPU:0 there'


@pytest.mark.parametrize(('hosts', 'cores'), [(1, 8), (4, 32)])
def test_cores_and_hosts_are_counted(server, monkeypatch, hosts, cores):
    class Device:
        def __init__(self, name):
            self.name = name

    names = [f'/job:worker/replica:0/task:{host}/device:CPU:0' for host in range(hosts)]
    names += [f'/job:worker/replica:0/task:{core % hosts}/device:TPU:{core // hosts}' for core in range(cores)]
    names += ['/job:worker/replica:0/task:0/device:TPU_SYSTEM:0']
    monkeypatch.setattr(tf.compat.v1.Session, 'list_devices', lambda session: [Device(name) for name in names])
    system, problem = tpu_system.find(server.target, {})
    assert (system, problem, system.host_cores) == (System(server.target, cores, hosts), '', 8)


def test_no_tpu_says_where_it_looked():
    assert tpu_system.find('', {}) == (None, 'none named by --tpu or TPU_NAME, no device file')
    assert tpu_system.find('local', {}) == (None, 'this machine has no TPU device file (/dev/accel0)')


def test_name_that_the_service_does_not_know(monkeypatch):
    def resolve(name):
        raise OSError('Name or service not known')

    monkeypatch.setattr(tpu_system, 'resolve', resolve)
    expected = 'my-tpu is no grpc:// address, and as the name of a Cloud TPU it cannot be resolved (Name or service not known)'
    assert tpu_system.find('my-tpu', {}) == (None, expected)
