"""The evaluation of a pre-trained rule: its statistics by hand, that it resumes, and its page from records alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import app
from benchmarks.rule import evaluate as evaluation
from benchmarks.rule import runs, sections
from benchmarks.rule.entrants import FEATURES, RULE, Ablated, Entrant, load_rule
from benchmarks.rule.evaluate import Amounts, evaluate
from benchmarks.rule.federations import federation, with_least_rows
from benchmarks.rule.page import write_page
from benchmarks.rule.records import Record, Records
from benchmarks.rule.responses import responses
from benchmarks.rule.runs import Job, carry_out
from benchmarks.rule.sections import GRID, KEPT, SECTIONS, choice
from benchmarks.rule.statistics import clustered, part_of_rounds, percentile, win_rate
from benchmarks.rule.view import View
from numpy.random import default_rng
from torch import Tensor
from typer.testing import CliRunner

from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS
from fedunfold.pretraining.distribution import Distribution
from fedunfold.pretraining.finished import finished_rule
from fedunfold.pretraining.learner import Pretraining, pretrain
from fedunfold.rules.features import CLIENT_FEATURES, ROUND_FEATURES, RoundFeatures
from fedunfold.rules.rule_file import save_rule
from fedunfold.rules.unfolded import PrivateRule, UnfoldedRule, initial_parameters
from fedunfold.studies.benchmark.statistics import interval

SCORES = [50.0, 60.0, 70.0]


def record(environment: str, method: str, trial: int = 0, scores: list[float] | None = None, **more: object) -> Record:
    scores = SCORES if scores is None else scores
    final, mean = (scores[-1], sum(scores) / len(scores)) if scores else (None, None)
    made = Record("paper", environment, method, trial, "", "accuracy", True, final, mean, scores, 1.0)
    return replace(made, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A rule that hardly learned anything."""
    small = Distribution(clients=(3, 4), rounds=(2, 3), samples=(100, 150), sampled=0.0, digits=0.0, flaky=1.0)
    file = tmp_path_factory.mktemp("rule") / "rule.safetensors"
    settings = Pretraining(steps=1, every=1, federations=1, validation=2, width=4, server="grafted", distribution=small)
    save_rule(finished_rule(settings, pretrain(settings)), file)
    return str(file)


def test_an_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 4.0, 5.0])  # mean 3, sd √(10/3), t₃ = 3.182446
    assert found.mean == 3.0
    assert found.low == pytest.approx(3 - 3.182446 * (10 / 3) ** 0.5 / 2, abs=1e-5)
    assert found.high - found.mean == pytest.approx(found.mean - found.low)
    assert interval([2.0]).text() == "+2.00" and interval([2.0]).as_json() == [2.0, None, None]


def test_trials_of_one_federation_count_as_one() -> None:
    assert clustered({"a": [0.0, 2.0], "b": [2.0, 4.0], "c": [5.0]}) == interval([1.0, 3.0, 5.0])


def test_ties_count_half_and_the_median_of_rounds_counts_never_as_one() -> None:
    assert win_rate([0.26, 0.25, -0.25, -0.26]) == 0.5
    assert win_rate([3.0, 0.0]) == 0.75
    assert part_of_rounds([1.0, 3.0, 2.0, 4.0], 3.0) == 0.5
    assert part_of_rounds([1.0, 2.0], 2.5) == 1.0
    assert percentile([0.0, 10.0, 20.0], 5) == pytest.approx(1.0)


def test_a_run_that_diverged_scores_the_worst_there_is() -> None:
    assert record("a", "fedavg", scores=[]).score(3) == 0.0
    assert record("a", "fedavg", scores=[], greater_is_better=False).score(3) == float("inf")
    assert record("a", "fedavg").score(2) == 65.0


def test_gains_are_paired_by_trial_and_know_the_direction() -> None:
    lower = {"greater_is_better": False, "metric": "perplexity"}
    runs = [record("a", method, trial, [score], **lower) for method, trial, score in
            [(RULE, 0, 4.0), (RULE, 1, 6.0), ("fedavg", 1, 7.0), ("fedavg", 2, 1.0), ("fedexp", 1, 5.0)]]  # fmt: skip
    view = View(runs, last=1)
    assert view.gains("a", RULE, "fedavg") == [1.0]
    assert view.best_rival("a") == "fedavg"  # mean 4 against 5


