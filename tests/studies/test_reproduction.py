"""The paper's experiments, on an environment small enough for a test."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.config import Environment, environment
from fedunfold.core.errors import FedunfoldError, InputError
from fedunfold.io.checkpoint import write_record
from fedunfold.rules.learned import LearnedWeights
from fedunfold.studies import tables
from fedunfold.studies.cases import ENVIRONMENTS, Setting, Study, StudyCase, list_cases, read_assignment
from fedunfold.studies.findings import findings
from fedunfold.studies.jobs import Job, list_jobs
from fedunfold.studies.processes import run_jobs
from fedunfold.studies.records import CaseRecords, StudyRecords, check_same
from fedunfold.studies.results import Results
from fedunfold.studies.rows import StudyRow, list_rows
from fedunfold.unfolding import Learning
from tests.support.federations import tiny

SETTING = Setting(trials=2)
SHORT = {"iterations": 2}


def short_rows(env: Environment, study: Study = "dogs", **learning: Any) -> list[StudyRow]:
    """A study's entries with two outer iterations."""
    return [
        row if row.learning is None else replace(row, learning=replace(row.learning, **SHORT | learning))
        for row in list_rows(study, env, SETTING)
    ]


def work(case: StudyCase, run: list[StudyRow], records: StudyRecords, most: int | None = None) -> int:
    """Work off what is not done yet, at most so many jobs; how many there were."""
    todo = [job for job in list_jobs(case, run) if not job.done(records)]
    run_jobs(todo[:most], records, "cpu", 1, lambda name, cost: None)
    return len(todo)


