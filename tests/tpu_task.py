"""`trainer.task` on a simulated TPU, run as a process of its own; prints the steps of each session call as its last line.

python -m tests.tpu_task CORES HOSTS [flags of trainer.task]
"""

from __future__ import annotations

import json
import sys

from tests.tpu import Simulator
from trainer import task, tpu_system


def main(argv: list[str]) -> int:
    cores, hosts, *flags = argv
    system = tpu_system.System('simulated', int(cores), int(hosts))
    tpu_system.find = lambda name, environ: (system, '')
    tpu_system.resolve = lambda name: None
    with Simulator(system.cores, system.hosts).running() as simulator:
        code = task.main(flags)
    print(json.dumps({'loops': simulator.loops, 'sums': simulator.num_sums}))
    return code


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
