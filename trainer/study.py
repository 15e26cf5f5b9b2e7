"""What a sweep knows of its trials, in a file that survives it: an optuna study in SQLite.

A trial enters the file whole, in one transaction, before its process starts; reports and ends are added as they come. So
whenever the sweep is killed, each trial is there once: finished, or RUNNING, which the next sweep into the folder runs on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import optuna
from optuna.trial import FrozenTrial, TrialState

from trainer import hptuning, search
from trainer.errors import DataError, UsageError
from trainer.hptuning import HyperparameterSpec, Value

RUNNING, SUCCEEDED, FAILED = 'RUNNING', 'SUCCEEDED', 'FAILED'
STOPPED = 'STOPPED'
"""Ended early: the others did better at its step."""
_STATES = {
    TrialState.RUNNING: RUNNING,
    TrialState.COMPLETE: SUCCEEDED,
    TrialState.FAIL: FAILED,
    TrialState.PRUNED: STOPPED,
}
_OPTUNA_STATES = {ours: theirs for theirs, ours in _STATES.items()}
_NAME = 'sweep'
_SPEC = 'spec'
_ID, _JOB = 'id', 'job'
StorageError = optuna.exceptions.StorageInternalError
"""The file cannot be read or written any more."""
# Of a sweep, these may be other ones when it goes on.
_MAY_CHANGE = ('max_trials', 'max_parallel_trials', 'max_failed_trials', 'early_stopping', 'algorithm', 'resume_job')
# Trials that have to have ended before the median of them says anything.
_MEDIAN_TRIALS = 3


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial as the file has it."""

    id: str
    """From '1'; the name of its folder."""
    params: Mapping[str, Value]
    state: str
    """RUNNING, SUCCEEDED, FAILED or STOPPED."""
    reports: Mapping[int, float]
    """Step to the metric that is optimized, rising."""
    start_time: str
    """ISO 8601, local time."""
    end_time: str
    """The same; '' while it runs."""

    @property
    def step(self) -> Optional[int]:
        """Of the last report."""
        return max(self.reports, default=None)

    @property
    def objective(self) -> Optional[float]:
        """The last report: what counts, as in the service."""
        return None if self.step is None else self.reports[self.step]


class Study:
    """The trials of a sweep.

    Args:
        path: of the file, local; made when there is none.
        spec: what is tuned and how.
        seed: of the search.

    Raises:
        UsageError: the file is of a sweep that tunes something else.
        DataError: it is no such file.
    """

    def __init__(self, path: str, spec: HyperparameterSpec, *, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._spec, self._seed = spec, seed
        self._space = search.make_distributions(spec.params)
        self._study = _open(path, direction=spec.goal.lower())
        self._check_spec(path)

    def _check_spec(self, path: str) -> None:
        fixed = {name: value for name, value in dataclasses.asdict(self._spec).items() if name not in _MAY_CHANGE}
        spec = json.loads(json.dumps(fixed))  # as it comes back from the file
        known = self._study.user_attrs.get(_SPEC)
        if known is None:
            self._study.set_user_attr(_SPEC, spec)
        for name, value in (known or {}).items():
            if value != spec[name]:
                raise UsageError(
                    f'{path}: the sweep in this folder has other {name} than the file: {_differences(value, spec[name])}; '
                    'set them back, or take another --output_path'
                )

    def add_trials_of(self, path: str) -> int:
        """Adds what has been measured by an earlier sweep, for the search to know; returns how many trials that were.

        Raises:
            UsageError: that one has other parameters.
            DataError: there is no such file.
        """
        if not os.path.exists(path):
            raise DataError(f'{path}: no such file, and resumePreviousJobId names the sweep that is to be in it')
        job = os.path.abspath(path)
        measured = [trial for trial in _open(path).get_trials(deepcopy=False) if trial.value is not None]
        for trial in measured:
            if trial.distributions != self._space:
                raise UsageError(
                    f'{path}: the sweep of resumePreviousJobId tunes other parameters: '
                    f'{_differences(trial.distributions, self._space)}'
                )
        if not any(trial.user_attrs.get(_JOB) == job for trial in self._study.get_trials(deepcopy=False)):
            for trial in measured:
                self._study.add_trial(
                    optuna.trial.create_trial(
                        params=trial.params, distributions=trial.distributions, value=trial.value, user_attrs={_JOB: job}
                    )
                )
        return len(measured)

    @property
    def trials(self) -> list[Trial]:
        """All trials of this sweep, by id."""
        return [self._to_trial(trial) for trial in self._study.get_trials(deepcopy=False) if _ID in trial.user_attrs]

    def _to_trial(self, trial: FrozenTrial) -> Trial:
        return Trial(
            id=trial.user_attrs[_ID],
            params={param.name: search.to_value(param, trial.params[param.name]) for param in self._spec.params},
            state=_STATES[trial.state],
            reports=dict(sorted(trial.intermediate_values.items())),
            start_time=_format_time(trial.datetime_start),
            end_time=_format_time(trial.datetime_complete),
        )

    def add_trial(self) -> Trial:
        """Chooses the parameters of the next trial; it is in the file, RUNNING, when this returns."""
        others = self._study.get_trials(deepcopy=False)
        number = len(others)
        sampler = search.make_sampler(self._spec, seed=self._seed, number=number)
        trial = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={_ID: str(1 + len(self.trials))})
        trial.number = number
        params = sampler.sample_relative(self._study, trial, self._space)
        for name, distribution in self._space.items():
            if name not in params:
                params[name] = sampler.sample_independent(self._study, trial, name, distribution)
        trial.params, trial.distributions = {name: params[name] for name in self._space}, self._space
        self._study.add_trial(trial)
        return self.trials[-1]

    def report(self, trial_id: str, reports: Mapping[int, float]) -> None:
        """Adds what a trial has reported and is not known yet."""
        trial = self._find(trial_id)
        for step in sorted(reports.keys() - trial.intermediate_values.keys()):
            optuna.trial.Trial(self._study, trial._trial_id).report(reports[step], step)

    def finish(self, trial_id: str, state: str) -> None:
        """The trial has ended.

        Args:
            trial_id: of a RUNNING one.
            state: SUCCEEDED, FAILED or STOPPED.
        """
        trial = self._find(trial_id)
        objective = self._to_trial(trial).objective
        if state == SUCCEEDED:
            self._study.tell(trial.number, objective)
        else:  # of one that was pruned, optuna takes the last report
            self._study.tell(trial.number, state=_OPTUNA_STATES[state])

    def _find(self, trial_id: str) -> FrozenTrial:
        (found,) = [t for t in self._study.get_trials(deepcopy=False) if t.user_attrs.get(_ID) == trial_id]
        return found

    def find_importances(self) -> dict[str, float]:
        """How much of what differs between good and bad trials each parameter explains, in [0, 1]; {} before 10 have ended."""
        if len([trial for trial in self.trials if trial.state == SUCCEEDED]) < 10:
            return {}
        return optuna.importance.get_param_importances(self._study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())


