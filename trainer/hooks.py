"""Session hooks, one concern each. All read the state after a session call from a `LoopState`.

TensorFlow's own hooks fetch the global step beside the training op, which races with a loop that raises it many times; these
fetch `StepResult`, which is read after the loop.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import tensorflow as tf
import tqdm
import tqdm.contrib.logging

from trainer import storage
from trainer.errors import DataError
from trainer.loop import LoopState

logger = logging.getLogger(__name__)


class NanLossError(RuntimeError):
    """The training loss is not a finite number; `step` says after which step."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class StopOnNanHook(tf.compat.v1.train.SessionRunHook):
    """Raises NanLossError at the first loss that is not finite, before anything of that step is saved."""

    def __init__(self, state: LoopState) -> None:
        self._state = state

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs([self._state.result.step, self._state.result.loss])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        step, loss = run_values.results
        if not math.isfinite(loss):
            raise NanLossError(int(step), f'the loss became {loss} at step {step}')


class RestoredStepHook(tf.compat.v1.train.SessionRunHook):
    """Raises DataError when a session does not start from the latest checkpoint.

    TensorFlow starts anew, without a word, when it cannot read which one that is, and would then write over the old run.

    Args:
      find_step: gives the step of the latest checkpoint, 0 when there is none.
    """

    def __init__(self, find_step: Callable[[], int]) -> None:
        self._find_step = find_step

    def after_create_session(self, session: Any, coord: Any) -> None:
        step, latest = int(session.run(tf.compat.v1.train.get_global_step())), self._find_step()
        if step < latest:
            raise DataError(f'training would start at step {step}, but the latest checkpoint is of step {latest}; run again')


class RecoveryHook(tf.compat.v1.train.SessionRunHook):
    """Ends a run whose files cannot be reached, or whose session is lost again and again at the same step.

    TensorFlow makes a new session, as often as it takes, after an error that a restarted peer may have caused. A store that
    fails for minutes causes the same ones.

    Args:
      check: looks at the files that the session reads and writes; raises DataError when one cannot be reached.
    """

    MAX_LOSSES = 3

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._step: Optional[int] = None
        self._losses = 0

    def after_create_session(self, session: Any, coord: Any) -> None:
        step = int(session.run(tf.compat.v1.train.get_global_step()))
        if self._step is not None:
            logger.warning('The session was lost; going on from step %d', step)
            self._check()
            self._losses = self._losses + 1 if step <= self._step else 1
            if self._losses > self.MAX_LOSSES:
                raise DataError(
                    f'the session was lost {self._losses} times after step {step}, though files can be read and written; '
                    'run with --debug for the errors of TensorFlow'
                )
        self._step = step


class ThreadsHook(tf.compat.v1.train.SessionRunHook):
    """Gives a small step one thread: handing its operations from thread to thread costs more than they take.

    It acts in `begin`, when the model's size is known and the session is not yet made.

    Args:
      session_config: the ConfigProto of the session to come; threads that are set stay as they are.
      global_batch_size: examples of a step.
    """

    # Multiplications and additions of a step, about 6 for each weight and example (2 forward, 4 backward) of layers that use
    # a weight once; convolutions never count as small. Measured on two cores: at 60 million one thread made 1.3 times the
    # steps, at 600 million 0.9 times.
    SMALL_STEP_FLOPS = 2e8

    def __init__(self, session_config: Any, global_batch_size: int) -> None:
        self._session_config = session_config
        self._global_batch_size = global_batch_size

    def begin(self) -> None:
        shapes = [variable.shape for variable in tf.compat.v1.trainable_variables()]
        weights = sum(shape.num_elements() or 0 for shape in shapes)
        if any(shape.rank > 2 for shape in shapes) or 6.0 * weights * self._global_batch_size > self.SMALL_STEP_FLOPS:
            return
        for name in ('intra_op_parallelism_threads', 'inter_op_parallelism_threads'):
            if not getattr(self._session_config, name):
                setattr(self._session_config, name, 1)


class StopAtStepHook(tf.compat.v1.train.SessionRunHook):
    """Ends training when `max_steps` is reached."""

    def __init__(self, state: LoopState, max_steps: int) -> None:
        self._state = state
        self._max_steps = max_steps
        self.step = 0
        """The last step that was seen."""

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._state.result.step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.step = int(run_values.results)
        if self.step >= self._max_steps:
            run_context.request_stop()


