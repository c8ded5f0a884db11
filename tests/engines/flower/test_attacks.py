"""What a curious server, and one that cheats, tried on secure sums: each of these attacks once worked."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.rules import fixed
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from tests.engines.flower.test_secure_server import five, secure
from tests.support.federations import simulated

WEIGHTS = (0.12 * torch.ones(5, 5, dtype=torch.float64) + 0.4 * torch.eye(5, dtype=torch.float64)).tolist()
"""Five rows of weights that no four of them determine: as many equations as there are clients."""


def updates_of(env: Environment, run: str = "trial-0") -> Tensor:
    """What the clients' updates in the first round are, which the server must not learn."""
    here = simulated(env)
    (report,) = here.train([Algorithm().request(run, 0, here.initial_model(run))])
    return report.updates.rows


def recovered(models: list[Tensor], start: Tensor) -> Tensor:
    """Single updates from sums of them: W⁻¹ of the sums, where all are of the same updates."""
    return torch.linalg.solve(
        torch.tensor(WEIGHTS, dtype=torch.float64), torch.stack([model - start for model in models])
    )


def test_runs_under_different_weights_do_not_give_single_updates() -> None:
    """Five ordinary runs of one round, which the server has to wish for only."""
    env = five()
    clients = secure(env)
    models = [run_rounds(clients, fixed([row]), 1)[0].model for row in WEIGHTS]
    found, plain = recovered(models, clients.initial_model("trial-0")), updates_of(env)
    assert float((found - plain).norm() / plain.norm()) > 0.5
    # Had all been of one name, this would have been all there is to it.
    here = simulated(env)
    same = [run_rounds(here, fixed([row]), 1)[0].model for row in WEIGHTS]
    torch.testing.assert_close(recovered(same, here.initial_model("trial-0")), plain)


def test_learning_from_one_initial_model_is_refused() -> None:
    """It would meet the same first updates in every outer step, under other weights."""
    with pytest.raises(InputError, match="would reveal single updates; learn with initial_model='resample'"):
        learn(secure(five()), 2, learning=Learning(iterations=5))


def test_every_outer_step_begins_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, begun = secure(five()), []
    initial_model = clients.initial_model

    def noted(run: str) -> Tensor:
        begun.append(initial_model(run))
        return begun[-1]

    monkeypatch.setattr(clients, "initial_model", noted)
    for _ in range(2):
        learn(clients, 1, learning=Learning(iterations=2, initial_model="resample"))
    trained = [
        start for i, start in enumerate(begun) if i not in (0, 3)
    ]  # the first names the work, and is not trained
    assert len(trained) == 4
    assert all(not torch.equal(one, other) for i, one in enumerate(trained) for other in trained[:i])


def test_a_run_resumes_under_its_own_name(tmp_path: Any) -> None:
    env, file = five(), tmp_path / "run.safetensors"
    clients = secure(env)
    whole = run_rounds(clients, fixed([WEIGHTS[0]] * 3), 3, checkpoint=file, on_round=lambda t, _: t == 1)[0]
    assert len(whole.scores) == 2
    resumed = run_rounds(clients, fixed([WEIGHTS[0]] * 3), 3, checkpoint=file)[0]
    assert len(resumed.scores) == 3 and torch.equal(resumed.weights[:2], whole.weights)
    assert resumed.scores[:2] == whole.scores
