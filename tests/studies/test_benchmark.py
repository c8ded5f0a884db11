"""Suites, methods and runs of a benchmark: what is run on what, what is recorded, what is said of it."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.config import environment
from fedunfold.core.errors import InputError
from fedunfold.core.task import PrimaryMetric
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.checkpoint import read_record, write_record
from fedunfold.rules.rule import RULES
from fedunfold.studies.benchmark import runs as runs_module
from fedunfold.studies.benchmark.contenders import LEARNED, Contender, contenders, table_order
from fedunfold.studies.benchmark.page import write_page
from fedunfold.studies.benchmark.plan import Plan, carry_out
from fedunfold.studies.benchmark.records import RunRecord, RunRecords
from fedunfold.studies.benchmark.suites import TUNING_DRAWS, Place, Suite, find_suite, suite_names
from fedunfold.studies.benchmark.summary import Cell, Summary
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import method_names
from fedunfold.unfolding import learn

SMALL = Place(environment="digits-label-skew", changes={"name": "small", "rounds": 2})
FEDAVG = Contender(base="fedavg", grid=("server=sgd:lr=1", "server=sgd:lr=2"), default="server=sgd:lr=1")
PROX = Contender(base="fedprox", grid=("local=prox:mu=0.1", "local=prox:mu=1"))


def small_suite(*places: Place, **settings: Any) -> Suite:
    given: dict[str, Any] = {"name": "small", "trials": 2, "tuning_trials": 1, "environments": places or (SMALL,)}
    return Suite(**given | settings)


def carried_out(folder: Path, suite: Suite, methods: dict[str, Contender], **options: Any) -> RunRecords:
    records = RunRecords(folder / "records")
    plan = Plan.of(suite, Path(), methods, **options)
    carry_out(plan, records, 1, lambda title, todo: lambda name, cost: None)
    write_page(folder)
    return records


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def rows_of(inputs: Any) -> list[bytes]:
    return [row.tobytes() for row in np.ascontiguousarray(inputs.numpy())]


# --- suites and methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", suite_names())
def test_the_environments_of_every_suite_fit_together(name: str) -> None:
    suite, folder = find_suite(name)
    names = [place.case(folder, 0).env.name for place in suite.environments]
    assert suite.name == name and suite.description and len(set(names)) == len(names)


def test_the_suites_are_those_that_were_asked_for() -> None:
    paper, devices, wide = (find_suite(name)[0] for name in ("paper", "devices", "cross-device"))
    six = ["mnist-1", "mnist-2", "mnist-3", "mnist-4", "dogs-a", "dogs-b"]
    assert [place.environment for place in paper.environments] == six
    assert (paper.trials, devices.trials, wide.trials) == (10, 5, 5)
    sampled = {
        (place.case(Path(), 0).env.name, len(env.clients), env.clients_per_round, env.rounds)
        for place in wide.environments
        for env in [place.case(Path(), 0).env]
    }
    assert {("mnist-0.1-100", 100, 10, 50), ("fashion-mnist-0.3-1000", 1000, 20, 100)} <= sampled
    natural = {place.environment: place for place in find_suite("natural")[0].environments}
    assert natural["shakespeare"].trials == 3
    assert natural["shakespeare"].case(Path(), 0).env.rounds <= 30


def test_the_suite_that_the_page_shows_can_be_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "hospitals.toml").write_text(environment("digits-flaky").to_toml(), encoding="utf-8")
    (tmp_path / "mine.toml").write_text(shown, encoding="utf-8")
    suite, folder = find_suite(str(tmp_path / "mine.toml"))
    plan = Plan.of(suite, folder, contenders(suite.methods, suite.contenders))
    assert list(plan.venues) == ["digits-flaky", "digits-dirichlet"]
    assert set(plan.contenders) == {"fedavg", "fedadam", "fedunfold", "halved"}
    assert len(list(plan.tuning_runs())) == 2 * 2 * (5 + 5 + 2)


def test_every_method_chooses_among_as_many_settings() -> None:
    """Five each; the pre-trained rule has nothing to choose."""
    known = contenders()
    assert {"fedavg", "fedprox", "fednova", "fedavgm", "fedadam", "fedyogi", "fedexp", "fedadp", "fedfa", "dr-fedavg",
            "duw-fedavg", "fedunfold-table", "fedunfold"} <= set(known)  # fmt: skip
    assert {name: len(one.grid) for name, one in known.items() if len(one.grid) != 5} == {"fedunfold": 0}
    for name, one in known.items():
        assert one.base in method_names()
        assert len({one.described(settings) for settings in one.grid}) == len(one.grid), name
        assert not one.tuned_on or one.default in one.grid
    assert list(known) == sorted(known, key=table_order)


def test_absent_clients_are_dropped_by_all_but_those_that_bring_something() -> None:
    known = contenders()
    absent = {name: one.method(one.default).algorithm.absent for name, one in known.items()}
    assert {name for name, how in absent.items() if how != "drop"} == {"mifa", "fedunfold-table", "fedunfold"}
    (rule,) = contenders(["open@1"]).values()
    assert rule.method().algorithm.absent == "remember", "a shipped rule keeps what it is for"


def test_methods_say_what_they_are_given_more(monkeypatch: pytest.MonkeyPatch) -> None:
    known = contenders()
    assert known["fedavg"].uses == frozenset()
    assert known["duw-fedavg"].uses == {LEARNED}
    assert known["fedunfold-table"].uses == {LEARNED, "label counts"}, "its outer loss is the balanced one"

    class Proxied:
        name = "proxied"
        required_metrics: frozenset[Any] = frozenset()
        uses = frozenset({"server data"})

        def __call__(self, report: Any, state: Any) -> Any:
            return report.num_examples / report.num_examples.sum(), state

    monkeypatch.setitem(RULES._own, "proxied", Proxied)
    assert Contender(base="proxied-fedavg").uses == {"server data"}


def test_settings_are_parts_of_a_method() -> None:
    made = Contender(base="fedadam").method("server=adam:lr=0.1,tau=0.01 absent=keep")
    assert (made.algorithm.server.describe()["lr"], made.algorithm.absent) == (0.1, "keep")
    assert Contender(base="duw-fedavg").method("outer_lr=0.5").learning.lr == 0.5
    for settings, said in (
        ("sgd:lr=1", "part=name"),
        ("step=sgd", "part=name"),
        ("outer_lr=x", "no number|not a number"),
    ):
        with pytest.raises(InputError, match=said):
            Contender(base="fedavg").method(settings)


def test_a_redrawn_place_has_other_clients_in_every_trial_and_others_to_choose_by() -> None:
    place = Place(
        environment="digits-label-skew",
        redraw=True,
        changes={"partition": {"kind": "dirichlet", "alpha": 0.3}, "clients": [{"key": "client", "count": 4}]},
    )
    draws = [place.case(Path(), trial, tuning=tuning) for tuning in (False, True) for trial in (0, 1)]
    seeds = [getattr(case.env.partition, "seed", None) for case in draws]
    assert seeds == [0, 1, TUNING_DRAWS, TUNING_DRAWS + 1]
    assert len({case.env.load().sizes for case in draws}) == 4
    with pytest.raises(InputError, match="its partition draws nothing"):
        Place(environment="vowel", redraw=True).case(Path(), 0)


# --- what is evaluated ------------------------------------------------------------------------------------------------


def test_settings_are_chosen_without_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tuning run is tested on are rows of the clients on which nobody trains in that run."""
    seen: list[tuple[str, SimulatedFederation]] = []

    def watched(federation: SimulatedFederation, rule: Any, rounds: int, runs: Sequence[str], **more: Any) -> Any:
        seen.extend((run, federation) for run in runs)
        return run_rounds(federation, rule, rounds, runs, **more)

    monkeypatch.setattr(runs_module, "run_rounds", watched)
    learner = Contender(base="duw-fedavg", grid=("outer_lr=0.01", "outer_lr=0.02"))
    learned_on: list[SimulatedFederation] = []

    def watched_learn(federation: SimulatedFederation, *given: Any, **more: Any) -> Any:
        learned_on.append(federation)
        return learn(federation, *given, **more)

    monkeypatch.setattr(runs_module, "learn", watched_learn)
    carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG, "duw-fedavg": learner})
    whole = SMALL.case(Path(), 0).env.load()
    trained, tested = set(rows_of(whole.x)), set(rows_of(whole.x_test))
    assert {run for run, _ in seen} == {"tuning-0", "trial-0", "trial-1"}
    for run, federation in seen:
        data = federation.data
        if run.startswith("trial"):
            assert torch.equal(data.x_test, whole.x_test) and torch.equal(data.x, whole.x)
            continue
        validation, rest = set(rows_of(data.x_test)), set(rows_of(data.x))
        assert validation <= trained and not validation & tested
        assert not validation & rest, "nobody trains on them"
        assert sorted(rows_of(data.x) + rows_of(data.x_test)) == sorted(rows_of(whole.x))
        assert data.sizes == tuple(-(-4 * size // 5) for size in whole.sizes)
    assert len(learned_on) == 2 + 2, "for each setting on the validation federation, then for the trials"
    assert all(len(federation.data.x) < len(whole.x) for federation in learned_on[:2])


def test_the_setting_that_is_best_on_validation_rows_is_chosen(tmp_path: Path) -> None:
    records = carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG, "fedprox": PROX})
    found = results(tmp_path)["environments"]["small"]["methods"]
    for name, contender in (("fedavg", FEDAVG), ("fedprox", PROX)):
        judged = {
            settings: read_record(records.place("small", name, settings) / "tuning-0.json", {"judged"})["judged"]
            for settings in contender.grid
        }
        assert found[name]["tuning"] == {settings: round(value, 4) for settings, value in judged.items()}
        assert found[name]["chosen"]["settings"] == max(judged, key=lambda settings: judged[settings])
        assert found[name]["default"]["settings"] == contender.default
        assert len(found[name]["chosen"]["finals"]) == 2
    assert found["fedavg"]["chosen"]["gain"] == [0.0, 0.0, 0.0]


