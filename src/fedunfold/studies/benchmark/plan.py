"""What is run: first every setting of a grid on validation rows, then the trials of the chosen and the default one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedunfold.core.errors import InputError
from fedunfold.studies.benchmark.contenders import Contender
from fedunfold.studies.benchmark.records import TUNING, RunRecords
from fedunfold.studies.benchmark.runs import BenchmarkRun
from fedunfold.studies.benchmark.suites import Place, Suite
from fedunfold.studies.cases import StudyCase
from fedunfold.studies.processes import OnProgress, run_jobs


@dataclass(frozen=True)
class Venue:
    """An environment of a suite whose data were looked at.

    Attributes:
        place: What the suite says of it.
        about: What the page has to know.
        identity: What may not change while there are records.
        run_cost: How long a run takes, about, in clients' minibatch steps.
    """

    place: Place
    about: Mapping[str, Any]
    identity: Mapping[str, Any]
    run_cost: float


@dataclass(frozen=True)
class Plan:
    """A suite, or the part of it that is run now.

    Attributes:
        suite: The suite.
        folder: Where its relative paths count from.
        contenders: The methods.
        venues: The environments that are run, by name.
        others: What the page has to know of those that are not run, by name.
        trials: How many trials, where they are fewer or more than the suite's.
        device: Where it is computed.
    """

    suite: Suite
    folder: Path
    contenders: Mapping[str, Contender]
    venues: Mapping[str, Venue]
    others: Mapping[str, Mapping[str, Any]]
    trials: int | None = None
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        suite: Suite,
        folder: Path,
        contenders: Mapping[str, Contender],
        only: Sequence[str] = (),
        trials: int | None = None,
        device: str = "cpu",
    ) -> "Plan":
        """The plan, for which the data of the environments that are run are read once.

        Raises:
            InputError: There is no such environment, or none whose data are at hand.
        """
        if trials is not None and trials < 1:
            raise InputError(f"a benchmark needs at least 1 trial, not {trials}.")
        cases = [(place, place.case(folder, 0)) for place in suite.environments]
        names = [case.env.name for _, case in cases]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"suite {suite.name} has two environments called {twice}; change the name of one.")
        for name in only:
            if name not in names:
                raise InputError(f"suite {suite.name} has no environment '{name}'; choose among {', '.join(names)}.")
        venues, others = {}, {}
        for place, case in cases:
            about = _about(place, case)
            if only and case.env.name not in only:
                others[case.env.name] = about
                continue
            try:
                identity = {"digest": case.digest, "rounds": case.env.rounds, "seed": case.env.seed, "device": device}
            except InputError as error:
                others[case.env.name] = {**about, "left_out": str(error)}
                continue
            venues[case.env.name] = Venue(place, {**about, "left_out": ""}, identity, _run_cost(case))
        if not venues:
            reason = next(about["left_out"] for about in others.values() if "left_out" in about)
            raise InputError(f"no environment of suite {suite.name} can be run: {reason}")
        return cls(suite, folder, contenders, venues, others, trials, device)

    def described(self) -> dict[str, Any]:
        """What the page has to know beside the records."""
        names = ("name", "description", "tuning_trials", "reason", "without")
        abouts = {name: venue.about for name, venue in self.venues.items()} | dict(self.others)
        return {
            **self.suite.model_dump(mode="json", include=set(names)),
            "environments": abouts,
            "methods": {name: contender.about() for name, contender in self.contenders.items()},
        }

    @property
    def left_out(self) -> dict[str, str]:
        """Environments whose data are not at hand, with the reason."""
        return {name: about["left_out"] for name, about in self.others.items() if "left_out" in about}

    def tuning_runs(self) -> Iterator[BenchmarkRun]:
        """The runs that settings are chosen by; a grid of one setting leaves nothing to choose."""
        grids = {label: one.grid for label, one in self.contenders.items() if len(one.grid) > 1}
        for name in self.venues:
            yield from self._runs(name, grids, self.suite.tuning_trials, tuning=True)

    def trial_runs(self, records: RunRecords) -> Iterator[BenchmarkRun]:
        """The runs that methods are judged by."""
        for name, venue in self.venues.items():
            settings = {}
            for label, one in self.contenders.items():
                chosen = choose(records, name, label, one.about(), self.suite.tuning_trials)
                settings[label] = (one.default, one.default if chosen is None else chosen)
            trials = self.trials or venue.place.trials or self.suite.trials
            yield from self._runs(name, settings, trials, tuning=False)

    def _runs(
        self, environment: str, settings: Mapping[str, Sequence[str]], trials: int, *, tuning: bool
    ) -> Iterator[BenchmarkRun]:
        """One trial after the other, so that those in one federation are made one after the other."""
        venue = self.venues[environment]
        together = self.device != "cpu" and not venue.place.redraw
        for numbers in [tuple(range(trials))] if together else [(trial,) for trial in range(trials)]:
            for label, listed in settings.items():
                for own in dict.fromkeys(listed):
                    yield BenchmarkRun(
                        environment,
                        venue.place,
                        self.folder,
                        label,
                        self.contenders[label],
                        own,
                        numbers,
                        tuning,
                        venue.run_cost,
                    )


def choose(records: RunRecords, environment: str, label: str, about: Mapping[str, Any], trials: int) -> str | None:
    """The settings with the best mean on validation rows, of equal ones the first in the grid; None while runs that
    this is decided by have no record.

    Args:
        records: The records.
        environment: Where.
        label: What the method is called.
        about: The method (`Contender.about`).
        trials: How many runs each setting is judged by.
    """
    grid: list[str] = about["grid"]
    if len(grid) < 2:
        return grid[0] if grid else str(about["default"])
    means = tuning_means(records, environment, label, about, trials)
    return None if len(means) < len(grid) else max(grid, key=lambda settings: means[settings])


def tuning_means(
    records: RunRecords, environment: str, label: str, about: Mapping[str, Any], trials: int
) -> dict[str, float]:
    """What each setting of a grid reached on validation rows, so that greater is better; those with all their runs."""
    means = {}
    for settings in about["grid"]:
        described = about["described"][settings]
        found = [records.find(environment, label, settings, f"{TUNING}-{i}", described) for i in range(trials)]
        judged = [record.validated for record in found if record is not None]
        if len(judged) == trials:
            means[settings] = fmean(judged)
    return means


def carry_out(
    plan: Plan,
    records: RunRecords,
    processes: int,
    on_phase: Callable[[str, Sequence[BenchmarkRun]], OnProgress],
) -> int:
    """Make the runs that have no record yet, in two phases; how many at a time makes no difference to them.

    Args:
        plan: What is run.
        records: Where it is recorded.
        processes: How many runs are made at a time.
        on_phase: Called before each phase with its title and its runs; what it returns is called as they proceed.

    Returns:
        How many runs were made.

    Raises:
        FedunfoldError: A run failed, which it names.
    """
    records.begin(plan.described(), {name: venue.identity for name, venue in plan.venues.items()})
    made = 0
    for title in ("choosing settings", "trials"):
        runs = plan.tuning_runs() if title == "choosing settings" else plan.trial_runs(records)
        todo = [run for run in runs if not run.done(records)]
        if todo:
            run_jobs(todo, records, plan.device, processes, on_phase(title, todo))
        made += sum(len(run.trials) for run in todo)
    return made


def _about(place: Place, case: StudyCase) -> dict[str, Any]:
    env = case.env
    return {
        "description": env.description,
        "notes": place.notes,
        "rounds": env.rounds,
        "clients": len(env.clients),
        "clients_per_round": env.clients_per_round,
        "redraw": place.redraw,
        "choose_by": place.choose_by,
    }


def _run_cost(case: StudyCase) -> float:
    env, sizes = case.env, case.load().sizes
    sampled = (env.clients_per_round or len(sizes)) / len(sizes)
    steps = (
        client.participation_probability * env.epochs(k, 0) * size / env.batch_size
        for k, (client, size) in enumerate(zip(env.clients, sizes, strict=True))
    )
    return env.rounds * sampled * sum(steps)
