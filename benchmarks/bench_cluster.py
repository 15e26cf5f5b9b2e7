"""Every strategy on this machine: accuracy at equal examples seen, steps and examples a second, scaling over one process.

    python benchmarks/bench_cluster.py --data DIR [--rounds 3] [--net mlp|convnet] [--rows one_device,mirrored]

The processes are those of `python -m trainer.launch`, over loopback. The one that all are compared with is pinned to one core
and has one thread for operations; the others have one such thread a process. Rates are of the chief's log: from its second
Train line on, so that start-up is left out, to its last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import measure

_LINE = re.compile(r'Train \[chief/0\], step (\d+): .*\((\d+\.\d+) sec\)')


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy as processes."""

    processes: tuple[str, ...]
    """Flags of trainer.launch."""
    flags: tuple[str, ...]
    """Flags of trainer.task."""
    parts: int
    """Batches of one process that make an update."""
    pinned: bool = False


ROWS = {
    'one_core': Row((), ('--distribution_strategy=one_device',), 1, pinned=True),
    'one_device': Row((), ('--distribution_strategy=one_device',), 1),
    'mirrored': Row((), ('--distribution_strategy=mirrored', '--num_cpu_replicas=2'), 2),
    'multi_worker_mirrored': Row(('--workers=1',), ('--distribution_strategy=multi_worker_mirrored',), 2),
    'parameter_server': Row(('--workers=1', '--ps=1'), ('--distribution_strategy=parameter_server',), 1),
    'sync_replicas': Row(
        ('--workers=2', '--ps=1'),
        ('--distribution_strategy=parameter_server', '--sync_replicas', '--replicas_to_aggregate=2'),
        2,
    ),
}


def run_row(row: Row, arguments: argparse.Namespace, *, examples: int) -> dict[str, float]:
    """Trains once; returns accuracy, steps and examples a second."""
    batch_size = arguments.batch * row.parts
    max_steps = examples // batch_size
    with tempfile.TemporaryDirectory() as output:
        flags = [
            f'--train_data_paths={arguments.data}/train-*',
            f'--eval_data_paths={arguments.data}/eval-*',
            f'--output_path={output}/run',
            f'--model={arguments.net}',
            f'--batch_size={batch_size}',
            f'--max_steps={max_steps}',
            # Fewer, larger updates go further each (Goyal et al. 2017, the linear scaling rule).
            f'--learning_rate={arguments.learning_rate * row.parts}',
            '--eval_steps=0',
            '--summary_steps=0',
            '--log_secs=1',
            '--noexport_best',
            '--intra_op_threads=1',
            *row.flags,
        ]
        command = [sys.executable, '-m', 'trainer.launch', *row.processes, f'--log_dir={output}/logs', '--', *flags]
        if row.pinned:
            command = ['taskset', '-c', '0', *command]
        environment = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '2'}
        child = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
        if child.returncode:
            raise RuntimeError(f'{" ".join(command)} failed:\n{child.stderr[-3000:]}')
        with open(f'{output}/logs/chief-0.log') as file:
            lines = [(int(step), float(secs)) for step, secs in _LINE.findall(file.read())]
        with open(f'{output}/run/final_metrics.json') as file:
            accuracy = json.load(file)['accuracy']
    (first, started), (last, ended) = lines[1], lines[-1]
    rate = (last - first) / (ended - started)
    return {'accuracy': accuracy, 'steps_per_sec': rate, 'examples_per_sec': rate * batch_size}


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', required=True, help='folder of the digits, from scripts/convert_mnist')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--net', choices=('mlp', 'convnet'), default='mlp')
    parser.add_argument('--batch', type=int, default=100, help='examples of a process and step')
    parser.add_argument('--examples', type=int, default=400_000, help='seen in all by each row')
    parser.add_argument('--learning_rate', type=float, default=0.1, help='for the batch of one process')
    parser.add_argument('--rows', default=','.join(ROWS))
    arguments = parser.parse_args()
    names = arguments.rows.split(',')
    print(measure.describe_machine())
    print(f'{arguments.net}, {arguments.batch} examples a process and step, {arguments.examples} examples in all')
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            results[name].append(run_row(ROWS[name], arguments, examples=arguments.examples))
    print(f'{"":24}{"accuracy":>10}{"steps/s":>10}{"examples/s":>12}   examples/s over {names[0]}')
    base = [run['examples_per_sec'] for run in results[names[0]]]
    for name, runs in results.items():
        accuracy, steps, examples = ([run[key] for run in runs] for key in ('accuracy', 'steps_per_sec', 'examples_per_sec'))
        print(
            f'{name:24}{statistics.median(accuracy):10.3f}{statistics.median(steps):10.1f}{statistics.median(examples):12.0f}'
            f'   {measure.compare(examples, base)}',
            flush=True,
        )


if __name__ == '__main__':
    main()
