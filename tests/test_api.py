"""Runs and comparisons from Python."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedunfold as fu
from fedunfold.core.outcomes import Evaluation
from fedunfold.training.loop import run_rounds
from tests.support.federations import tiny

QUICK = fu.Learning(iterations=2)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("name", fu.method_names())
def test_every_name_runs(name: str) -> None:
    env = tiny(dict.fromkeys("abcde", 7), participation_probability=0.7).replace(server_rows=5)
    model = normalized if "fedbn" in name else None
    table = fu.compare(env, name, trials=2, learning=QUICK, model=model)
    assert [result.name for result in table.methods] == [name]
    assert 0 <= table.methods[0].mean <= 100
    assert (table.methods[0].learned is not None) == name.startswith(("duw-", "fedunfold-table"))


def test_weights_are_learned_as_a_method_has_it() -> None:
    env = tiny(participation_probability=0.7)
    (compared,) = fu.compare(env, ["fedunfold-table"], trials=1, learning=QUICK).methods
    learned = fu.learn_weights(env, method="fedunfold-table", learning=QUICK)
    assert compared.learned is not None
    assert learned.algorithm == compared.learned.algorithm == fu.method("fedunfold-table").algorithm
    assert torch.equal(learned.weights, compared.learned.weights)
    other = fu.learn_weights(env, method="duw-fednova", algorithm=fu.Algorithm(fu.prox(0.3)), learning=QUICK)
    assert other.algorithm.local == fu.prox(0.3)


@pytest.mark.parametrize("methods", [["fedavg", "fedunfold"], ["fedavg", "duw-fedavg"]])
def test_a_comparison_learns_what_it_must_in_a_fresh_process(methods: list[str]) -> None:
    code = (
        "import fedunfold as fu\n"
        "env = fu.environment('digits-label-skew').replace(rounds=2)\n"
        f"table = fu.compare(env, {methods}, trials=1, learning=fu.Learning(iterations=1))\n"
        "print(*(f'{m.name} {m.learned is not None}' for m in table.methods))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [methods[0], "False", methods[1], str(methods[1] == "duw-fedavg")]


def test_messages_of_the_library_name_no_command_line_option() -> None:
    """In its source outside of cli/, no text but docstrings has one."""
    package = Path(fu.__file__).parent
    found = {}
    for file in sorted(package.rglob("*.py")):
        if "cli" in file.relative_to(package).parts:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        texts = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented
        ]
        # An option alone is an argument of another program.
        if options := [
            text
            for text in texts
            if re.search(r"(?<![\w(-])--[a-z]", text) and not re.fullmatch(r"--[a-z-]+(=\S*)?", text)
        ]:
            found[str(file.relative_to(package))] = options
    assert not found


def test_trials_differ_and_methods_share_their_draws() -> None:
    table = fu.compare(tiny(), ["fedavg", fu.fixed([[0.35, 0.2, 0.45]] * 3)], trials=2)
    size, same = table.methods
    assert torch.equal(size.trials[0].participated, same.trials[0].participated)
    torch.testing.assert_close(size.trials[1].model, same.trials[1].model)
    assert not torch.equal(size.trials[0].model, size.trials[1].model)


def test_trials_are_batched_as_far_as_it_is_worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Five of them in pairs and the last alone, each reported under its own number."""
    asked: list[list[str]] = []
    heard: list[tuple[int, int]] = []

    class Hears(fu.Callback):
        def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
            heard.append((trial, round_index))

    def noted(*given: Any, **more: Any) -> list[fu.RunResult]:
        asked.append(given[3])
        return run_rounds(*given, **more)

    apart = fu.compare(tiny(), "fedavg", trials=5)
    monkeypatch.setattr("fedunfold.training.trials.run_rounds", noted)
    monkeypatch.setattr(fu.SimulatedFederation, "max_parallel_runs", 2)
    in_pairs = fu.compare(tiny(), "fedavg", trials=5, callback=Hears(), checkpoints=tmp_path)
    assert asked == [["trial-0", "trial-1"], ["trial-2", "trial-3"], ["trial-4"]]
    assert in_pairs.records() == apart.records()
    assert heard == [(trial, t) for pair in ((0, 1), (2, 3), (4,)) for t in range(3) for trial in pair]


