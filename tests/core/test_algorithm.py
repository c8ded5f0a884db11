"""Algorithms as descriptions and requests."""

import json
from typing import Any

import pytest
import torch

from fedunfold import aggregation, local, server
from fedunfold.core.algorithm import Algorithm, check_algorithm
from fedunfold.core.errors import InputError

ALGORITHMS = [
    Algorithm(),
    Algorithm(local.prox(0.3), server.adam(0.05, beta2=0.9), "drop", "skip", (0.5, 2.0), "norm"),
    Algorithm(local.accumulated(local.momentum(0.5)), server.momentum(0.8), "remember"),
    Algorithm(local.nova(), aggregator=aggregation.krum(2)),
    Algorithm(aggregator=aggregation.trimmed_mean(0.3)),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_it_is_made_again_from_its_description(algorithm: Algorithm) -> None:
    described = algorithm.describe()
    assert Algorithm.from_description(described) == algorithm
    assert Algorithm.from_description(json.loads(json.dumps(described))) == algorithm


@pytest.mark.parametrize(
    "changes",
    [{"local": {"name": "sgdd"}}, {"server": {"name": "adam", "rate": 1}}, {"absent": "forget"}, {"more": 1}],
)
def test_other_descriptions_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Algorithm.from_description(Algorithm().describe() | changes)


def test_what_is_requested_of_a_federation() -> None:
    algorithm = Algorithm(local.prox(0.3), absent="remember", absent_loss="skip", filter="norm")
    model = torch.zeros(2)
    request = algorithm.request("trial-0", 4, model, required_metrics=frozenset({"loss"}))
    assert (request.run, request.round, request.optimizer) == ("trial-0", 4, local.prox(0.3))
    assert request.model is model
    assert request.absent_loss == "skip"
    assert request.required_metrics == {"loss"}
    assert request.stores_updates and request.compares_updates
    plain = Algorithm().request("trial-0", 4, model)
    assert not plain.stores_updates and not plain.compares_updates
    assert Algorithm(aggregator=aggregation.median()).request("trial-0", 4, model).compares_updates


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local": "sgd"}, r"an algorithm's local is one such as sgd\(\) or prox\(0.01\), not 'sgd'"),
        ({"local": local.sgd}, "an algorithm's local is one such as sgd"),
        ({"server": local.sgd()}, r"an algorithm's server is one such as server.sgd\(\)"),
        ({"aggregator": "median"}, r"an algorithm's aggregator is one such as median\(\)"),
        ({"filter": "size"}, "unknown filter of updates 'size'"),
    ],
)
def test_wrong_parts_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Algorithm(**settings)


def test_a_methods_name_is_no_algorithm() -> None:
    with pytest.raises(InputError, match=r"an algorithm is an Algorithm, such as .*, not 'fednova'"):
        check_algorithm("fednova")
