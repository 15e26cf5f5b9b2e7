"""`python -m trainer.sweep --config hptuning.yaml --output_path OUT -- FLAGS`: hyperparameter tuning on this machine.

Reads `trainingInput.hyperparameters` as the services do (`hptuning.py`) and runs each trial as a service does: `trainer.task`
in a process of its own, or a `trainer.launch` cluster where the scale tier has workers, with a folder `OUT/<trial>`. FLAGS take
the place of the file's `args`. The search is that of `search.py`; trials that run at once have each their part of the cores.

Everything known is in `OUT/sweep.sqlite3` (`study.py`): the same command goes on with a sweep that was killed or interrupted,
runs its running trials on from their checkpoints, and says the result of one that is done. A trial that fails is counted and
the sweep goes on, up to `maxFailedTrials`; where the file has none, up to half of the trials. Ctrl-C and SIGTERM end the
trials, which save, and print the table; a second one kills. When the sweep is killed, its guard (`guard.py`) ends the trials.

Exit codes: 0 done; 1 too many trials failed, or data is wrong; 2 wrong flags; 130 interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Optional

from trainer import folder_lock, machines, storage, tool_flags, training_input
from trainer.errors import DataError, UsageError
from trainer.guard import SAVE_SECS, Guard
from trainer.training_input import EVALUATOR, PARAMETER_SERVER, WORKER, TrainingInput

try:
    from trainer import search, study, sweep_report
    from trainer.trial_process import Share, TrialProcess, divide_machine
except ImportError as missing:  # of the extra that the rest of the package does without
    raise SystemExit(f"trainer.sweep: error: {missing}; install what sweeps need: pip install 'trainer[sweep]'") from missing

_POLL_SECS = 0.3
_ALIKE = 3  # trials, the first of a sweep, that fail in the same way before it is given up
_FILE = 'sweep.sqlite3'


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs, or goes on with, the sweep that the flags describe.

    Args:
        argv: flags without the program's name; None takes those of this process.

    Returns:
        The exit code.
    """
    return tool_flags.report('trainer.sweep', lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    options, args = parse(argv)
    job = load(options.config, args)
    try:
        with folder_lock.lock(options.sweep_dir, 'another sweep runs in this folder; end it, or take another --output_path'):
            return Sweep(job, options).run()
    except study.StorageError as error:
        reason = f'{storage.join(options.sweep_dir, _FILE)}: cannot be read or written any more ({error.__cause__ or error})'
        raise DataError(f'{reason}; what it has is kept: mend that and run the same command again') from error


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's settings, and the flags behind `--` for every trial.

    Raises:
        UsageError: a flag of the sweep is wrong.
        SystemExit: `--help` was asked for and has been printed.
    """
    parser = tool_flags.Parser(
        prog='python -m trainer.sweep',
        usage='%(prog)s --config hptuning.yaml --output_path DIR [flags] [-- FLAGS_OF_THE_TRAINER]',
        description='Tunes hyperparameters on this machine, as hptuning.yaml says.',
        epilog="What stands after -- goes to every trial, in place of the file's args; python -m trainer.task --help lists it.",
    )
    parser.add_argument('--config', metavar='FILE', default='hptuning.yaml', help='what to tune [%(default)s]')
    parser.add_argument('--output_path', metavar='DIR', default='', help='each trial has a folder in it; local or gs://')
    parser.add_argument(
        '--sweep_dir', metavar='DIR', default='', help='local folder of logs and of what is known [that of --output_path]'
    )
    parser.add_argument('--seed', metavar='N', type=int, default=1, help='of the search [%(default)s]')
    options, args = parser.parse(argv)
    if not options.output_path:
        raise UsageError('--output_path: missing; expected the folder for the trials, as in --output_path=sweep')
    if not options.sweep_dir:
        if storage.is_remote(options.output_path):
            raise UsageError(
                f'--sweep_dir: missing; --output_path={options.output_path} is remote, and what is known is kept locally'
            )
        options.sweep_dir = options.output_path
    elif storage.is_remote(options.sweep_dir):
        raise UsageError(f'--sweep_dir={options.sweep_dir}: expected a local folder')
    if options.seed < 0:
        raise UsageError(f'--seed={options.seed}: expected 0 or more')
    return options, args


def load(path: str, args: Sequence[str]) -> TrainingInput:
    """The job file, checked as far as it matters here.

    Raises:
        UsageError: something in it is wrong, or it tunes nothing.
        DataError: it cannot be read.
    """
    job = training_input.load(path, args, is_local=True)
    if job.hyperparameters is None:
        raise UsageError(f'{path}: expected trainingInput.hyperparameters, what to tune; there is none')
    return job


def make_command(job: TrainingInput, params: dict, *, job_dir: str, log_dir: str, threads: int) -> list[str]:
    """What a trial runs: a module and its flags.

    Args:
        job: with the args for all trials.
        params: name to value of the hyperparameters.
        job_dir: for all that the trial leaves.
        log_dir: of the tasks of a cluster, local.
        threads: for operations; 0 leaves it to the trainer.
    """
    task_flags = [*job.args, *(f'--{name}={value}' for name, value in params.items()), f'--job_dir={job_dir}']
    if threads:
        task_flags.append(f'--intra_op_threads={threads}')
    tier = machines.TIERS.get(job.tier)
    counts = {
        'workers': tier.workers if tier else job.count(WORKER),
        'ps': tier.parameter_servers if tier else job.count(PARAMETER_SERVER),
        'evaluator': 0 if tier else job.count(EVALUATOR),
    }
    if not any(counts.values()):
        return ['trainer.task', *task_flags]
    return [
        'trainer.launch',
        *(f'--{role}={count}' for role, count in counts.items()),
        f'--log_dir={log_dir}',
        '--',
        *task_flags,
    ]


class Sweep:
    """Runs the trials.

    Args:
        job: the job file, with what to tune.
        options: of `parse`.
    """

    def __init__(self, job: TrainingInput, options: argparse.Namespace) -> None:
        assert job.hyperparameters is not None
        self._job, self._spec = job, job.hyperparameters
        self._output_path, self._folder = options.output_path, os.path.abspath(options.sweep_dir)
        self._study = study.Study(storage.join(self._folder, _FILE), self._spec, seed=options.seed)
        self._maximize = study.is_maximized(self._spec)
        self._max_trials = int(min(self._spec.max_trials, search.count_points(self._spec)))
        self._max_failed = self._spec.max_failed_trials or max(1, -(-self._max_trials // 2))
        self._guard = Guard()
        self._running: list[TrialProcess] = []
        self._shares: list[Share] = divide_machine(self._spec.max_parallel_trials)
        self._signals: list[int] = []  # that came and have not been heeded
        self._exit_code: Optional[int] = None
        """Of the sweep, once no trial is to start any more before its time."""
        self._why = ''
        self._reasons: list[str] = []
        """Why trials have failed, without the names of their folders."""

    def run(self) -> int:
        """Runs all trials that are left and returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._signals.append(number))
        try:
            with sweep_report.Display(self._spec) as self._display:
                self._prepare()
                while self._running or self._start_next():
                    while self._start_next():
                        pass
                    time.sleep(_POLL_SECS)
                    self._heed_signals()
                    for process in list(self._running):
                        self._look_at(process)
                    self._display.show(self._study.trials)
        finally:
            self._guard.dismiss()  # after an error here it ends what still runs
        return self._end()

    def _prepare(self) -> None:
        sweep_report.write_experiment(self._output_path, self._spec)
        if self._spec.resume_job:
            path = self._spec.resume_job
            folder = path if os.path.isdir(path) else os.path.join(os.path.dirname(self._folder), path)
            count = self._study.add_trials_of(storage.join(folder, _FILE))
            self._display.say(f'{count} trials of {folder} count for the search')
        trials = self._study.trials
        running = [trial.id for trial in trials if trial.state == study.RUNNING]
        if trials:
            going_on = f'; going on with {", ".join(running)}' if running else ''
            self._display.say(f'{len(trials)} of {self._max_trials} trials are known{going_on}')
        elif self._max_trials < self._spec.max_trials:
            self._display.say(f'{self._max_trials} trials are all that there can be (maxTrials is {self._spec.max_trials})')

    def _start_next(self) -> bool:
        """Starts a trial if one is to be started and has a place; returns whether it did."""
        taken = {process.slot for process in self._running}
        free = [slot for slot in range(self._spec.max_parallel_trials) if slot not in taken]
        if self._exit_code is not None or not free:
            return False
        trials = self._study.trials
        started = {process.trial_id for process in self._running}
        waiting = [trial for trial in trials if trial.state == study.RUNNING and trial.id not in started]
        if not waiting and len(trials) >= self._max_trials:
            return False
        trial = waiting[0] if waiting else self._study.add_trial()
        folder, share = storage.join(self._folder, trial.id), self._shares[free[0]]
        job_dir = storage.join(self._output_path, trial.id)
        sweep_report.write_session_start(job_dir, trial.params, trial.id)
        command = make_command(
            self._job,
            dict(trial.params),
            job_dir=job_dir,
            log_dir=storage.join(folder, 'logs'),
            threads=0 if share.cores or self._spec.max_parallel_trials == 1 else share.threads,
        )
        self._running.append(
            TrialProcess(
                trial.id, command, folder=folder, tag=self._spec.metric_tag, slot=free[0], share=share, guard=self._guard
            )
        )
        self._display.show(self._study.trials)
        return True

    def _look_at(self, process: TrialProcess) -> None:
        code = process.poll()  # before the reports, so that none comes after
        reports = process.read_reports()
        if reports:
            self._study.report(process.trial_id, reports)
        if code is not None:
            self._running.remove(process)
            self._finish(process, code)
        elif reports and self._spec.early_stopping and self._exit_code is None and not process.is_stopped_early:
            trials = {trial.id: trial for trial in self._study.trials}
            trial = trials.pop(process.trial_id)
            if study.is_hopeless(trial, list(trials.values()), maximize=self._maximize):
                process.is_stopped_early = True
                process.stop()

    def _finish(self, process: TrialProcess, code: int) -> None:
        (trial,) = [trial for trial in self._study.trials if trial.id == process.trial_id]
        if self._exit_code is not None and code != 0:
            return  # it was told to end; it stays RUNNING and goes on in the next sweep
        if code == 0 and trial.objective is not None:
            state = study.SUCCEEDED
        elif process.is_stopped_early:
            state = study.STOPPED
        else:
            state = study.FAILED
            reason = process.read_last_line() if code else f'it reported no {self._spec.metric_tag}'
            self._display.say(f'trial {trial.id} ended with code {code}: {reason} ({process.log_path})')
            self._reasons.append(reason.replace(storage.join(self._output_path, trial.id), ''))
        self._study.finish(trial.id, state)
        sweep_report.write_session_end(storage.join(self._output_path, trial.id), state)
        if state != study.FAILED:
            return
        states = [other.state for other in self._study.trials]
        failed = states.count(study.FAILED)
        if code == UsageError.exit_code:
            self._stop(code, 'the flags are wrong, and no trial would run')
        elif len(self._reasons) == failed == _ALIKE and len(set(self._reasons)) == 1 and study.SUCCEEDED not in states:
            self._stop(1, f'the first {failed} trials have failed in the same way')
        elif failed >= self._max_failed:
            limit = 'maxFailedTrials' if self._spec.max_failed_trials else 'half of maxTrials'
            self._stop(1, f'{failed} trials have failed ({limit})')

    def _stop(self, code: int, why: str) -> None:
        self._exit_code, self._why = code, why
        for process in self._running:
            process.stop()

    def _heed_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if self._exit_code is None:
                self._stop(128 + number, f'{signal.Signals(number).name}; the same command goes on')
                if self._running:
                    self._display.say(
                        f'{signal.Signals(number).name}: up to {SAVE_SECS:g} s for the trials to save; once more kills them'
                    )
            else:
                for process in self._running:
                    process.kill()

    def _end(self) -> int:
        trials = self._study.trials
        sweep_report.write_results(self._output_path, self._spec, trials)
        print(sweep_report.format_table(self._spec, trials), end='', flush=True)
        importances = self._study.find_importances()
        if importances:
            print('importance:', ', '.join(f'{name} {share:.0%}' for name, share in importances.items()))
        best = study.find_best(trials, maximize=self._maximize)
        if best:
            values = ' '.join(f'--{name}={value}' for name, value in best.params.items())
            print(f'best: trial {best.id}, {self._spec.metric_tag} {best.objective:.6g} at step {best.step}: {values}')
        print(f'results: {storage.join(self._output_path, sweep_report.JSON_NAME)} and {sweep_report.YAML_NAME}')
        print(f'charts: tensorboard --logdir {self._output_path}', flush=True)
        if self._why:
            print('trainer.sweep: ended early:', self._why, file=sys.stderr)
        return self._exit_code or 0


if __name__ == '__main__':
    sys.exit(main())