def test_a_run_that_diverges_counts_and_is_counted(tmp_path: Path) -> None:
    wild = Contender(base="fedavg", default="server=sgd:lr=1e30")
    carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG, "wild": wild})
    found = results(tmp_path)["environments"]["small"]["methods"]["wild"]["default"]
    assert (found["finals"], found["diverged"], found["area"]) == ([0.0, 0.0], 2, 0.0)
    assert found["rounds_to_target"] is None and found["ended"]
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "0.00 ± 0.00 (2 diverged)" in page
    ranks = results(tmp_path)["ranking"]["default"]["mean_ranks"]
    assert ranks == {"fedavg": 1.0, "wild": 2.0}


def test_a_method_that_cannot_be_run_is_said_so_and_not_ranked(tmp_path: Path) -> None:
    """FedFa weighs by accuracies, which a regression has not; there lower is better, and gains know it."""
    place = Place(environment="diabetes-sites", changes={"rounds": 2})
    methods = {"fedavg": FEDAVG, "fedprox": PROX, "fedfa": Contender(base="fedfa")}
    carried_out(tmp_path, small_suite(SMALL, place), methods)
    found = results(tmp_path)
    assert "accuracies" in found["environments"]["diabetes-sites"]["methods"]["fedfa"]["refused"]
    assert found["ranking"]["chosen"]["unranked"] == ["fedfa"]
    assert set(found["ranking"]["chosen"]["mean_ranks"]) == {"fedavg", "fedprox"}
    assert "fedfa cannot be run on diabetes-sites" in (tmp_path / "README.md").read_text(encoding="utf-8")
    own = found["environments"]["diabetes-sites"]["methods"]
    assert own["fedprox"]["chosen"]["gain"][0] == pytest.approx(
        own["fedavg"]["chosen"]["mean"] - own["fedprox"]["chosen"]["mean"], abs=1e-3
    )
    smallest = min(own["fedavg"]["tuning"], key=lambda settings: -own["fedavg"]["tuning"][settings])
    assert own["fedavg"]["chosen"]["settings"] == smallest
    assert all(value < 0 for value in own["fedavg"]["tuning"].values()), "an error, with its sign turned"


