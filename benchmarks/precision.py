"""How far single precision drifts from double over 100 rounds: measured, and written to docs/numbers.md.

    python benchmarks/precision.py docs/numbers.md

The same runs in float32 and float64: the model and its test accuracy after every round of FedAvg, and the gradient of
the outer loss through all rounds, by both adjoints. Minibatches, absences and the initial model are the same.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedunfold.config import environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.outcomes import Evaluation
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.atomic import write_atomically
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.outer_loss import Path as PathLoss
from fedunfold.version import VERSION

ENVIRONMENTS = ("digits-label-skew", "digits-flaky")
ROUNDS = 100
SHOWN = (1, 10, 50, 100)


def distance(single: Tensor, double: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((single.double() - double).norm() / double.norm())


def run_drift(name: str, rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """After every round: the models' distance, and the difference of their accuracies in points."""
    single, double = (_models(name, dtype, rounds) for dtype in (torch.float32, torch.float64))
    return [(distance(a, b), 100 * abs(x - y)) for (a, x), (b, y) in zip(single, double, strict=True)]


def _models(name: str, dtype: torch.dtype, rounds: int) -> list[tuple[Tensor, float]]:
    """The model and its accuracy after every round."""
    federation = SimulatedFederation(environment(name), dtype=dtype)
    found, evaluate = [], federation.evaluate

    def record(models: Sequence[Tensor]) -> list[Evaluation]:
        tested = evaluate(models)
        found.append((models[0], tested[0].score))
        return tested

    federation.evaluate = record  # type: ignore[method-assign]
    run_rounds(federation, size(), rounds)
    return found


def gradient_drift(name: str, adjoint: AdjointKind, rounds: int = ROUNDS) -> tuple[float, float]:
    """The distance of dL/dθ over all rounds, and the largest of a single round's."""
    env = environment(name)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        federation = SimulatedFederation(env, dtype=dtype)
        shares = torch.tensor([client.num_examples for client in federation.clients], dtype=torch.float64)
        theta = (shares / shares.sum()).sqrt().repeat(rounds, 1)
        start = federation.initial_model("learn-0")
        how = (federation, theta, Algorithm(), PathLoss(), adjoint)
        (found,) = unroll_and_grad(*how, runs=["learn-0"], models=[start])
        gradients.append(found.gradient)
    single, double = gradients
    rows = [distance(a, b) for a, b in zip(single, double, strict=True) if bool(b.norm() > 0)]
    return distance(single, double), max(rows)


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)) + "\n"


def page(rounds: int = ROUNDS) -> str:
    shown = [t for t in SHOWN if t <= rounds]
    drifts = {name: run_drift(name, rounds) for name in ENVIRONMENTS}
    runs = [
        [name, *(f"{drift[t - 1][0]:.1e}" for t in shown), f"{max(d[1] for d in drift):.1f}"]
        for name, drift in drifts.items()
    ]
    gradients = []
    for name in ENVIRONMENTS:
        for adjoint in ("first_order", "exact"):
            whole, worst = gradient_drift(name, adjoint, rounds)
            gradients.append([name, adjoint, f"{whole:.1e}", f"{worst:.1e}"])
    heads = ["environment", *(f"round {t}" for t in shown), "accuracy, largest difference (points)"]
    return TEXT.format(
        version=VERSION,
        rounds=rounds,
        runs=table(heads, runs),
        gradients=table(["environment", "adjoint", "all rounds", "worst round"], gradients),
    )


TEXT = """# Numbers

What single precision costs, by `python benchmarks/precision.py docs/numbers.md` with version {version}.
Which messages appear when numbers go wrong is in [robustness.md](robustness.md).

## Single against double precision over {rounds} rounds

FedAvg with the same initial model, minibatches and absences in float32 and in float64: ‖w₃₂ − w₆₄‖ / ‖w₆₄‖ after a
round, and the largest difference of the test accuracies after any round.

{runs}
The gradient dL/dθ of the outer loss `path` through all {rounds} rounds, in the same way, over all rounds and in the
round where it is worst:

{gradients}"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the page to write: python benchmarks/precision.py docs/numbers.md")
    text = page()
    write_atomically(Path(sys.argv[1]), lambda temporary: temporary.write_text(text, encoding="utf-8"))
    sys.stdout.write(text)
