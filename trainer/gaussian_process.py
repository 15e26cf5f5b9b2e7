"""Bayesian optimization of a function of few numbers: a Gaussian process and its expected improvement, in numpy.

The process has a Matern 5/2 kernel with a length for each dimension (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, eq. 4.17), fitted by its marginal likelihood (eq. 2.30). The next point maximizes the logarithm of the expected
improvement (Jones et al., Efficient Global Optimization, 1998, eq. 15). Points that are still being measured count as if they
had turned out as expected (Ginsbourger et al., Kriging is well-suited to parallelize optimization, 2010: "Kriging believer").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # float64; numpy's stubs lose that on the way

# Priors of the logarithms, median and deviation: of a length in the unit cube; of the noise's share of the variance. They keep
# a fit to a handful of points from calling a dimension useless, or everything noise.
_LENGTH, _NOISE = (math.log(0.5), 1.0), (math.log(1e-4), 2.0)
_BOUNDS = (math.log(1e-6), math.log(30.0))
_STARTS, _FIT_STEPS = 4, 50
_MAX_FITTED = 120  # points that the kernel is fitted to; time grows with the third power
_CANDIDATES, _NEIGHBOURS, _REFINEMENTS = 2000, 200, 8
# Every so many points one must promise to be better by this many deviations of the values: it looks farther away than the
# others, which refine the best known and would never leave a local minimum.
_FAR_EVERY, _FAR_MARGIN = 3, 0.2
_WIDTHS = (0.2, 0.05, 0.01)  # of neighbourhoods of the best points
_erfc = np.vectorize(math.erfc, otypes=[float])


class GaussianProcess:
    """A process fitted to points in the unit cube.

    Args:
        points: [n, d] float64 in [0, 1].
        values: [n] float64, of mean 0 and deviation 1.
        rng: for the starts of the fit.
    """

    def __init__(self, points: Array, values: Array, rng: np.random.Generator) -> None:
        chosen = rng.permutation(len(points))[:_MAX_FITTED]
        theta = _fit(points[chosen], values[chosen], rng)
        self._lengths, self._noise = np.exp(theta[:-1]), math.exp(theta[-1])
        self._points, self._values = points, values
        self._solve()

    def _solve(self) -> None:
        covariance = _kernel(_squares(self._points, self._points) @ self._lengths**-2) + self._noise * np.eye(len(self._points))
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ self._values
        self._variance = max(float(self._values @ self._weights) / len(self._values), 1e-12)

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Mean and standard deviation [m] of the function at points [m, d]."""
        cross = _kernel(_squares(points, self._points) @ self._lengths**-2)
        share = 1 - np.einsum('ij,jk,ik->i', cross, self._inverse, cross, optimize=True)
        return cross @ self._weights, np.sqrt(self._variance * np.maximum(share, 1e-12))

    def believe(self, points: Array) -> None:
        """Takes points [m, d] as measured, with the values that are expected there."""
        self._values = np.concatenate([self._values, self.predict(points)[0]])
        self._points = np.concatenate([self._points, points])
        self._solve()


def suggest(points: Array, values: Array, pending: Array, snap: Callable[[Array], Array], rng: np.random.Generator) -> Array:
    """The point at which to measure next, to find the minimum.

    Args:
        points: [n, d] float64 in [0, 1], measured.
        values: [n] float64, what came out there.
        pending: [m, d] float64 in [0, 1], being measured.
        snap: moves points [k, d] to the nearest that can be measured, as whole numbers ask for.
        rng: makes the candidates.

    Returns:
        [d] float64 in [0, 1], one that `snap` leaves where it is.
    """
    scaled = _warp(values)
    process = GaussianProcess(points, scaled, rng)
    if len(pending):
        process.believe(pending)
    is_far = (len(points) + len(pending)) % _FAR_EVERY == 0
    aim, taken = scaled.min() - _FAR_MARGIN * is_far, {point.tobytes() for point in np.concatenate([points, pending])}

    def rate(candidates: Array) -> Array:
        mean, deviation = process.predict(candidates)
        rating = _log_improvement((aim - mean) / deviation) + np.log(deviation)
        # The same twice tells little; it is chosen where nothing else is left.
        return np.where([point.tobytes() in taken for point in candidates], -np.inf, rating)

    best_points = points[np.argsort(scaled, kind='stable')[:5]]
    neighbours = [_neighbours(point, width, rng) for point in best_points for width in _WIDTHS]
    candidates = snap(np.concatenate([rng.random((_CANDIDATES, points.shape[1])), *neighbours]))
    ratings = rate(candidates)
    best, rating = candidates[ratings.argmax()], ratings.max()
    for refinement in range(_REFINEMENTS):
        candidates = snap(_neighbours(best, 0.1 * 0.5**refinement, rng))
        ratings = rate(candidates)
        if ratings.max() > rating:
            best, rating = candidates[ratings.argmax()], ratings.max()
    return best


