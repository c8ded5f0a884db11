"""Numbers behind numbers: what single precision costs, and how long honest updates are, for docs/numbers.md.

    python benchmarks/numbers_page.py docs/numbers.md

The same runs in float32 and float64: the model and its test accuracy after every round of FedAvg, and the gradient of
the outer loss through all rounds, by both adjoints. Minibatches, absences and the initial model are the same.
Lengths are those that the screening by norm compares, over the rounds of the bundled environments.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from fedunfold.environments import environment
from fedunfold.files import write_atomically
from fedunfold.losses import OuterLoss
from fedunfold.rounds import Algorithm, Server, aggregate, run_rounds
from fedunfold.screening import AT_LEAST
from fedunfold.simulation import SimulatedFederation
from fedunfold.unfolding.adjoint import AdjointKind, unfold
from fedunfold.updates import LocalUpdate, nova, sgd
from fedunfold.version import VERSION
from fedunfold.weighting import size

ENVIRONMENTS = ("digits-label-skew", "digits-flaky")
ROUNDS = 100
SHOWN = (1, 10, 50, 100)
DIGITS = ("digits-quantity-skew", "digits-label-skew", "digits-compute-skew", "digits-flaky")
UPDATES = (sgd(), nova())


def distance(single: Tensor, double: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((single.double() - double).norm() / double.norm())


def run_drift(name: str, rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """After every round: the models' distance, and the difference of their accuracies in points."""
    env = environment(name)
    found: list[list[tuple[Tensor, float]]] = []
    for dtype in (torch.float32, torch.float64):
        federation = SimulatedFederation(env, dtype=dtype)
        models: list[tuple[Tensor, float]] = []
        evaluate = federation.evaluate

        def keep(model: Tensor, evaluate=evaluate, models=models):  # type: ignore[no-untyped-def]
            tested = evaluate(model)
            models.append((model, tested.accuracy))
            return tested

        federation.evaluate = keep  # type: ignore[method-assign]
        run_rounds(federation, size(), rounds)
        found.append(models)
    return [(distance(a, b), 100 * abs(x - y)) for (a, x), (b, y) in zip(*found, strict=True)]


def gradient_drift(name: str, adjoint: AdjointKind, rounds: int = ROUNDS) -> tuple[float, float]:
    """The distance of dL/dθ over all rounds, and the largest of a single round's."""
    env = environment(name)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        federation = SimulatedFederation(env, dtype=dtype)
        shares = torch.tensor([client.samples for client in federation.clients], dtype=torch.float64)
        theta = (shares / shares.sum()).sqrt().repeat(rounds, 1)
        start = federation.initial_model("learn-0")
        found = unfold(federation, theta, Algorithm(), OuterLoss(), adjoint, run="learn-0", model=start)
        gradients.append(found.gradient)
    single, double = gradients
    rows = [distance(a, b) for a, b in zip(single, double, strict=True) if bool(b.norm() > 0)]
    return distance(single, double), max(rows)


def longest(name: str, update: LocalUpdate) -> float:
    """The largest of e^(x_k − m) over all rounds in which at least 5 clients are there (`fedunfold.screening`)."""
    env, algorithm = environment(name), Algorithm(update)
    federation = SimulatedFederation(env)
    server = Server.start(federation.initial_model("trial-0"), algorithm)
    found = []
    for t in range(env.rounds):
        sifted = algorithm.sift(federation.train(algorithm.request("trial-0", t, server.model)), ())
        lengths = sifted.lengths[~sifted.lengths.isnan()]
        if len(lengths) >= AT_LEAST:
            found.append(float((lengths.max() - lengths.quantile(0.5)).exp()))
        server, _ = aggregate(server, sifted.report, size()(sifted.report, None)[0], algorithm)
    return max(found)


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
        lengths=table(
            ["environment", *(update.name for update in UPDATES)],
            [[name, *(f"{longest(name, update):.2f}" for update in UPDATES)] for name in DIGITS],
        ),
    )


TEXT = """# Numbers

What single precision costs, and how long honest updates are, by `python benchmarks/numbers_page.py docs/numbers.md`
with version {version}.
What is told when numbers go wrong is in [robustness.md](robustness.md).

## Single against double precision over {rounds} rounds

FedAvg with the same initial model, minibatches and absences in float32 and in float64: ‖w₃₂ − w₆₄‖ / ‖w₆₄‖ after a
round, and the largest difference of the test accuracies after any round.

{runs}
The gradient dL/dθ of the outer loss `path` through all {rounds} rounds, in the same way, over all rounds and in the
round where it is worst:

{gradients}
## How long honest updates are

The longest update of a round as a multiple of its median, lengths taken over the root of the steps for sgd (nova
scales all to the same number): the largest over all rounds in which at least 5 clients are there. The screening by norm
sets nothing aside below 5.

{lengths}"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the page to write: python benchmarks/numbers_page.py docs/numbers.md")
    text = page()
    write_atomically(Path(sys.argv[1]), lambda temporary: temporary.write_text(text, encoding="utf-8"))
    sys.stdout.write(text)