def test_the_setting_with_the_largest_mean_gain_is_chosen() -> None:
    methods = ["fedavg", *(f"{base} {server}" for base, servers in GRID.items() for server in servers)]
    best = {base: servers[1] for base, servers in GRID.items()}
    found = [
        record(f"tuning-{i}", method, scores=[51.0 + i if method in {f"{b} {s}" for b, s in best.items()} else 50.0])
        for i in range(2)
        for method in methods
    ]
    # In a federation where FedAvg diverges, or something is missing, nothing is compared.
    found += [record("tuning-2", method, scores=[] if method == "fedavg" else [90.0]) for method in methods]
    found += [record("tuning-3", methods[-1], scores=[99.0])]
    assert choice(found) == best
    with pytest.raises(InputError, match="run the section tuning first"):
        choice([])


def test_rows_come_from_the_largest_client() -> None:
    parts = with_least_rows(
        [torch.arange(5).numpy(), torch.tensor([7]).numpy(), torch.tensor([]).numpy()], default_rng(0)
    )
    assert sorted(map(len, parts)) == [2, 2, 2]
    assert sorted(row for part in parts for row in part) == [0, 1, 2, 3, 4, 7]


def test_clients_that_send_the_reverse_go_the_other_way() -> None:
    bad, good = (federation("bad-clients", f"boxes-{kind}-2", 0).federation for kind in ("updates", "labels"))
    request = Entrant("fedavg", "fedavg").method().algorithm.request("trial-0", 0, bad.initial_model("trial-0"))
    (reversed_,), (flipped,) = bad.train([request]), good.train([request])
    clean = type(good)(bad.environment).train([request])[0]
    assert torch.equal(reversed_.updates.rows[-2:], -clean.updates.rows[-2:])
    for other in (reversed_, flipped):
        assert torch.equal(other.updates.rows[:-2], clean.updates.rows[:-2])
    assert not torch.equal(flipped.updates.rows[-2:], clean.updates.rows[-2:])


def example(clients: int = 4) -> RoundFeatures[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    of_clients = torch.randn(clients, len(CLIENT_FEATURES), generator=drawn, dtype=torch.float64)
    of_round = torch.randn(len(ROUND_FEATURES), generator=drawn, dtype=torch.float64)
    return RoundFeatures(torch.arange(clients), torch.full((clients,), 1 / clients).double(), of_clients, of_round, {})


def loud_rule() -> UnfoldedRule:
    drawn = torch.Generator().manual_seed(2)
    params = {
        name: torch.randn(value.shape, generator=drawn, dtype=torch.float64)
        for name, value in initial_parameters(4, 0).items()
    }
    ranges = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).repeat(1, len(FEATURES))
    return UnfoldedRule(params, ranges=ranges)


@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_its_value_makes_no_difference(feature: str) -> None:
    found, place, own = example(), FEATURES.index(feature), len(CLIENT_FEATURES)
    changed = RoundFeatures(found.clients, found.shares, found.of_clients.clone(), found.of_round.clone(), {})
    (changed.of_clients[0] if place < own else changed.of_round)[place if place < own else place - own] += 2.0
    blind = Ablated.of(loud_rule(), feature)
    assert torch.equal(blind.decide(found, 4).weights, blind.decide(changed, 4).weights)
    assert torch.equal(blind.decide(found, 4).step, blind.decide(changed, 4).step)
    assert not torch.equal(loud_rule().decide(found, 4).weights, loud_rule().decide(changed, 4).weights)


