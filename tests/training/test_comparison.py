"""What a comparison says of tasks other than classification: which metric, which way is better, and all others."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedunfold as fu
from fedunfold.cli import console
from fedunfold.config import Environment
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import ACCURACY, PrimaryMetric
from fedunfold.report.grouping import group_runs
from fedunfold.report.insights import findings
from fedunfold.report.render import build
from fedunfold.runs.artifacts import of_comparison
from fedunfold.runs.catalog import summarize
from fedunfold.runs.folder import RunFolder
from fedunfold.runs.reader import read_runs
from fedunfold.runs.resume import RunSpec
from fedunfold.training.comparison import Comparison, MethodResult

ERROR = PrimaryMetric("rmse", greater_is_better=False, percentages=frozenset())


def regression(**settings: Any) -> Environment:
    """Three sites whose targets lie apart."""
    stream = np.random.default_rng(0)

    def site(n: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
        x = stream.normal(size=(n, 3))
        return x, x @ [1.0, 2.0, 3.0] + shift

    clients = {"a": site(40, 0), "b": site(24, 5), "c": site(16, -5)}
    defaults: dict[str, Any] = {"rounds": 3, "batch_size": 8, "lr": 0.02, "name": "sites"}
    return Environment.from_arrays(clients, site(50, 0), task=fu.regression(), **defaults | settings)


def result(score: float, metrics: dict[str, float] | None = None, primary: PrimaryMetric = ERROR) -> RunResult:
    tests = (Evaluation(score, 1.0, metrics=metrics or {primary.name: score}, primary=primary),)
    return RunResult(torch.zeros(1), torch.full((1, 2), 0.5), torch.ones(1, 2, dtype=torch.bool), tests)


def saved(comparison: Comparison, env: Environment, folder: Path) -> Path:
    with RunFolder(folder, RunSpec("compare", {})) as opened:
        opened.write(env, of_comparison(env, comparison, {}), methods=[m.name for m in comparison.methods], trials=2)
    return folder


def test_an_error_is_no_percentage_and_less_of_it_is_a_gain() -> None:
    comparison = Comparison(
        "sites",
        1,
        (
            MethodResult("fedavg", (result(50.0, {"rmse": 50.0, "r2": 0.25}),)),
            MethodResult("dr", (result(45.5, {"rmse": 45.5, "r2": math.nan}),)),
        ),
    )
    lines = repr(comparison).splitlines()
    assert lines[0] == "sites: RMSE on the test set after the last round, lower is better"
    assert lines[1].split() == ["method", "trials", "mean", "±", "sd", "R²"]
    assert lines[2].split() == ["fedavg", "1", "50", "0.25"]
    assert lines[3].split() == ["dr", "1", "45.5", "–"]
    table = console.comparison_table(comparison)
    assert list(table.columns[2].cells) == ["", "+4.5"]
    document = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert document["metric"] == {"name": "rmse", "greater_is_better": False, "percentages": []}
    assert document["methods"][1]["metrics"] == {"rmse": 45.5, "r2": None}
    assert document["methods"][1]["rmse_mean"] == 45.5


def test_a_classifiers_table_stays_as_it_is() -> None:
    comparison = fu.compare("digits-label-skew", ["fedavg"], trials=1)
    assert comparison.primary == ACCURACY
    assert repr(comparison).splitlines()[1].split() == ["method", "trials", "mean", "±", "sd", "worst", "class"]
    row = comparison.as_json()["methods"][0]
    assert row["metrics"]["accuracy"] == row["accuracy_mean"]
    assert set(row["metrics"]) == {"accuracy", "balanced_accuracy"}


def test_binary_shows_all_its_metrics() -> None:
    stream = np.random.default_rng(1)
    x = stream.normal(size=(60, 2))
    y = (x[:, 0] > 0).astype(int)
    env = Environment.from_arrays({"a": (x, y)}, (x, y), rounds=2, batch_size=10, lr=0.5, task=fu.binary())
    (method,) = fu.compare(env, ["fedavg"], trials=1).methods
    assert set(method.metrics) == {"accuracy", "balanced_accuracy", "auc", "f1", "brier"}
    shown = fu.compare(env, ["fedavg"], trials=1).other_metrics
    assert list(shown) == ["balanced accuracy (%)", "AUC (%)", "F1 (%)", "brier", "worst class (%)"]


def test_a_regression_from_comparison_to_report(tmp_path: Path) -> None:
    env = regression()
    comparison = fu.compare(env, ["fedavg", "uniform-fedavg"], trials=2)
    folder = saved(comparison, env, tmp_path / "kept")
    (run,) = read_runs([folder])
    assert run.primary == ERROR
    assert run.methods[0].finals.tolist() == pytest.approx(comparison.methods[0].finals)
    assert run.methods[1].metrics["r2"].mean() == pytest.approx(comparison.methods[1].metrics["r2"])
    predicted = fu.trained_module(env, comparison.methods[0].trials[0])(env.load().client(1)[0])
    own = (predicted - env.load().client(1)[1]).square().mean().sqrt().item()
    assert run.methods[0].client_scores[0, 1] == pytest.approx(own, rel=1e-5)
    told = findings(group_runs([run])[0])
    fedavg, uniform = comparison.methods
    gap = fedavg.mean - uniform.mean
    assert gap > 0, "the text below is about an error that falls"
    wins = sum(mine < theirs for mine, theirs in zip(uniform.finals, fedavg.finals, strict=True))
    assert f": {gap:.4g} less, which is better, better in {wins} of 2 trials" in told[0]
    assert "(RMSE, lower is better)" in told[0]
    assert any("worst-served client, by the final model's RMSE" in line for line in told)
    page = build([run]).html
    assert "test RMSE" in page and "regression" in page and "RMSE by client" in page
    assert "class 0" not in page and "Who holds which labels" not in page
    summary = summarize(folder)
    assert summary.primary == ERROR
    assert summary.results[0]["rmse_mean"] == comparison.methods[0].mean
    assert (folder / "rmse.png").is_file()


def test_resuming_keeps_the_metrics(tmp_path: Path) -> None:
    env = regression()
    whole = fu.run(env, checkpoint=tmp_path / "run.safetensors")
    again = fu.run(env, checkpoint=tmp_path / "run.safetensors")
    assert [test.metrics for test in again.evaluations] == [test.metrics for test in whole.evaluations]
    assert again.evaluations[-1].primary == ERROR


def test_rounds_spent_on_learning_are_counted() -> None:
    learning = fu.Learning(iterations=2)
    table = fu.compare("digits-label-skew", ["fedavg", "duw-fedavg"], trials=1, learning=learning)
    assert [result.learning_rounds for result in table.methods] == [0, 2 * 10]