@pytest.fixture(autouse=True)
def short_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg with the whole budget is as short as the learning."""
    monkeypatch.setattr("fedunfold.studies.cases.FAST", {"iterations": 2, "lr": 0.02})


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    case = StudyCase(tiny(participation_probability=0.8))
    run = short_rows(case.env)
    whole, parts = StudyRecords(tmp_path / "whole"), StudyRecords(tmp_path / "parts")
    total = work(case, run, whole)
    assert work(case, run, parts, most=total // 2) == total
    assert work(case, run, parts) == total - total // 2
    assert work(case, run, parts) == 0
    results = Results(SETTING, {"dogs": [(case, run)]})
    text = results.write(tmp_path / "one", "x", whole).read_text()
    assert text == results.write(tmp_path / "two", "x", parts).read_text()
    for shown in ("| duw-fedavg-exact |", "| fednova, remember |", "| fedunfold-table |", "under another seed |"):
        assert shown in text
    assert (tmp_path / "one" / "dogs.png").stat().st_size > 10_000
    document = json.loads((tmp_path / "one" / "results.json").read_text())["cases"][case.name]
    assert np.shape(document["fedunfold-table"]["accuracies"]) == (2, 3)
    assert len(document["fedunfold-table"]["settings"]["algorithm"]["step_sizes"]) == 3
    assert json.loads((tmp_path / "one" / "made.json").read_text())["process_seconds"] >= 0


def test_tables_of_records_from_another_machine_name_that_machine(tmp_path: Path) -> None:
    """Records made on a GPU can be put into tables where there is none."""
    case = StudyCase(tiny())
    run = [row for row in short_rows(case.env) if row.name == "fedavg"]
    records = StudyRecords(tmp_path / "records")
    work(case, run, records)
    results = Results(replace(SETTING, device="cuda"), {"dogs": [(case, run)]})
    (tmp_path / "made.json").write_text('{"device": "a GPU", "command": "before"}')
    results.write(tmp_path, "after", records, computed=False)
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["device"], made["command"]) == ("a GPU", "after")


def test_the_largest_fall() -> None:
    """The mean of 0.2, 0.4, 0.1, 0.5 and 0.4, 0.6, 0.5, 0.5 is 0.3, 0.5, 0.3, 0.5."""
    trials = [{"accuracies": [0.2, 0.4, 0.1, 0.5]}, {"accuracies": [0.4, 0.6, 0.5, 0.5]}]
    assert tables.largest_fall(trials) == pytest.approx(20)


def test_a_learning_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedunfold.io.checkpoint.CHECKPOINT_SECONDS", 0.0)
    case = StudyCase(tiny(participation_probability=0.8))
    run = [row for row in short_rows(case.env, iterations=6) if row.name == "fedunfold-table"]
    whole, parts = StudyRecords(tmp_path / "whole"), StudyRecords(tmp_path / "parts")

    def stop(name: str, cost: float) -> None:
        heard.append(name)
        if len(heard) == 4:
            raise KeyboardInterrupt

    learning = Job(case, run[0], None)
    run_jobs([learning], whole, "cpu", 1, lambda name, cost: None)
    heard: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_jobs([learning], parts, "cpu", 1, stop)
    assert parts.checkpoint(case, "fedunfold-table").exists()
    run_jobs([learning], parts, "cpu", 1, lambda name, cost: heard.append(name))
    assert len(heard) == 4 + 1 + 2, "stopped in the fourth iteration; then what was kept, and the last two"
    assert not parts.checkpoint(case, "fedunfold-table").exists()
    files = [records.folder / case.name / "fedunfold-table" / "weights.safetensors" for records in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_several_processes_give_the_same_records(tmp_path: Path) -> None:
    case = StudyCase(environment("digits-label-skew").replace(rounds=2))
    run = [row for row in short_rows(case.env, "digits") if row.name in ("fedavg", "duw-fedavg")]
    todo = list_jobs(case, run)
    alone, together = StudyRecords(tmp_path / "alone"), StudyRecords(tmp_path / "together")
    heard: dict[str, float] = {}
    run_jobs(todo, alone, "cpu", 1, lambda name, cost: None)
    run_jobs(todo, together, "cpu", 2, lambda name, cost: heard.update({name: heard.get(name, 0) + cost}))
    assert heard == {job.name: pytest.approx(job.cost) for job in todo}
    for row in run:
        one, other = (records.trials(case, row.name, 2) for records in (alone, together))
        assert [t["accuracies"] for t in one] == [t["accuracies"] for t in other]
    learned = [records.weights(case, "duw-fedavg") for records in (alone, together)]
    assert learned[0] is not None
    assert learned[1] is not None
    assert torch.equal(learned[0].weights, learned[1].weights)


def test_a_failing_task_is_named_and_ends_the_others(tmp_path: Path) -> None:
    case = StudyCase(environment("digits-label-skew").replace(rounds=2, lr=1e30))
    run = [row for row in short_rows(case.env, "digits") if row.name == "fedavg"]
    with pytest.raises(FedunfoldError, match=r"digits-label-skew: fedavg, trial .*learning rate"):
        run_jobs(list_jobs(case, run), StudyRecords(tmp_path), "cpu", 2, lambda name, cost: None)


def test_records_hold_what_the_trials_cost(tmp_path: Path) -> None:
    case = StudyCase(tiny())  # 3, 4 and 6 steps a round
    run = [row for row in short_rows(case.env) if row.name in ("fedavg", "fedavg-budget")]
    records = StudyRecords(tmp_path)
    work(case, run, records)
    trials = records.trials(case, "fedavg", 2)
    assert [trial["client_steps"] for trial in trials] == [39, 39]
    assert [trial["participations"] for trial in trials] == [9, 9]
    assert [trial["rounds"] for trial in records.trials(case, "fedavg-budget", 2)] == [9, 9]
    assert len(records.trials(case, "fedavg", 1)) == 1


def test_price_of_learning_by_hand() -> None:
    """5-4-3 network: 39 numbers. Once over 7, 4 and 9 samples in threes: 3 + 2 + 3 steps."""
    case = StudyCase(tiny())
    found = {row.name: row for row in short_rows(case.env)}
    trials = [{"rounds": 3, "client_steps": 39, "participations": 9}]

    def cost(name: str, **learning: Any) -> tuple[float, float, float]:
        row = found[name]
        if learning and row.learning is not None:
            row = replace(row, learning=replace(row.learning, **learning))
        return tables.price(case, row, trials)

    megabyte = 39 * 4 / 1e6
    assert cost("fedavg") == pytest.approx((3, 39, 18 * megabyte))
    assert cost("duw-fedavg") == pytest.approx((3 + 2 * 3, 39 + 2 * (39 + 8), (18 + 2 * (18 + 6)) * megabyte))
    assert cost("duw-fedavg", num_samples=2) == pytest.approx(
        (3 + 4 * 3, 39 + 4 * (39 + 8), (18 + 4 * (18 + 6)) * megabyte)
    )
    absent = [{"rounds": 3, "client_steps": 30, "participations": 7}]  # 2 of 9 away: 2 · 8/3 steps of one pass
    balanced = tables.price(
        case, replace(found["duw-fedavg"], learning=Learning(iterations=2, outer="balanced")), absent
    )
    assert balanced == pytest.approx((9, 30 + 2 * (30 + 8 + 2 * 8 / 3), (14 + 2 * (14 + 6 + 2 * 2 + 7)) * megabyte))
    exact = (3 + 2 * 6, 39 + 2 * (4 * 39 + 8), (18 + 2 * (45 + 6)) * megabyte)
    assert cost("duw-fedavg-exact") == pytest.approx(exact)


def test_rounds_to_a_milestone() -> None:
    trials = [{"accuracies": [0.2, 0.6, 0.5]}, {"accuracies": [0.4, 0.6, 0.9]}]
    assert [tables.rounds_to(trials, percent) for percent in (30, 60, 70, 71)] == [1, 2, 3, None]


def test_variants_change_one_thing_each() -> None:
    ours, *others = [e for e in list_rows("variants", tiny(), SETTING) if e.learning is not None]
    assert ours.name == "fedunfold-table"
    fields = ("base", "local", "absent", "learning")
    seen = [tuple(getattr(row, name) for name in fields) for row in (ours, *others)]
    assert len({str(row) for row in seen}) == len(seen), "two variants are the same"
    for row in others[:-1]:
        if row.name != "exact-final-balanced":
            assert sum(getattr(row, name) != getattr(ours, name) for name in fields) == 1, row.name


def test_variants_are_tested_on_what_clients_hold_out(tmp_path: Path) -> None:
    case = StudyCase(environment("digits-label-skew").replace(rounds=2), held_out=0.2)
    run = [row for row in short_rows(case.env, "variants") if row.name == "fedavg-remember"]
    records = StudyRecords(tmp_path)
    work(case, run, records)
    accuracies = [trial["accuracies"][-1] for trial in records.trials(case, "fedavg-remember", 2)]
    held_out = len(case.env.load().held_out(0.2, 0).y_test)
    assert all((accuracy * held_out) % 1 == pytest.approx(0, abs=1e-6) for accuracy in accuracies)
    assert case.name == "digits-label-skew-held-out"


def test_rate_figures(tmp_path: Path) -> None:
    records, case = StudyRecords(tmp_path), StudyCase(tiny())
    run = short_rows(case.env, "rate")[:3]
    work(case, run, records)
    rounds, variances = tables.rate_points(CaseRecords(case, run, records))
    assert rounds == [4, 6, 8]
    assert all(0 < variance < 1 for variance in variances)
    assert tables.rate_fit([4, 16], [0.5, 0.25])[0] == pytest.approx(-0.5)
    assert tables.slopes([4, 16], [0.5, 0.25]) == "-0.50 over all T"
    assert tables.slopes([2, 4, 16], [0.1, 0.5, 0.25]).endswith(", -0.50 from the peak at T = 4 on")
    text = Results(SETTING, {"rate": [(case, run)]}).write(tmp_path, "x", records).read_text()
    assert "| 4 |" in text
    assert (tmp_path / "rate.png").stat().st_size > 10_000


def test_findings_by_hand(tmp_path: Path) -> None:
    """Two rounds of records made up for the communication skew: ahead by 2 at the end, ordered but for one pair."""
    env = tiny(dict.fromkeys("abcde", 9), participation_probability={"a": 0.2, "b": 0.3, "c": 0.8, "d": 0.9, "e": 1.0})
    case, records = StudyCase(env.replace(name="mnist-4", rounds=5)), StudyRecords(tmp_path)
    run = [StudyRow(name, name, 5, 1) for name in ("fedavg", "dr-fedavg", "duw-fedavg")]
    for row, curve in zip(run, ([1, 2, 3, 40, 50], [1, 2, 3, 41, 51], [0, 0, 4, 42, 53]), strict=True):
        file = records.folder / case.name / row.name / "trial-0.json"
        rest: dict[str, object] = {
            "class_accuracy": [],
            **dict.fromkeys(("rounds", "client_steps", "participations", "seconds"), 0),
        }
        write_record(file, {"accuracies": [value / 100 for value in curve]} | rest)
    learned = [row for row in short_rows(case.env, "mnist") if row.name == "duw-fedavg"]
    work(case, [replace(learned[0], trials=0)], records)
    weights = records.weights(case, "duw-fedavg")
    assert weights is not None
    made_up = torch.tensor([[0.1, 0.05, 0.2, 0.3, 0.35]], dtype=torch.float64).repeat(5, 1)
    records.save_weights(case, "duw-fedavg", replace(weights, weights=made_up), 0.0)
    above, ahead, ordered = findings(CaseRecords(case, run, records))
    assert (above.seen, above.holds) == ("by at least 1.0", True)
    assert (ahead.seen, ahead.holds) == ("+2.0", True)
    assert (ordered.seen, ordered.holds) == ("0.90", True)
    assert len(findings(CaseRecords(case, [*run, StudyRow("fedprox", "fedprox", 5, 1)], records))) == 3
    assert findings(CaseRecords(case, run[:2], records)) == [], "what was not asked for is not judged"
    assert findings(CaseRecords(case, [replace(row, trials=2) for row in run], records)) == []


def made_up(records: StudyRecords, case: StudyCase, finals: dict[str, float], weights: list[list[float]]) -> list[Any]:
    """Records of one trial each, with these accuracies at the end and these learned weights."""
    rest: dict[str, object] = {
        "class_accuracy": [],
        **dict.fromkeys(("rounds", "client_steps", "participations", "seconds"), 0),
    }
    for name, accuracy in finals.items():
        file = records.folder / case.name / name / "trial-0.json"
        write_record(file, {"accuracies": [accuracy / 100] * len(weights)} | rest)
    theta = torch.tensor(weights, dtype=torch.float64)
    keys = tuple(client.key for client in case.env.clients)
    learned = LearnedWeights(keys, theta, torch.zeros(0, dtype=torch.float64), theta[None].clone(), {})
    records.save_weights(case, "duw-fedavg", learned, 0.0)
    run = [StudyRow(name, name, len(weights), 1) for name in finals]
    return [(found.seen, found.holds) for found in findings(CaseRecords(case, run, records))]


FIVE = dict.fromkeys("abcde", 9)


def test_quantity_skew_by_hand(tmp_path: Path) -> None:
    case = StudyCase(tiny(FIVE).replace(name="mnist-1"))
    heavy, even = [0.01, 0.01, 0.01, 0.01, 0.96], [0.2] * 5
    finals = {"fedavg": 90.0, "dr-fedavg": 91.0, "duw-fedavg": 89.5}
    found = made_up(StudyRecords(tmp_path / "1"), case, finals, [even, *[heavy] * 8, even])
    assert found == [("-1.5", True), ("at least 0.960", True), ("0.20 to 0.20", True)]
    found = made_up(StudyRecords(tmp_path / "2"), case, finals | {"duw-fedavg": 88.9}, [*[even] * 9, heavy])
    assert [verify_checksum for _, verify_checksum in found] == [False, False, False]


def test_label_and_computation_skew_by_hand(tmp_path: Path) -> None:
    labels, slow = (StudyCase(tiny(FIVE).replace(name=name)) for name in ("mnist-2", "mnist-3"))
    finals = {"fedavg": 55.0, "dr-fedavg": 57.0, "duw-fedavg": 73.0}
    rising = [[0.1, 0.1, 0.3, 0.3, 0.2], [0.3, 0.3, 0.1, 0.1, 0.2]]
    found = made_up(StudyRecords(tmp_path / "1"), labels, finals, rising)
    assert found == [("73.0 %", True), ("+16.0", True), ("0.20 to 0.60", True)]
    found = made_up(StudyRecords(tmp_path / "2"), labels, finals | {"dr-fedavg": 57.1}, rising[::-1])
    assert [verify_checksum for _, verify_checksum in found] == [True, False, False]
    first = [[0.96, 0.01, 0.01, 0.01, 0.01]] * 10
    found = made_up(StudyRecords(tmp_path / "3"), slow, finals, first)
    assert found == [("by at least 16.0", True), ("+16.0", True), ("at least 0.960", True)]


def test_dogs_by_hand(tmp_path: Path) -> None:
    case = StudyCase(tiny(FIVE).replace(name="dogs-b"))
    finals = {"fedavg": 75.0, "dr-fedavg": 65.0, "fedadp": 76.0, "fedfa": 70.0, "duw-fedavg": 77.0}
    assert made_up(StudyRecords(tmp_path / "1"), case, finals, [[0.2] * 5]) == [("+1.0 against fedadp", True)]
    finals["duw-fedavg"] = 75.5
    assert made_up(StudyRecords(tmp_path / "2"), case, finals, [[0.2] * 5]) == [("-0.5 against fedadp", False)]


def test_records_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    records = StudyRecords(tmp_path)
    case = StudyCase(tiny())
    check_same(records, SETTING, [case])
    check_same(records, Setting(trials=5), [case])
    with pytest.raises(InputError, match=r"another setting \(seed was 0 and is 1\); choose another `out`"):
        check_same(records, Setting(seed=1), [case])
    with pytest.raises(InputError, match="other data or clients"):
        check_same(records, SETTING, [StudyCase(tiny(participation_probability=0.5))])


def test_weights_learned_in_another_way_are_not_taken(tmp_path: Path) -> None:
    records, case = StudyRecords(tmp_path), StudyCase(tiny())
    run = [row for row in short_rows(case.env) if row.name == "fedunfold-table"]
    work(case, run, records, most=1)
    other = [row for row in short_rows(case.env, iterations=3) if row.name == "fedunfold-table"]
    with pytest.raises(InputError, match="learned in another way"):
        work(case, other, records)


def test_a_damaged_record_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records, case = StudyRecords(tmp_path), StudyCase(tiny())
    file = records.folder / case.name / "fedavg" / "trial-0.json"
    file.parent.mkdir(parents=True)
    for damaged in ('{"accuracies": [0.', "{}", "[]"):
        file.write_text(damaged)
        assert not Job(case, short_rows(case.env)[0], 0).done(records)
        assert not file.exists()
    weights = file.with_name("weights.safetensors")
    weights.write_bytes(b"nothing")
    assert records.weights(case, "fedavg") is None
    assert not weights.exists()
    assert caplog.messages == [
        *[f"record {file} is damaged; it is made again."] * 3,
        f"record {weights} is damaged; it is made again.",
    ]


def test_only_what_was_asked_for() -> None:
    results = Results.of(["digits"], SETTING, None, ["digits-flaky", "fedavg", "duw-fedavg"])
    assert [(case.name, [row.name for row in run]) for case, run in results.cases()] == [
        ("digits-flaky", ["fedavg", "duw-fedavg"])
    ]
    with pytest.raises(InputError, match="'fedavgg'"):
        Results.of(["digits"], SETTING, None, ["fedavgg"])
    (reused,) = Results.of(["digits"], SETTING, None, ["digits-flaky", "duw-fedavg-reused"]).cases()
    assert [row.name for row in reused[1]] == ["duw-fedavg", "duw-fedavg-reused"]
    with pytest.raises(InputError, match="no environment in the study has such a method"):
        Results.of(["digits", "variants"], SETTING, None, ["digits-flaky", "pull"])


def test_a_trial_whose_weights_nobody_learns_is_told(tmp_path: Path) -> None:
    case = StudyCase(environment("digits-label-skew").replace(rounds=2))
    run = [row for row in short_rows(case.env, "digits") if row.name == "duw-fedavg-reused"]
    for jobs in (1, 2):
        with pytest.raises(FedunfoldError, match=r"duw-fedavg-reused, trial 0: .*weights"):
            run_jobs(list_jobs(case, run), StudyRecords(tmp_path), "cpu", jobs, lambda name, cost: None)


def test_an_assignment_is_about_dogs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an assignment is about the dogs"):
        list_cases("digits", SETTING, tmp_path / "clients.json")


def test_assignment(tmp_path: Path) -> None:
    file = tmp_path / "clients.json"
    file.write_text(json.dumps({"clients": [[[0, 3], [2, 1]], [[1, 5]]]}))
    assert read_assignment(file) == [[(0, 3.0), (2, 1.0)], [(1, 5.0)]]
    for wrong in ("", "[]", '{"clients": [[[1]]]}', '{"clients": 3}'):
        file.write_text(wrong)
        with pytest.raises(InputError, match="must hold"):
            read_assignment(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_assignment(tmp_path / "nowhere.json")


def test_presets_have_the_papers_settings() -> None:
    """Table of the experiments: clients, epochs, reliabilities, rounds, batch size, outer schedule."""
    names = [*ENVIRONMENTS["mnist"], *ENVIRONMENTS["rate"], *ENVIRONMENTS["dogs"]]
    found = {name: environment(name) for name in names}
    epochs = {name: [client.epochs for client in env.clients] for name, env in found.items()}
    assert epochs["mnist-3"] == [2, 1, 1, 1, 1]
    assert epochs["mnist-rate"] == [3, 1]
    assert epochs["dogs-b"] == [4, 7, 1, 2, 7]
    assert [client.participation_probability for client in found["mnist-4"].clients] == [0.2, 0.3, 0.8, 0.9, 1]
    assert [client.participation_probability for client in found["dogs-a"].clients] == [
        0.96,
        0.6995,
        0.9999,
        0.2201,
        0.3611,
    ]
    assert [client.participation_probability for client in found["dogs-b"].clients] == [
        0.5173,
        0.947,
        0.7655,
        0.2824,
        0.221,
    ]
    rounds = {name: env.rounds for name, env in found.items()}
    assert (rounds["mnist-1"], rounds["dogs-a"], rounds["dogs-b"]) == (10, 100, 70)
    batches = {name: env.batch_size for name, env in found.items()}
    assert set(batches.values()) == {50, 100}
    assert (batches["mnist-2"], batches["dogs-b"]) == (50, 100)
    outer = {name: (env.paper_schedule.iterations, env.paper_schedule.lr) for name, env in found.items()}
    assert outer["mnist-2"] == (400, 0.001)
    assert outer["mnist-4"] == (1000, 0.001)
    assert outer["mnist-rate"] == (1000, 0.0005)
