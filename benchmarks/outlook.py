"""What `env check` expects of learned weights beside what they gained, on small federations and on the paper's.

    python benchmarks/outlook.py docs/results/outlook

Runs what the folder's results.json lacks (a minute or two each on one core), then writes results.md. The rows of the
paper's environments are those of docs/results/mnist, which is not run again; they need MNIST (FEDUNFOLD_DATA).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import fedunfold as fu
from fedunfold.config.heterogeneity import Heterogeneity
from fedunfold.config.recommendation import recommend
from fedunfold.data.partitions import DirichletPartition, IidPartition, SizesPartition
from fedunfold.data.sources import load_digits
from fedunfold.io.atomic import write_atomically

CLIENTS = 5
TRIALS = 3
METHODS = ("fedavg", "duw-fedavg", "fedunfold-table")
MNIST = Path(__file__).parent.parent / "docs" / "results" / "mnist" / "results.json"
UNEVEN = (0.2, 0.3, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Case:
    """Five clients that differ in one thing; alpha None divides rows evenly."""

    data: str
    what: str
    alpha: float | None = None
    seed: int = 0
    shares: tuple[int, ...] | None = None
    first_epochs: int | None = None  # of the first client, where the others make one
    participation_probability: tuple[float, ...] = field(default=(1.0,) * CLIENTS)

    @property
    def key(self) -> str:
        return f"{self.data}: {self.what}" + (f", draw {self.seed}" if self.alpha is not None else "")

    def environment(self) -> fu.Environment:
        x, y, x_test, y_test = digits() if self.data == "digits" else gaussians()
        rng = np.random.default_rng(self.seed + 10)
        if self.alpha is not None:
            parts = DirichletPartition(alpha=self.alpha).split(y, CLIENTS, rng)
        elif self.shares is not None:
            sizes = tuple(int(0.98 * share / sum(self.shares) * len(y)) for share in self.shares)
            parts = SizesPartition(sizes=sizes).split(y, CLIENTS, rng)
        else:
            parts = IidPartition().split(y, CLIENTS, rng)
        keys = [f"s{k}" for k in range(CLIENTS)]
        epochs = dict.fromkeys(keys, 2 if self.first_epochs is None else 1)
        if self.first_epochs is not None:
            epochs["s0"] = self.first_epochs
        return fu.Environment.from_arrays(
            {key: (x[part], y[part]) for key, part in zip(keys, parts, strict=True)},
            (x_test, y_test),
            rounds=10,
            batch_size=10,
            lr=0.05,
            epochs=epochs,
            participation_probability=dict(zip(keys, self.participation_probability, strict=True)),
            model=(32,),
            classes=1 + int(y.max()),
            name=self.key,
        )


def digits() -> tuple[np.ndarray, ...]:
    data = load_digits()
    return data.x_train, data.y_train, data.x_test, data.y_test


def gaussians(samples: int = 1600, features: int = 10, classes: int = 4) -> tuple[np.ndarray, ...]:
    """Overlapping normal clouds, an easy task: ten rounds of FedAvg come near the best there is."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(classes, features))
    y = np.arange(samples) % classes
    rng.shuffle(y)
    x = (means[y] + 1.3 * rng.normal(size=(samples, features))).astype(np.float32)
    return x[:1200], y[:1200], x[1200:], y[1200:]


def cases() -> Iterator[Case]:
    for data, alphas in (("digits", (0.05, 0.1, 0.3, 1.0, 10.0)), ("gaussians", (0.1, 0.3, 1.0))):
        for alpha in alphas:
            for seed in (0, 1):
                yield Case(data, f"Dirichlet {alpha:g}", alpha=alpha, seed=seed)
    yield Case("gaussians", "Dirichlet 0.05", alpha=0.05, seed=1)
    yield Case("gaussians", "Dirichlet 0.05", alpha=0.05, seed=5)  # this and the next for their sole classes
    yield Case("gaussians", "Dirichlet 0.02", alpha=0.02, seed=1)
    yield Case("digits", "all alike", shares=(1, 1, 1, 1, 1))
    for largest in (4, 16):
        yield Case("digits", f"one client {largest} times as large", shares=(1, 1, 1, 1, largest))
    for epochs in (2, 4):
        yield Case("digits", f"one client {epochs} times as long", first_epochs=epochs)
    yield Case("digits", "unevenly reliable", participation_probability=UNEVEN)
    yield Case("digits", "all there half the time", participation_probability=(0.5,) * CLIENTS)
    yield Case("gaussians", "one client 4 times as long", first_epochs=4)
    yield Case("gaussians", "unevenly reliable", participation_probability=UNEVEN)


def run(case: Case) -> dict[str, Any]:
    compared = fu.compare(case.environment(), list(METHODS), trials=TRIALS)
    return {"trials": TRIALS, "accuracy": {method.name: [method.mean, method.sd] for method in compared.methods}}


def row(name: str, env: fu.Environment, accuracy: dict[str, list[float]]) -> str:
    found = Heterogeneity.of(env, env.load())
    base = accuracy["fedavg"]
    cells = [
        name,
        f"{found.mean_divergence:.2f}",
        str(len(found.sole_holders)),
        f"{found.size_ratio:.1f}",
        f"{found.epochs_ratio:g}",
        f"{found.participation_spread:.1f}",
        recommend(found).learned_weights,
        f"{base[0]:.1f} ± {base[1]:.1f}",
        *(f"{accuracy[method][0] - base[0]:+.1f}" for method in METHODS[1:]),
    ]
    return f"| {' | '.join(cells)} |"


def mnist() -> Iterator[str]:
    for name, entries in json.loads(MNIST.read_text(encoding="utf-8"))["cases"].items():
        last = {method: [100 * run[-1] for run in entries[method]["accuracies"]] for method in METHODS}
        accuracy = {method: [fmean(values), float(np.std(values, ddof=1))] for method, values in last.items()}
        yield row(name, fu.environment(name), accuracy)


HEAD = """# What `env check` expects, and what was seen

`python benchmarks/outlook.py docs/results/outlook`: five clients and ten rounds; accuracies in percent, gains over
FedAvg in points, means over the trials that results.json counts (three; five in records that an earlier version of the
script made of the same federations); in the last rows, those of [mnist](../mnist/results.md).
Dirichlet deals classes unevenly, the smaller its number the more. Divergence is the mean
over the samples, sole classes are at one client alone, sizes and epochs are largest over smallest, and reliability is
largest less smallest. Expected is what `fedunfold env check` says of learned weights. The last two draws of the
gaussians were chosen for their sole classes, all others were not chosen.

| federation | divergence | sole classes | sizes | epochs | reliability | expected | FedAvg | """
HEAD += "duw-fedavg | fedunfold-table |\n|---|---|---|---|---|---|---|---|---|---|\n"


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    file = folder / "results.json"
    records: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for case in cases():
        if case.key not in records:
            records[case.key] = run(case)
            text = json.dumps(records, indent=1) + "\n"
            write_atomically(file, partial(_write, text))
    rows = [row(case.key, case.environment(), records[case.key]["accuracy"]) for case in cases()]
    page = HEAD + "\n".join([*rows, *mnist()]) + "\n"
    write_atomically(folder / "results.md", partial(_write, page))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
