"""The default search against random search and optuna's TPE on functions with a known minimum.

    python benchmarks/bench_search.py --seeds 15 --trials 30

Three functions: `network` of three parameters like those of the MNIST sweep (two whole numbers, a rate on a logarithmic scale);
`hartmann3` (Dixon and Szego, 1978), the usual test of such searches; `names`, the first with a choice between four optimizers
beside it. Prints the median regret of each search, how far its best trial is from the minimum, and the ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.measure import describe_machine
from trainer import hptuning, search
from trainer.hptuning import HyperparameterSpec, Parameter

_SIZES = (
    Parameter('hidden1', hptuning.INTEGER, (40, 400), hptuning.LINEAR),
    Parameter('hidden2', hptuning.INTEGER, (5, 250), hptuning.LINEAR),
    Parameter('learning_rate', hptuning.DOUBLE, (1e-4, 0.5), hptuning.LOG),
)
# What each adds to the loss, and by what it multiplies the best rate.
_OPTIMIZERS = {'sgd': (0.05, 1.0), 'momentum': (0.0, 0.3), 'adam': (0.02, 0.02), 'adagrad': (0.1, 1.0)}
_NAMES = Parameter('optimizer', hptuning.CATEGORICAL, tuple(_OPTIMIZERS))
_UNITS = tuple(Parameter(f'x{index}', hptuning.DOUBLE, (0.0, 1.0), hptuning.LINEAR) for index in range(3))
_WEIGHTS = np.array([1.0, 1.2, 3.0, 3.2])
_SCALES = np.array([[3, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]])
_CENTRES = 1e-4 * np.array([[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]])


def network(sample: Mapping[str, Any]) -> float:
    """A loss, 0 at hidden1 = 290, hidden2 = 120, learning_rate = 0.06; the rate matters most, and too high is worst."""
    rate = math.log10(sample['learning_rate'] / 0.06)
    return (
        0.3 * ((sample['hidden1'] - 290) / 360) ** 2
        + 0.2 * ((sample['hidden2'] - 120) / 245) ** 2
        + (0.12 if rate < 0 else 0.5) * rate**2
        + 0.05 * rate * (sample['hidden1'] - 290) / 360
    )


def hartmann3(sample: Mapping[str, Any]) -> float:
    """Hartmann's function of three numbers, above its minimum of -3.86278."""
    point = np.array([sample['x0'], sample['x1'], sample['x2']])
    return 3.86278 - float(_WEIGHTS @ np.exp(-(_SCALES * (point - _CENTRES) ** 2).sum(1)))


def named_network(sample: Mapping[str, Any]) -> float:
    """`network` with an optimizer that adds to the loss and moves the best rate."""
    penalty, factor = _OPTIMIZERS[sample['optimizer']]
    return penalty + network({**sample, 'learning_rate': sample['learning_rate'] / factor})


TASKS: dict[str, tuple[Callable[[Mapping[str, Any]], float], tuple[Parameter, ...], int]] = {
    'network': (network, _SIZES, 1),
    'hartmann3': (hartmann3, _UNITS, 1),
    'hartmann3, 4 at once': (hartmann3, _UNITS, 4),
    'names': (named_network, (*_SIZES, _NAMES), 1),
    'names, 4 at once': (named_network, (*_SIZES, _NAMES), 4),
}
_ROW = '{:20} {:>28} {:>28} {:>28} {:>15} {:>12}'
SEARCHES = ('default', 'random', 'tpe')


def run(task: str, name: str, *, trials: int, seed: int) -> float:
    """Regret of the best of `trials` trials."""
    function, params, parallel = TASKS[task]
    algorithm = hptuning.RANDOM_SEARCH if name == 'random' else hptuning.BAYESIAN
    spec = HyperparameterSpec('MINIMIZE', 'loss', params, max_parallel_trials=parallel, algorithm=algorithm)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=parallel > 1))
    space, running, best = search.make_distributions(params), [], math.inf
    for number in range(trials):
        if name != 'tpe':
            study.sampler = search.make_sampler(spec, seed=seed, number=number)
        running.append(study.ask(space))
        while running and (len(running) == parallel or number == trials - 1):
            trial = running.pop(0)
            value = function({param.name: search.to_value(param, trial.params[param.name]) for param in params})
            study.tell(trial, value)
            best = min(best, value)
    return best


def main() -> None:
    """Runs all searches in turn, seed by seed, and prints the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, default=15, help='runs of each search')
    parser.add_argument('--trials', type=int, default=30, help='trials of each run')
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    results = {}
    print(_ROW.format('median regret', *SEARCHES, 'random/default', 'tpe/default'))
    for task in TASKS:
        regrets: dict[str, list[float]] = {name: [] for name in SEARCHES}
        started = time.monotonic()
        for seed in range(options.seeds):
            for name in SEARCHES:
                regrets[name].append(run(task, name, trials=options.trials, seed=seed))
        medians = {name: statistics.median(values) for name, values in regrets.items()}
        cells = [f'{medians[name]:.6f} ({min(regrets[name]):.6f}-{max(regrets[name]):.6f})' for name in SEARCHES]
        ratios = [f'{medians[name] / medians["default"]:.1f}' for name in ('random', 'tpe')]
        print(_ROW.format(task, *cells, *ratios), flush=True)
        results[task] = {**medians, 'secs': round(time.monotonic() - started, 1)}
    print(json.dumps({'trials': options.trials, 'seeds': options.seeds, 'regret': results, 'machine': describe_machine()}))


if __name__ == '__main__':
    main()
