"""Learning rates over the steps: each schedule is a pure function of the step, of numbers or of tensors.

A step is the number of updates made before: the first update has step 0. What a schedule gives is a share of the peak, 1 at
first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer.config import Config


def warm_up(step: Any, steps: int) -> Any:
    """From 1 / steps at step 0 in equal parts to 1 (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 2.2)."""
    return _minimum((step + 1) / steps, 1.0) if steps else 1.0


def exponential(step: Any, steps: int, rate: float) -> Any:
    """rate ** (step / steps)."""
    return rate ** (step / steps)


def polynomial(step: Any, steps: int, power: float, end: float) -> Any:
    """From 1 to `end` at step `steps`, and so on: (1 - end) * (1 - step / steps) ** power + end."""
    return (1.0 - end) * (1.0 - _minimum(step / steps, 1.0)) ** power + end


def cosine(step: Any, steps: int, end: float) -> Any:
    """From 1 to `end` at step `steps`, and so on, along half a wave (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983)."""
    angle = math.pi * _minimum(step / steps, 1.0)
    return (1.0 - end) * 0.5 * (1.0 + (tf.cos(angle) if tf.is_tensor(angle) else math.cos(angle))) + end


def piecewise(step: Any, boundaries: Sequence[int], rate: float) -> Any:
    """`rate` ** (how many boundaries the step has reached), as ResNets are trained (He et al. 2016, section 3.4)."""
    passed = [step >= boundary for boundary in boundaries]
    return rate ** (tf.add_n([tf.cast(one, tf.float32) for one in passed]) if tf.is_tensor(step) else sum(passed))


def _minimum(value: Any, limit: float) -> Any:
    return tf.minimum(value, limit) if tf.is_tensor(value) else min(value, limit)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate of a run: `params['schedule']` of every model_fn.

    Args:
      peak: the rate after warm-up.
      kind: a choice of `--learning_rate_schedule`.
      warmup_steps: of a linear warm-up; exponential, polynomial and cosine begin after it, boundaries count from step 0.
      decay_steps: in which exponential falls by `decay_rate`, and polynomial and cosine come to their end.
      decay_rate: of exponential, and at each boundary of piecewise.
      decay_power: of polynomial.
      decay_end: what polynomial and cosine end at, as a share of the peak.
      boundaries: of piecewise, in steps.
    """

    peak: float
    kind: str = 'constant'
    warmup_steps: int = 0
    decay_steps: int = 1
    decay_rate: float = 0.1
    decay_power: float = 1.0
    decay_end: float = 0.0
    boundaries: tuple[int, ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether every step has the same rate."""
        return self.kind == 'constant' and not self.warmup_steps

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of the update that follows `step`: a float for a number, [] float32 for a [] tensor."""
        step = tf.cast(step, tf.float32) if tf.is_tensor(step) else step
        later = step - self.warmup_steps
        later = tf.maximum(later, 0.0) if tf.is_tensor(step) else max(later, 0)
        share: Any = 1.0
        if self.kind == 'exponential':
            share = exponential(later, self.decay_steps, self.decay_rate)
        elif self.kind == 'polynomial':
            share = polynomial(later, self.decay_steps, self.decay_power, self.decay_end)
        elif self.kind == 'cosine':
            share = cosine(later, self.decay_steps, self.decay_end)
        elif self.kind == 'piecewise':
            share = piecewise(step, self.boundaries, self.decay_rate)
        return self.peak * share * warm_up(step, self.warmup_steps)


def make_schedule(config: Config) -> Schedule:
    """Returns the schedule that the flags describe."""
    settings = config.optimizer
    scale = config.data.batch_size / settings.learning_rate_batch if settings.learning_rate_batch else 1.0
    return Schedule(
        peak=settings.learning_rate * scale,
        kind=settings.learning_rate_schedule,
        warmup_steps=settings.warmup_steps,
        decay_steps=settings.decay_steps or max(1, config.loop.max_steps - settings.warmup_steps),
        decay_rate=settings.decay_rate,
        decay_power=settings.decay_power,
        decay_end=settings.decay_end,
        boundaries=settings.boundaries,
    )
