"""The live file: there while the run is at work, gone once its records are."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedunfold as fu
from fedunfold.core.outcomes import Evaluation
from fedunfold.tracking import CallbackList
from fedunfold.tracking.jsonl import JsonLines
from tests.support.federations import tiny


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def test_every_line_is_there_as_soon_as_it_is_told(tmp_path: Path) -> None:
    file, seen_on_disk = tmp_path / "live.jsonl", list[int]()

    class Reader(fu.Callback):
        def on_round_end(self, method: str, trial: int, round_index: int, evaluation: Evaluation) -> None:
            record = lines(file)[-1]
            assert (record["round"], record["accuracy"]) == (round_index, 100 * evaluation.score)
            seen_on_disk.append(round_index)

    fu.run(tiny(), callback=CallbackList(JsonLines(file), Reader(), log=pytest.fail))
    assert seen_on_disk == [0, 1, 2]


def test_what_a_comparison_writes(tmp_path: Path) -> None:
    file = tmp_path / "live.jsonl"
    tracker = JsonLines(file)
    how = fu.Learning(iterations=2)
    compared = fu.compare(tiny(), ["duw-fedavg"], trials=1, learning=how, callback=tracker)
    learned = compared.methods[0].learned
    assert learned is not None
    began, *work, table = lines(file)
    assert began["began"]["clients"] == list(learned.client_ids)
    assert [line["outer_loss"] for line in work[:2]] == learned.losses.tolist()
    assert list(work[1]["mean_weights"].values()) == pytest.approx(learned.weights.mean(0).tolist())
    assert [line["accuracy"] for line in work[2:5]] == [100 * a for a in compared.methods[0].trials[0].scores]
    assert work[5]["weights"] == compared.methods[0].trials[0].weights.tolist()
    assert table["table"] == [compared.methods[0].as_row()]
    seconds = [line["seconds"] for line in (*work, table)]
    assert seconds == sorted(seconds)
    tracker.on_artifacts([])
    assert not file.exists()


def test_nothing_is_written_before_work_is_done(tmp_path: Path) -> None:
    tracker = JsonLines(tmp_path / "live.jsonl")
    tracker.on_start({"clients": []})
    tracker.on_end(RuntimeError())
    assert not tracker.path.exists()


def test_a_second_run_starts_on_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "live.jsonl"
    file.write_text('{"method": "fe')
    fu.run(tiny(), callback=JsonLines(file))
    cut, began, *_ = file.read_text().splitlines()
    assert cut == '{"method": "fe'
    assert json.loads(began)["began"]["command"] == "run"
