"""The paper's experiments, run once and kept: weights and trials in records that a later call goes on from.

A record is written whole, under a name that says what it is, and never computed again while it is there. So a
run that was killed goes on where it was, and the results depend on the records alone.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fedunfold.environments import Environment, environment
from fedunfold.errors import InputError
from fedunfold.experiments.learning import device_of, learn_weights
from fedunfold.experiments.methods import Method, method
from fedunfold.files import write_atomically
from fedunfold.rounds import RunResult, run_rounds
from fedunfold.simulation import SimulatedFederation
from fedunfold.unfolding import FAST, Learning
from fedunfold.unfolding.adjoint import AdjointKind
from fedunfold.weighting.learned import LearnedWeights

Study = Literal["mnist", "rate", "dogs"]
ENVIRONMENTS: Mapping[Study, tuple[str, ...]] = {
    "mnist": ("mnist-1", "mnist-2", "mnist-3", "mnist-4"),
    "rate": ("mnist-rate",),
    "dogs": ("dogs-a", "dogs-b"),
}
PLAIN = ("fedavg", "fedprox", "fednova", "dr-fedavg", "fedadp", "fedfa")
LEARNED: Mapping[str, tuple[str, AdjointKind]] = {
    "duw-fedavg": ("duw-fedavg", "first_order"),
    "duw-fednova": ("duw-fednova", "first_order"),
    "duw-fedavg-exact": ("duw-fedavg", "exact"),
}
RATE_ROUNDS = (4, 6, 8, 12, 16, 24, 32, 40)
LONG_TRIALS = 3  # of FedAvg with the whole budget, which takes as long as a learning


@dataclass(frozen=True)
class Setting:
    """How the paper's experiments are run here."""

    schedule: Literal["fast", "paper"] = "fast"
    trials: int = 10
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"a reproduction needs at least 1 trial, not {self.trials}.")

    def learning(self, env: Environment, adjoint: AdjointKind) -> Learning:
        iterations, lr = FAST
        if self.schedule == "paper":
            iterations, lr = env.paper.iterations, env.paper.lr
        return Learning(iterations=iterations, lr=lr, adjoint=adjoint)


@dataclass(frozen=True)
class Records:
    """The folder `records/`: a file for every set of weights and every trial."""

    folder: Path

    def weights(self, env: str, name: str) -> LearnedWeights | None:
        file = self._file(env, name, "weights.safetensors")
        return LearnedWeights.load(file) if file.exists() else None

    def keep_weights(self, env: str, name: str, learned: LearnedWeights) -> None:
        learned.save(self._file(env, name, "weights.safetensors"))

    def trial(self, env: str, name: str, trial: int) -> dict[str, Any] | None:
        file = self._file(env, name, f"trial-{trial}.json")
        if not file.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"record {file} is damaged ({error}); delete it and run again.") from error
        return record

    def keep_trial(self, env: str, name: str, trial: int, result: RunResult, steps: int) -> None:
        content = {
            "accuracies": result.accuracies,
            "class_accuracy": result.evaluations[-1].class_accuracy.tolist(),
            "rounds": len(result.evaluations),
            "client_steps": steps,
            "participations": int(result.present.sum()),
        }
        text = json.dumps(content)
        file = self._file(env, name, f"trial-{trial}.json")
        write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def trials(self, env: str, name: str) -> list[dict[str, Any]]:
        """All trials there are, in order."""
        found: list[dict[str, Any]] = []
        while (record := self.trial(env, name, len(found))) is not None:
            found.append(record)
        return found

    def _file(self, env: str, name: str, file: str) -> Path:
        return self.folder / env / name / file


@dataclass(frozen=True)
class Task:
    """One thing to do, with a name for the progress bar; `done` says whether its record is there."""

    name: str
    done: Callable[[], bool]
    do: Callable[[], None]