class SaveHook(tf.compat.v1.train.CheckpointSaverHook):
    """Saves a checkpoint whenever a multiple of `save_steps` is passed, or `save_secs` have gone by, and at the end.

    The base class counts from the step at which it started, so after a restart at step 137 it would save at 1137; and it saves
    at every start, which after a restart replaces a good checkpoint by the same one.

    Args:
      state: of the loop.
      directory: of the checkpoints.
      save_steps: steps; 0 means not by steps.
      save_secs: seconds; 0 means not by time.
      listeners: CheckpointSaverListeners.
      clock: seconds, for tests.
    """

    def __init__(
        self,
        state: LoopState,
        directory: str,
        *,
        save_steps: int,
        save_secs: float,
        listeners: Sequence[Any] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(directory, save_steps=max(1, save_steps), listeners=listeners)
        self._state = state
        self._every_steps = save_steps
        self._every_secs = save_secs
        self._now = clock
        self._saved_step = 0
        self._saved_at = 0.0

    def after_create_session(self, session: Any, coord: Any) -> None:
        step = int(session.run(self._global_step_tensor))
        self._saved_step, self._saved_at = step, self._now()
        if step == 0:
            # The graph goes to TensorBoard and the first checkpoint to disk, as the base class does it.
            with storage.reporting_remote_errors():
                super().after_create_session(session, coord)

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._state.result.step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        step = int(run_values.results)
        passed = self._every_steps and step // self._every_steps > self._saved_step // self._every_steps
        is_time = self._every_secs and self._now() - self._saved_at >= self._every_secs
        if passed or is_time:
            self._save_at(run_context.session, step)

    def end(self, session: Any) -> None:
        step = int(session.run(self._global_step_tensor))
        if step != self._saved_step:
            self._save_at(session, step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save_at(self, session: Any, step: int) -> None:
        # TensorFlow would take a store that is away for a lost peer, and train from the last checkpoint to here for ever.
        with storage.reporting_remote_errors(), _reporting_full_disk(step):
            self._save(session, step)
        self._saved_step, self._saved_at = step, self._now()


@contextlib.contextmanager
def _reporting_full_disk(step: int) -> Iterator[None]:
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        cause = re.search(r'\S*; (No space left on device|Disk quota exceeded|File too large)', str(error))
        if not cause:
            raise
        raise DataError(
            f'the checkpoint of step {step} cannot be written: {cause.group()}; those before it are whole: free some space, or '
            'lower --keep_checkpoint_max, and run the same command again, which goes on from the last one'
        ) from error


class ProgressHook(tf.compat.v1.train.SessionRunHook):
    """Prints the Train lines and, on a terminal, a bar with the loss and the time left; feeds examples/s to the summaries.

    `Train [chief/0], step 482: loss: 1.362, accuracy: 0.642 (8.503 sec) 60.9 global steps/s, 60.9 local steps/s`: seconds are
    since the start; rates are of the time spent in training, evaluations left out, since the line before.

    Args:
      state: of the loop.
      task: role and index, such as 'chief/0'.
      global_batch_size: examples of a step.
      max_steps: the last step, for the time left.
      log_secs: seconds between lines.
      is_shared: other workers raise the global step too, also while this one evaluates: global and local rates differ.
      metrics: scalar summaries named in the line besides the loss, where the model has them.
      show_bar: None shows the bar on a terminal only.
      clock: seconds, for tests.
    """

    def __init__(
        self,
        state: LoopState,
        *,
        task: str,
        global_batch_size: int,
        max_steps: int,
        log_secs: float,
        is_shared: bool = False,
        metrics: Sequence[str] = ('accuracy',),
        show_bar: Optional[bool] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._task = task
        self._global_batch_size = global_batch_size
        self._max_steps = max_steps
        self._log_secs = log_secs
        self._is_shared = is_shared
        self._metrics = metrics
        self._show_bar = sys.stderr.isatty() if show_bar is None else show_bar
        self._clock = clock
        self._bar: Any = None
        self._step: Optional[int] = None
        self._steps_per_sec = 0.0

    def begin(self) -> None:
        self._start = self._clock()
        self._logged_at = self._start - self._log_secs
        self._window_steps, self._window_secs, self._window_calls = 0, 0.0, 0
        self._seen_at = self._start
        self._global_step = tf.compat.v1.train.get_global_step()

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._step = int(session.run(self._global_step))
        self._seen_at = self._clock()
        if self._show_bar:
            self._bar = tqdm.tqdm(total=self._max_steps, initial=self._step, unit='step', dynamic_ncols=True, leave=False)
            # A log line written over the bar would leave pieces of it behind.
            self._redirect = tqdm.contrib.logging.logging_redirect_tqdm()
            self._redirect.__enter__()

    def before_run(self, run_context: Any) -> Any:
        result = self._state.result
        fetches = {'step': result.step, 'loss': result.loss}
        fetches.update((name, result.scalars[name]) for name in self._metrics if name in result.scalars)
        self._called_at = self._clock()
        rate = self._steps_per_sec * self._global_batch_size
        feed_dict: dict[Any, Any] = {result.examples_per_sec: [rate]}
        if result.seen_step is not None:
            feed_dict[result.seen_step] = [self._step]
        return tf.compat.v1.train.SessionRunArgs(fetches, feed_dict=feed_dict)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        now = self._clock()
        values = dict(run_values.results)
        step = int(values.pop('step'))
        assert self._step is not None
        # Less than before, when the chief came back and restored a checkpoint.
        self._window_steps += max(0, step - self._step)
        self._window_secs += now - (self._seen_at if self._is_shared else self._called_at)
        self._window_calls += 1
        self._seen_at = now
        if self._window_secs:
            self._steps_per_sec = self._window_steps / self._window_secs
        if self._bar is not None:
            self._bar.set_postfix(loss=f'{float(values["loss"]):.3f}', refresh=False)
            self._bar.update(step - self._step)
        self._step = step
        if now - self._logged_at >= self._log_secs or step >= self._max_steps:
            self._log(step, values, now)

    def end(self, session: Any) -> None:
        if self._bar is not None:
            self._redirect.__exit__(None, None, None)
            self._bar.close()

    def _log(self, step: int, values: dict[str, Any], now: float) -> None:
        numbers = ', '.join(f'{name}: {float(value.reshape(-1)[0]):.3f}' for name, value in values.items())
        rate = self._steps_per_sec
        local_rate = self._window_calls / self._window_secs if self._is_shared and self._window_secs else rate
        logger.info(
            'Train [%s], step %d: %s (%.3f sec) %.1f global steps/s, %.1f local steps/s',
            *(self._task, step, numbers, now - self._start, rate, local_rate),
        )
        self._logged_at = now
        self._window_steps, self._window_secs, self._window_calls = 0, 0.0, 0
