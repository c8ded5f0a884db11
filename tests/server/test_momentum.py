import math
from typing import Any

import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.server import momentum


def test_by_hand() -> None:
    """m: 1 → 0.5·1 + 2 = 2.5;  w: 0 → 1 → 3.5."""
    optimizer = momentum(0.5)
    w, state = torch.zeros(1), optimizer.init(torch.zeros(1))
    w, state = optimizer.update(w, torch.tensor([1.0]), state)
    w, state = optimizer.update(w, torch.tensor([2.0]), state)
    assert (w.item(), state[0].item()) == (3.5, 2.5)


@pytest.mark.parametrize("settings", [{"beta": 1.0}, {"beta": -0.1}, {"beta": math.nan}, {"lr": 0.0}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"momentum needs .*{next(iter(settings))}"):
        momentum(**settings)
