"""A round passes through few hands."""

from benchmarks.path_length import executed_files, learning_files, round_files

from fedunfold.core import rng


def test_what_runs_is_counted_once_and_imports_are_not() -> None:
    assert executed_files(lambda: [rng.integer(0, "a"), rng.integer(0, "b")]) == ["core/rng.py"]
    assert executed_files(lambda: None) == []


def test_a_round_runs_through_at_most_13_files() -> None:
    files = round_files()
    assert len(files) <= 13, files


def test_learning_weights_runs_through_at_most_45_files() -> None:
    files = learning_files()
    assert len(files) <= 45, files
