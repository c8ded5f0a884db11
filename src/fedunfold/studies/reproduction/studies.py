"""What is run in each study: environments, methods, and how weights are learned."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fedunfold.config import Environment, environment
from fedunfold.core.errors import InputError
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.atomic import read_json
from fedunfold.studies.attacks import Attack
from fedunfold.training.methods import RECOMMENDED, Method, changed, method
from fedunfold.unfolding import FAST, Learning, published
from fedunfold.unfolding.adjoint import AdjointKind

Study = Literal["mnist", "rate", "dogs", "variants", "digits", "attack"]
STUDIES: tuple[Study, ...] = get_args(Study)
ENVIRONMENTS: Mapping[Study, tuple[str, ...]] = {
    "mnist": ("mnist-1", "mnist-2", "mnist-3", "mnist-4"),
    "rate": ("mnist-rate",),
    "dogs": ("dogs-a", "dogs-b"),
    "variants": ("mnist-2", "dogs-a", "dogs-b"),
    "digits": ("digits-quantity-skew", "digits-label-skew", "digits-compute-skew", "digits-flaky"),
    "attack": ("digits-label-skew",),
}
ATTACKS = (None, *(Attack(kind, bad) for kind in ("flip", "noise") for bad in (1, 2)))
PLAIN = ("fedavg", "fedprox", "fednova", "dr-fedavg", "fedadp", "fedfa")
REMEMBERING = ("fedavg", "fedprox", "fednova", "dr-fedavg")
"""Methods that treat absent clients in a way that can be changed; FedAdp and FedFa give them no weight anyhow."""
RATE_ROUNDS = (4, 6, 8, 12, 16, 24, 32, 40)
LONG_TRIALS = 3  # of FedAvg with the whole budget, which takes as long as a learning
HELD_OUT = 0.2  # of every client's training data, to choose among variants by


@dataclass(frozen=True)
class Setting:
    """How the studies are run here."""

    schedule: Literal["fast", "paper"] = "fast"
    trials: int = 10
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"a reproduction needs at least 1 trial, not {self.trials}.")

    def learning(self, env: Environment, adjoint: AdjointKind) -> Learning:
        """The paper's learning, by its own schedule or by the fast one."""
        schedule = FAST if self.schedule == "fast" else published(env.paper_schedule.iterations, env.paper_schedule.lr)
        return Learning(**schedule, adjoint=adjoint)


@dataclass(frozen=True)
class StudyCase:
    """An environment that a study runs on, tested on the test set or on what its clients hold out, with or without
    clients that spoil it."""

    env: Environment
    held_out: float = 0.0
    attack: Attack | None = None

    @property
    def name(self) -> str:
        parts = [self.env.name, "held-out" if self.held_out else "", self.attack.name if self.attack else ""]
        return "-".join(filter(None, parts))

    def load(self) -> FederatedData:
        """What clients train on and what models are tested on."""
        return _loaded(self)

    def federation(self, seed_shift: int, device: torch.device) -> SimulatedFederation:
        """Its clients, under a seed so much larger."""
        env = self.env.replace(seed=self.env.seed + seed_shift) if seed_shift else self.env
        if self.attack is not None:
            return self.attack.federation(env, self.load(), device=device)
        return SimulatedFederation(env, self.load(), device=device)

    @property
    def digest(self) -> str:
        """Stands for the data and for how clients train on them."""
        return self.env.digest(self.load())


@dataclass(frozen=True)
class StudyRow:
    """A line of a table: a method, its number of trials, and how its weights come about.

    `base` names a method, `update`, `absent`, `screen` and `aggregate` change parts of it. One without a rule learns
    its weights by `learning`, or takes those of the entry `weights_from`. `rounds` is T, `seed_shift` is added to the
    seed. Plain data, so that it can be handed to another process.
    """

    name: str
    base: str
    rounds: int
    trials: int
    learning: Learning | None = None
    weights_from: str | None = None
    seed_shift: int = 0
    update: str | None = None
    absent: str | None = None
    screen: str | None = None
    aggregate: str | None = None
    title: str = ""

    @property
    def method(self) -> Method:
        parts = {name: getattr(self, name) for name in ("update", "absent", "screen", "aggregate")}
        return changed(method(self.base), **parts)


