"""Rounds under a clock: updates that reach the server later than they were trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedunfold.core.messages import ClientUpdates, OpenUpdates
from fedunfold.core.run_result import RunResult
from fedunfold.rules import size
from fedunfold.training.clock import Arrived, Clock
from fedunfold.training.loop import run_rounds
from tests.support.federations import RUN, Plain, assert_same, mlp, simulated, tiny

SLOW = 1
ENV = tiny(rounds=4)


class Prompt:
    """Updates arrive in the round in which they were trained."""

    limit = None

    def participation(self, run: str, t: int) -> None:
        return None

    def arrive(self, run: str, report: ClientUpdates, state: Any) -> Arrived:
        return Arrived(report, state)

    def describe(self) -> str:
        return type(self).__name__


class OneRoundLate(Prompt):
    """The slow client's update arrives a round after it was trained; its first round it counts as absent."""

    def arrive(self, run: str, report: ClientUpdates, state: Any) -> Arrived:
        assert isinstance(report.updates, OpenUpdates)
        rows = report.updates.rows.clone()
        held = rows[SLOW].clone()
        if state is None:
            arrived = torch.tensor([k != SLOW for k in range(len(rows))])
            return Arrived(report.accept(arrived), {"held": held})
        rows[SLOW] = state["held"]
        return Arrived(replace(report, updates=OpenUpdates(report.updates.clients, rows)), {"held": held})


def run(clock: Clock | None, file: Path | None = None, *, killed_after: int | None = None) -> RunResult:
    def on_round(t: int, _: object) -> None:
        if t == killed_after:
            raise SystemExit

    federation = simulated(ENV)
    (result,) = run_rounds(federation, size(), 4, [RUN], checkpoint=file, clock=clock, on_round=on_round)
    return result


def test_a_late_update_enters_the_round_it_arrives_in() -> None:
    plain = Plain(ENV, mlp(ENV))
    model = simulated(ENV).initial_model(RUN)
    held = torch.zeros_like(model)
    for t in range(4):
        updates = [plain.train(model, t, k).model - model for k in range(3)]
        late, held = held, updates[SLOW]
        updates[SLOW] = late
        parts = [share * update for share, update in zip(plain.shares, updates, strict=True)]
        model = model + torch.stack(parts).sum(0)
    result = run(OneRoundLate())
    assert_same(result.model, model)
    assert result.participated[:, SLOW].tolist() == [False, True, True, True]
    assert not torch.allclose(result.model, run(None).model, rtol=0, atol=1e-4)


def test_a_clock_that_holds_nothing_back_changes_nothing() -> None:
    assert torch.equal(run(Prompt()).model, run(None).model)


@pytest.mark.parametrize("killed_after", [0, 2])
def test_updates_on_their_way_are_resumed_byte_for_byte(tmp_path: Path, killed_after: int) -> None:
    whole, file = tmp_path / "whole.safetensors", tmp_path / "run.safetensors"
    expected = run(OneRoundLate(), whole)
    with pytest.raises(SystemExit):
        run(OneRoundLate(), file, killed_after=killed_after)
    assert torch.equal(run(OneRoundLate(), file).model, expected.model)
    assert file.read_bytes() == whole.read_bytes()
