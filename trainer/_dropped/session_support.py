"""`tensorflow.python.tpu.session_support`: TPUEstimator's watch over the TPU workers.

A TPU worker answers the WorkerHeartbeat op with its health. Two things rest on it: a hook that saves a checkpoint and
acts when a worker says that it is about to go (preemption, maintenance), and a watchdog thread whose silence makes
the workers shut themselves down when this process has died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.core.util import event_pb2
from tensorflow.python.client import session as session_lib
from tensorflow.python.framework import dtypes, errors, ops
from tensorflow.python.ops import array_ops
from tensorflow.python.platform import tf_logging as logging
from tensorflow.python.tpu.ops import tpu_ops
from tensorflow.python.training import session_run_hook, training_util

_PING_TIMEOUT_MS = 60_000
# How long a worker that was told to shut down has for its own clean-up, and how long we then wait for its host.
_SHUTDOWN_TIMEOUT_MS = 60_000
_SHUTDOWN_MARGIN_SECS = 10
# Tells the worker's supervisor to start it again.
_RESTART_EXIT_CODE = 42

_watchdog: WatchdogManager | None = None


class CoordinatorResetError(errors.AbortedError):
    """Makes the monitored session start again from the last checkpoint."""

    def __init__(self) -> None:
        super().__init__(None, None, 'Resetting session loop due to worker shutdown.')


class WorkerHeartbeatManager:
    """Sends heartbeat requests to a set of TPU workers and reads their answers.

    Args:
      session: the session in which the heartbeat ops run.
      devices: one CPU device name for each worker.
      heartbeat_ops: the op of each device, or None to make them in the default graph.
      request: the string placeholder that feeds the ops; made along with them.
    """

    def __init__(
        self, session: Any, devices: Sequence[str], heartbeat_ops: Sequence[Any] | None = None, request: Any = None
    ) -> None:
        self._session = session
        self._devices = list(devices)
        if heartbeat_ops is None:
            heartbeat_ops = []
            request = array_ops.placeholder(dtypes.string, name='worker_heartbeat_request')
            for device in self._devices:
                with ops.device(device):
                    heartbeat_ops.append(tpu_ops.worker_heartbeat(request))
        self._ops = list(heartbeat_ops)
        self._request = request

    @classmethod
    def from_devices(cls, session: Any, devices: Sequence[str]) -> WorkerHeartbeatManager:
        """A manager whose ops are made in the default graph, one for each of `devices`."""
        return cls(session, devices)

    def __repr__(self) -> str:
        return f'HeartbeatManager({",".join(self._devices)})'

    def num_workers(self) -> int:
        """Number of workers watched."""
        return len(self._devices)

    def configure(self, message: Any) -> None:
        """Sends a WorkerHeartbeatRequest to every worker."""
        logging.info('Configuring worker heartbeat: %s', message)
        self._session.run(self._ops, {self._request: message.SerializeToString()})

    def ping(self, request: Any = None, timeout_in_ms: int = _PING_TIMEOUT_MS) -> list[Any]:
        """The WorkerHeartbeatResponse of every worker, in the order of the devices."""
        request = request or event_pb2.WorkerHeartbeatRequest()
        replies = self._session.run(
            self._ops,
            {self._request: request.SerializeToString()},
            options=config_pb2.RunOptions(timeout_in_ms=timeout_in_ms),
        )
        return [event_pb2.WorkerHeartbeatResponse.FromString(reply) for reply in replies]

    def lame_workers(self) -> WorkerHeartbeatManager | None:
        """A manager of the workers that do not report themselves healthy, None when all do."""
        lame = [i for i, reply in enumerate(self.ping()) if reply.health_status != event_pb2.OK]
        if not lame:
            return None
        devices = [self._devices[i] for i in lame]
        return WorkerHeartbeatManager(self._session, devices, [self._ops[i] for i in lame], self._request)

    def shutdown(self, wait_time_in_ms: int = _SHUTDOWN_TIMEOUT_MS, exit_code: int = 0) -> None:
        """Tells the workers to exit with `exit_code` and waits until they must have."""
        logging.info('Shutting down %s.', self)
        self.configure(
            event_pb2.WorkerHeartbeatRequest(
                watchdog_config=event_pb2.WatchdogConfig(timeout_ms=wait_time_in_ms),
                shutdown_mode=event_pb2.SHUTDOWN_AFTER_TIMEOUT,
                exit_code=event_pb2.RequestedExitCode(exit_code=exit_code),
            )
        )
        time.sleep(_SHUTDOWN_MARGIN_SECS + wait_time_in_ms / 1000)


def all_worker_devices(session: Any) -> list[str]:
    """The CPU device of each worker with a TPU, by full name: the op runs on the host of the TPU."""
    names = [device.name for device in session.list_devices()]
    return [name.replace('TPU', 'CPU') for name in names if ':TPU:0' in name and 'coordinator' not in name]


class WatchdogManager(threading.Thread):
    """Pings the workers until stopped; once the pings cease for `shutdown_timeout`, the workers exit by themselves.

    Also a context manager: watches inside the block.

    Args:
      session: a session on the workers; pings run in a session and a graph of their own.
      devices: CPU device of each worker, None for all workers.
      ping_interval: seconds between pings.
      shutdown_timeout: seconds without a ping after which a worker exits.
    """

    def __init__(
        self,
        session: Any,
        devices: Sequence[str] | None = None,
        ping_interval: float = 60,
        shutdown_timeout: float = 2 * 3600,
    ) -> None:
        super().__init__(daemon=True)
        self.ping_interval = ping_interval
        self.shutdown_timeout = shutdown_timeout
        self._target = session.sess_str
        self._config = session._config
        self._devices = devices
        self._workers: WorkerHeartbeatManager | None = None
        self._stopped = threading.Event()

    def configure_and_run(self) -> None:
        """Arms the watchdog of every worker and starts the pings."""
        logging.info(
            'Enabling watchdog timer with %d second timeout and %d second ping interval.',
            self.shutdown_timeout,
            self.ping_interval,
        )
        self._connect(timeout_ms=int(self.shutdown_timeout * 1000), shutdown_mode=event_pb2.WAIT_FOR_COORDINATOR)
        self.start()

    def stop(self) -> None:
        """Disarms the workers' watchdogs and ends the pings."""
        logging.info('Stopping worker watchdog.')
        self._stopped.set()
        self.join()
        self._connect(timeout_ms=-1, shutdown_mode=event_pb2.NOT_CONFIGURED)

    def __enter__(self) -> WatchdogManager:
        self.configure_and_run()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                assert self._workers is not None
                self._workers.ping()
                self._stopped.wait(self.ping_interval)
            except errors.OpError as error:
                # A worker that restarts breaks the session; pings must go on over a new one.
                logging.debug('Caught error while sending heartbeat: %s', error)
                self._connect(timeout_ms=int(self.shutdown_timeout * 1000), shutdown_mode=event_pb2.WAIT_FOR_COORDINATOR)

    def _connect(self, *, timeout_ms: int, shutdown_mode: int) -> None:
        """Opens a new session and sends the workers these watchdog settings."""
        graph = ops.Graph()
        session = session_lib.Session(self._target, graph=graph, config=self._config)
        if self._devices is None:
            self._devices = all_worker_devices(session)
        with graph.as_default():
            self._workers = WorkerHeartbeatManager.from_devices(session, self._devices)
        self._workers.configure(
            event_pb2.WorkerHeartbeatRequest(
                watchdog_config=event_pb2.WatchdogConfig(timeout_ms=timeout_ms), shutdown_mode=shutdown_mode
            )
        )