@lru_cache(maxsize=2)
def _loaded(case: StudyCase) -> FederatedData:
    data = case.env.load()
    if case.attack is not None:
        return case.attack.spoiled(data)
    return data.held_out(case.held_out, case.env.seed) if case.held_out else data


def cases(study: Study, setting: Setting, assignment: Path | None = None) -> list[StudyCase]:
    """The study's environments; with an assignment, the dogs' classes go to clients as that file says."""
    if assignment is not None and not any(name.startswith("dogs") for name in ENVIRONMENTS[study]):
        raise InputError(f"--assignment is about the dogs, and study '{study}' has none.")
    if study == "attack":
        return [StudyCase(_ten_sites(setting.seed), attack=attack) for attack in ATTACKS]
    found = []
    for name in ENVIRONMENTS[study]:
        env = environment(name).replace(seed=setting.seed)
        if assignment is not None and name.startswith("dogs"):
            env = env.replace(partition={"kind": "shares", "shares": read_assignment(assignment)})
        found.append(StudyCase(env, HELD_OUT if study == "variants" else 0.0))
    return found


def entries(study: Study, env: Environment, setting: Setting) -> list[StudyRow]:
    """What a study runs on one of its environments, in the order of its table."""
    match study:
        case "rate":
            learning = setting.learning(env, "first_order")
            return [StudyRow(f"rounds-{t}", "duw-fedavg", t, 0, learning) for t in RATE_ROUNDS]
        case "variants":
            return _variants(env, setting)
        case "attack":
            return _under_attack(env, setting)
        case "mnist" | "digits":
            return [*_published(env, setting), *_beyond(env, setting)]
        case "dogs":
            return [*_published(env, setting), *_remembering(env, setting), *_beyond(env, setting)]


def _published(env: Environment, setting: Setting) -> list[StudyRow]:
    """The paper's comparison, the same weights under other randomness, and FedAvg with the whole budget."""
    rounds, trials = env.rounds, setting.trials
    learned: Mapping[str, tuple[str, AdjointKind]] = {
        "duw-fedavg": ("duw-fedavg", "first_order"),
        "duw-fednova": ("duw-fednova", "first_order"),
        "duw-fedavg-exact": ("duw-fedavg", "exact"),
    }
    iterations = setting.learning(env, "first_order").iterations
    return [
        *(StudyRow(name, name, rounds, trials) for name in PLAIN),
        *(
            StudyRow(name, base, rounds, trials, setting.learning(env, adjoint))
            for name, (base, adjoint) in learned.items()
        ),
        StudyRow(
            "duw-fedavg-reused",
            "duw-fedavg",
            rounds,
            trials,
            weights_from="duw-fedavg",
            seed_shift=1,
            title="duw-fedavg, the same weights under another seed",
        ),
        StudyRow(
            "fedavg-budget",
            "fedavg",
            rounds * (iterations + 1),
            min(LONG_TRIALS, trials),
            title="fedavg with the rounds that learning took",
        ),
    ]


def _remembering(env: Environment, setting: Setting) -> list[StudyRow]:
    """The paper's methods where the server remembers the last update of an absent client."""
    return [
        StudyRow(f"{name}-remember", name, env.rounds, setting.trials, absent="remember", title=f"{name}, remember")
        for name in REMEMBERING
    ]


def _beyond(env: Environment, setting: Setting) -> list[StudyRow]:
    """The recommended setting."""
    return [StudyRow("fedunfold", "fedunfold", env.rounds, setting.trials, RECOMMENDED.learning)]


