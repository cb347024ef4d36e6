"""Search for good values with optuna. Every trial is an ordinary run; the journal of trials is a file of JSON lines."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat import specs
from fedflat.core.curves import falls
from fedflat.errors import CheckpointError, InputError, RunError, UnknownNameError, one_line
from fedflat.experiment import IRRELEVANT, Experiment, check_names, default_out, field_type
from fedflat.runs.callbacks import Callback

if TYPE_CHECKING:
    from fedflat.runs.result import Run

JOURNAL = "trials.jsonl"


def _log(trial: Any, name: str, low: float, high: float) -> Any:
    """Real numbers between two positive ones, uniform on a logarithmic scale."""
    return trial.suggest_float(name, low, high, log=True)


def _uniform(trial: Any, name: str, low: float, high: float) -> Any:
    """Real numbers between two, uniform."""
    return trial.suggest_float(name, low, high)


def _int(trial: Any, name: str, low: int, high: int, log: bool = False) -> Any:
    """Integers between two, both included."""
    return trial.suggest_int(name, low, high, log=log)


LAWS: dict[str, Callable[..., Any]] = {"log": _log, "uniform": _uniform, "int": _int}


@dataclass(frozen=True)
class Dimension:
    """One dimension of the search space.

    Args:
        name: A field, or an argument inside one, such as method.sam.rho.
        law: The distribution of its values: log(low, high), uniform(low, high), int(low, high) or choice(a, b, …).
    """

    name: str
    law: specs.Call

    @classmethod
    def parse(cls, text: str) -> Dimension:
        """Read `"lr=log(0.001, 1)"`."""
        name, equals, law = text.partition("=")
        if not equals:
            raise InputError(f"cannot read --search {text!r}: write field=law, for example lr=log(0.001, 1)")
        call = specs.parse(law)
        if call.name not in (*LAWS, "choice"):
            raise UnknownNameError("law of a search", call.name, (*LAWS, "choice"))
        return cls(name.strip().replace("-", "_"), call)

    def suggest(self, trial: Any) -> Any:
        """The value for a trial."""
        if self.law.name == "choice":
            return trial.suggest_categorical(self.name, self.law.args)
        try:
            return specs.build("law", self.law, LAWS, trial, self.name)
        except ValueError as error:
            raise InputError(f"--search {self.name}={self.law} is not possible: {error}") from None

    def __str__(self) -> str:
        return f"{self.name}={self.law}"


def changed(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """A copy of an experiment with other values of fields, or of arguments inside them.

    >>> changed(Experiment(method="fedavg+sam"), {"lr": 0.5, "method.sam.rho": 0.2}).method
    'fedavg+sam(rho=0.2)'
    """
    for name, value in values.items():
        field, _, inner = name.partition(".")
        check_names({field: value})
        own = _with_argument(field, getattr(experiment, field), inner, value) if inner else value
        experiment = experiment.replace(**{field: own})
    return experiment


def _with_argument(field: str, text: Any, where: str, value: Any) -> str:
    """A sum of calls with another value of the argument `where`, written call.argument."""
    name, _, argument = where.partition(".")
    parts = specs.parse_sum(str(text))
    if name not in [part.name for part in parts]:
        raise UnknownNameError(f"name in {field}={text!r}:", name, [part.name for part in parts])
    put = [replace(p, kwargs={**p.kwargs, argument: value}) if p.name == name else p for p in parts]
    return "+".join(map(str, put))


def tidy(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with real numbers rounded to four digits."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


class Reporter(Callback):
    """Reports the metric of a run to its trial, and stops the run if the trial is pruned."""

    def __init__(self, trial: Any, metric: str, prune: bool) -> None:
        self._trial, self._metric, self._prune = trial, metric, prune
        self.pruned = False

    def start(self, run: Run) -> None:
        """Report the rounds of earlier processes."""
        for row in run.metrics:
            self._report(row)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> bool:
        """Report a round; unless it is the last, the trial may be pruned."""
        known = self._report(metrics) and metrics["round"] < run.experiment.rounds
        self.pruned = bool(known and self._prune and self._trial.should_prune())
        return self.pruned

    def _report(self, row: Mapping[str, Any]) -> bool:
        value = row.get(self._metric)
        if value is None or not math.isfinite(value):
            return False
        self._trial.report(value, row["round"])
        return True


class Search:
    """An optuna study in a folder; a new process continues it.

    Args:
        experiment: What all trials have in common.
        dimensions: What differs between them.
        out: The folder of the study and its runs.
        metric: What to maximise after the last round; losses, deviations and times are minimised.
        prune: Stop a trial early if it is worse than the median of the earlier ones, at any round after the first
            quarter.
    """

    def __init__(
        self,
        experiment: Experiment,
        dimensions: Sequence[Dimension],
        out: str | Path,
        *,
        metric: str = "accuracy",
        prune: bool = True,
    ) -> None:
        if not dimensions:
            raise InputError("nothing to search: give --search such as lr=log(0.001, 1)")
        self.experiment, self.dimensions, self.out = experiment, dimensions, Path(out)
        self.metric, self.prune = metric, prune
        self._optuna = _optuna()
        self._check()
        self.study = self._open()

    def _check(self) -> None:
        """Raise `InputError` if the first or the last value of every law makes no valid experiment."""
        for end in (0, -1):
            changed(self.experiment, {d.name: d.law.args[end] for d in self.dimensions if d.law.args})
        for d in self.dimensions:
            if "." not in d.name and field_type(d.name)[0] is int and d.law.name in ("log", "uniform"):
                raise InputError(f"{d.name} takes integers: write --search {d.name}=int(low, high), not {d.law}")

    def _open(self) -> Any:
        self.out.mkdir(parents=True, exist_ok=True)
        backend = importlib.import_module("optuna.storages.journal").JournalFileBackend(str(self.out / JOURNAL))
        study = self._optuna.create_study(
            storage=self._optuna.storages.JournalStorage(backend),
            study_name="sweep",
            load_if_exists=True,
            direction="minimize" if falls(self.metric) else "maximize",
            pruner=self._optuna.pruners.MedianPruner(n_warmup_steps=self.experiment.rounds // 4),
        )
        fields = {name: value for name, value in self.experiment.to_dict().items() if name not in IRRELEVANT}
        described = {"experiment": fields, "search": [str(d) for d in self.dimensions], "metric": self.metric}
        known = study.user_attrs  # some of it only, where a process was killed while it wrote them
        if any(known[name] != value for name, value in described.items() if name in known):
            raise CheckpointError(f"{self.out} holds another search ({known}); choose another folder")
        for name, value in described.items():
            study.set_user_attr(name, value)
        self._take_up(study)
        return study

    def _take_up(self, study: Any) -> None:
        """Queue the trials of a killed process again; their runs continue where they stopped."""
        states = self._optuna.trial.TrialState
        for trial in study.get_trials(states=(states.RUNNING,)):
            study.tell(trial.number, state=states.FAIL)
            study.enqueue_trial(trial.params)

    @property
    def ended(self) -> list[Any]:
        """The trials that are complete, pruned, or failed with `user_attrs["failure"]`."""
        states = self._optuna.trial.TrialState
        ends = (states.COMPLETE, states.PRUNED)
        return [t for t in self.study.get_trials() if t.state in ends or "failure" in t.user_attrs]

    def step(self, watchers: Callable[[str], Sequence[Callback]] = lambda label: (), **options: Any) -> None:
        """Run one trial.

        Args:
            watchers: Makes the callbacks of a run from its label.
            **options: As for `fedflat.run`.
        """
        from fedflat.engine.assembly import settled
        from fedflat.runs.runner import run

        trial, states = self._ask(), self._optuna.trial.TrialState
        values = tidy({dimension.name: dimension.suggest(trial) for dimension in self.dimensions})
        experiment, reporter = settled(changed(self.experiment, values)), Reporter(trial, self.metric, self.prune)
        folder = self.out / default_out(experiment).name
        trial.set_user_attr("folder", folder.name)
        label = ", ".join(f"{name}={value}" for name, value in values.items())
        try:
            result = run(experiment, out=folder, progress=False, callbacks=[reporter, *watchers(label)], **options)
        except RunError as error:
            trial.set_user_attr("failure", one_line(error))
            self.study.tell(trial, state=states.FAIL)
            return
        if reporter.pruned:
            self.study.tell(trial, state=states.PRUNED)
        else:
            self.study.tell(trial, self._value(result))

    def _ask(self) -> Any:
        """A new trial. The seed depends on the number of ended trials, so that interruptions change nothing."""
        seed = (self.experiment.seed * 1_000_003 + len(self.ended)) % 2**32
        self.study.sampler = self._optuna.samplers.TPESampler(seed=seed)
        return self.study.ask()

    def _value(self, result: Run) -> float:
        from fedflat.runs.records import record_of

        value = record_of(result).last(self.metric)
        if value is None:
            raise UnknownNameError(
                "metric", self.metric, [name for name, v in result.metrics[-1].items() if v is not None]
            )
        return value

    def best(self) -> Experiment | None:
        """The experiment of the best complete trial; None if there is none."""
        complete = self.study.get_trials(states=(self._optuna.trial.TrialState.COMPLETE,))
        return changed(self.experiment, tidy(self.study.best_params)) if complete else None


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise InputError("a search needs optuna: pip install 'fedflat[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
