"""Private runs under the names of the simulation's, whose numbers theirs are compared with."""

import pytest

from fedunfold.training import loop
from fedunfold.unfolding import learner


def named_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loop, learner):
        monkeypatch.setattr(module, "fresh_run", lambda name: name)