def test_learned_weights_are_learned_once_and_their_rounds_counted(tmp_path: Path) -> None:
    learner = Contender(base="duw-fedavg", parts="absent=drop", default="outer_lr=0.02")
    records = carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG, "duw-fedavg": learner})
    files = sorted(file.suffix for file in records.place("small", "duw-fedavg", learner.default).glob("weights*"))
    assert files == [".json", ".safetensors"]
    assert results(tmp_path)["uses"]["duw-fedavg"] == [LEARNED]
    summary = Summary(records)
    cell = summary.cell("default", "small", "duw-fedavg")
    plain = summary.cell("default", "small", "fedavg")
    assert cell is not None and plain is not None
    iterations = learner.method(learner.default).learning.iterations
    first = min(cell.curve)
    assert cell.rounds_to(first) == 2 * iterations + 1 + cell.curve.index(first)
    # A run: 5 clients, 2 rounds, the model there and back. An outer iteration: a run, and the model to everybody and a
    # gradient back. 2410 numbers of four bytes.
    unit = 2410 * 4 / 1e6
    assert plain.megabytes == pytest.approx(2 * 5 * 2 * unit)
    assert cell.megabytes == pytest.approx((2 * 5 * 2 + iterations * (2 * 5 * 2 + 2 * 5)) * unit)
    assert "duw-fedavg§" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_what_a_method_sends_besides_is_counted(tmp_path: Path) -> None:
    more = FEDAVG.model_copy(update={"vectors": 3})
    records = carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG, "more": more})
    own, plain = (Summary(records).cell("default", "small", name) for name in ("more", "fedavg"))
    assert own is not None and plain is not None
    assert own.finals == plain.finals
    assert own.megabytes == pytest.approx(1.5 * plain.megabytes)


