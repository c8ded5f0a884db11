"""Learning a rule over drawn federations: the same from anywhere, resumed to the bit, and of use."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.outcomes import OuterLossResult
from fedunfold.core.run_result import RunResult
from fedunfold.pretraining import federations, learner
from fedunfold.pretraining.distribution import Distribution, DrawnFederation
from fedunfold.pretraining.federations import Gain, HeldOutLoss, JudgedOnHeldOut, MetaGradient, meta_gradient, validate
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


def test_what_is_returned_is_a_mean_over_about_a_tenth_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 steps: plain means of the first three φ, from then on a third of the new one. Also if interrupted."""

    def drawn(distribution: Distribution, number: int, params: dict[str, Tensor], **settings: object) -> MetaGradient:
        random = torch.Generator().manual_seed(number)
        return MetaGradient(1.0, 1.0, {k: torch.randn(v.shape, generator=random).double() for k, v in params.items()})

    seen: list[Tensor] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress.params["step.0.weight"])
        if len(seen) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(learner, "meta_gradient", drawn)
    settings = TINY.model_copy(update={"steps": 30, "every": 30, "validation": 1})
    with pytest.raises(KeyboardInterrupt):
        pretrain(settings, checkpoint=tmp_path / "pretraining.safetensors", on_step=interrupt)
    learned = pretrain(settings, checkpoint=tmp_path / "pretraining.safetensors", on_step=interrupt)
    expected = torch.stack(seen[:3]).mean(0)
    for one in seen[3:]:
        expected = 2 / 3 * expected + one / 3
    assert len(seen) == 30 and not torch.allclose(expected, seen[-1], rtol=0, atol=1e-4)
    torch.testing.assert_close(learned.rule.params["step.0.weight"], expected)


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
    for t in (1, rounds):
        counted, plain = judged(federation, t)
        r = 2 * t / (rounds + 1)
        assert counted.loss == pytest.approx(r * plain.loss) and torch.allclose(counted.gradient, r * plain.gradient)
    counted, plain = judged(JudgedOnHeldOut(drawn), 1)
    assert counted.loss == plain.loss and torch.equal(counted.gradient, plain.gradient)


def test_what_is_lost_against_fedavg_counts_more() -> None:
    """F + 3 max(0, F − F_t) for a caution of 4, in a round where FedAvg is better and in one where it is worse."""
    drawn = SMALL.draw(0)
    rounds = drawn.environment.rounds
    _, plain = judged(JudgedOnHeldOut(drawn), 1)
    fedavg = [plain.loss - 0.5, *[plain.loss + 0.5] * (rounds - 1)]
    federation = JudgedOnHeldOut(drawn, fedavg, caution=4.0)
    assert federation.fedavg_loss == pytest.approx(rounds * plain.loss + 0.5 * (rounds - 2))
    worse, better = judged(federation, 1)[0], judged(federation, 2)[0]
    assert worse.loss == pytest.approx(plain.loss + 1.5) and torch.allclose(worse.gradient, 4 * plain.gradient)
    assert better.loss == pytest.approx(plain.loss) and torch.allclose(better.gradient, plain.gradient)


def test_rows_held_out_count_as_in_a_test_where_some_classes_are_rare() -> None:
    """FedAvg's losses, which are those of tests, are what the outer loss is compared with."""
    drawn = SMALL.model_copy(update={"imbalanced": 1.0}).draw(0)
    federation = JudgedOnHeldOut(drawn)
    model = federation.initial_model("trial-0")
    assert judged(federation, 1)[1].loss == pytest.approx(federation.evaluate([model])[0].loss, rel=1e-5)


def judged(federation: JudgedOnHeldOut, t: int) -> tuple[OuterLossResult, OuterLossResult]:
    """The outer loss of the initial model in round t, and the held-out loss itself."""
    request = Algorithm().request("trial-0", t, federation.initial_model("trial-0"), outer=HeldOutLoss())
    return federation.outer_loss([request])[0], federation.held_out.outer_loss([request])[0]


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
    paths = [1.0, -1.0, 0.5, 1.5]
    made = Validation.of(7, [Gain(final, path, ranges) for final, path in zip(finals, paths, strict=True)])
    assert made == Validation(step=7, mean=1.0, worst=-2.0, path=0.5, worst_path=-1.0, wins=0.625, federations=4)
    assert made.value == 1.0 - 2.0 - 1.0


def test_a_validated_federation_notes_what_was_met() -> None:
    gain = validate(SMALL, 0, initial_parameters(4, 0), sgd())
    assert gain is not None and gain.ranges is not None
    assert bool((gain.ranges[0] <= gain.ranges[1]).all()) and bool(gain.ranges.isfinite().all())
