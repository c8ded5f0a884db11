"""What is drawn for a round."""

import torch

from fedunfold.engines.simulation.drawing import BatchSampler
from tests.support.federations import tiny


def test_what_was_drawn_ahead_is_not_drawn_again_and_is_for_those_clients_alone() -> None:
    env = tiny(participation_probability=0.6)
    drawing = BatchSampler(env, env.load(), torch.device("cpu"), torch.float64)
    shares = drawing.shares(1)
    first, second = ([(drawing.draw(run, 1), share) for share in shares] for run in ("trial-0", "trial-1"))
    drawing.draw_ahead(first)
    drawing.send_ahead()
    kept = drawing.schedule(list(first))
    assert kept is drawing.schedule(first)
    other = drawing.schedule(second)
    assert other.rows.shape == kept.rows.shape
    assert not torch.equal(other.rows, kept.rows)
    alone = BatchSampler(env, env.load(), torch.device("cpu"), torch.float64)
    assert torch.equal(alone.schedule(first).rows, kept.rows)
    drawing.draw_ahead(second)
    assert torch.equal(drawing.schedule(second).rows, other.rows), "also where it was not sent yet"


def test_shares_are_those_of_the_round() -> None:
    env = tiny({"a": 7, "b": 4}, epochs={"a": (1, 2, 3), "b": 2})
    drawing = BatchSampler(env, env.load(), torch.device("cpu"), torch.float64)
    for round in (0, 2, 1, 0):
        found = drawing.shares(round)
        assert [share.epochs for share in found] == [round + 1, 2]
        assert [share.size for share in found] == [7, 4]
        assert drawing.shares(round) is found
