"""What an outer step exchanges over Flower is counted, and as much as follows from what it is."""

import pytest
from benchmarks.learning_traffic import measure_traffic, traffic_page
from flwr.supercore.task_identity import TaskIdentity


def test_messages_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)
    rounds = 3
    found = measure_traffic(rounds)
    # Rounds and the final evaluation; the way back; a round more for each model between rounds.
    expected = [rounds + 1, rounds + 1, 2 * rounds + 1, rounds + 1, 2 * rounds]
    assert [row.messages for row in found.rows] == [found.clients * count for count in expected]
    size = 4 * found.entries * found.clients
    models = [(rounds + 1, 2 * rounds + 1), (rounds + 1, rounds + 1), (3 * rounds + 1, 2 * rounds + 1)]
    models += [(rounds + 1, rounds + 1), (2 * rounds, 2 * rounds)]
    for row, (to, back) in zip(found.rows, models, strict=True):
        assert to * size < row.sent < 1.1 * to * size
        assert back * size < row.received < 1.1 * back * size
    assert "| the app's own training | every-round | 6 | " in traffic_page(found)