def _open(path: str, *, direction: Any = None) -> optuna.Study:
    """The study in the file; made when there is none and a direction is given."""
    try:
        storage = optuna.storages.RDBStorage(f'sqlite:///{os.path.abspath(path)}')
        if direction is None:
            return optuna.load_study(study_name=_NAME, storage=storage)
        return optuna.create_study(study_name=_NAME, storage=storage, direction=direction, load_if_exists=True)
    except Exception as error:  # sqlalchemy's, sqlite's and optuna's own, by what is wrong with the file
        reason = ' '.join(str(error).split())[:200]
        raise DataError(f'{path}: not the file of a sweep, or one that cannot be read or written ({reason})') from error


def is_hopeless(trial: Trial, others: Sequence[Trial], *, maximize: bool) -> bool:
    """Whether to end a trial early, by the median rule: its best so far is worse than the median of the others' averages.

    Of each other trial that has ended by itself, the average is that of its reports up to this trial's step (Golovin et al.
    2017, Google Vizier, section 3.2).
    """
    if trial.step is None:
        return False
    averages = []
    for other in others:
        values = [value for step, value in other.reports.items() if step <= trial.step]
        if other.state == SUCCEEDED and values:
            averages.append(statistics.fmean(values))
    if len(averages) < _MEDIAN_TRIALS:
        return False
    best, median = (max if maximize else min)(trial.reports.values()), statistics.median(averages)
    return best < median if maximize else best > median


def rank(trials: Sequence[Trial], *, maximize: bool) -> list[Trial]:
    """The trials from the best to the worst; those that have reported nothing, or failed, come last."""

    def key(trial: Trial) -> tuple[bool, float, int]:
        value = math.inf if trial.objective is None else -trial.objective if maximize else trial.objective
        return trial.state == FAILED or trial.objective is None, value, int(trial.id)

    return sorted(trials, key=key)


def find_best(trials: Sequence[Trial], *, maximize: bool) -> Optional[Trial]:
    """The best that has ended by itself."""
    ranked = rank([trial for trial in trials if trial.state == SUCCEEDED], maximize=maximize)
    return ranked[0] if ranked else None


def is_maximized(spec: HyperparameterSpec) -> bool:
    """Whether more is better."""
    return spec.goal == hptuning.GOALS[0]


def _format_time(time: Any) -> str:
    return time.astimezone().isoformat(timespec='seconds') if time else ''


def _differences(old: Any, new: Any) -> str:
    """What one has and the other does not, shortly."""
    if isinstance(old, Mapping):
        old, new = [f'{k}={v}' for k, v in old.items()], [f'{k}={v}' for k, v in new.items()]
    if not isinstance(old, list):
        return f'{old} before, {new} now'
    before, now = [item for item in old if item not in new], [item for item in new if item not in old]
    return f'{_shorten(before)} before, {_shorten(now)} now'


def _shorten(items: Sequence[Any]) -> str:
    texts = [' '.join(map(str, item.values())) if isinstance(item, dict) else str(item) for item in items]
    return '; '.join(texts) or 'nothing more'