def _warp(values: Array) -> Array:
    """Values with mean 0 and deviation 1, the bad half drawn together: how bad a failure is says nothing about the minimum."""
    median = np.median(values)
    unit = median - values.min()
    if unit > 0:
        worse = np.maximum(values - median, 0) / unit
        values = np.where(values > median, median + unit * np.log1p(worse), values)
    return (values - values.mean()) / max(values.std(), 1e-12)


def _neighbours(point: Array, width: float, rng: np.random.Generator) -> Array:
    """Points [k, d] around one [d], some of whose coordinates are the same."""
    moves = rng.normal(0, width, (_NEIGHBOURS, len(point))) * (rng.random((_NEIGHBOURS, len(point))) < 0.7)
    return np.clip(point + moves, 0, 1)


def _log_improvement(z: Array) -> Array:
    """log(phi(z) + z Phi(z)), exact where the improvement itself is too small for a float."""
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    improvement = density + z * 0.5 * _erfc(-z / math.sqrt(2))
    far = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(np.maximum(-z, 1))  # the first term for z -> -infinity
    return np.where(z < -20, far, np.log(np.maximum(improvement, 1e-300)))


def _squares(left: Array, right: Array) -> Array:
    """[m, n, d]: squares of the distances along each dimension."""
    return (left[:, None, :] - right[None, :, :]) ** 2


def _kernel(squared: Array) -> Array:
    """Matern 5/2 of squared distances in units of the lengths."""
    root = np.sqrt(5 * squared)
    return (1 + root + root**2 / 3) * np.exp(-root)


def _fit(points: Array, values: Array, rng: np.random.Generator) -> Array:
    """Logarithms [d + 1] of the lengths and the noise, those with the highest posterior that gradient ascent finds.

    Rprop (Riedmiller and Braun, 1993) needs no step size; all starts climb at once. The variance is the best one for each.
    """
    squares, dimensions = _squares(points, points), points.shape[1]
    medians = np.array([_LENGTH[0]] * dimensions + [_NOISE[0]])
    deviations = np.array([_LENGTH[1]] * dimensions + [_NOISE[1]])
    theta = medians + deviations * rng.normal(0, 1, (_STARTS, dimensions + 1))
    theta[0] = medians
    theta = np.clip(theta, *_BOUNDS)
    step, last = np.full_like(theta, 0.2), np.zeros_like(theta)
    best, best_posterior = theta.copy(), np.full(_STARTS, -np.inf)
    for _ in range(_FIT_STEPS):
        posterior, gradient = _posterior(theta, squares, values, medians, deviations)
        better = posterior > best_posterior
        best[better], best_posterior[better] = theta[better], posterior[better]
        agreement = np.sign(gradient) * last
        step = np.clip(step * np.where(agreement > 0, 1.2, np.where(agreement < 0, 0.5, 1)), 1e-3, 1.0)
        last = np.where(agreement < 0, 0, np.sign(gradient))
        theta = np.clip(theta + last * step, *_BOUNDS)
    return best[best_posterior.argmax()]


def _posterior(theta: Array, squares: Array, values: Array, medians: Array, deviations: Array) -> tuple[Array, Array]:
    """Logarithm of the posterior [s] of each theta [s, d + 1], up to a constant, and its gradient [s, d + 1]."""
    count = len(values)
    scaled = squares[None] * np.exp(-2 * theta[:, None, None, :-1])  # [s, n, n, d]
    root = np.sqrt(5 * scaled.sum(-1))
    decay = np.exp(-root)
    noise = np.exp(theta[:, -1])[:, None, None] * np.eye(count)
    covariance = (1 + root + root**2 / 3) * decay + noise
    inverse = np.linalg.inv(covariance)
    weights = inverse @ values
    variance = np.maximum(weights @ values / count, 1e-12)
    distance = (theta - medians) / deviations
    posterior = -0.5 * (count * np.log(variance) + np.linalg.slogdet(covariance)[1]) - 0.5 * (distance**2).sum(-1)
    # Of 0.5 (w' dK w / variance - tr(K^-1 dK)), what stands before dK.
    factor = 0.5 * (weights[:, :, None] * weights[:, None, :] / variance[:, None, None] - inverse)
    by_length = np.einsum('sij,sijd->sd', factor * (5 / 3) * (1 + root) * decay, scaled)
    by_noise = (factor * noise).sum((1, 2))
    return posterior, np.concatenate([by_length, by_noise[:, None]], 1) - distance / deviations
