"""A step for every coordinate, with the length of plain averaging's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import RoundInfo
from fedunfold.server import grafted


def test_two_rounds_by_hand() -> None:
    """u = (3, 4): v = (4.5, 8), r = u / (√v + 2.5), as √mean v = 2.5; u = (0, 1): v = (2.25, 4.5)."""
    server, w = grafted(beta2=0.5, damping=1.0), torch.zeros(2, dtype=torch.float64)
    u = torch.tensor([3.0, 4.0], dtype=torch.float64)
    r = u / (torch.tensor([4.5, 8.0], dtype=torch.float64).sqrt() + 2.5)
    w, state = server.update(w, u, server.init(w))
    torch.testing.assert_close(w, 5 * r / r.norm())
    assert state[0].tolist() == pytest.approx([4.5, 8.0])
    w, state = server.update(torch.zeros_like(w), torch.tensor([0.0, 1.0], dtype=torch.float64), state)
    assert w.tolist() == pytest.approx([0.0, 1.0])
    assert state[0].tolist() == pytest.approx([2.25, 4.5])


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-6, 6), damping=st.floats(0.05, 20))
def test_the_step_is_as_long_as_plain_averagings_and_has_no_scale(seed: int, exponent: int, damping: float) -> None:
    server, drawn = grafted(damping=damping), torch.Generator().manual_seed(seed)
    rounds = torch.randn(3, 6, dtype=torch.float64, generator=drawn)
    w, state = torch.zeros(6, dtype=torch.float64), server.init(rounds[0])
    scaled, other = w, state
    for u in rounds:
        before = w
        w, state = server.update(w, u, state)
        scaled, other = server.update(scaled, 10.0**exponent * u, other)
        assert float((w - before).norm()) == pytest.approx(float(u.norm()), rel=1e-6)
    torch.testing.assert_close(scaled, 10.0**exponent * w, rtol=1e-6, atol=0)


def test_strong_damping_is_plain_averaging() -> None:
    u = torch.tensor([3.0, -4.0, 0.5])
    server = grafted(damping=1e6)
    torch.testing.assert_close(server.update(torch.zeros(3), u, server.init(u))[0], u, rtol=1e-5, atol=1e-5)


def test_where_nothing_moves_nothing_happens_and_the_derivative_is_finite() -> None:
    zero = torch.zeros(3)
    model, _ = grafted().update(zero, zero, grafted().init(zero))
    assert model.tolist() == [0, 0, 0]
    found = grafted().vjp(zero, torch.tensor([1.0, 0.0, 0.0]), grafted().init(zero), torch.ones(3), (torch.zeros(3),))
    assert all(bool(part.isfinite().all()) for part in (found[0], found[1], *found[2]))


def test_running_statistics_have_no_part_in_it() -> None:
    layout = ParamLayout.of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    nothing = torch.zeros(0)
    info = RoundInfo(0, layout, nothing, None, nothing, nothing)
    u = torch.zeros(layout.size)
    u[: layout.num_params] = torch.tensor([1.0, 2.0, 0.0, 2.0])
    alone, _ = grafted().update(torch.zeros_like(u), u, grafted().init(u), info)
    u[layout.num_params :] = 100.0
    beside, _ = grafted().update(torch.zeros_like(u), u, grafted().init(u), info)
    assert torch.equal(alone[: layout.num_params], beside[: layout.num_params])


@pytest.mark.parametrize("given_settings", [{"lr": 0.0}, {"beta2": 1.0}, {"damping": 0.0}])
def test_settings_out_of_range_are_refused(given_settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"server optimiser grafted needs 0 < {next(iter(given_settings))} < "):
        grafted(**given_settings)
