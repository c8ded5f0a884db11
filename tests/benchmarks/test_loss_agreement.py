"""Which loss agrees with the accuracy."""

import pytest
import torch
from benchmarks.loss_agreement import LOSSES, loss_agreement_page, measure_loss_agreement

from benchmarks import loss_agreement
from fedunfold.pretraining.distribution import Distribution

TINY = Distribution(rounds=(4, 6), samples=(60, 80), clients=(3, 4), features=(4, 5), digits=0, pictures=0, sampled=0)


def test_losses_are_asked_about_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of 50, 70 and 69.5 %, of which the first loss prefers the first and the others the second."""
    models = [[50.0, 1.0, 3.0, 3.0], [70.0, 2.0, 1.0, 1.0], [69.5, 2.0, 2.0, 2.0]]
    monkeypatch.setattr(loss_agreement, "_measured", lambda drawn, number: [torch.tensor(own) for own in models])
    found = measure_loss_agreement(2, lambda line: None)
    assert (found.federations, found.pairs) == (2, 4)
    assert [row.agrees for row in found.rows] == [0.0, 1.0, 1.0]
    assert [row.lost for row in found.rows] == pytest.approx([19.75, 0.0, 0.0])


def test_a_line_for_each_loss() -> None:
    said: list[str] = []
    found = measure_loss_agreement(3, said.append, TINY)
    assert len(said) == 3 and 0 < found.pairs <= 30
    page = loss_agreement_page(found)
    for row, name in zip(found.rows, LOSSES, strict=True):
        assert row.loss == name and 0 <= row.agrees <= 1
        assert f"| {name} | {100 * row.agrees:.1f} | {row.lost:.2f} |" in page
