"""What secure sums cost: every message is counted, and so is who drops out."""

import logging
from typing import Any

import pytest
from benchmarks.secure_cost import COMPLETE, NEIGHBOURS, OPEN, measure_sums, sums_page

from benchmarks import secure_cost
from fedunfold.engines.flower.secagg import graph


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_cost, "SAMPLES", 4)


def test_messages_of_a_round() -> None:
    """Openly five are sent and four come back; secure sums measure first, and have five stages."""
    level = logging.getLogger("fedunfold").level
    found = measure_sums(5, 1, 1)
    assert [row.name for row in found.rows] == [OPEN, NEIGHBOURS, COMPLETE]
    assert [row.messages for row in found.rows] == [9, *2 * [10 + 10 + 10 + 9 + 8 + 8]]
    assert [row.neighbours for row in found.rows] == [0, 4, 4]
    opened, *secure = found.rows
    model = 4 * found.entries
    assert model < opened.sent < 1.01 * model
    assert 0.8 * model < opened.received < 0.81 * model  # four of five updates
    for row in secure:
        assert 2 * model < row.sent < 2.1 * model  # for the numbers, and for the sum
        assert 1.6 * model < row.received < 1.7 * model  # in 64 bits
        assert row.client > 0 and row.server > 0
    assert logging.getLogger("fedunfold").level == level
    page = sums_page(found)
    assert "1 of which drop out in every round" in page and page.count("| 55 |") == 2


def test_neighbours_and_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "COMPLETE", 7)
    graph.reach.cache_clear()
    try:
        found: Any = measure_sums(8, 0, 1)
    finally:
        monkeypatch.undo()
        graph.reach.cache_clear()
    assert [row.neighbours for row in found.rows] == [0, 4, 7]
    few, all_others = found.rows[1:]
    assert few.received < all_others.received
