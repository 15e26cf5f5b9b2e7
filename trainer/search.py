"""Which hyperparameters to try next: samplers of an optuna study for the algorithms of `hptuning.yaml`.

The default is a Gaussian process of our own (`gaussian_process.py`): optuna's needs PyTorch, and after 30 trials its TPE is
many times farther from the best (`benchmarks/bench_search.py`). Whatever is random comes from the seed and the trial's number,
so that a sweep that goes on goes on the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from trainer import gaussian_process, hptuning
from trainer.gaussian_process import Array
from trainer.hptuning import HyperparameterSpec, Parameter, Value

# Trials before the first fit, at least; else as many as there are parameters. A sweep has few trials, and from the first fit
# on they are better than any even spread.
_FIRST_TRIALS = 3
# How far apart the codes of two choices are: near enough that what is learnt of one tells something of the others.
_HOT = 0.5
_MEASURED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


def make_sampler(spec: HyperparameterSpec, *, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """The sampler of one trial.

    Args:
        spec: what to tune and how.
        seed: of the sweep.
        number: of the trial in the study, from 0.
    """
    space = make_distributions(spec.params)
    if spec.algorithm == hptuning.GRID_SEARCH:
        return GridSampler(space, seed)
    if spec.algorithm == hptuning.RANDOM_SEARCH:
        return optuna.samplers.RandomSampler(int(np.random.default_rng([seed, number]).integers(2**31)))
    return GaussianProcessSampler(space, seed)


def make_distributions(params: Sequence[Parameter]) -> dict[str, BaseDistribution]:
    """What optuna samples for each parameter; `to_value` makes the parameter's value from it."""
    return {param.name: _make_distribution(param) for param in params}


def _make_distribution(param: Parameter) -> BaseDistribution:
    values: Any = param.values
    if param.type == hptuning.CATEGORICAL:
        return CategoricalDistribution(values)
    if param.type == hptuning.DISCRETE:  # the position: the values were chosen to be as far apart as they are for a reason
        return IntDistribution(0, len(values) - 1)
    log = param.scale in (hptuning.LOG, hptuning.REVERSE_LOG)
    kind: Any = IntDistribution if param.type == hptuning.INTEGER else FloatDistribution
    return kind(*values, log=log)


def to_value(param: Parameter, sampled: Any) -> Value:
    """The value of a parameter from what was sampled for it."""
    if param.type == hptuning.DISCRETE:
        return param.values[sampled]
    if param.scale == hptuning.REVERSE_LOG:  # the logarithmic scale seen from the other end: fine near the highest value
        low, high = param.values
        return min(max(low + high - sampled, low), high)  # type: ignore[operator]  # they are numbers
    return sampled


def count_points(spec: HyperparameterSpec) -> float:
    """How many different trials there can be; infinite for real numbers."""
    return math.prod(map(_count, make_distributions(spec.params).values()))


