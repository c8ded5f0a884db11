"""A server's identity, which Flower sets where a run begins and messages ask for."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)