def test_without_a_part_of_the_decision_it_is_fedavgs() -> None:
    found, whole = example(), loud_rule().decide(example(), 4)
    assert torch.equal(Ablated.of(loud_rule(), "weights").decide(found, 4).weights, found.shares)
    without_s = Ablated.of(loud_rule(), "s").decide(found, 4)
    assert torch.equal(without_s.step, 1 - whole.momentum) and torch.equal(without_s.momentum, whole.momentum)
    without_momentum = Ablated.of(loud_rule(), "β").decide(found, 4)
    assert float(without_momentum.momentum) == 0
    assert float(without_momentum.step) == pytest.approx(float(whole.step / (1 - whole.momentum)))
    nothing = Ablated.of(loud_rule(), "weights s β a").decide(found, 4)
    assert (float(nothing.step), float(nothing.momentum), float(nothing.trust)) == (1.0, 0.0, 0.0)
    with pytest.raises(InputError, match="a rule has no 'colour'"):
        Ablated.of(loud_rule(), "colour")


def test_an_untrained_rule_answers_to_nothing() -> None:
    met = {"mean": [0.0] * len(FEATURES), "low": [-1.0] * len(FEATURES), "high": [1.0] * len(FEATURES)}
    found = responses(UnfoldedRule(initial_parameters(4, 0)), met)
    assert set(found["weights"]) == set(CLIENT_FEATURES)
    assert all(y == 0 for points in found["weights"].values() for y in points["y"])
    assert all(y == 1 for points in found["step"].values() for y in points["y"])


def test_a_rule_comes_with_what_it_was_learned_for(rule: str, tmp_path: Path) -> None:
    _, algorithm = load_rule(rule)
    assert (algorithm.server, algorithm.absent) == (SERVER_OPTIMIZERS.make("grafted"), "remember")
    with pytest.raises(InputError, match="there is no rule"):
        load_rule(str(tmp_path / "nothing"))
    private = PrivateRule.initial(4, 0)
    ranges = torch.tensor([[-1.0], [1.0]]).repeat(1, len(private.client_features) + len(private.round_features))
    save_rule(replace(private, ranges=ranges, algorithm=algorithm), tmp_path / "private.safetensors")
    with pytest.raises(InputError, match="is no network that sees open updates"):
        load_rule(str(tmp_path / "private.safetensors"))


def test_what_was_run_is_not_run_again(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = list(replace(SECTIONS["paper"], environments=("digits-label-skew",), trials={"": 1}).jobs(rule, {}))
    jobs = [job for job in jobs if job.entrant.label in ("fedavg", KEPT, RULE)]
    once = Records(tmp_path / "once")
    carry_out(jobs, once, 1)
    in_parts = Records(tmp_path / "parts")
    carry_out(jobs[:1], in_parts, 1)
    made: list[str] = []
    run = Job.run
    monkeypatch.setattr(Job, "run", lambda job: made.append(job.entrant.label) or run(job))  # type: ignore[func-returns-value]
    carry_out(jobs, Records(tmp_path / "parts"), 1)
    assert made == [job.entrant.label for job in jobs[1:]]
    first, second = (Records(tmp_path / name).of("paper") for name in ("once", "parts"))
    assert [replace(one, seconds=0) for one in first] == [replace(one, seconds=0) for one in second]
    # Another setting of the same method is another run.
    other = [replace(jobs[0], entrant=replace(jobs[0].entrant, server="sgd:lr=2"))]
    carry_out(other, Records(tmp_path / "parts"), 1)
    assert made[-1] == jobs[0].entrant.label and len(made) == len(jobs)


def test_records_of_two_machines_are_merged_and_damage_is_said(tmp_path: Path) -> None:
    for name, environment in (("a", "mnist-1"), ("b", "mnist-2")):
        records = Records(tmp_path / name)
        records.add(record(environment, "fedavg"))
        records.save()
    merged = Records(tmp_path / "a")
    merged.merge([tmp_path / "b"])
    assert [one.environment for one in Records(tmp_path / "a").of("paper")] == ["mnist-1", "mnist-2"]
    with pytest.raises(InputError, match="there is no folder"):
        merged.merge([tmp_path / "c"])
    (tmp_path / "b" / "paper.json").write_text("[{}]")
    with pytest.raises(InputError, match="does not hold records"):
        Records(tmp_path / "b")


def test_sections_run_in_turn_and_make_the_page(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "GRID", {"fedavg": ("sgd:lr=1", "sgd:lr=2")})
    said: list[str] = []
    with pytest.raises(InputError, match="there is no section 'papers'"):
        evaluate(rule, tmp_path, ["papers"])
    with pytest.raises(InputError, match="run the section tuning first"):
        evaluate(rule, tmp_path, ["paper"])
    small = {name: SECTIONS[name] for name in ("tuning", "ablation")}
    monkeypatch.setattr(evaluation, "SECTIONS", small)
    monkeypatch.setattr(runs, "REPORT_SECONDS", 0.0)
    evaluate(rule, tmp_path, [], 1, Amounts(federations=1), said.append)
    assert said[-1].startswith("ablation: 26 of 26 runs")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["sections"]) == {"tuning", "ablation"} and len(summary["rules"]) == 1
    page = (tmp_path / "README.md").read_text()
    assert "weights-by-feature.png" in page and (tmp_path / "weights-by-feature.png").exists()
    assert "run the section `paper`" in page


