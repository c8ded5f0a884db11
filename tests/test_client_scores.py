"""Scores by client: on what a client held out, and on the data of a client that was left out."""

from pathlib import Path

import pytest
import torch

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.report.grouping import group_runs
from fedunfold.report.insights import findings
from fedunfold.runs.reader import read_runs
from tests.support.federations import tiny
from tests.training.test_comparison import regression, saved


def test_what_is_held_out_is_never_trained_on_and_the_rest_always() -> None:
    whole = tiny({"a": 10, "b": 3, "c": 2})
    env = whole.replace(holdout=0.2)
    train, held, all_rows = env.load(), env.load_held_out(), whole.load()
    assert held is not None
    assert (train.sizes, held.sizes) == ((8, 2, 1), (2, 1, 1))
    for k in range(3):
        parts = torch.cat([train.client(k)[0], held.client(k)[0]])
        expected = all_rows.client(k)[0]
        assert sorted(parts.tolist()) == sorted(expected.tolist())
    assert torch.equal(train.x_test, all_rows.x_test)
    assert env.replace(seed=5).load().checksum == train.checksum
    assert whole.load_held_out() is None
    assert env.digest(train) != whole.digest(all_rows)


def test_a_client_with_a_single_row_can_hold_out_none() -> None:
    with pytest.raises(InputError, match="Client b has a single row"):
        tiny({"a": 4, "b": 1}).replace(holdout=0.5).load()
    with pytest.raises(InputError, match="holdout"):
        tiny().replace(holdout=1.0)


def test_scores_are_those_of_the_final_model_on_rows_held_out() -> None:
    env = regression(rounds=2).replace(holdout=0.25)
    result = fu.run(env)
    held = env.load_held_out()
    assert held is not None
    module = fu.trained_module(env, result)
    for k, key in enumerate(held.keys):
        x, y = held.client(k)
        assert result.held_out[key] == pytest.approx((module(x) - y).square().mean().sqrt().item(), rel=1e-5)


def test_compare_shows_mean_and_worst_client(tmp_path: Path) -> None:
    env = regression().replace(holdout=0.25)
    comparison = fu.compare(env, ["fedavg", "uniform-fedavg"], trials=2)
    method = comparison.methods[0]
    each = [trial.held_out for trial in method.trials]
    means = {key: (each[0][key] + each[1][key]) / 2 for key in "abc"}
    worst = max(means, key=lambda key: means[key])
    assert method.held_out == pytest.approx(means)
    assert method.client_mean == pytest.approx(sum(means.values()) / 3)
    assert method.worst_client is not None
    assert method.worst_client[0] == worst and method.worst_client[1] == pytest.approx(means[worst])
    assert list(comparison.other_metrics)[-2:] == ["mean client", "worst client"]
    assert comparison.other_metrics["worst client"][0] == f"{means[worst]:.4g} {worst}"
    assert comparison.as_json()["methods"][0]["held_out"]["worst_client"] == worst
    (run,) = read_runs([saved(comparison, env, tmp_path / "kept")])
    assert run.methods[0].held_out is not None
    assert run.methods[0].held_out.mean(0).tolist() == pytest.approx(list(means.values()))
    assert any("on what they held out" in line and f"at {worst}" in line for line in findings(group_runs([run])[0]))


def test_a_percentage_is_worst_where_it_is_lowest() -> None:
    (method,) = fu.compare(tiny({"a": 12, "b": 8}).replace(holdout=0.5), ["fedavg"], trials=1).methods
    scores = method.trials[0].held_out
    assert method.worst_client is not None
    assert method.worst_client[1] == pytest.approx(100 * min(scores.values()))
