"""Learning a rule over drawn federations: the same from anywhere, resumed to the bit, and of use."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.core.run_result import RunResult
from fedunfold.pretraining import federations
from fedunfold.pretraining.distribution import Distribution, DrawnFederation
from fedunfold.pretraining.federations import Gain, JudgedOnHeldOut, meta_gradient, validate
from fedunfold.pretraining.learner import Pretraining, Progress, Validation, pretrain
from fedunfold.rules.families import FAMILIES, Family
from fedunfold.rules.rule import WeightingRule
from fedunfold.rules.unfolded import initial_parameters
from fedunfold.server import sgd
from tests.rules.test_unfolded import without_last_layers

SMALL = Distribution(
    rounds=(3, 4), samples=(80, 120), clients=(3, 4), sampled_clients=(5, 6), cohort=(2, 3), features=(4, 6), digits=0.0
)
TINY = Pretraining(steps=4, federations=2, validation=3, every=2, width=4, distribution=SMALL)


@pytest.fixture(scope="module")
def learned() -> Progress:
    """What TINY's rule is, learned in this process."""
    return pretrain(TINY)


def same(first: Progress, second: Progress) -> bool:
    """Whether φ, the best φ and all that was noted are equal to the bit."""
    pairs = zip(first.rule.params.values(), second.rule.params.values(), strict=True)
    last = zip(first.params.values(), second.params.values(), strict=True)
    return (
        all(torch.equal(a, b) for a, b in (*pairs, *last))
        and first.losses == second.losses
        and first.validations == second.validations
    )


def test_processes_make_no_difference_and_a_seed_does(learned: Progress) -> None:
    assert same(learned, pretrain(TINY, processes=2))
    assert len(learned.losses) == 4 and [made.step for made in learned.validations] == [2, 4]
    assert not same(learned, pretrain(TINY.model_copy(update={"seed": 1})))


@pytest.mark.parametrize("family", ["private-network", "formula"])
def test_other_families_are_learned_too(family: Family, tmp_path: Path) -> None:
    """And resumed: the rule that comes back is of its kind."""
    file, some = tmp_path / "pretraining.safetensors", TINY.model_copy(update={"family": family})
    learned = pretrain(some, checkpoint=file).rule
    assert type(learned) is FAMILIES[family] and learned.ranges is not None
    again = pretrain(some, checkpoint=file).rule
    assert type(again) is FAMILIES[family]
    assert all(torch.equal(again.params[name], value) for name, value in learned.params.items())
    start = FAMILIES[family].initial(4, 0).params
    assert any(not torch.equal(start[name], value) for name, value in learned.params.items())


def test_what_was_interrupted_is_resumed_to_the_bit(learned: Progress, tmp_path: Path) -> None:
    file = tmp_path / "pretraining.safetensors"

    def interrupt(progress: Progress) -> None:
        if len(progress.losses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(TINY, checkpoint=file, on_step=interrupt)
    steps: list[int] = []
    resumed = pretrain(TINY, checkpoint=file, on_step=lambda progress: steps.append(len(progress.losses)))
    assert steps == [4]
    assert same(resumed, learned)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pretraining.safetensors"
    pretrain(TINY.model_copy(update={"steps": 2}), checkpoint=file)
    with pytest.raises(InputError, match=r"pretraining\.safetensors"):
        pretrain(TINY.model_copy(update={"steps": 2, "lr": 0.02}), checkpoint=file)


@pytest.mark.parametrize("lateness", [0.0, 1.0])
def test_without_last_layers_the_loss_is_fedavgs(lateness: float) -> None:
    params = without_last_layers(initial_parameters(4, 0))
    dropping = SMALL.model_copy(update={"remembered": 0.0})
    found = meta_gradient(dropping, 0, params, "exact", sgd(), lateness=lateness)
    assert found.loss == pytest.approx(found.fedavg_loss, rel=1e-6)
    assert found.gradient is not None and any(bool(slope.any()) for slope in found.gradient.values())


def test_steps_along_the_gradient_lower_the_loss() -> None:
    params = initial_parameters(4, 0)
    before = meta_gradient(SMALL, 0, params, "exact", sgd())
    assert before.gradient is not None
    gradient = before.gradient
    norm = sum(float(slope.square().sum()) for slope in gradient.values()) ** 0.5
    moved = {name: value - 1e-3 * gradient[name] / norm for name, value in params.items()}
    assert meta_gradient(SMALL, 0, moved, "exact", sgd()).loss < before.loss


def test_later_rounds_count_more() -> None:
    """r_t = 2t/(T + 1) for a lateness of 1: the loss and its gradient, round by round."""
    drawn = SMALL.draw(0)
    federation, rounds = JudgedOnHeldOut(drawn, lateness=1.0), drawn.environment.rounds
    assert federation.coefficients == pytest.approx([2 * t / (rounds + 1) for t in range(rounds + 1)])
    assert JudgedOnHeldOut(drawn).coefficients == [1.0] * (rounds + 1)
    outer, model = OUTER_LOSSES.make("every-round"), federation.initial_model("trial-0")
    requests = [Algorithm().request("trial-0", t, model, outer=outer) for t in (1, rounds)]
    for request in requests:
        (found,), (alike,) = federation.outer_loss([request]), federation.held_out.outer_loss([request])
        r = federation.coefficients[request.round]
        assert found.loss == pytest.approx(r * alike.loss) and torch.allclose(found.gradient, r * alike.gradient)


def test_a_width_that_no_file_could_tell_is_refused() -> None:
    with pytest.raises(InputError, match="width"):
        Pretraining(width=2)


def test_a_run_that_diverges_scores_0_and_widens_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(drawn: DrawnFederation, federation: Any, rule: WeightingRule, algorithm: Algorithm) -> RunResult:
        if rule.name != "size":
            raise DivergenceError("too long a step")
        return carried_out(drawn, federation, rule, algorithm)

    carried_out = federations._run
    survived = validate(SMALL, 0, initial_parameters(4, 0), sgd())
    monkeypatch.setattr(federations, "_run", run)
    gain = validate(SMALL, 0, initial_parameters(4, 0), sgd())
    assert gain is not None and survived is not None and gain.ranges is None
    assert gain.final < 0 and gain.mean < 0 and gain.final < survived.final


def test_validation_counts_ties_half_and_the_worst_tenth() -> None:
    ranges = torch.zeros(2, 1)
    finals = [-2.0, 0.25, 0.75, 5.0]
    made = Validation.of(7, [Gain(final, 0.5, ranges) for final in finals])
    assert made == Validation(step=7, mean=1.0, worst=-2.0, path=0.5, wins=0.625, federations=4)


def test_a_validated_federation_notes_what_was_met() -> None:
    gain = validate(SMALL, 0, initial_parameters(4, 0), sgd())
    assert gain is not None and gain.ranges is not None
    assert bool((gain.ranges[0] <= gain.ranges[1]).all()) and bool(gain.ranges.isfinite().all())
