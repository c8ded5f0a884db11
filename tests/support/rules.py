"""A rule as a file would have it, small enough to be made in a test."""

from typing import Any

import torch

from fedunfold.core.algorithm import Algorithm
from fedunfold.rules.features import CLIENT_FEATURES, ROUND_FEATURES
from fedunfold.rules.unfolded import UnfoldedRule, initial_parameters
from fedunfold.server.momentum import Momentum

WIDTH = 4
FEATURES = (*CLIENT_FEATURES, *ROUND_FEATURES)


def small_rule(**changes: Any) -> UnfoldedRule:
    """One that decides otherwise than FedAvg, with numbers that single precision holds."""
    drawn = torch.Generator().manual_seed(1)
    params = {
        name: (value + 0.3 * torch.randn(value.shape, generator=drawn, dtype=torch.float64)).float().double()
        for name, value in initial_parameters(WIDTH, 0).items()
    }
    ends = torch.tensor([[-6.5], [6.5]], dtype=torch.float64)
    given: dict[str, Any] = {
        "ranges": ends.expand(2, len(FEATURES)).contiguous(),
        "name": "small@1",
        "algorithm": Algorithm(server=Momentum(beta=0.5), absent="remember"),
        "description": "A rule of a test.",
    }
    return UnfoldedRule(params, **given | changes)