def test_two_sets_of_learned_weights_under_names_of_their_own() -> None:
    env = tiny()
    first = fu.learn_weights(env, learning=QUICK)
    second = fu.learn_weights(env, learning=fu.Learning(iterations=2, adjoint="exact"))
    table = fu.compare(env, [first, replace(second, name="exact")], trials=1)
    assert [result.name for result in table.methods] == ["learned", "exact"]
    with pytest.raises(fu.InputError, match="'learned' is named twice"):
        fu.compare(env, [first, second])


def test_learned_weights_come_with_what_they_were_learned_for() -> None:
    env = tiny(participation_probability=0.6)
    algorithm = fu.Algorithm(fu.prox(0.3), fu.adam(0.05), "remember")
    learned = fu.learn_weights(env, algorithm=algorithm, learning=QUICK)
    by_weights = fu.run(env, learned)
    by_method = fu.run(env, fu.Method("mine", algorithm, learned))
    assert torch.equal(by_weights.model, by_method.model)


def test_refusals_come_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("a method ran before all were checked")

    monkeypatch.setattr("fedunfold.training.trials.run_rounds", unexpected)
    unlearnable = fu.Method("mine", fu.Algorithm(aggregator=fu.median()), None)
    with pytest.raises(fu.InputError, match="krum with 1 bad clients needs at least 5 clients, and there are 3"):
        fu.compare(tiny(), ["fedavg", "krum-fedavg"])
    with pytest.raises(fu.InputError, match="learned through the aggregator 'median'"):
        fu.compare(tiny(), ["fedavg", unlearnable])
    other = fu.learn_weights(tiny(), learning=QUICK)
    with pytest.raises(fu.InputError, match="3 rounds"):
        fu.compare(tiny(rounds=4), ["fedavg", other])


def test_another_model_is_another_federation() -> None:
    env = tiny()
    learned = fu.learn_weights(env, learning=QUICK, model=lambda: nn.Linear(5, 3))
    fu.run(env, learned, model=lambda: nn.Linear(5, 3))
    with pytest.raises(fu.InputError, match="another federation"):
        fu.run(env, learned)


def test_the_trained_module_comes_out() -> None:
    env = tiny()
    result = fu.run(env, "fednova")
    data = env.load()
    right = fu.trained_module(env, result)(data.x_test).argmax(1) == data.y_test
    assert right.double().mean().item() == pytest.approx(result.scores[-1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: fu.Algorithm("prox"), "local"),  # type: ignore[arg-type]
        (lambda: fu.Algorithm(fu.sgd(), "adam"), "server"),  # type: ignore[arg-type]
        (lambda: fu.Method("m", fu.Algorithm(), fu.size), "no weighting rule"),  # type: ignore[arg-type]
        (lambda: fu.compare(tiny(), []), "at least one method"),
        (lambda: fu.compare(tiny(), ["fedavg"], trials=0), "at least 1 trial"),
        (lambda: fu.run(tiny(), "duw-fedavg"), "needs learned weights; learn_weights learns them"),
        (lambda: fu.learn_weights(tiny(), method="fedavg"), "method 'fedavg' learns no weights"),
        (lambda: fu.learn_weights(tiny(), method="duw"), "unknown method 'duw'"),
        (lambda: fu.run(tiny(), device="meta"), "unknown device 'meta'"),
    ],
)
def test_wrong_arguments(wrong: object, message: str) -> None:
    with pytest.raises(fu.InputError, match=message):
        wrong()  # type: ignore[operator]
