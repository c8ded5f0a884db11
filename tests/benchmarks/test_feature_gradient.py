"""The gradient a rule is learned by beside the full one."""

from typing import Any

import pytest
from benchmarks.feature_gradient import feature_gradient_page, measure_feature_gradients

from benchmarks import feature_gradient
from fedunfold.pretraining.distribution import Distribution
from fedunfold.rules import features

TINY = Distribution(
    rounds=(8, 8), step=(0.5, 1.0), samples=(60, 80), clients=(3, 3), features=(4, 5), digits=0, pictures=0, sampled=0
)


def test_where_features_are_constants_both_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_gradient, "SMALL", TINY)
    (found,) = measure_feature_gradients("open", 1, 3, lambda line: None).rows
    assert found.cosine < 0.999

    def constant(round_: Any) -> Any:
        return round_.sizes * 0

    of_clients = {name: features.Feature(constant, own.needs) for name, own in features.OF_CLIENTS.items()}
    of_round = {name: features.Feature(lambda round_: 0.0, own.needs) for name, own in features.OF_ROUND.items()}
    monkeypatch.setattr(features, "OF_CLIENTS", of_clients)
    monkeypatch.setattr(features, "OF_ROUND", of_round)
    measured = measure_feature_gradients("open", 1, 3, lambda line: None)
    assert measured.rows[0].cosine == pytest.approx(1, abs=1e-4)
    assert measured.rows[0].ratio == pytest.approx(1, abs=1e-2)
    assert 0 < measured.rows[0].evolution < 0.1  # three directions among some ten thousand parameters
    assert "Median: 1.000." in feature_gradient_page(measured)
