"""What a task of a cluster does for the others, training aside: it listens, watches them, and outlives those that need it."""

from __future__ import annotations

import logging
import time
from typing import Any

import tensorflow as tf

from trainer import distribute, stopping, watchdog
from trainer.cluster import CHIEF, PS, Cluster
from trainer.errors import DataError, Terminated
from trainer.experiment import Experiment

logger = logging.getLogger(__name__)

_CHIEF_POLL_SECS = 0.5
_PORT_SECS = 5.0


def serve(experiment: Experiment) -> None:
    """A parameter server: holds variables until training is over.

    Raises:
      Terminated: SIGTERM came; the chief was given time to save.
    """
    cluster, files = experiment.cluster, experiment.files
    server = start_server(experiment)
    logger.info('Serving variables as %s at %s', cluster.name, server.target)
    dog = make_watchdog(experiment)
    dog.start()
    with stopping.SigtermGuard() as sigterm:
        over = files.find_over(experiment.config.loop.max_steps)
        while over is None:
            if sigterm.is_set():
                _outlive_chief(cluster.spec[CHIEF][0])
                raise Terminated('SIGTERM; the variables were held while the chief saved them', sigterm.EXIT_CODE)
            time.sleep(files.poll_secs)
            dog.feed()
            over = files.find_over(experiment.config.loop.max_steps)
    dog.stop()
    logger.info('Training is over (%s)', over)


def await_end(experiment: Experiment, sigterm: stopping.SigtermGuard) -> None:
    """A worker with parameter servers that has seen the last step: stays until the chief says that training is over.

    Raises:
      Terminated: the chief was lost and has come back, with an earlier step, or stays away; or SIGTERM came.
    """
    if experiment.distribution.name != distribute.PARAMETER_SERVER:
        return
    files, (address,) = experiment.files, experiment.cluster.spec[CHIEF]
    connections, is_lost = watchdog.Connections(), False
    seen_at = looked_at = time.monotonic()
    while True:
        now = time.monotonic()
        if now - looked_at >= files.poll_secs:
            looked_at = now
            if files.find_over(experiment.config.loop.max_steps):
                return
        if sigterm.is_set():
            raise Terminated('SIGTERM after the last step', sigterm.EXIT_CODE)
        if connections.answers(address):
            if is_lost:
                _end_with_chief('was lost after the last step and has come back')
            seen_at = now
        else:
            is_lost = True
            if now - seen_at > experiment.config.distribution.peer_timeout_secs:
                _end_with_chief(f'({address}) has been gone for {now - seen_at:.0f} seconds')
        time.sleep(_CHIEF_POLL_SECS)


def _end_with_chief(what: str) -> None:
    code = watchdog.EXIT_CODE
    raise Terminated(f'the chief {what}; ending with code {code}, to be started again beside it', code)


def _outlive_chief(address: str) -> None:
    """Waits, for some seconds, until the chief has gone: a service sends SIGTERM to all tasks at once."""
    connections, deadline = watchdog.Connections(), time.monotonic() + stopping.GRACE_SECS
    while connections.answers(address) and time.monotonic() < deadline:
        time.sleep(0.2)


def start_server(experiment: Experiment) -> Any:
    """Starts TensorFlow's server of this task and returns it.

    Raises:
      DataError: its port is taken.
    """
    cluster = experiment.cluster
    await_port(cluster)
    return tf.distribute.Server(
        {role: list(hosts) for role, hosts in cluster.spec.items()},
        job_name=cluster.role,
        task_index=cluster.index,
        protocol='grpc',
        config=experiment.make_session_config(),
    )


def await_port(cluster: Cluster) -> None:
    """Waits until this task's port is free, as a task that it follows may just be ending; TensorFlow's error names no port.

    Raises:
      DataError: it is not within seconds.
    """
    address = cluster.spec[cluster.role][cluster.index]
    deadline = time.monotonic() + _PORT_SECS
    while not watchdog.is_free(address):
        if time.monotonic() > deadline:
            raise DataError(
                f'{cluster.name} is to listen at {address}, where another process listens; end that one, or give this task '
                'another port'
            )
        time.sleep(0.2)


def make_watchdog(experiment: Experiment) -> watchdog.Watchdog:
    """Returns what ends this process when a task that it needs is gone, or no step is made; not started."""
    settings, cluster = experiment.config.distribution, experiment.cluster
    peers = cluster.peers()
    if experiment.distribution.name == distribute.PARAMETER_SERVER:
        # A lost worker keeps nobody from working. A parameter server lives for the chief, which writes the checkpoints.
        needed = 'chief/' if cluster.role == PS else 'ps/'
        peers = {name: address for name, address in peers.items() if name.startswith(needed)}
    return watchdog.Watchdog(
        peers,
        is_lockstep=experiment.distribution.is_lockstep,
        peer_timeout_secs=settings.peer_timeout_secs,
        step_timeout_secs=settings.step_timeout_secs,
        is_over=lambda: experiment.files.find_over(experiment.config.loop.max_steps),
    )
