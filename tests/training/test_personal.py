"""Fine-tuning at every client: a round of local training more, tested on what clients hold out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedunfold as fu
from fedunfold.client_scores import HeldOut
from fedunfold.core.errors import InputError
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.parts import LocalOptimizer
from fedunfold.core.run_result import RunResult
from fedunfold.report.grouping import group_runs
from fedunfold.report.insights import findings
from fedunfold.report.panels import cards_of
from fedunfold.runs.reader import read_runs
from fedunfold.training.personal import FineTuning
from tests.support.federations import RUN, Plain, assert_same, mlp, simulated, tiny
from tests.training.test_comparison import saved

ENV = tiny({"a": 14, "b": 8, "c": 18}, rounds=3).replace(holdout=0.25)


def tuned(env: fu.Environment, epochs: object) -> FineTuning:
    found = HeldOut.of(simulated(env), epochs).fine_tuning  # type: ignore[arg-type]
    assert found is not None
    return found


def ended(env: fu.Environment, rounds: int = 3) -> RunResult:
    """A run that has come back to w^(0) after some rounds."""
    everybody = torch.ones(rounds, len(env.clients), dtype=torch.bool)
    return RunResult(simulated(env).initial_model(RUN), everybody.double(), everybody, (Evaluation(0, 0),) * rounds)


def test_no_epochs_leave_the_final_model_as_it_is() -> None:
    (method,) = fu.compare(ENV, ["fedavg"], trials=1, personal=0).methods
    assert method.fine_tuned == method.held_out != {}


@pytest.mark.parametrize("optimizer", [fu.sgd(), fu.prox(0.1), fu.momentum(0.5), fu.nova()], ids=lambda o: o.name)
def test_fine_tuning_is_a_round_of_local_training_at_one_client(optimizer: LocalOptimizer) -> None:
    """As plain PyTorch trains; nova scales to the steps of others, of whom there are none."""
    flaky = ENV.replace(
        clients=tuple(fu.Client(key=c.key, epochs=c.epochs, participation_probability=0.3) for c in ENV.clients)
    )
    plain = Plain(flaky, mlp(flaky))
    result = ended(flaky)
    models = tuned(flaky, "own").models(result, RUN, fu.Algorithm(optimizer))
    settings = {"prox": {"mu": 0.1}, "momentum": {"rho": 0.5}}.get(optimizer.name, {})
    for k, model in enumerate(models):
        assert_same(model, plain.train(result.model, 3, k, **settings).model)


def test_so_many_epochs_as_requested() -> None:
    more = ENV.replace(clients=tuple(fu.Client(key=client.key, epochs=5) for client in ENV.clients))
    found = tuned(ENV, 5).models(ended(ENV), RUN, fu.Algorithm())
    assert torch.equal(found, tuned(more, "own").models(ended(ENV), RUN, fu.Algorithm()))
    assert not torch.equal(found, tuned(ENV, 1).models(ended(ENV), RUN, fu.Algorithm()))


def test_scores_are_those_of_the_fine_tuned_models_on_rows_held_out() -> None:
    (method,) = fu.compare(ENV, ["fedavg"], trials=1, personal=2, dtype=torch.float64).methods
    held, plain = (
        ENV.load_held_out(),
        Plain(ENV.replace(clients=tuple(fu.Client(key=k, epochs=2) for k in "abc")), mlp(ENV)),
    )
    assert held is not None
    for k, key in enumerate("abc"):
        x, y = held.client(k)
        own = plain.module(plain.train(method.trials[0].model, 3, k).model)
        right = own(x.double()).argmax(1) == y
        assert method.fine_tuned[key] == pytest.approx(100 * right.double().mean().item())
    assert fu.run(ENV).fine_tuned == {}


def test_a_client_that_diverges_has_no_score() -> None:
    found = tuned(tiny({"a": 9, "b": 2, "c": 9}, epochs=1, lr=1e19).replace(holdout=0.4), 1)
    federation = simulated(found.federation.environment, dtype=torch.float32)
    start = ended(federation.environment)
    start = replace(start, model=start.model.float())
    held = federation.over(federation.environment, found.held.data)
    scores = FineTuning(federation, held, 1).scores(start, RUN, fu.Algorithm())
    known = {key for key, score in scores.items() if score == score}
    assert known and known != set("abc")


@pytest.mark.parametrize("epochs", [-1, 1.5, "all", True])
def test_a_number_of_epochs_or_own(epochs: object) -> None:
    with pytest.raises(InputError, match="a number of epochs from 0, or the clients' 'own', not"):
        tuned(ENV, epochs)


def test_rows_must_be_held_out() -> None:
    with pytest.raises(InputError, match=r"these hold out none; set the environment's holdout, as in holdout=0\.2"):
        fu.compare(tiny(), ["fedavg"], personal="own")


def test_fine_tuned_models_from_comparison_to_report(tmp_path: Path) -> None:
    comparison = fu.compare(ENV, ["fedavg", "uniform-fedavg", "local"], trials=2, personal="own")
    rows = ["fedavg", "fedavg, fine-tuned", "uniform-fedavg", "uniform-fedavg, fine-tuned", "local (reference)"]
    assert comparison.by_client is not None
    title, heads, cells = comparison.by_client
    assert title == "in-memory: accuracy on what each client held out (%)"
    assert heads == ("method", "mean", "worst", "a", "b", "c")
    assert [row[0] for row in cells] == rows
    document = json.loads(json.dumps(comparison.as_json(), allow_nan=False))["methods"]
    tuned = document[0]["fine_tuned"]
    assert tuned["worst"] == min(tuned["clients"].values()) == tuned["clients"][tuned["worst_client"]]
    assert tuned["mean"] == pytest.approx(sum(tuned["clients"].values()) / 3)
    assert "fine_tuned" not in document[2]
    (run,) = read_runs([saved(comparison, ENV, tmp_path / "kept")])
    assert run.methods[0].fine_tuned is not None and run.methods[2].fine_tuned is None
    assert run.methods[0].fine_tuned.mean(0).tolist() == pytest.approx(list(tuned["clients"].values()))
    (group,) = group_runs([run])
    _, held = cards_of([""], [group])["clients"]
    assert [drawing.label for drawing in held.drawings] == [*rows[1:]]
    assert any(
        line.startswith("With fedavg, fine-tuned, the mean of the clients' accuracy") for line in findings(group)
    )