def test_verdicts_are_computed_from_the_records(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    for trial in range(2):
        records.add(record("mnist-1", KEPT, trial, [80.0, 85.0, 88.0 + trial]))
        records.add(record("mnist-1", RULE, trial, [85.0, 89.0, 90.0 + trial]))
        records.add(record("mnist-2", KEPT, trial, [60.0, 65.0, 70.0]))
        records.add(record("mnist-2", RULE, trial, [50.0, 60.0, 69.0]))
        for number, gain in ((0, 3.0), (1, 0.1), (5, 1.0)):
            about = {"data": "boxes", "test_rows": 60 if number == 5 else 1500}
            for method, score in (("fedavg", 50.0), (RULE, 50.0 + gain)):
                scores = [0.0, score, score, score]
                name = f"held-out-{number}"
                records.add(record(name, method, trial, scores, section="held-out", about=about))
    records.save()
    write_page(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())["sections"]
    verdicts = {bar["text"].split(",")[0]: bar["holds"] for bar in summary["paper"]["bars"]}
    assert verdicts["mnist-1: final score 90.50"] and not verdicts["mnist-2: final score 69.00"]
    # 88.5 is reached in the second of three rounds, 70 never.
    assert summary["paper"]["numbers"]["rounds"] == {"mnist-1": 0.6667, "mnist-2": 1.0}
    assert [bar["holds"] for bar in summary["held-out"]["bars"]] == [False, False, True]  # wins 1 and a half of 2
    found = summary["held-out"]["numbers"]["1000 test rows or more"]
    assert (found["federations"], found["win rate"], found["mean gain"][0]) == (2, 0.75, 1.55)
    page = (tmp_path / "README.md").read_text()
    assert "- Holds: mnist-1: final score 90.50, at least 89.8." in page
    assert "- **Does not hold**: win rate 75.0 %, at least 85 %." in page
    assert "nan" not in page


def test_the_command_merges_and_writes_the_page(tmp_path: Path) -> None:
    records = Records(tmp_path / "other" / "records")
    records.add(record("mnist-1", RULE, setting="abc"))
    records.save()
    command = ["rule", "--out", str(tmp_path / "mine")]
    ended = CliRunner().invoke(app, [*command, "--page", "--merge", str(tmp_path / "other" / "records")])
    assert ended.exit_code == 0, ended.output
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["rules"] == ["abc"]
    assert isinstance(CliRunner().invoke(app, command).exception, InputError)


def test_a_rival_that_diverges_is_shown_and_loses(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    lower = {"section": "natural", "metric": "perplexity", "greater_is_better": False}
    for trial in range(2):
        records.add(record("shakespeare", "fedavg", trial, [5.0 + trial], **lower))
        records.add(record("shakespeare", "fedadam (tuned)", trial, [], **lower))
        records.add(record("shakespeare", RULE, trial, [4.5 + 1.2 * trial], **lower))
    records.save()
    write_page(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| fedadam (tuned) | diverged |" in page and "6 of 196 runs, of which 2 diverged." in page
    assert "- Holds: shakespeare: +0.400 [-0.871, +1.671] over the best rival, fedavg, not below it" in page
