"""Bad clients by hand, and their study on a federation small enough for a test."""

from pathlib import Path

import pytest
import torch

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.studies.attacks import TIMES, Attack
from fedunfold.studies.cases import Setting, StudyCase, list_cases
from fedunfold.studies.jobs import list_jobs
from fedunfold.studies.processes import run_jobs
from fedunfold.studies.records import StudyRecords
from fedunfold.studies.results import Results
from fedunfold.studies.rows import list_rows
from tests.support.federations import tiny, train

SETTING = Setting(trials=2)


def seven() -> Environment:
    return tiny(dict.fromkeys("abcdefg", 6), epochs=1)


def test_flipped_labels_are_those_of_the_last_clients() -> None:
    data = seven().load()
    spoiled = Attack("flip", 2).spoiled(data)
    first = data.offsets[5]
    assert torch.equal(spoiled.y[:first], data.y[:first])
    assert torch.equal(spoiled.y[first:], 2 - data.y[first:])
    assert torch.equal(spoiled.y_test, data.y_test)
    assert Attack("flip", 2).clients(data.keys) == ("f", "g")


def test_noise_is_long_and_drawn_by_run_round_and_client() -> None:
    env = seven()
    honest = train(Attack("flip", 1).federation(env, env.load(), dtype=torch.float64))
    noisy = Attack("noise", 2).federation(env, Attack("noise", 2).spoiled(env.load()), dtype=torch.float64)
    found, again, later = train(noisy), train(noisy), train(noisy, round=1)
    assert torch.equal(found.updates.rows[:5], honest.updates.rows[:5])
    torch.testing.assert_close(found.updates.rows[5:].norm(dim=1), TIMES * honest.updates.rows[5:].norm(dim=1))
    cosine = torch.nn.functional.cosine_similarity(found.updates.rows[5:], honest.updates.rows[5:])
    assert float(cosine.abs().max()) < 0.9
    assert torch.equal(found.updates.rows, again.updates.rows)
    assert not torch.equal(found.updates.rows[5:], later.updates.rows[5:])
    with pytest.raises(InputError, match="learn with the first_order adjoint"):
        noisy.vjp([], [found.participated], [found.updates.rows])


@pytest.mark.parametrize("bad", [0, 7, -1])
def test_somebody_is_bad_and_somebody_is_not(bad: int) -> None:
    with pytest.raises(InputError, match="1 to 6 of 7 clients"):
        Attack("noise", bad).clients("abcdefg")


def test_the_study_goes_on_and_says_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedunfold.studies.cases.FAST", {"iterations": 2, "lr": 0.02})
    env = seven()
    studied = [
        (StudyCase(env, attack=attack), list_rows("attack", env, SETTING))
        for attack in (None, Attack("flip", 2), Attack("noise", 2))
    ]
    assert [case.name for case, _ in studied] == ["in-memory", "in-memory-flip-2", "in-memory-noise-2"]
    records = StudyRecords(tmp_path / "records")
    jobs = [task for case, entries in studied for task in list_jobs(case, entries)]
    run_jobs(jobs, records, "cpu", 1, lambda name, cost: None)
    assert all(job.done(records) for job in jobs)
    text = Results(SETTING, {"attack": studied}).write(tmp_path, "x", records).read_text(encoding="utf-8")
    assert text.startswith("# Attacks")
    for shown in ("| multi-Krum, 2 bad |", "| nobody bad | 2 flip | 2 noise |"):
        assert shown in text
    assert "- 2 noise: the screening rejected bad clients in 12 of 12 of their rounds, good ones in 0." in text
    by_size = "their size would give them 28.6 %"
    assert text.count(by_size) == 2
    assert (tmp_path / "attack.png").stat().st_size > 10_000


def test_the_study_is_of_ten_sites() -> None:
    cases = list_cases("attack", Setting(seed=3))
    assert [case.name for case in cases] == [
        "digits-ten",
        "digits-ten-flip-1",
        "digits-ten-flip-2",
        "digits-ten-noise-1",
        "digits-ten-noise-2",
    ]
    assert all(len(case.env.clients) == 10 and case.env.seed == 3 for case in cases)
    assert len({case.digest for case in cases}) == 3, "noise is no other data"
    entries = list_rows("attack", cases[0].env, SETTING)
    assert [row.method.algorithm.filter for row in entries].count("norm") == 2
    assert {row.method.algorithm.absent for row in entries} == {"drop"}
