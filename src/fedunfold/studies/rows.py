"""The rows of each study's table: methods, and how their weights are learned."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedunfold.config import Environment
from fedunfold.studies.cases import Setting, Study
from fedunfold.training.methods import TABLE, Method, changed, method
from fedunfold.unfolding import Learning

PLAIN = ("fedavg", "fedprox", "fednova", "dr-fedavg", "fedadp", "fedfa")
REMEMBERING = ("fedavg", "fedprox", "fednova", "dr-fedavg")
"""Methods that treat absent clients in a way that can be changed; FedAdp and FedFa give them no weight anyhow."""
RATE_ROUNDS = (4, 6, 8, 12, 16, 24, 32, 40)
LONG_TRIALS = 3  # of FedAvg with the whole budget, which takes as long as learning weights


@dataclass(frozen=True)
class StudyRow:
    """A row of a table. Plain data, so that it can be handed to another process.

    Attributes:
        name: What it is called in records.
        base: The name of a method.
        rounds: T.
        trials: How often it is run.
        learning: How its weights are learned, where the method has no rule.
        weights_from: The row whose learned weights it uses.
        seed_shift: Is added to the seed.
        local: Another local optimiser for the method.
        absent: What becomes of absent clients.
        filter: Which updates are rejected.
        aggregator: Another aggregator.
        title: What it is called in tables; its name where there is none.
    """

    name: str
    base: str
    rounds: int
    trials: int
    learning: Learning | None = None
    weights_from: str | None = None
    seed_shift: int = 0
    local: str | None = None
    absent: str | None = None
    filter: str | None = None
    aggregator: str | None = None
    title: str = ""

    @property
    def method(self) -> Method:
        """The method with its parts."""
        parts = {name: getattr(self, name) for name in ("local", "absent", "filter", "aggregator")}
        return changed(method(self.base), **parts)


def list_rows(study: Study, env: Environment, setting: Setting) -> list[StudyRow]:
    """What a study runs on one of its environments, in the order of its table.

    Args:
        study: Which one.
        env: The environment.
        setting: How it is run.
    """
    row = partial(StudyRow, rounds=env.rounds, trials=setting.trials)
    learning, exact = setting.learning(env, "first_order"), setting.learning(env, "exact")
    ours = row("fedunfold-table", "fedunfold-table", learning=TABLE.learning)
    remembering = [row(f"{name}-remember", name, absent="remember", title=f"{name}, remember") for name in REMEMBERING]
    if study == "rate":
        return [StudyRow(f"rounds-{t}", "duw-fedavg", t, 0, learning) for t in RATE_ROUNDS]
    if study == "variants":
        return [*(own for own in remembering if own.base in ("fedavg", "fednova")), *_variants(ours)]
    if study == "attack":
        return _under_attack(partial(row, absent="drop"), learning)
    return [
        *(row(name, name) for name in PLAIN),
        row("duw-fedavg", "duw-fedavg", learning=learning),
        row("duw-fednova", "duw-fednova", learning=learning),
        row("duw-fedavg-exact", "duw-fedavg", learning=exact),
        row(
            "duw-fedavg-reused",
            "duw-fedavg",
            weights_from="duw-fedavg",
            seed_shift=1,
            title="duw-fedavg, the same weights under another seed",
        ),
        StudyRow(
            "fedavg-budget",
            "fedavg",
            env.rounds * (learning.iterations + 1),
            min(LONG_TRIALS, setting.trials),
            title="fedavg with the rounds that learning took",
        ),
        *(remembering if study == "dogs" else ()),
        ours,
    ]


def _variants(ours: StudyRow) -> list[StudyRow]:
    """The recommended setting with one thing changed at a time."""

    def learned(name: str, title: str, **changes: Any) -> StudyRow:
        return replace(ours, name=name, title=title, learning=replace(TABLE.learning, **changes))

    return [
        replace(ours, title="fedunfold-table, the recommended setting"),
        replace(ours, name="keep", title="absent clients: keep", absent="keep"),
        replace(ours, name="sgd", title="local update: sgd", local="sgd"),
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


def _under_attack(row: "partial[StudyRow]", learning: Learning) -> list[StudyRow]:
    """By size, robust in several ways, and learned. All participate, so that dropping is about rejected updates."""
    return [
        row("fedavg", "fedavg", title="FedAvg"),
        row("fedavg-screened", "fedavg", filter="norm", title="FedAvg, screened by norm"),
        row("median-fedavg", "median-fedavg", title="median"),
        row("trimmed-fedavg", "trimmed-fedavg", aggregator="trimmed-mean:fraction=0.25", title="trimmed mean, 0.25"),
        row("krum-fedavg", "krum-fedavg", aggregator="krum:num_byzantine=2", title="multi-Krum, 2 bad"),
        row("duw-fedavg", "duw-fedavg", learning=learning, title="learned"),
        row("duw-fedavg-screened", "duw-fedavg", learning=learning, filter="norm", title="learned, screened by norm"),
    ]
