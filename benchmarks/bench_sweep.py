"""A sweep of the digits: the best of 10 trials of the default search against the best of 20 random ones; 2 at once against 1.

    python benchmarks/bench_sweep.py --data DIR [--seeds 5] [--steps 300]

What is tuned is that of the Cloud ML MNIST sample: hidden1 40-400, hidden2 5-250, learning_rate 0.0001-0.5. Every trial is a
process of `trainer.task`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import yaml

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import measure

PARAMS = [
    {'parameterName': 'hidden1', 'type': 'INTEGER', 'minValue': 40, 'maxValue': 400, 'scaleType': 'UNIT_LINEAR_SCALE'},
    {'parameterName': 'hidden2', 'type': 'INTEGER', 'minValue': 5, 'maxValue': 250, 'scaleType': 'UNIT_LINEAR_SCALE'},
    {'parameterName': 'learning_rate', 'type': 'DOUBLE', 'minValue': 0.0001, 'maxValue': 0.5, 'scaleType': 'UNIT_LOG_SCALE'},
]
_ALONE_SEEDS = 2  # in which the same is done one trial at a time


def run_sweep(arguments: argparse.Namespace, *, seed: int, **settings: object) -> tuple[list[float], float]:
    """Runs a sweep; returns the accuracy of each trial in their order, and seconds."""
    tuning = {'goal': 'MAXIMIZE', 'hyperparameterMetricTag': 'accuracy', 'params': PARAMS, **settings}
    with tempfile.TemporaryDirectory() as folder:
        with open(f'{folder}/hptuning.yaml', 'w') as file:
            yaml.safe_dump({'trainingInput': {'hyperparameters': tuning}}, file)
        command = [sys.executable, '-m', 'trainer.sweep', f'--config={folder}/hptuning.yaml', f'--output_path={folder}/out']
        data = [f'--train_data_paths={arguments.data}/train-*', f'--eval_data_paths={arguments.data}/eval-*']
        flags = [*data, f'--max_steps={arguments.steps}', '--eval_steps=100', '--noexport_best', '--summary_steps=0']
        started = time.monotonic()
        subprocess.run([*command, f'--seed={seed}', '--', *flags], check=True, capture_output=True)
        secs = time.monotonic() - started
        with open(f'{folder}/out/sweep_results.json') as file:
            trials = json.load(file)['trainingOutput']['trials']
    by_id = sorted(trials, key=lambda trial: int(trial['trialId']))
    return [trial['finalMetric']['objectiveValue'] for trial in by_id], secs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', required=True, help='folder of the digits, from scripts/convert_mnist')
    parser.add_argument('--seeds', type=int, default=5)
    parser.add_argument('--steps', type=int, default=300)
    arguments = parser.parse_args()
    print(measure.describe_machine())
    print('| seed | best of 10, default | best of 20, random | as good after trial | seconds, 2 at once | seconds, 1 |')
    print('| --- | --- | --- | --- | --- | --- |')
    ours, theirs, ratios = [], [], []
    for seed in range(1, arguments.seeds + 1):
        chosen, secs = run_sweep(arguments, seed=seed, maxTrials=10, maxParallelTrials=2)
        random, _ = run_sweep(arguments, seed=seed, maxTrials=20, maxParallelTrials=2, algorithm='RANDOM_SEARCH')
        alone = '-'
        if seed <= _ALONE_SEEDS:
            _, alone_secs = run_sweep(arguments, seed=seed, maxTrials=10, maxParallelTrials=1)
            alone = f'{alone_secs:.1f}'
            ratios.append(alone_secs / secs)
        reached = next((str(number) for number, value in enumerate(chosen, 1) if value >= max(random)), 'not reached')
        print(f'| {seed} | {max(chosen):.3f} | {max(random):.3f} | {reached} | {secs:.1f} | {alone} |', flush=True)
        ours.append(max(chosen))
        theirs.append(max(random))
    spread = f'{min(ratios):.2f}-{max(ratios):.2f}'
    print(f'| median | {statistics.median(ours):.3f} | {statistics.median(theirs):.3f} | | 1 to 2 at once: |', end='')
    print(f' {statistics.median(ratios):.2f} ({spread}) |')


if __name__ == '__main__':
    main()
