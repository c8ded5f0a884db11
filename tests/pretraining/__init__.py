"""Tests of what rules are learned on."""

from functools import cache

from fedunfold.pretraining.distribution import Distribution, DrawnFederation


@cache
def drawn_federations() -> list[DrawnFederation]:
    """Twenty-four of the default distribution."""
    return [Distribution().draw(number) for number in range(24)]
