from __future__ import annotations

import math

import numpy as np
import optuna
import pytest

from trainer import gaussian_process, search
from trainer.hptuning import HyperparameterSpec, Parameter

INTEGER = Parameter('units', 'INTEGER', (5, 250), 'UNIT_LINEAR_SCALE')
LOG = Parameter('rate', 'DOUBLE', (1e-4, 0.5), 'UNIT_LOG_SCALE')
REVERSE = Parameter('momentum', 'DOUBLE', (0.5, 0.99), 'UNIT_REVERSE_LOG_SCALE')
CATEGORICAL = Parameter('optimizer', 'CATEGORICAL', ('sgd', 'adam', 'adagrad'))
DISCRETE = Parameter('batch_size', 'DISCRETE', (10, 100, 1000))
SMALL = Parameter('layers', 'INTEGER', (1, 2))


def make_spec(*params: Parameter, algorithm: str = 'ALGORITHM_UNSPECIFIED', goal: str = 'MINIMIZE') -> HyperparameterSpec:
    return HyperparameterSpec(goal, 'loss', params, algorithm=algorithm)


def ask(spec: HyperparameterSpec, count: int, *, seed: int = 1, loss=lambda values: 0.0) -> list[dict]:  # type: ignore[no-untyped-def]
    """The values of the first trials, one at a time."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=spec.goal.lower())
    space, found = search.make_distributions(spec.params), []
    for number in range(count):
        study.sampler = search.make_sampler(spec, seed=seed, number=number)
        trial = study.ask(space)
        found.append({param.name: search.to_value(param, trial.params[param.name]) for param in spec.params})
        result = loss(found[-1])
        if result is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, result)
    return found


@pytest.mark.parametrize('algorithm', ['ALGORITHM_UNSPECIFIED', 'RANDOM_SEARCH'])
def test_values_are_of_their_type_and_range(algorithm: str) -> None:
    spec = make_spec(INTEGER, LOG, REVERSE, CATEGORICAL, DISCRETE, algorithm=algorithm)
    for values in ask(spec, 12, loss=lambda values: values['rate']):
        assert type(values['units']) is int and 5 <= values['units'] <= 250
        assert type(values['rate']) is float and 1e-4 <= values['rate'] <= 0.5
        assert 0.5 <= values['momentum'] <= 0.99
        assert values['optimizer'] in CATEGORICAL.values and values['batch_size'] in DISCRETE.values


def test_reverse_log_is_fine_near_the_highest_value() -> None:
    values = [values['momentum'] for values in ask(make_spec(Parameter('momentum', 'DOUBLE', (0.01, 1.0), REVERSE.scale),
                                                             algorithm='RANDOM_SEARCH'), 200)]  # fmt: skip
    # In the middle of the logarithmic scale of 0.01 to 1 stands 0.1, seen from the other end 0.91.
    assert sum(value > 0.91 for value in values) == pytest.approx(100, abs=25)
    assert search.to_value(REVERSE, 0.5) == 0.99 and search.to_value(REVERSE, 0.99) == 0.5


@pytest.mark.parametrize('algorithm', ['ALGORITHM_UNSPECIFIED', 'RANDOM_SEARCH', 'GRID_SEARCH'])
def test_the_same_seed_gives_the_same_trials(algorithm: str) -> None:
    spec = make_spec(INTEGER, CATEGORICAL, algorithm=algorithm)
    assert ask(spec, 8, loss=lambda values: values['units']) == ask(spec, 8, loss=lambda values: values['units'])


def test_a_grid_visits_every_combination_once() -> None:
    spec = make_spec(CATEGORICAL, DISCRETE, SMALL, algorithm='GRID_SEARCH')
    found = [tuple(values.values()) for values in ask(spec, 18)]
    assert sorted(found) == sorted((name, size, layers) for name in CATEGORICAL.values for size in DISCRETE.values
                                   for layers in SMALL.values)  # fmt: skip
    assert search.count_points(spec) == 18
    # Soon everywhere: the first few have seen each of the names.
    assert {values[0] for values in found[:6]} == set(CATEGORICAL.values)


def test_real_numbers_have_no_end() -> None:
    assert search.count_points(make_spec(SMALL, LOG)) == math.inf
    assert search.count_points(make_spec(INTEGER)) == 246


@pytest.mark.parametrize(('goal', 'sign'), [('MINIMIZE', 1), ('MAXIMIZE', -1)])
def test_the_default_finds_the_best_of_numbers(goal: str, sign: int) -> None:
    def distance(values: dict) -> float:
        return sign * (math.log10(values['rate'] / 0.02) ** 2 + ((values['units'] - 100) / 245) ** 2)

    found = ask(make_spec(INTEGER, LOG, goal=goal), 25, loss=distance)
    assert min(sign * distance(values) for values in found) < 1e-3


def test_the_default_finds_the_best_choice() -> None:
    def distance(values: dict) -> float:
        best = {'sgd': 0.3, 'adam': 0.001, 'adagrad': 0.1}[values['optimizer']]
        return (values['optimizer'] != 'adam') * 0.3 + math.log10(values['rate'] / best) ** 2

    found = ask(make_spec(LOG, CATEGORICAL), 25, loss=distance)
    assert min(distance(values) for values in found) < 0.01


def test_failed_trials_are_kept_away_from() -> None:
    found = ask(make_spec(LOG), 20, loss=lambda values: None if values['rate'] > 0.05 else -values['rate'])
    assert sum(values['rate'] > 0.05 for values in found[10:]) <= 5
    assert max(values['rate'] for values in found if values['rate'] <= 0.05) > 0.04


def test_trials_at_once_are_not_the_same() -> None:
    spec = make_spec(LOG)
    study = optuna.create_study()
    for number in range(5):
        study.sampler = search.make_sampler(spec, seed=1, number=number)
        trial = study.ask(search.make_distributions(spec.params))
        study.tell(trial, math.log10(trial.params['rate'] / 0.02) ** 2)
    running = []
    for number in range(5, 9):
        study.sampler = search.make_sampler(spec, seed=1, number=number)
        running.append(study.ask(search.make_distributions(spec.params)).params['rate'])
    assert len(set(running)) == 4


def test_a_small_space_is_exhausted_before_anything_is_repeated() -> None:
    found = ask(make_spec(DISCRETE, SMALL), 6, loss=lambda values: values['batch_size'])
    # The first are spread evenly, which may repeat one; a fit does not.
    assert len({tuple(values.values()) for values in found}) >= 5


def test_a_process_goes_through_what_was_measured() -> None:
    points = np.linspace(0, 1, 7)[:, None]
    values = np.sin(6 * points[:, 0])
    values = (values - values.mean()) / values.std()
    process = gaussian_process.GaussianProcess(points, values, np.random.default_rng(0))
    mean, deviation = process.predict(points)
    assert mean == pytest.approx(values, abs=0.02)
    far = process.predict(np.array([[0.25 / 3]]))[1]
    assert deviation.max() < far[0]


def test_the_gradient_of_the_fit_is_that_of_its_posterior() -> None:
    rng = np.random.default_rng(0)
    points, values = rng.random((8, 2)), rng.normal(0, 1, 8)
    squares = (points[:, None] - points[None]) ** 2
    medians, deviations = np.array([-0.7, -0.7, -9.0]), np.array([1.0, 1.0, 2.0])
    theta = np.array([[-0.3, 0.2, -3.0]])
    _, gradient = gaussian_process._posterior(theta, squares, values, medians, deviations)
    for index in range(3):
        nudge = np.eye(3)[index] * 1e-5
        up, _ = gaussian_process._posterior(theta + nudge, squares, values, medians, deviations)
        down, _ = gaussian_process._posterior(theta - nudge, squares, values, medians, deviations)
        assert gradient[0, index] == pytest.approx((up[0] - down[0]) / 2e-5, rel=1e-4)


def test_the_logarithm_of_a_tiny_improvement_is_finite() -> None:
    z = np.array([-50.0, -20.1, -19.9, 0.0, 3.0])
    logs = gaussian_process._log_improvement(z)
    assert np.isfinite(logs).all() and (np.diff(logs) > 0).all()
    assert logs[3] == pytest.approx(math.log(1 / math.sqrt(2 * math.pi)))
    assert logs[1] == pytest.approx(logs[2], abs=4.2)
