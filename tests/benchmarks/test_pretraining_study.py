"""Short pre-trainings that differ in one thing."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from benchmarks.pretraining_study import AS_IT_IS, VARIANTS, Variant, measure_pretraining, pretraining_page, validated
from benchmarks.rule_designs import Attending, Curriculum, Deeper, LongSteps, WithoutLastStep, WithoutUnevenness

from benchmarks import pretraining_study
from fedunfold.pretraining.distribution import Distribution
from fedunfold.pretraining.tempered_loss import TemperedLoss
from fedunfold.rules.families import FAMILIES
from fedunfold.rules.features import RoundFeatures
from fedunfold.rules.unfolded import UnfoldedRule
from fedunfold.tasks.classification import Classification

TINY = Distribution(rounds=(2, 3), samples=(60, 80), clients=(3, 4), features=(4, 5), digits=0, pictures=0, sampled=0)


def test_every_variant_differs_in_something() -> None:
    made = {(it.design, it.judge, it.curriculum, it.pretraining().model_dump_json()) for it in VARIANTS.values()}
    assert len(made) == len(VARIANTS)


def test_a_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"steps": 2, "federations": 2, "validation": 4, "width": 4, "lr": 0.1, "distribution": TINY}
    monkeypatch.setattr(pretraining_study, "SHORT", short)
    monkeypatch.setattr(pretraining_study, "worker_pool", in_this_process)
    chosen = [AS_IT_IS, "gradients of first order", "few clients and rounds first"]
    study = measure_pretraining(chosen, lambda line: None)
    assert [row.found.step for row in study.rows] == [2, 2, 2]
    assert study.rows[0].found != study.rows[1].found
    page = pretraining_page(study)
    assert "4 drawn federations" in page
    assert f"| {chosen[1]} | {study.rows[1].found.mean:+.2f} |" in page


@pytest.mark.parametrize("design", [Attending, Deeper, LongSteps, WithoutLastStep, WithoutUnevenness])
def test_every_design_is_learned(design: type[UnfoldedRule]) -> None:
    short = {"steps": 1, "federations": 1, "validation": 2, "width": 4, "distribution": TINY}
    found = validated(Variant(short, design))
    assert found.step == 1 and math.isfinite(found.value)
    assert FAMILIES["network"] is UnfoldedRule


def test_another_judge_makes_another_rule() -> None:
    short = {"steps": 3, "federations": 2, "validation": 4, "width": 4, "lr": 0.1, "distribution": TINY}
    assert validated(Variant(short)) != validated(Variant(short, judge=Classification))
    assert isinstance(TINY.draw(0).held_out.task, TemperedLoss)


@pytest.mark.parametrize("design", [Attending, Deeper])
def test_the_order_of_clients_makes_no_difference(design: type[UnfoldedRule]) -> None:
    rule = design.initial(4, 0)
    params = {name: value + 0.3 * torch.randn_like(value) for name, value in rule.params.items()}
    rule, of_clients = replace(rule, params=params), torch.randn(3, len(rule.client_features)).double()
    shares, of_round = torch.tensor([0.5, 0.3, 0.2]).double(), torch.randn(len(rule.round_features)).double()
    order = torch.tensor([2, 0, 1])
    found = RoundFeatures(torch.arange(3), shares, of_clients, of_round, {})
    moved = replace(found, shares=shares[order], of_clients=of_clients[order])
    assert torch.allclose(rule.decide(found, 3).weights[order], rule.decide(moved, 3).weights)
    assert torch.allclose(rule.decide(found, 3).step, rule.decide(moved, 3).step)


def test_a_curriculum_begins_with_few_rounds_and_ends_with_all() -> None:
    curriculum = Curriculum(federations=100, rounds=(4, 64), clients=(3, 3), sampled=0)
    first = [curriculum.draw(n).environment.rounds for n in range(8)]
    assert max(first) <= 10
    assert (
        curriculum.draw(60).environment.rounds
        == Distribution(rounds=(4, 64), clients=(3, 3), sampled=0).draw(60).environment.rounds
    )


@contextmanager
def in_this_process(processes: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool
