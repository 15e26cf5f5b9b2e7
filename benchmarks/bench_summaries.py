"""What summaries cost: steps a second with host_call writing every 100 steps, pictures included, and with none.

    python benchmarks/bench_summaries.py --data DIR [--rounds 3]

Each run is `trainer.task` in a fresh process; with and without take turns. The window leaves out the first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import bench_loop, measure

EVERY_STEPS = 100
# Flags, steps before the window, steps of the window: some seconds of it.
MODELS = {
    'convnet': (['--model=convnet', '--batch_size=100'], 200, 600),
    'dcgan': (
        [
            *('--model=dcgan', '--gan_filters=8', '--batch_size=64'),
            *('--optimizer=adam', '--learning_rate=0.0002', '--adam_beta1=0.5'),
        ],
        *(100, 200),
    ),
}


def run_variant(model: str, data: str, summary_steps: int) -> None:
    """Runs one variant in this process and prints its figures as JSON."""
    flags, warm_up, steps = MODELS[model]
    window = bench_loop.Window(warm_up, warm_up + steps)
    with tempfile.TemporaryDirectory() as output:
        run = [f'--train_data_paths={data}', '--mode=train', f'--output_path={output}', f'--max_steps={warm_up + steps}']
        # Without summaries no call would have to end at step 100: the same number of steps a call for both.
        bench_loop.run_task([*flags, *run, '--steps_per_loop=10', f'--summary_steps={summary_steps}'], window)
    print(json.dumps(window.result))


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', required=True, help='the training shards')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--models', default=','.join(MODELS))
    parser.add_argument('--summary_steps', type=int, help='run with these alone, in this process')
    arguments = parser.parse_args()
    models = arguments.models.split(',')
    if arguments.summary_steps is not None:
        run_variant(models[0], arguments.data, arguments.summary_steps)
        return
    print(measure.describe_machine())
    for model in models:
        runs: dict[int, list[dict[str, float]]] = {0: [], EVERY_STEPS: []}
        for _ in range(arguments.rounds):
            for summary_steps, results in runs.items():
                flags = ['--data', arguments.data, '--models', model, '--summary_steps', str(summary_steps)]
                results.append(measure.run_child(__file__, flags, timeout_secs=300))
        for key, name in (('steps_per_sec', 'wall clock'), ('steps_per_cpu_sec', 'CPU')):
            without, with_summaries = ([run[key] for run in runs[steps]] for steps in (0, EVERY_STEPS))
            ratio = measure.compare(without, with_summaries)
            print(f'{model}: time of a step with summaries every {EVERY_STEPS} steps to none, by {name}: {ratio}')


if __name__ == '__main__':
    main()