def _count(distribution: BaseDistribution) -> float:
    if isinstance(distribution, CategoricalDistribution):
        return len(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return distribution.high - distribution.low + 1
    return math.inf


class _JointSampler(optuna.samplers.BaseSampler):
    """Samples all parameters of a trial at once.

    Args:
        space: what to sample, as `study.ask` will ask for it.
        seed: of the sweep.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], seed: int) -> None:
        self._space = dict(space)
        self._seed = seed

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._space

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: BaseDistribution) -> Any:
        raise AssertionError(f'{param_name} is not in the search space')


class GridSampler(_JointSampler):
    """Every combination once, as the trial's number has it, in an order that soon has been everywhere."""

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        count = math.prod(int(_count(distribution)) for distribution in self._space.values())
        # Steps of the golden section spread any number of points evenly; without a common factor they reach all.
        stride = next(stride for stride in range(max(round(count * 0.618), 1), 2 * count + 1) if math.gcd(stride, count) == 1)
        rest, sample = trial.number * stride % count, {}
        for name, distribution in self._space.items():
            rest, index = divmod(rest, int(_count(distribution)))
            is_choice = isinstance(distribution, CategoricalDistribution)
            sample[name] = distribution.choices[index] if is_choice else distribution.low + index  # type: ignore[attr-defined]
        return sample


class GaussianProcessSampler(_JointSampler):
    """Bayesian optimization. The first trials are spread evenly, from the middle on; a failed one counts as the worst."""

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        axes = [_Choice(d) if isinstance(d, CategoricalDistribution) else _Number(d) for d in self._space.values()]
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        measured = [other for other in others if other.state in _MEASURED and other.params.keys() == self._space.keys()]
        pending = [other for other in others if not other.state.is_finished() and other.params.keys() == self._space.keys()]
        values = _read_values(measured, study.direction)
        if len(measured) < max(_FIRST_TRIALS, len(axes)) or not np.isfinite(values).any():
            units = _spread(trial.number, len(axes), self._seed)
            return {name: axis.pick(float(unit)) for name, axis, unit in zip(self._space, axes, units)}
        values = np.where(np.isfinite(values), values, values[np.isfinite(values)].max())
        point = gaussian_process.suggest(
            self._encode(measured, axes),
            values,
            self._encode(pending, axes),
            lambda points: np.concatenate([axis.snap(part) for axis, part in zip(axes, _split(points, axes))], 1),
            np.random.default_rng([self._seed, trial.number]),
        )
        return {name: axis.decode(part[0]) for name, axis, part in zip(self._space, axes, _split(point[None], axes))}

    def _encode(self, trials: Sequence[FrozenTrial], axes: Sequence[_Axis]) -> Array:
        """The points [n, d] of trials in the unit cube."""
        rows = [[code for name, axis in zip(self._space, axes) for code in axis.encode(trial.params[name])] for trial in trials]
        return np.array(rows, float).reshape(-1, sum(axis.width for axis in axes))


class _Axis(Protocol):
    """A parameter's way to `width` numbers in [0, 1], its code, and back."""

    width: int

    def pick(self, unit: float) -> Any:
        """The value at a place in [0, 1) of all values."""

    def encode(self, value: Any) -> list[float]:
        """The code of a value."""

    def decode(self, code: Array) -> Any:
        """The value whose code [width] this is."""

    def snap(self, codes: Array) -> Array:
        """For any numbers [n, width], the nearest codes."""


class _Number:
    """A whole or real number; one number is its code."""

    width = 1

    def __init__(self, distribution: Any) -> None:
        self._is_whole = isinstance(distribution, IntDistribution)
        self._low, self._high = distribution.low, distribution.high
        self._log = distribution.log
        # Half a number more on both sides, so that the first and the last are as wide as the others.
        margin = 0.5 if self._is_whole else 0
        self._start, self._end = self._scale(self._low - margin), self._scale(self._high + margin)

    def _scale(self, value: float) -> float:
        return math.log(value) if self._log else float(value)

    def pick(self, unit: float) -> float:
        scaled = self._start + unit * (self._end - self._start)
        value = math.exp(scaled) if self._log else scaled
        if not self._is_whole:
            value = float(f'{value:.9g}')  # digits that can be read, and bounds that are themselves
        return min(max(round(value) if self._is_whole else value, self._low), self._high)

    def encode(self, value: float) -> list[float]:
        return [(self._scale(value) - self._start) / (self._end - self._start)]

    def decode(self, code: Array) -> float:
        return self.pick(float(code[0]))

    def snap(self, codes: Array) -> Array:
        if not self._is_whole:
            return codes
        scaled = self._start + codes * (self._end - self._start)
        values = np.clip(np.round(np.exp(scaled) if self._log else scaled), self._low, self._high)
        # One value has one code, as whether a point has been measured is told by its code.
        known = {value: self.encode(value) for value in np.unique(values)}
        return np.array([known[value] for value in values[:, 0]])


class _Choice:
    """One of some values without an order; its code is _HOT at its own place and 0 at those of the others."""

    def __init__(self, distribution: CategoricalDistribution) -> None:
        self._choices = distribution.choices
        self.width = len(self._choices)

    def pick(self, unit: float) -> Any:
        return self._choices[int(unit * self.width)]

    def encode(self, value: Any) -> list[float]:
        return [_HOT * (value == choice) for choice in self._choices]

    def decode(self, code: Array) -> Any:
        return self._choices[int(code.argmax())]

    def snap(self, codes: Array) -> Array:
        return _HOT * np.eye(self.width)[codes.argmax(1)]


def _split(points: Array, axes: Sequence[_Axis]) -> list[Array]:
    """The columns of points [n, d] by axis."""
    return np.split(points, np.cumsum([axis.width for axis in axes])[:-1], axis=1)


def _read_values(trials: Sequence[FrozenTrial], direction: optuna.study.StudyDirection) -> Array:
    """What to minimize [n]: the result of each trial, of a stopped one the last; infinite for one that failed."""
    sign = -1.0 if direction == optuna.study.StudyDirection.MAXIMIZE else 1
    results = [
        trial.value if trial.value is not None and trial.state != TrialState.FAIL else math.inf * sign for trial in trials
    ]
    return sign * np.array(results, float)


def _spread(index: int, dimensions: int, seed: int) -> Array:
    """Point [d] of a sequence that fills the unit cube evenly, number 0 in the middle.

    Multiples of the powers of the generalized golden section (Roberts, The unreasonable effectiveness of quasirandom sequences,
    2018), shifted at random.
    """
    if index == 0:
        return np.full(dimensions, 0.5)
    ratio = 2.0
    for _ in range(40):
        ratio = (1 + ratio) ** (1 / (dimensions + 1))
    shift = np.random.default_rng([seed]).random(dimensions)
    return (shift + index * ratio ** -np.arange(1.0, dimensions + 1)) % 1
