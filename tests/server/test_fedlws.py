"""FedLWS by hand, its derivative, runs of it, and where updates are not known."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedunfold.aggregation import server_round
from fedunfold.aggregation.server_round import layer_spread
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import RoundInfo
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.rules.step import step
from fedunfold.server import exp, fedlws, sgd
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import method
from tests.support.federations import tiny
from tests.support.rules import small_rule

TWO_LAYERS = ParamLayout(
    ("0.weight", "0.bias", "2.weight"),
    (torch.Size([1, 1]), torch.Size([1]), torch.Size([2, 1])),
    ("running_mean",),
    (torch.Size([1]),),
)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shown(spread: Tensor | None, layout: ParamLayout = TWO_LAYERS) -> RoundInfo:
    ones = torch.ones(2)
    return RoundInfo(3, layout, ones / 2, None, ones, ones, spread)


def test_layers_are_modules_without_buffers() -> None:
    assert TWO_LAYERS.layer_sizes == (2, 2)
    assert [part.tolist() for part in TWO_LAYERS.split_layers(vector(1, 2, 3, 4, 5))] == [[1, 2], [3, 4]]
    assert [part.tolist() for part in ParamLayout().split_layers(vector(1, 2, 3))] == [[1, 2, 3]]


def test_the_spread_by_hand() -> None:
    """Means (1, 0) and (0, 4): both are ‖(3, 4)‖ = 5 from the first, 4 and 4 from the second."""
    rows = torch.tensor([[4.0, 4.0, 0.0, 0.0, 70.0], [-2.0, -4.0, 0.0, 8.0, -70.0]])
    assert layer_spread(rows, TWO_LAYERS).tolist() == [5.0, 4.0]
    assert layer_spread(rows[:0], TWO_LAYERS).tolist() == [0.0, 0.0]


def test_by_hand() -> None:
    # β·5 = 1.5 is cut to 1, β·1 = 0.3 stays: γ = 5/(5 + 1·10) and 2/(2 + 0.3·4). The running mean is only moved.
    w, u = vector(3, 4, 2, 0, 7), vector(6, 8, 0, 4, 1)
    model, state = fedlws(beta=0.3, min_tau=0.1, max_tau=1.0).update(w, u, (), shown(vector(5.0, 1.0)))
    torch.testing.assert_close(model, vector(9 / 3, 12 / 3, 2 * 0.625, 4 * 0.625, 8))
    assert state == ()
    model, _ = fedlws(beta=0.0, min_tau=0.5, max_tau=1.0).update(w, u, (), shown(vector(5.0, 1.0)))
    torch.testing.assert_close(model, vector(9 / 2, 12 / 2, 2 / 2, 4 / 2, 8))


def test_a_layer_of_zeros_is_not_shrunk() -> None:
    w, u = vector(0, 0, 0, 0, 0), vector(6, 8, 0, 0, 1)
    model, _ = fedlws(min_tau=1.0, max_tau=1.0).update(w, u, (), shown(vector(5.0, 1.0)))
    assert torch.equal(model, u)
    to_model, to_direction, _ = fedlws(min_tau=1.0, max_tau=1.0).vjp(
        w, u, (), torch.ones_like(w), (), shown(vector(5.0, 1.0))
    )
    assert to_model.isfinite().all() and torch.equal(to_direction, torch.ones_like(w))


def test_vjp_is_autograds_through_the_factors() -> None:
    """The spread is a constant; what γ owes to w and u is not."""
    random = torch.Generator().manual_seed(0)
    w, u, adjoint = (torch.randn(5, dtype=torch.float64, generator=random) for _ in range(3))
    to_model, to_direction, _ = fedlws(beta=0.5, max_tau=3.0).vjp(w, u, (), adjoint, (), shown(vector(2.0, 1.0)))
    leaves = w.clone().requires_grad_(), u.clone().requires_grad_()
    after = [leaves[0][4:] + leaves[1][4:]]
    for part, tau in ((slice(2, 4), 0.5), (slice(0, 2), 1.0)):
        own, move = leaves[0][part], leaves[1][part]
        r, s = (own @ own).sqrt(), (move @ move).sqrt()
        after.insert(0, r / (r + tau * s) * (own + move))
    expected = torch.autograd.grad(adjoint @ torch.cat(after), leaves)
    torch.testing.assert_close((to_model, to_direction), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_without_tau_it_is_plain_averaging(absent: Any) -> None:
    federation = SimulatedFederation(tiny(participation_probability=0.6, seed=3), dtype=torch.float64)
    plain, ours = (
        run_rounds(federation, size(), 3, algorithm=Algorithm(server=server, absent=absent))[0].model
        for server in (sgd(), fedlws(min_tau=0.0, max_tau=0.0))
    )
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


def test_a_round_is_the_formula_on_the_clients_updates() -> None:
    federation = SimulatedFederation(tiny(), dtype=torch.float64)
    w = federation.initial_model("trial-0")
    (report,) = federation.train([Algorithm().request("trial-0", 0, w)])
    rows = report.updates.rows
    (result,) = run_rounds(federation, size(), 1, algorithm=Algorithm(server=fedlws(beta=2.0, max_tau=9.0)))
    u, begin, expected = report.num_examples / report.num_examples.sum() @ rows, 0, []
    for length in (5 * 4 + 4, 4 * 3 + 3):
        part = slice(begin, begin := begin + length)
        own = rows[:, part]
        tau = 2.0 * sum(float((row - own.sum(0) / 3).norm()) for row in own) / 3
        assert 0.01 < tau < 9
        expected.append(w[part].norm() / (w[part].norm() + tau * u[part].norm()) * (w[part] + u[part]))
    torch.testing.assert_close(result.model, torch.cat(expected))


def test_only_a_server_that_reads_the_spread_has_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("computed")

    monkeypatch.setattr(server_round, "layer_spread", refuse)
    run_rounds(SimulatedFederation(tiny()), size(), 1, algorithm=Algorithm(server=exp(), absent="drop"))
    with pytest.raises(AssertionError, match="computed"):
        run_rounds(SimulatedFederation(tiny()), size(), 1, algorithm=Algorithm(server=fedlws()))


def test_its_name_as_a_method() -> None:
    assert method("fedlws").algorithm.server == fedlws()
    assert method("dr-fedlws").algorithm == method("fedlws").algorithm


@pytest.mark.parametrize("info", [None, shown(None)])
def test_without_a_spread_it_is_refused(info: Any) -> None:
    with pytest.raises(InputError, match="fedlws needs how far clients' updates lie apart, which is not known here"):
        fedlws().update(vector(0, 0, 0, 0, 0), vector(1, 1, 1, 1, 1), (), info)


def test_a_round_in_arrays_is_refused_because_it_does_not_know_the_model() -> None:
    rule = small_rule(algorithm=Algorithm(server=fedlws(), absent="drop"))
    with pytest.raises(InputError, match="round 0: server optimiser fedlws needs"):
        step(rule, torch.tensor([[1.0, 0.0], [0.0, 1.0]]).numpy(), [3, 1])


@pytest.mark.parametrize(
    "settings",
    [{"beta": -1.0}, {"min_tau": -0.1}, {"min_tau": 0.3, "max_tau": 0.2}, {"max_tau": float("inf")}],
)
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="fedlws needs a finite beta >= 0"):
        fedlws(**settings)
