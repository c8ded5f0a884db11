"""What each study is run on: environments, with or without clients that attack."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from fedunfold.config import Environment, environment
from fedunfold.core.errors import InputError
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.atomic import read_json
from fedunfold.studies.attacks import Attack
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
HELD_OUT = 0.2  # of every client's training data, to choose among variants by


@dataclass(frozen=True)
class Setting:
    """How the studies are run here.

    Attributes:
        schedule: Outer iterations and step sizes: fast, or as published for the environment.
        trials: How often each method is run.
        seed: Of all environments.
        device: Where it is computed.
    """

    schedule: Literal["fast", "paper"] = "fast"
    trials: int = 10
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"a reproduction needs at least 1 trial, not {self.trials}.")

    def learning(self, env: Environment, adjoint: AdjointKind) -> Learning:
        """The paper's way to learn weights, by its own schedule or by the fast one."""
        schedule = FAST if self.schedule == "fast" else published(env.paper_schedule.iterations, env.paper_schedule.lr)
        return Learning(**schedule, adjoint=adjoint)


@dataclass(frozen=True)
class StudyCase:
    """An environment that a study runs on.

    Attributes:
        env: The environment.
        held_out: This fraction of the clients' data is the test set; 0 for the environment's own test set.
        attack: What some of its clients do.
    """

    env: Environment
    held_out: float = 0.0
    attack: Attack | None = None

    @property
    def name(self) -> str:
        """What it is called in tables and records."""
        parts = [self.env.name, "held-out" if self.held_out else "", self.attack.name if self.attack else ""]
        return "-".join(filter(None, parts))

    def load(self) -> FederatedData:
        """What clients train on and what models are tested on."""
        return _load(self)

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


@lru_cache(maxsize=2)
def _load(case: StudyCase) -> FederatedData:
    data = case.env.load()
    if case.attack is not None:
        return case.attack.spoiled(data)
    return data.held_out(case.held_out, case.env.seed) if case.held_out else data


def local_steps(env: Environment, data: FederatedData, rounds: int) -> np.ndarray:
    """τ_k^(t) = E_k^(t) ⌈N_k/B⌉, as [T, K].

    Args:
        env: How clients train.
        data: What they hold.
        rounds: T.
    """
    steps = [
        [env.epochs(k, t) * -(-size // env.batch_size) for k, size in enumerate(data.sizes)] for t in range(rounds)
    ]
    return np.array(steps)


def list_cases(study: Study, setting: Setting, assignment: Path | None = None) -> list[StudyCase]:
    """The cases of a study.

    Args:
        study: Which one.
        setting: How it is run.
        assignment: A file that assigns the dogs' classes to clients (`read_assignment`).

    Raises:
        InputError: The assignment cannot be read, or there are no dogs in the study.
    """
    if assignment is not None and not any(name.startswith("dogs") for name in ENVIRONMENTS[study]):
        raise InputError(f"an assignment is about the dogs, and study '{study}' has none.")
    if study == "attack":
        return [StudyCase(_ten_sites(setting.seed), attack=attack) for attack in ATTACKS]
    found = []
    for name in ENVIRONMENTS[study]:
        env = environment(name).replace(seed=setting.seed)
        if assignment is not None and name.startswith("dogs"):
            env = env.replace(partition={"kind": "shares", "shares": read_assignment(assignment)})
        found.append(StudyCase(env, HELD_OUT if study == "variants" else 0.0))
    return found


def _ten_sites(seed: int) -> Environment:
    """Ten sites with unlike shares of all classes, of which none is needed for any."""
    return environment("digits-label-skew").replace(
        name="digits-ten",
        description="Ten sites share the digits; every class is spread over them by Dirichlet(1).",
        seed=seed,
        partition={"kind": "dirichlet", "alpha": 1.0},
        clients=[{"key": "site", "count": 10, "epochs": 2}],
    )


def read_assignment(path: Path) -> list[list[tuple[int, float]]]:
    """[class, images] pairs for every client from a JSON file ``{"clients": [[[class, images], …], …]}``.

    Raises:
        InputError: It cannot be read, or is something else.
    """
    try:
        clients = read_json(path)["clients"]
        return [[(int(label), float(images)) for label, images in own] for own in clients]
    except OSError as error:
        raise InputError(f"assignment file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, OverflowError, KeyError, TypeError) as error:
        raise InputError(
            f'assignment file {path} must hold {{"clients": [[[class, images], …], …]}} ({error}).'
        ) from error
