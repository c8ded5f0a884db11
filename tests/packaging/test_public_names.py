"""What `import fedunfold as fu` offers: documented by example, shown readably, and clear about wrong arguments."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch

import fedunfold as fu
from fedunfold.core.text_table import TextTable

ENV = fu.environment("digits-label-skew").replace(rounds=2)
QUICK = fu.Learning(iterations=1)


@pytest.fixture(scope="module")
def table() -> fu.Comparison:
    return fu.compare(ENV, ["fedavg", fu.uniform()], trials=2)


@pytest.fixture(scope="module")
def learned() -> fu.LearnedWeights:
    return fu.learn_weights(ENV, learning=QUICK)


@pytest.mark.parametrize("name", sorted(set(fu.__all__) - {"__version__", "plot"}))
def test_every_name_has_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(fu, name)) or "")


def test_names_are_listed_and_others_refused() -> None:
    assert set(dir(fu)) == set(fu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fedavg'"):
        _ = fu.fedavg


def test_a_comparison_is_shown_as_a_table(table: fu.Comparison) -> None:
    caption, heads, *rows = repr(table).splitlines()
    assert caption.startswith("digits-label-skew")
    assert heads.split() == ["method", "trials", "mean", "±", "sd", "worst", "class"]
    assert [row.split()[:2] for row in rows] == [["fedavg", "2"], ["uniform", "2"]]
    for result, row in zip(table.methods, rows, strict=True):
        assert f"{result.mean:.1f} ± {result.sd:.1f}" in row
        assert f"{result.mean:.1f} ± {result.sd:.1f}</td>" in table._repr_html_()
        assert f"{result.worst_class:.1f}" == row.split()[-1]


def test_records_are_long_form(table: fu.Comparison) -> None:
    records = table.records()
    assert len(records) == 2 * 2 * 2
    last = [r["accuracy"] for r in records if r["method"] == "uniform" and r["round"] == 2]
    assert last == table.methods[1].finals


def test_learned_weights_are_shown_by_client(learned: fu.LearnedWeights) -> None:
    assert repr(learned) == "LearnedWeights(rounds=2, clients=5, iterations=1)"
    shown = learned._repr_html_()
    assert shown.count("<tr>") == 1 + len(learned.client_ids)
    assert all(key in shown for key in learned.client_ids)


def test_names_from_outside_stay_text_in_html() -> None:
    assert "<script>" not in TextTable("<script>", ("<script>",), [("<script>",)]).html()


def test_samples_are_never_shown() -> None:
    x, y = np.full((2, 3), 0.123456), [0, 1]
    env = fu.Environment.from_arrays({"a": (x, y)}, (x, y), rounds=1, batch_size=2, lr=0.1)
    assert "0.12" not in repr(env)


def test_one_method_needs_no_list(learned: fu.LearnedWeights) -> None:
    assert [m.name for m in fu.compare(ENV, learned, trials=1).methods] == ["learned"]  # type: ignore[arg-type]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a number for methods": (lambda: fu.compare(ENV, 5), "'int' is no weighting rule"),  # type: ignore[arg-type]
    "trials as text": (lambda: fu.compare(ENV, ["fedavg"], trials="5"), "1 trial, not '5'"),  # type: ignore[arg-type]
    "half a trial": (lambda: fu.compare(ENV, ["fedavg"], trials=1.5), "1 trial, not 1.5"),  # type: ignore[arg-type]
    "a schedule's name": (lambda: fu.learn_weights(ENV, learning="fast"), "Learning.*'fast'"),  # type: ignore[arg-type]
    "a method's name": (lambda: fu.learn_weights(ENV, algorithm="fednova"), "'fednova'"),  # type: ignore[arg-type]
    "a method of names": (lambda: fu.Method("x", "fedavg", fu.size()), "'fedavg'"),  # type: ignore[arg-type]
    "a built model": (lambda: fu.run(ENV, model=torch.nn.Linear(64, 10)), "function that builds"),
    "a model's name": (lambda: fu.run(ENV, model="mlp"), "function that builds one.*'mlp'"),  # type: ignore[arg-type]
    "no module": (lambda: fu.run(ENV, model=lambda: "x"), "must build a torch.nn.Module"),  # type: ignore[arg-type,return-value]
    "iterations as text": (lambda: fu.Learning(iterations="3"), "iterations .* at least 1, not '3'"),  # type: ignore[arg-type]
    "half an iteration": (lambda: fu.Learning(iterations=3.5), "iterations .* at least 1, not 3.5"),  # type: ignore[arg-type]
    "a step as text": (lambda: fu.Learning(lr="x"), "learning rate.*'x'"),  # type: ignore[arg-type]
    "a device's number": (lambda: fu.run(ENV, device=5), "device '5'"),  # type: ignore[arg-type]
    "a type's name": (lambda: fu.run(ENV, dtype="float64"), "'float64'"),  # type: ignore[arg-type]
    "whole numbers": (lambda: fu.run(ENV, dtype=torch.int64), "torch.int64"),
    "weights of an environment": (lambda: fu.plot.weights(ENV), "LearnedWeights, not a Environment"),  # type: ignore[arg-type]
    "accuracy of weights": (lambda: fu.plot.scores(fu.size()), "Comparison, not a Rule"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_get_one_sentence(what: str) -> None:
    call, said = WRONG[what]
    with pytest.raises(fu.InputError, match=said) as refused:
        call()
    assert "\n" not in str(refused.value)