def test_an_environment_without_its_data_is_left_out_with_the_reason(tmp_path: Path) -> None:
    missing = Place(
        environment="digits-label-skew",
        changes={
            "name": "elsewhere",
            "data": {"source": "npz", "path": str(tmp_path / "nowhere.npz")},
            "partition": {"kind": "given"},
        },
    )
    suite = small_suite(SMALL, missing)
    plan = Plan.of(suite, Path(), {"fedavg": FEDAVG})
    assert list(plan.venues) == ["small"] and "nowhere.npz" in plan.left_out["elsewhere"]
    carried_out(tmp_path / "out", suite, {"fedavg": FEDAVG})
    assert "nowhere.npz" in results(tmp_path / "out")["left_out"]["elsewhere"]
    assert "**Left out, elsewhere:**" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(InputError, match=r"no environment of suite small can be run: .*nowhere\.npz"):
        Plan.of(small_suite(missing), Path(), {"fedavg": FEDAVG})


def test_a_method_may_have_an_environment_of_its_own(tmp_path: Path) -> None:
    """As one that reads rows of the server; where these cannot be had it is refused, and the others go on."""
    slower = FEDAVG.model_copy(update={"environment": {"lr": 0.001}})
    lost = FEDAVG.model_copy(update={"environment": {"lr": -1.0}})
    carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG, "slower": slower, "lost": lost})
    found = results(tmp_path)["environments"]["small"]["methods"]
    assert found["slower"]["default"]["mean"] < found["fedavg"]["default"]["mean"]
    assert "field lr" in found["lost"]["refused"]


