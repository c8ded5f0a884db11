"""Figures hold what they say they show."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedunfold import plotting
from fedunfold.core.errors import InputError, WriteError
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.run_result import RunResult
from fedunfold.rules.learned import LearnedWeights
from fedunfold.training.comparison import Comparison, MethodResult


def result(*accuracies: float) -> RunResult:
    rounds = len(accuracies)
    tests = tuple(Evaluation(accuracy, 1.0) for accuracy in accuracies)
    return RunResult(torch.zeros(1), torch.full((rounds, 2), 0.5), torch.ones(rounds, 2, dtype=torch.bool), tests)


def learned(clients: int) -> LearnedWeights:
    history = torch.full((3, 4, clients), 1 / clients, dtype=torch.float64)
    history[-1, :, 0] += 0.5 / clients
    history[-1, :, 1] -= 0.5 / clients
    keys = tuple(f"site-{k}" for k in range(clients))
    return LearnedWeights(keys, history[-1], torch.tensor([3.0, 2.0], dtype=torch.float64), history, {})


def test_accuracy_shows_mean_and_spread_of_every_method() -> None:
    comparison = Comparison(
        "two-sites",
        2,
        (
            MethodResult("fedavg", (result(0.5, 0.6), result(0.7, 0.8))),
            MethodResult("duw-fedavg", (result(0.6, 0.9), result(0.6, 0.7))),
        ),
    )
    axes = plotting.scores(comparison).axes[0]
    assert [line.get_ydata() for line in axes.lines] == [
        pytest.approx([60.0, 70.0]),
        pytest.approx([60.0, 80.0]),
    ]
    bands = [np.asarray(band.get_paths()[0].vertices)[:, 1] for band in axes.collections]
    assert bands[0].max() == pytest.approx(70 + 10 * 2**0.5)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["fedavg  70.0", "duw-fedavg  80.0"]


def test_weights_show_a_line_for_each_client() -> None:
    axes = plotting.weights(learned(3)).axes[0]
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in axes.lines}
    assert lines["site-0"] == pytest.approx([0.5] * 4)
    assert lines["site-1"] == pytest.approx([1 / 6] * 4)
    assert lines["site-2"] == pytest.approx([1 / 3] * 4)


def test_many_clients_need_no_legend() -> None:
    axes = plotting.weights(learned(200)).axes[0]
    assert len(axes.lines) == 200
    assert axes.get_legend() is None


def test_methods_with_different_numbers_of_trials() -> None:
    stopped = Comparison(
        "two-sites", 2, (MethodResult("a", (result(0.5), result(0.6))), MethodResult("b", (result(0.7),)))
    )
    assert plotting.scores(stopped).axes[0].get_title(loc="left").endswith("mean ± sd of 1 to 2 trials")


def test_a_trial_that_stopped_early_stays_where_it_was() -> None:
    method = MethodResult("a", (result(0.5, 0.6, 0.7), result(0.7)))
    assert method.rounds == pytest.approx([60.0, 65.0, 70.0])
    (line,) = plotting.scores(Comparison("two-sites", 2, (method,))).axes[0].lines
    assert line.get_ydata() == pytest.approx([60.0, 65.0, 70.0])


@pytest.mark.parametrize(("given", "written"), [("loss", "loss.png"), ("loss.PDF", "loss.PDF"), ("a/b.svg", "a/b.svg")])
def test_the_name_says_the_format(tmp_path: Path, given: str, written: str) -> None:
    plotting.save(plotting.outer_loss(learned(2)), tmp_path / given)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / written]


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"loss\.docx.*\.png") as caught:
        plotting.save(plotting.outer_loss(learned(2)), tmp_path / "new" / "loss.docx")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_outer_loss_and_saving(tmp_path: Path) -> None:
    figure = plotting.outer_loss(learned(2))
    assert np.asarray(figure.axes[0].lines[0].get_ydata()).tolist() == [3.0, 2.0]
    plotting.save(figure, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.width > 800


def test_a_place_that_cannot_be_written_is_told_without_options_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="choose a folder you can write to") as caught:
        plotting.save(plotting.outer_loss(learned(2)), tmp_path / "file" / "loss.png")
    assert "--out" not in str(caught.value)
