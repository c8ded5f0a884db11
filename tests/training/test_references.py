"""References: what is trained alone and in one place is what a federation of one client trains, majority by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedunfold as fu
from fedunfold.cli import console
from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.run_result import RunResult
from fedunfold.report.grouping import group_runs
from fedunfold.report.insights import findings
from fedunfold.report.panels import cards_of
from fedunfold.runs.reader import read_runs
from fedunfold.tracking.scalars import mean_weights
from fedunfold.training.methods import as_compared, changed, method
from fedunfold.training.references import alone, mean_evaluation, pooled
from tests.support.federations import tiny
from tests.training.test_comparison import regression, saved


def reference(env: Environment, name: str, **options: Any) -> RunResult:
    (found,) = fu.compare(env, [name], trials=1, **options).methods
    return found.trials[0]


@pytest.mark.parametrize("epochs", [None, {"a": 2, "b": (1, 3, 1), "c": 1}])
def test_local_is_a_federation_of_each_client_alone_to_the_bit(epochs: Any) -> None:
    """Neither the others nor absence and sampling make a difference to a client that trains alone."""
    more: dict[str, Any] = {"clients_per_round": 2, "participation_probability": 0.4, "epochs": epochs}
    env = tiny({"a": 14, "b": 8, "c": 18}, **more).replace(holdout=0.25)
    found, held, train = reference(env, "local"), env.load_held_out(), env.load()
    assert held is not None
    finals = []
    for k, key in enumerate("abc"):
        x, y = train.client(k)
        single = Environment.from_arrays(
            {key: (x.numpy(), y.numpy())},
            (train.x_test.numpy(), train.y_test.numpy()),
            classes=3,
            epochs={key: env.clients[k].epochs},
            rounds=3,
            batch_size=3,
            lr=0.3,
            model=(4,),
        )
        own = fu.run(single)
        finals.append(own)
        predicted = fu.trained_module(single, own)(held.client(k)[0]).argmax(1)
        assert found.held_out[key] == (predicted == held.client(k)[1]).double().mean().item()
        predicted = fu.trained_module(single, own)(x).argmax(1)
        assert found.client_scores[key] == (predicted == y).double().mean().item()
    for t, test in enumerate(found.evaluations):
        assert test.score == pytest.approx(sum(own.scores[t] for own in finals) / 3, abs=1e-15)
        assert test.loss == pytest.approx(sum(own.evaluations[t].loss for own in finals) / 3, rel=1e-12)
    assert found.is_reference and not len(found.model)


def test_pooled_is_a_federation_of_one_client_to_the_bit() -> None:
    env = tiny(epochs=2, participation_probability=0.5)
    data = env.load()
    single = Environment.from_arrays(
        {"pooled": (data.x.numpy(), data.y.numpy())},
        (data.x_test.numpy(), data.y_test.numpy()),
        classes=3,
        epochs=2,
        rounds=3,
        batch_size=3,
        lr=0.3,
        model=(4,),
    )
    found, expected = reference(env, "pooled"), fu.run(single)
    assert torch.equal(found.model, expected.model)
    assert found.scores == expected.scores


def test_pooled_passes_over_all_rows_as_often_as_clients_over_theirs() -> None:
    """(7·1 + 4·2 + 9·(1, 3, 5)) / 20 = 1.2, 2.1 and 3 epochs."""
    env = tiny(epochs={"a": 1, "b": 2, "c": (1, 3, 5)})
    assert pooled(env, env.load()).clients[0].epochs == (1, 2, 3)


def test_rows_of_data_sets_are_pooled_and_divided_too() -> None:
    x, y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1, 1, 0, 0])
    parts = {"a": (x[:5], y[:5]), "b": (x[5:], y[5:])}
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 2, "lr": 0.1, "task": fu.classification(2)}
    kept = Environment.from_arrays(parts, (x, y), **settings)
    read = Environment.from_datasets(
        {key: TensorDataset(*part) for key, part in parts.items()}, TensorDataset(x, y), **settings
    )
    for name in ("local", "pooled"):
        assert reference(read, name).scores == reference(kept, name).scores
    with pytest.raises(InputError, match="'majority' needs targets in memory"):
        reference(read, "majority")


def test_majority_by_hand() -> None:
    """Classes 0, 0, 0, 1 and 1, 1, 2, 2: 0 and 1 are as frequent in all, and 0 is the first of them."""
    x = np.zeros((4, 2))
    env = Environment.from_arrays(
        {"a": (x, [0, 0, 0, 1]), "b": (x, [1, 1, 2, 2])},
        (np.zeros((5, 2)), [0, 0, 1, 1, 2]),
        classes=3,
        rounds=2,
        batch_size=2,
        lr=0.1,
    )
    found = reference(env, "majority")
    assert found.scores == [0.4, 0.4]
    assert found.client_scores == {"a": 0.75, "b": 0.5}
    assert found.evaluations[0].class_accuracy.tolist() == [1, 0, 0]
    shares = torch.tensor([4 / 11, 4 / 11, 3 / 11], dtype=torch.float64)  # (3 + 1) / (8 + 3), and so on
    expected = -shares.log()[[0, 0, 1, 1, 2]].mean()
    assert found.evaluations[0].loss == pytest.approx(float(expected))


def test_majority_of_numbers_is_their_mean() -> None:
    x = np.zeros((2, 1))
    env = Environment.from_arrays(
        {"a": (x, [0.0, 2.0]), "b": (x, [4.0, 10.0])},
        (x, [4.0, 6.0]),
        task=fu.regression(),
        rounds=1,
        batch_size=2,
        lr=0.1,
    )
    found = reference(env, "majority")
    assert found.scores == [pytest.approx(2**0.5)]  # of (0² + 2²) / 2
    assert found.client_scores == {"a": pytest.approx(1.0), "b": pytest.approx(3.0)}


def test_majority_needs_classes_or_numbers() -> None:
    x = np.zeros((4, 2))
    labels = np.eye(2)[[0, 1, 0, 1]]
    env = Environment.from_arrays(
        {"a": (x, labels)},
        (x, labels),
        task=fu.multilabel(2),
        rounds=1,
        batch_size=2,
        lr=0.1,
    )
    with pytest.raises(InputError, match="leave it out for the task multilabel"):
        reference(env, "majority")


def test_a_mean_of_tests_is_one_number_by_number() -> None:
    env = tiny(rounds=1)
    tests = [fu.run(env, trial=trial).evaluations[0] for trial in range(2)]
    mean = mean_evaluation(tests)
    assert mean.metrics["accuracy"] == mean.score == (tests[0].score + tests[1].score) / 2
    assert mean.class_accuracy.tolist() == ((tests[0].class_accuracy + tests[1].class_accuracy) / 2).tolist()


def test_references_are_no_methods() -> None:
    for name in ("local", "pooled", "majority"):
        assert name not in fu.method_names()
        with pytest.raises(InputError, match=f"'{name}' is no federated method but a reference"):
            method(name)
        with pytest.raises(InputError, match=f"'{name}' is a reference and no run of its own"):
            fu.run(tiny(), as_compared(name))


def test_only_local_training_of_a_reference_can_be_changed() -> None:
    parts = {"local": "prox:mu=0.5", "server": "adam", "absent": "drop", "aggregator": "median"}
    own = changed(as_compared("local"), **parts)
    assert (own.name, own.reference, own.rule) == ("local prox:mu=0.5", "local", None)
    assert own.algorithm == fu.Algorithm(fu.prox(0.5))
    assert changed(as_compared("majority"), **parts) == as_compared("majority")
    env = tiny({"a": 6}, rounds=2)
    (table,) = fu.compare(env, [own], trials=1).methods
    expected = fu.run(env, fu.Method("alone", fu.Algorithm(fu.prox(0.5)), fu.size()))
    assert table.trials[0].scores == expected.scores


def test_a_comparison_resumes_its_references(tmp_path: Path) -> None:
    env = tiny(rounds=2).replace(holdout=0.3)
    names = ["fedavg", "local", "pooled", "majority"]
    whole = fu.compare(env, names, trials=2, checkpoints=tmp_path)
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(files) == 2 * (1 + 3 + 1)
    again = fu.compare(env, names, trials=2, checkpoints=tmp_path)
    assert again.as_json() == whole.as_json()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_a_table_says_what_is_a_reference(tmp_path: Path) -> None:
    env = regression(rounds=2).replace(holdout=0.25)
    comparison = fu.compare(env, ["local", "majority", "uniform-fedavg", "pooled"], trials=2)
    named = ["local (reference)", "majority (reference)", "uniform-fedavg", "pooled (reference)"]
    tested, by_client = repr(comparison).split("sites: RMSE on what each client held out")
    for text in (tested, by_client):
        assert [line.split("  ")[0] for line in text.splitlines()[2:]] == named
    table = console.comparison_table(comparison)
    assert list(table.columns[0].cells) == [name.removesuffix(" (reference)") for name in named]
    assert table.caption == "for reference, no federated methods: local, majority, pooled"
    rows = json.loads(json.dumps(comparison.as_json(), allow_nan=False))["methods"]
    assert [row["reference"] for row in rows] == [True, True, False, True]
    assert all(set(row["held_out"]["clients"]) == set("abc") for row in rows)
    (run,) = read_runs([saved(comparison, env, tmp_path / "kept")])
    local = run.methods[0]
    assert local.is_reference and local.held_out is not None
    assert local.held_out.mean(0).tolist() == pytest.approx(list(comparison.methods[0].held_out.values()))
    assert local.client_scores[1].tolist() == pytest.approx(
        list(comparison.methods[0].trials[1].client_scores.values())
    )
    (group,) = group_runs([run])
    assert group.baseline is not None and group.baseline.label == "uniform-fedavg"
    assert {method.label for method in group.others} == set(named) - {"uniform-fedavg"}
    told = findings(group)
    assert any(line.startswith("local (reference) ends at") for line in told)
    alone, together = (comparison.methods[i].held_out for i in (0, 2))
    better = sum((alone[key] or 0) < (together[key] or 0) for key in "abc")
    assert 0 < better <= 3
    mean = f"{comparison.methods[2].client_mean:.4g}"
    best = f"uniform-fedavg, which has the best mean of the federated ones, {mean}."
    sentence = f"With local (reference), {better} of 3 clients do better on what they held out than with {best}"
    assert sentence in told
    (weights,) = cards_of([""], [group])["weights"]
    assert [drawing.label for drawing in weights.drawings] == ["uniform-fedavg"]
    assert mean_weights(comparison.methods[0].trials[0].weights, "abc") == {}


def test_a_client_alone_is_always_there() -> None:
    env = tiny(participation_probability=0.1, clients_per_round=1)
    single = alone(env, env.load(), "b")
    assert single.clients_per_round is None
    assert [(client.key, client.participation_probability) for client in single.clients] == [("b", 1.0)]
