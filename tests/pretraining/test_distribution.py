"""Federations to learn on: reproducible, valid, and as different as described."""

import numpy as np
import torch

from fedunfold.pretraining.columns import LONG_TAIL, YES_OR_NO
from fedunfold.pretraining.distribution import Distribution, DrawnFederation
from fedunfold.pretraining.mixtures import Mixture
from fedunfold.pretraining.pictures import Pictures
from tests.pretraining import drawn_federations


def test_a_number_always_draws_the_same() -> None:
    first, again = Distribution().draw(3), Distribution().draw(3)
    assert first.environment.load().checksum == again.environment.load().checksum
    assert first.environment.lr == again.environment.lr
    assert first.absent == again.absent and first.knows_horizon == again.knows_horizon


def test_numbers_purposes_and_seeds_draw_others() -> None:
    found = [Distribution().draw(0), Distribution().draw(1), Distribution().draw(0, "validation")]
    found.append(Distribution(seed=1).draw(0))
    assert len({drawn.environment.load().checksum for drawn in found}) == 4


def test_ranges_hold() -> None:
    of = Distribution()
    for drawn in drawn_federations():
        env, data = drawn.environment, drawn.environment.load()
        sampled = env.clients_per_round is not None
        low, high = of.sampled_clients if sampled else of.clients
        assert low <= len(env.clients) <= high
        assert of.rounds[0] <= env.rounds <= of.rounds[1]
        assert min(data.sizes) >= 6
        assert drawn.absent in ("drop", "remember")
        assert bool(torch.isfinite(data.x).all())


def test_federations_differ_in_every_respect() -> None:
    found: list[DrawnFederation] = drawn_federations()
    environments = [drawn.environment for drawn in found]
    assert {drawn.knows_horizon for drawn in found} == {True, False}
    assert {env.clients_per_round is None for env in environments} == {True, False}
    flaky = {any(client.participation_probability < 1 for client in env.clients) for env in environments}
    uneven = {len({client.epochs for client in env.clients}) > 1 for env in environments}
    assert flaky == uneven == {True, False}
    assert len({env.model for env in environments}) == 4
    assert {env.load().features == (64,) for env in environments} == {True, False}


def test_a_clients_conditions_move_its_samples() -> None:
    rng = np.random.default_rng(0)
    mixture = Mixture.draw(rng, classes=3, features=5)
    labels = np.zeros(500, dtype=np.int64)
    here = mixture.sample(np.random.default_rng(1), labels)
    there = mixture.sample(np.random.default_rng(1), labels, shift=np.full(mixture.mapping.shape[0], 2.0))
    assert here.shape == (500, 5) and here.dtype == np.float32
    assert np.abs(here.mean(0) - there.mean(0)).max() > 5 * here.std(0).max() / np.sqrt(500)


def test_columns_of_a_table_are_of_different_kinds() -> None:
    """Every column has mean 0 and deviation 1; some have two values only, some are skewed to the right."""
    rng = np.random.default_rng(3)
    mixture = Mixture.draw(rng, classes=4, features=40, table=True)
    assert mixture.columns is not None
    x = mixture.sample(rng, rng.integers(4, size=20_000)) / mixture.scale
    np.testing.assert_allclose(x.mean(0), 0, atol=0.2)
    np.testing.assert_allclose(x.std(0), 1, atol=0.25)
    two = np.array([len(np.unique(column.round(4))) == 2 for column in x.T])
    np.testing.assert_array_equal(two, mixture.columns.kinds == YES_OR_NO)
    tails = mixture.columns.kinds == LONG_TAIL
    assert 0 < tails.sum() < 40 and ((x**3).mean(0) > 0.5)[tails].mean() > 0.9


def test_classes_are_as_rare_in_the_test_data_as_at_the_clients() -> None:
    """Where all clients hold alike shares, the test data hold them too; without `imbalanced` all classes are alike."""
    of = Distribution(digits=0, imbalanced=1, clients=(24, 24), sampled=0, classes=(6, 6), samples=(6000, 6000))
    apart = []
    for number in range(12):
        drawn = of.draw(number)
        data, tests = drawn.environment.load(), drawn.held_out.load()
        held, test = (np.bincount(own.numpy(), minlength=6) / len(own) for own in (data.y, tests.y_test))
        apart.append(np.abs(held - test).max())
        assert test.max() > 1.2 / 6
    assert np.median(apart) < 0.12
    even = of.model_copy(update={"imbalanced": 0.0}).draw(0).held_out.load()
    assert len(set(np.bincount(even.y_test.numpy()).tolist())) == 1


def test_pictures_are_mostly_background_and_differ_by_class() -> None:
    pictures = Pictures.draw(np.random.default_rng(2), classes=3)
    x = pictures.sample(np.random.default_rng(0), np.repeat([0, 1, 2], 100))
    assert x.shape == (300, pictures.side**2) and x.dtype == np.float32
    assert pictures.low <= x.min() and x.max() <= pictures.high
    assert (x < (pictures.low + pictures.high) / 2).mean() > 0.5
    means = x.reshape(3, 100, -1).mean(1)
    apart = np.linalg.norm(means[0] - means[1])
    assert apart > 5 * np.linalg.norm(x[:100].std(0)) / np.sqrt(100)
