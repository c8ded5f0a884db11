"""Scores by client: on what a client held out, and on the data of a client that was left out."""

from pathlib import Path

import pytest
import torch

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.leave_out import leave_one_out, without_client
from fedunfold.report.grouping import group_runs
from fedunfold.report.insights import findings
from fedunfold.report.panels import cards_of
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
    assert comparison.by_client is not None
    title, heads, (row, _) = comparison.by_client
    assert title == "sites: RMSE on what each client held out, lower is better"
    assert heads == ("method", "mean", "worst", "a", "b", "c")
    each_one = [f"{means[key]:.4g}" for key in "abc"]
    assert row == ("fedavg", f"{method.client_mean:.4g}", f"{means[worst]:.4g}", *each_one)
    assert comparison.as_json()["methods"][0]["held_out"]["worst_client"] == worst
    (run,) = read_runs([saved(comparison, env, tmp_path / "kept")])
    assert run.methods[0].held_out is not None
    assert run.methods[0].held_out.mean(0).tolist() == pytest.approx(list(means.values()))
    own, held = cards_of([""], group_runs([run]))["clients"]
    assert "own training data" in own.about and "rows that it held out" in held.about
    (rings,) = [trace for trace in held.drawings[0].chart["data"] if trace["name"] == "fedavg"]
    assert rings["y"] == pytest.approx(list(means.values()), rel=1e-5)
    assert any("on what they held out" in line and f"at {worst}" in line for line in findings(group_runs([run])[0]))


def test_of_many_clients_the_worst_is_named_and_none_has_a_column() -> None:
    comparison = fu.compare(tiny(dict.fromkeys("abcdefghi", 4)).replace(holdout=0.5), ["fedavg"], trials=1)
    assert comparison.by_client is not None and comparison.methods[0].worst_client is not None
    _, heads, (row,) = comparison.by_client
    worst, score = comparison.methods[0].worst_client
    assert heads == ("method", "mean", "worst client")
    assert row[2] == f"{score:.1f} {worst}"


def test_a_percentage_is_worst_where_it_is_lowest() -> None:
    (method,) = fu.compare(tiny({"a": 12, "b": 8}).replace(holdout=0.5), ["fedavg"], trials=1).methods
    scores = method.trials[0].held_out
    assert method.worst_client is not None
    assert method.worst_client[1] == pytest.approx(100 * min(scores.values()))


def test_a_client_left_out_is_the_test_set_and_nowhere_else() -> None:
    env = tiny(clients_per_round=3, participation_probability={"a": 1.0, "b": 0.5, "c": 1.0})
    rest, whole = without_client(env, "b"), env.load()
    data = rest.load()
    assert (data.keys, data.sizes, rest.clients_per_round) == (("a", "c"), (7, 9), 2)
    assert torch.equal(data.x_test, whole.client(1)[0]) and torch.equal(data.y_test, whole.client(1)[1])
    assert torch.equal(data.client(1)[0], whole.client(2)[0])
    assert [client.key for client in rest.clients] == ["a", "c"]
    for key, only in (("nobody", env), ("a", tiny({"a": 4}))):
        with pytest.raises(InputError, match=f"client {key} cannot be left out"):
            without_client(only, key)


def test_leaving_out_each_client_in_turn() -> None:
    env = regression(rounds=2)
    found = leave_one_out(env, ["fedavg", "uniform-fedavg"], trials=2)
    whole, own = env.load(), []
    for trial in range(2):
        rest = without_client(env, "b")
        module = fu.trained_module(rest, fu.run(rest, trial=trial))
        x, y = whole.client(1)
        own.append((module(x) - y).square().mean().sqrt().item())
    assert found.scores["fedavg"]["b"] == pytest.approx(sum(own) / 2, rel=1e-5)
    row = found.as_json()["methods"][0]
    assert row["worst"] == max(row["left_out"].values()) and row["left_out"][row["worst_client"]] == row["worst"]
    assert row["rmse_mean"] == pytest.approx(sum(row["left_out"].values()) / 3)
    lines = repr(found).splitlines()
    assert lines[0] == "sites: RMSE on each client, trained without it, lower is better"
    assert lines[1].split() == ["method", "mean", "worst", "a", "b", "c"]


def test_references_are_trained_without_the_client_too() -> None:
    env = regression(rounds=1)
    found = leave_one_out(env, ["majority"], trials=1)
    whole = env.load()
    others = torch.cat([whole.client(k)[1] for k in (0, 2)])
    error = whole.client(1)[1] - others.mean()
    assert found.scores["majority"]["b"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)
    assert repr(found).splitlines()[2].startswith("majority (reference)")
