"""What docs/tracking.md shows works as it stands there, and what the stores then hold is what the run recorded."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedunfold.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    fedunfold +([^\n#]+)", PAGE, re.MULTILINE)
COMPARISON, LEARNING = "compare-digits-flaky", "learn-digits-label-skew"

Curves = Mapping[str, Sequence[tuple[int, float]]]


def run(command: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(command))
    assert stop.value.code in (0, None), command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of runs after the commands of the page but the last, which deletes."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for command in COMMANDS[:-1]:
            run(command)
        yield folder / "runs"


def recorded(folder: Path) -> Curves:
    """The curves that metrics.jsonl, result.json and the settings stand for."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "iteration" in line:
            curves.setdefault("learned/learning/outer_loss", []).append((line["iteration"], line["outer_loss"]))
            continue
        name = f"{line['method']}/trial-{line['trial']}"
        values = {"accuracy": line["accuracy"], "loss": line["loss"]}
        values |= {f"class_accuracy/{c}": value for c, value in enumerate(line["class_accuracy"]) if value is not None}
        for what, value in values.items():
            curves.setdefault(f"{name}/{what}", []).append((line["round"], value))
    if (folder / "result.json").exists():
        for row in json.loads((folder / "result.json").read_text())["methods"]:
            curves[f"{row['method']}/final/accuracy_mean"] = [(0, row["accuracy_mean"])]
    return curves


def assert_holds(store: Curves, expected: Curves) -> None:
    assert len(expected) > 0
    for name, curve in expected.items():
        steps, values = zip(*store[name], strict=True)
        assert list(steps) == [step for step, _ in curve], name
        assert list(values) == pytest.approx([value for _, value in curve], rel=1e-6), name  # TensorBoard has float32


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "histograms", "images", "tensors"), 0)
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


@pytest.mark.parametrize("name", [COMPARISON, LEARNING])
def test_tensorboard_holds_the_curves(runs: Path, name: str) -> None:
    found = events(runs / "tensorboard" / name)
    tags = found.Tags()
    store = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags["scalars"]}
    assert_holds(store, recorded(runs / name))
    learned = "duw-fedavg" if name == COMPARISON else "learned"
    means = [store[f"{learned}/learning/mean_weight/site-{key}"][-1][1] for key in "abcde"]
    assert sum(means) == pytest.approx(1)
    assert [event.step for event in found.Histograms(f"{learned}/learning/weights")] == [*range(10)]


def test_tensorboard_holds_settings_results_and_figures(runs: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    found = events(runs / "tensorboard" / COMPARISON)
    figures = {file.stem: file.read_bytes() for file in (runs / COMPARISON).glob("*.png")}
    assert len(figures) == 3
    for stem, content in figures.items():
        (image,) = found.Images(f"figures/{stem}")
        assert image.encoded_image_string == content
    for text, word in (("settings", "digits-flaky"), ("results", "accuracy_mean")):
        (written,) = found.Tensors(f"{text}/text_summary")
        assert word in written.tensor_proto.string_val[0].decode()
    plugin = found.PluginTagToContent(metadata.PLUGIN_NAME)
    parameters = metadata.parse_session_start_info_plugin_data(plugin["_hparams_/session_start_info"]).hparams
    assert parameters["trials"].number_value == 2
    assert parameters["environment"].string_value == "digits-flaky"


def test_mlflow_holds_the_same(runs: Path) -> None:
    from fedunfold.tracking.mlflow import _client

    client = _client(runs / "mlflow.db")
    experiment = client.get_experiment_by_name("fedunfold")
    assert experiment is not None
    (stored,) = client.search_runs([experiment.experiment_id])
    assert (stored.info.run_name, stored.info.status) == (COMPARISON, "FINISHED")
    names = list(stored.data.metrics)
    history = {name: client.get_metric_history(stored.info.run_id, name) for name in names}
    store = {name: sorted((metric.step, metric.value) for metric in curve) for name, curve in history.items()}
    assert_holds(store, recorded(runs / COMPARISON))
    assert [step for step, _ in store["duw-fedavg/learning/outer_loss"]] == [0, 1]
    parameters = stored.data.params
    assert (parameters["environment"], parameters["trials"]) == ("digits-flaky", "2")
    assert parameters["learning.duw-fedavg.iterations"] == "2"
    kept = {artifact.path for artifact in client.list_artifacts(stored.info.run_id)}
    assert kept == {file.name for file in (runs / COMPARISON).iterdir()}
    assert {"duw-fedavg.safetensors", "accuracy.png", "settings.json", "metrics.jsonl"} <= kept


def test_the_live_file_is_gone_and_rm_takes_the_rest(runs: Path) -> None:
    assert not list(runs.rglob("progress.jsonl"))
    assert (runs / "flaky").is_dir()
    run(COMMANDS[-1])
    assert {entry.name for entry in runs.iterdir()} == {
        *(COMPARISON, LEARNING, "tensorboard", "mlflow.db", "mlflow-artifacts")
    }


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {"__name__": "docs"})  # noqa: S102  (our own page)
    assert len(re.findall(r"^fedavg, round \d: worst class \d+ %$", capsys.readouterr().out, re.MULTILINE)) == 10