def test_runs_that_a_gpu_carries_out_together_are_those_of_a_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three trials in one job, two at a time; where one diverges they are made one by one."""
    monkeypatch.setattr(SimulatedFederation, "max_parallel_runs", 2)
    alone, together = RunRecords(tmp_path / "alone"), RunRecords(tmp_path / "together")
    parts: list[float] = []
    for settings in ("server=sgd:lr=1", "server=sgd:lr=1e30"):
        for records, groups in ((alone, [(0,), (1,), (2,)]), (together, [(0, 1, 2)])):
            for trials in groups:
                run = runs_module.BenchmarkRun("small", SMALL, Path(), "fedavg", FEDAVG, settings, trials, tuning=False)
                assert not run.done(records)
                run.run(records, "cpu", parts.append)
                assert run.done(records)
        for trial in range(3):
            own, other = (
                records.find("small", "fedavg", settings, f"trial-{trial}", FEDAVG.described(settings))
                for records in (alone, together)
            )
            assert own is not None and other is not None
            assert replace(own, seconds=0) == replace(other, seconds=0)
            assert own.diverged == settings.endswith("1e30")
    assert max(parts) == 1.0
    plan = Plan.of(small_suite(trials=3), Path(), {"fedavg": FEDAVG}, device="cuda")
    assert [run.trials for run in plan.trial_runs(alone)] == [(0, 1, 2)]


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_damaged_record_and_one_of_other_settings_are_made_again(tmp_path: Path) -> None:
    records = carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG})
    before = (tmp_path / "results.json").read_bytes()
    file = records.place("small", "fedavg", FEDAVG.default) / "trial-1.json"
    content = file.read_text()
    file.write_text(content.replace("trial-1", "trial-7"))
    carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG})
    assert (tmp_path / "results.json").read_bytes() == before
    write_record(file, {**read_record(file, set()), "scores": "high"})
    carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG})
    assert (tmp_path / "results.json").read_bytes() == before
    changed = FEDAVG.model_copy(update={"parts": "absent=keep"})
    carried_out(tmp_path, small_suite(), {"fedavg": changed})
    assert read_record(file, {"described"})["described"] == "fedavg absent=keep server=sgd:lr=1"


def test_a_part_of_a_suite_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    """Methods one after the other, fewer trials first: in the end the same bytes."""
    methods = {"fedavg": FEDAVG, "fedprox": PROX}
    other = Place(environment="digits-flaky", changes={"rounds": 2})
    suite = small_suite(SMALL, other)
    carried_out(tmp_path / "whole", suite, methods)
    for only in ("digits-flaky", "small"):
        for name in ("fedprox", "fedavg"):
            for trials in (1, None):
                carried_out(tmp_path / "parts", suite, {name: methods[name]}, only=[only], trials=trials)
    whole, parts = (tmp_path / name / "results.json" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    assert results(tmp_path / "whole")["ranking"]["chosen"]["environments"] == 2


def test_records_of_other_clients_are_not_mixed_in(tmp_path: Path) -> None:
    carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG})
    longer = Place(environment="digits-label-skew", changes={"name": "small", "rounds": 3})
    with pytest.raises(InputError, match="other data, clients or devices"):
        carried_out(tmp_path, small_suite(longer), {"fedavg": FEDAVG})


def test_records_hold_no_time_that_the_results_depend_on(tmp_path: Path) -> None:
    carried_out(tmp_path, small_suite(), {"fedavg": FEDAVG})
    assert "seconds" not in (tmp_path / "results.json").read_text(encoding="utf-8")
    assert "Seconds for a run" in (tmp_path / "README.md").read_text(encoding="utf-8")


# --- what is said of them ---------------------------------------------------------------------------------------------


def record(run: int, scores: list[float], **more: Any) -> RunRecord:
    metric = PrimaryMetric()
    given: dict[str, Any] = {"participations": [3] * len(scores), "parameters": 250_000}
    return RunRecord("e", "m", "", "m", f"trial-{run}", metric, scores, **given | more)


def test_a_cell_by_hand() -> None:
    """The second trial diverged: finals 60 and 0, the mean curve 20, 25, 30."""
    cell = Cell("", (record(0, [40.0, 50.0, 60.0]), record(1, [])), worst=0.0)
    assert (cell.finals, cell.areas, cell.diverged) == ([60.0, 0.0], [50.0, 0.0], 1)
    assert cell.curve == [20.0, 25.0, 30.0]
    assert (cell.rounds_to(24.0), cell.rounds_to(31.0)) == (2, None)
    assert cell.megabytes_to(24.0) == 2 * 3 * 2 * 250_000 * 4 / 1e6
    assert cell.megabytes_to(31.0) is None
    learned = Cell("", (record(0, [40.0, 50.0], learning={"rounds": 30.0, "megabytes": 7.0}),), worst=0.0)
    assert learned.rounds_to(50.0) == 32
    assert learned.megabytes_to(40.0) == 7.0 + 3 * 2 * 250_000 * 4 / 1e6


def test_wins_ties_and_losses_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one environment a is clearly above b and c, which do not differ; in the other all are alike."""
    methods = {name: Contender(base="fedavg", parts=parts) for name, parts in
               {"a": "absent=drop", "b": "absent=keep", "c": "absent=remember"}.items()}  # fmt: skip
    other = Place(environment="digits-flaky", changes={"name": "even", "rounds": 2})
    finals = {
        "small": {"a": [90.0, 91.0, 92.0], "b": [80.1, 80.9, 82.0], "c": [80.0, 81.0, 82.1]},
        "even": {"a": [50.0, 60.0, 55.0], "b": [55.0, 50.0, 60.0], "c": [60.0, 55.0, 50.0]},
    }

    def given(self: runs_module.BenchmarkRun, records: RunRecords, device: str, on_part: Any) -> None:
        for run, trial in zip(self.runs, self.trials, strict=True):
            score = finals[self.environment][self.label][trial]
            described = self.contender.described("")
            metric = PrimaryMetric()
            records.save(RunRecord(self.environment, self.label, "", described, run, metric, [score], parameters=1))

    monkeypatch.setattr(runs_module.BenchmarkRun, "run", given)
    records = carried_out(tmp_path, small_suite(SMALL, other, trials=3), methods)
    wins = Summary(records).wins("chosen")
    assert wins["a"] == {"b": [1, 1, 0], "c": [1, 1, 0]}
    assert wins["b"] == {"a": [0, 1, 1], "c": [0, 2, 0]}
    assert Summary(records).means("chosen")["a"] == {"b": [1, 0], "c": [1, 0]}
    assert Summary(records).means("chosen")["c"] == {"a": [0, 1], "b": [1, 0]}  # 81.03 against 81
    ranking = Summary(records).ranking("chosen")
    assert ranking is not None
    assert ranking["mean_ranks"] == {"a": 1.5, "b": 2.5, "c": 2.0}  # (1, 3, 2) and three times 55