def start_worker_watchdog(
    session: Any, devices: Sequence[str] | None = None, ping_interval: float = 60, shutdown_timeout: float = 3600
) -> None:
    """Starts the one watchdog of this process, if it has none yet; times in seconds."""
    global _watchdog
    if _watchdog is None:
        # Several pings may be lost before a worker gives up.
        _watchdog = WatchdogManager(session, devices, min(shutdown_timeout / 10, ping_interval), shutdown_timeout)
        _watchdog.configure_and_run()


def stop_worker_watchdog() -> None:
    """Stops the watchdog of this process, if it has one."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None


class GracefulShutdownHook(session_run_hook.SessionRunHook):
    """Saves a checkpoint and calls `on_shutdown_hooks` when a worker is about to shut down.

    Args:
      checkpoint_prefix: path and name of the checkpoint, without its step.
      saver: writes it; None for the one saver in the graph's SAVERS collection.
      on_shutdown_hooks: called as fn(run_context, all_workers, lame_workers) after the checkpoint.
    """

    def __init__(
        self, checkpoint_prefix: str, saver: Any = None, on_shutdown_hooks: Sequence[Callable[..., None]] | None = None
    ) -> None:
        self._checkpoint_prefix = checkpoint_prefix
        self._saver = saver
        self._on_shutdown_hooks = list(on_shutdown_hooks or [])
        self._workers: WorkerHeartbeatManager | None = None

    def after_create_session(self, training_session: Any, coord: Any) -> None:
        del coord
        if training_util.get_global_step() is None and self.saver() is not None:
            raise ValueError('Saver defined but no global step. Call `get_or_create_global_step()` in the model_fn.')
        # The training graph is final by now.
        graph = ops.Graph()
        session = session_lib.Session(training_session.sess_str, graph=graph, config=training_session._config)
        with graph.as_default():
            workers = WorkerHeartbeatManager.from_devices(session, all_worker_devices(session))
        self._workers = workers if self._can_watch(workers) else None
        if self._workers is None:
            logging.warning('No workers support heartbeats. Failure handling will be disabled.')

    @staticmethod
    def _can_watch(workers: WorkerHeartbeatManager) -> bool:
        if not workers.num_workers():
            return False
        try:
            workers.configure(event_pb2.WorkerHeartbeatRequest(shutdown_mode=event_pb2.WAIT_FOR_COORDINATOR))
        except errors.InvalidArgumentError:
            return False
        return True

    def saver(self) -> Any:
        """The saver that writes the checkpoint, None when there is not exactly one."""
        if self._saver:
            return self._saver
        savers = ops.get_collection(ops.GraphKeys.SAVERS)
        if len(savers) > 1:
            logging.error('Multiple savers in the SAVERS collection: no checkpoint at shutdown. Pass an explicit `saver`.')
        return savers[0] if len(savers) == 1 else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        del run_values
        lame_workers = self._workers.lame_workers() if self._workers else None
        if not lame_workers:
            return
        saver = self.saver()
        logging.info('ShutdownHook: %s are shutting down; checkpoint: %s', lame_workers, bool(saver))
        if saver:
            step = training_util.get_global_step()
            saver.save(run_context.session, self._checkpoint_prefix, global_step=step, write_state=True)
        for on_shutdown in self._on_shutdown_hooks:
            on_shutdown(run_context, self._workers, lame_workers)


class ResetComputation:
    """Shuts all workers down, then makes the training loop start again."""

    def __call__(self, run_context: Any, all_workers: WorkerHeartbeatManager, lame_workers: Any) -> None:
        del run_context, lame_workers
        all_workers.shutdown(exit_code=_RESTART_EXIT_CODE)
        raise CoordinatorResetError()


class ShutdownLameWorkers:
    """Shuts down the workers that are not healthy; training waits for them to be restarted."""

    def __call__(self, run_context: Any, all_workers: Any, lame_workers: WorkerHeartbeatManager) -> None:
        del run_context, all_workers
        lame_workers.shutdown(exit_code=_RESTART_EXIT_CODE)


class ShutdownAllWorkers:
    """Shuts down all workers; training waits for them to be restarted."""

    def __call__(self, run_context: Any, all_workers: WorkerHeartbeatManager, lame_workers: Any) -> None:
        del run_context, lame_workers
        all_workers.shutdown(exit_code=_RESTART_EXIT_CODE)