def _variants(env: Environment, setting: Setting) -> list[StudyRow]:
    """The recommended setting with one thing changed at a time, and what it is measured against."""
    ours = StudyRow("fedunfold", "fedunfold", env.rounds, setting.trials, RECOMMENDED.learning)

    def learned(name: str, title: str, **changes: Any) -> StudyRow:
        return replace(ours, name=name, title=title, learning=replace(RECOMMENDED.learning, **changes))

    return [
        *(entry for entry in _remembering(env, setting) if entry.base in ("fedavg", "fednova")),
        replace(ours, title="fedunfold, the recommended setting"),
        replace(learned("keep", "absent clients: keep"), absent="keep"),
        replace(learned("sgd", "local update: sgd"), update="sgd"),
        learned("path", "outer loss: path", outer="path"),
        learned("sample", "outer loss: sample", outer="sample"),
        learned("final-balanced", "outer loss: final-balanced", outer="final-balanced"),
        learned("exact", "adjoint: exact", adjoint="exact"),
        learned("exact-final-balanced", "exact, final-balanced", adjoint="exact", outer="final-balanced"),
        learned("draws", "4 draws for each step", num_samples=4),
        learned("resample", "initial model: resampled", initial_model="resample"),
        learned("pull", "pull towards sizes: 0.1", kl_weight=0.1),
        learned("steps-one", "step sizes: all 1", step_sizes="fixed"),
        learned("shared", "10 rounds share their weights", tie_rounds=10),
        learned("larger-steps", "outer steps of 0.03", lr=0.03),
        learned("longer", "50 outer steps, from 0.02 down", iterations=50, lr=0.02, decay="linear"),
        replace(
            learned("published", "duw-fedavg, remember", outer="path", step_sizes="fixed"),
            base="duw-fedavg",
            absent="remember",
        ),
    ]


def _ten_sites(seed: int) -> Environment:
    """Ten sites with unlike shares of all classes, of which none is needed for any."""
    return environment("digits-label-skew").replace(
        name="digits-ten",
        description="Ten sites share the digits; every class is spread over them by Dirichlet(1).",
        seed=seed,
        partition={"kind": "dirichlet", "alpha": 1.0},
        clients=[{"key": "site", "count": 10, "epochs": 2}],
    )


def _under_attack(env: Environment, setting: Setting) -> list[StudyRow]:
    """By size, held off in several ways, and learned. Nobody is away, so that dropping is about those set aside."""

    def entry(name: str, base: str, title: str, **parts: Any) -> StudyRow:
        return StudyRow(name, base, env.rounds, setting.trials, absent="drop", title=title, **parts)

    learning = setting.learning(env, "first_order")
    return [
        entry("fedavg", "fedavg", "FedAvg"),
        entry("fedavg-screened", "fedavg", "FedAvg, screened by norm", screen="norm"),
        entry("median-fedavg", "median-fedavg", "median"),
        entry("trimmed-fedavg", "trimmed-fedavg", "trimmed mean, 0.25", aggregate="trimmed:share=0.25"),
        entry("krum-fedavg", "krum-fedavg", "multi-Krum, 2 bad", aggregate="krum:bad=2"),
        entry("duw-fedavg", "duw-fedavg", "learned", learning=learning),
        entry("duw-fedavg-screened", "duw-fedavg", "learned, screened by norm", learning=learning, screen="norm"),
    ]


def read_assignment(path: Path) -> list[list[tuple[int, float]]]:
    """[class, images] pairs for every client from a JSON file ``{"clients": [[[class, images], …], …]}``."""
    try:
        clients = read_json(path)["clients"]
        return [[(int(label), float(images)) for label, images in own] for own in clients]
    except OSError as error:
        raise InputError(f"assignment file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, OverflowError, KeyError, TypeError) as error:
        raise InputError(
            f'assignment file {path} must hold {{"clients": [[[class, images], …], …]}} ({error}).'
        ) from error