def check_same(records: Records, setting: Setting) -> None:
    """Records of other settings must not be mixed in: the folder remembers the ones it was made with."""
    file = records.folder / "setting.json"
    text = json.dumps({"schedule": setting.schedule, "seed": setting.seed, "device": setting.device}, indent=2)
    if file.exists():
        if file.read_text(encoding="utf-8") != text:
            raise InputError(
                f"{records.folder} holds records of another schedule, seed or device; choose another --out."
            )
        return
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def environments(study: Study, setting: Setting, assignment: Path | None = None) -> list[Environment]:
    """The study's environments; with an assignment, classes go to clients as that file says."""
    found = [environment(name).with_(seed=setting.seed) for name in ENVIRONMENTS[study]]
    if assignment is None:
        return found
    partition = {"kind": "shares", "shares": read_assignment(assignment)}
    return [env.with_(partition=partition) for env in found]


def read_assignment(path: Path) -> list[list[tuple[int, float]]]:
    """[class, images] pairs for every client from a JSON file ``{"clients": [[[class, images], …], …]}``."""
    try:
        clients = json.loads(path.read_text(encoding="utf-8"))["clients"]
        return [[(int(label), float(images)) for label, images in own] for own in clients]
    except OSError as error:
        raise InputError(f"assignment file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'assignment file {path} must hold {{"clients": [[[class, images], …], …]}} ({error}).'
        ) from error


def tasks(env: Environment, setting: Setting, records: Records) -> Iterator[Task]:
    """Everything the comparison of one environment needs, in order."""
    federation = SimulatedFederation(env, device=device_of(setting.device))
    for name in PLAIN:
        yield from _trials(env, name, method(name), setting.trials, env.rounds, federation, records)
    for name, (base, adjoint) in LEARNED.items():
        chosen, learning = method(base), setting.learning(env, adjoint)
        yield _learning(env, name, chosen, learning, setting, records)
        yield from _trials(env, name, chosen, setting.trials, env.rounds, federation, records)
    # What experts ask first: the same weights under other randomness, and FedAvg with the whole budget.
    other = SimulatedFederation(env.with_(seed=setting.seed + 1), device=device_of(setting.device))
    yield from _trials(env, "duw-fedavg-reused", method("duw-fedavg"), setting.trials, env.rounds, other, records)
    budget = env.rounds * (setting.learning(env, "first_order").iterations + 1)
    yield from _trials(
        env, "fedavg-budget", method("fedavg"), min(LONG_TRIALS, setting.trials), budget, federation, records
    )


def rate_tasks(env: Environment, setting: Setting, records: Records) -> Iterator[Task]:
    """Weights for every number of rounds."""
    for rounds in RATE_ROUNDS:
        changed = env.with_(rounds=rounds)
        learning = setting.learning(changed, "first_order")
        yield _learning(changed, f"rounds-{rounds}", method("duw-fedavg"), learning, setting, records)


def _learning(
    env: Environment, name: str, chosen: Method, learning: Learning, setting: Setting, records: Records
) -> Task:
    def do() -> None:
        learned = learn_weights(env, algorithm=chosen.algorithm, learning=learning, device=setting.device)
        records.keep_weights(env.name, name, learned)

    return Task(f"{env.name}: learn {name}", lambda: records.weights(env.name, name) is not None, do)


def _trials(
    env: Environment,
    name: str,
    chosen: Method,
    trials: int,
    rounds: int,
    federation: SimulatedFederation,
    records: Records,
) -> Iterator[Task]:
    learned_as = name.removesuffix("-reused")

    def run(trial: int) -> None:
        rule = chosen.rule or records.weights(env.name, learned_as)
        if rule is None:
            raise InputError(f"{env.name}: the weights of {learned_as} are missing; run the reproduction again.")
        result = run_rounds(federation, rule, rounds, algorithm=chosen.algorithm, run=f"trial-{trial}")
        records.keep_trial(env.name, name, trial, result, _client_steps(env, result))

    def there(trial: int) -> bool:
        return records.trial(env.name, name, trial) is not None

    for trial in range(trials):
        yield Task(f"{env.name}: {name}", partial(there, trial), partial(run, trial))


def _client_steps(env: Environment, result: RunResult) -> int:
    """Σ_t Σ_present τ_k^(t)."""
    sizes = env.load().sizes
    per_round = [
        [env.epochs(k, t) * -(-size // env.batch_size) for k, size in enumerate(sizes)]
        for t in range(len(result.present))
    ]
    return int((torch.tensor(per_round) * result.present).sum())
