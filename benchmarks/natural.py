"""FedAvg, FedAdam and learned weights on the natural federations, beside what is published.

    python -m benchmarks.natural docs/results/natural [ENVIRONMENT ...]

Runs what the folder's results.json lacks of the environments named, or of all whose files are at hand, then writes
results.md from it. Five trials each, three of Shakespeare; seconds to minutes on two cores, Shakespeare a quarter of an
hour.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.core.task import PrimaryMetric
from fedunfold.io.atomic import write_atomically
from fedunfold.training.methods import changed

TRIALS = 5
FLAMBY_ADAM = "adam:lr=0.1,beta2=0.999,tau=1e-8"
"""FLamby's server for FedAdam, which goes with a local learning rate of 0.01."""
HEAD = """# Natural federations: what methods reach

Made by `python -m benchmarks.natural docs/results/natural`. Means over five trials, or as many as a row says, and their
standard deviations, on the pooled test set; settings are those of the bundled environments ([natural
data](../../natural-data.md)). Published are FLamby's means over five seeds (Ogier du Terrail et al. 2022), whose
features are not standardised: only rows that say so are to be compared with them. Differences that remain: whole epochs
where FLamby makes 100 steps, and ties of times, which are handled after Efron. Mean and worst client are on rows that
every client held out, the worst one in each trial.

"""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        environment: A bundled one.
        method: A method's name.
        unscaled: Whether features stay as they are.
        flamby: Whether server and local learning rate are FLamby's.
        published: FLamby's figure for it.
        trials: Over how many its figures are.
        iterations: Outer iterations of a learning; by default the method's.
        holdout: What part of its rows every client keeps from training, to be tested on by itself.
    """

    environment: str
    method: str
    unscaled: bool = False
    flamby: bool = False
    published: float | None = None
    trials: int = TRIALS
    iterations: int | None = None
    holdout: float | None = None

    @property
    def label(self) -> str:
        said = {
            "features unscaled": self.unscaled,
            "server as FLamby's": self.flamby,
            f"{self.iterations} outer iterations": self.iterations is not None,
            f"{self.trials} trials": self.trials != TRIALS,
            f"{self.holdout} held out": self.holdout is not None,
        }
        return ", ".join([self.method, *(words for words, holds in said.items() if holds)])

    def run(self) -> dict[str, Any]:
        """Its figures over all trials."""
        env, method = fu.environment(self.environment), fu.method(self.method)
        if self.unscaled:
            env = env.replace(data={"source": env.data.source, "scaling": "none"})
        if self.holdout is not None:
            env = env.replace(holdout=self.holdout)
        if self.flamby:
            env, method = env.replace(lr=0.01), changed(method, server=FLAMBY_ADAM)
        if self.iterations is not None:
            method = replace(method, learning=replace(method.learning, iterations=self.iterations))
        (found,) = fu.compare(env, [method], trials=self.trials).methods
        tests = [trial.evaluations for trial in found.trials]
        final = {name: [own[-1].metrics[name] for own in tests] for name in tests[0][-1].metrics}
        if self.holdout is not None:
            each = [list(trial.held_out.values()) for trial in found.trials]
            final |= {"mean client": list(map(fmean, each)), "worst client": list(map(min, each))}
        metric = PrimaryMetric.of(env.load().task).name
        return {"metric": metric, "final": final, "first": [own[0].score for own in tests]}


ROWS = (
    Row("tcga-brca", "fedavg"),
    Row("tcga-brca", "fedavg", unscaled=True, published=0.735),
    Row("tcga-brca", "fedadam", flamby=True),
    Row("tcga-brca", "fedadam", unscaled=True, flamby=True, published=0.842),
    Row("tcga-brca", "fedadam"),
    Row("tcga-brca", "duw-fedavg"),
    Row("heart-disease", "fedavg", published=0.748),
    Row("wisdm", "fedavg"),
    Row("wisdm", "duw-fedavg"),
    Row("wisdm", "fedavg", holdout=0.2),
    Row("wisdm", "duw-fedavg", holdout=0.2),
    Row("wisdm-sampled", "fedavg"),
    Row("vowel", "fedavg"),
    Row("diabetes-sites", "fedavg"),
    Row("diabetes-sites", "duw-fedavg"),
    Row("breast-cancer-sites", "fedavg"),
    Row("breast-cancer-sites", "duw-fedavg"),
    Row("shakespeare", "fedavg", trials=3),
    Row("shakespeare", "duw-fedavg", trials=3, iterations=5),
)


def page(results: dict[str, Any]) -> str:
    """The table of everything that was run."""
    lines = [
        "| environment | method | metric | first round | at the end | other metrics | published |",
        "|---" * 7 + "|",
    ]
    for row in ROWS:
        if (found := results.get(f"{row.environment}: {row.label}")) is None:
            continue
        final = dict(found["final"])
        primary = final.pop(found["metric"])
        others = "; ".join(f"{name} {_spread(values)}" for name, values in final.items())
        cells = [row.environment, row.label, found["metric"], _spread(found["first"]), _spread(primary), others]
        lines.append("| " + " | ".join([*cells, "" if row.published is None else f"{row.published:.3f}"]) + " |")
    return HEAD + "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.4g} ± {stdev(values):.2g}"


def main(folder: Path, wanted: list[str]) -> None:
    """Run what is missing, saving after every row, and write the page."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for row in ROWS:
        key = f"{row.environment}: {row.label}"
        if key in results or (wanted and row.environment not in wanted):
            continue
        try:
            fu.environment(row.environment).load()
        except InputError as error:
            print(f"left out: {key}: {error}", flush=True)
            continue
        print(key, flush=True)
        results[key] = row.run()
        write_atomically(file, partial(_write, text=json.dumps(results, indent=2) + "\n"))
    write_atomically(folder / "results.md", partial(_write, text=page(results)))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
