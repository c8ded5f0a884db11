"""Data sets of the Hugging Face library in, arrays by client out. All of them are made here; no hub is asked."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedunfold.core.errors import InputError
from fedunfold.data.importers import image_transform
from fedunfold.data.importers.huggingface import HubData
from fedunfold.data.importers.imported import ImportedData
from fedunfold.data.importers.partition_spec import PartitionSpec

datasets: Any = pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")
pytest.importorskip("flwr_datasets", reason="the extra 'datasets' is not installed")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def rows(count: int, classes: int = 4) -> list[dict[str, Any]]:
    return [
        {"row": i, "half": i / 2, "site": f"site {'ab'[i % 2]}", "kind": f"kind {i % classes}"} for i in range(count)
    ]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(80)))
    return str(path)


def imported(file: str, how: str, clients: int | None = 4, **options: Any) -> ImportedData:
    data = HubData.load(file)
    return data.partition(PartitionSpec.parse(how), clients, "kind", 0.25, None, scaling="none", **options)


@pytest.mark.parametrize(
    "how", ["iid", "dirichlet:alpha=0.5", "shard:shards=2", "pathological:classes=2", "linear", "exponential"]
)
def test_every_row_is_at_one_client_or_in_the_test(file: str, how: str) -> None:
    made = imported(file, how, drop=["site"])
    assert list(made.clients) == [f"client-{i}" for i in range(4)]
    assert made.classes == ("kind 0", "kind 1", "kind 2", "kind 3")
    x, y = (np.concatenate([pair[i] for pair in (*made.clients.values(), made.test)]) for i in (0, 1))
    assert sorted(x[:, 0].tolist()) == list(range(80))
    assert np.array_equal(x[:, 1], x[:, 0] / 2)
    assert np.array_equal(y, x[:, 0] % 4)
    again = imported(file, how, drop=["site"])
    assert all(np.array_equal(x, again.clients[key][0]) for key, (x, _) in made.clients.items())


def test_kinds_of_partition_differ(file: str) -> None:
    def held(how: str) -> float:
        made = imported(file, how, drop=["site"])
        return float(np.mean([len(set(y.tolist())) for _, y in made.clients.values()]))

    assert held("iid") == 4
    assert held("pathological:classes=1") == 1


def test_a_column_can_name_the_clients(file: str) -> None:
    made = imported(file, "natural:column=site", None)
    assert list(made.clients) == ["site-a", "site-b"]
    assert all(x[:, 0].astype(int) % 2 == i for i, (x, _) in enumerate(made.clients.values()) for x in x[:, None])
    assert made.clients["site-a"][0].shape[1] == 2  # the column itself is no feature


def test_folder_of_parquet_with_a_test_split(tmp_path: Path) -> None:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["night", "day", "never"])}
    )
    for split, count in (("train", 12), ("test", 4)):
        images = [Image.new("RGB", (8, 8), (20 * (i % 2),) * 3) for i in range(count)]
        made = datasets.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(count)]}, features=features)
        (tmp_path / "images").mkdir(exist_ok=True)
        made.to_parquet(tmp_path / "images" / f"{split}.parquet")
    data = HubData.load(str(tmp_path / "images"))
    assert data.guess_label() == "label" and data.train.image == "image"
    found = data.partition(PartitionSpec("iid"), 3, "label", 0.5, image_transform.pixels(2))
    assert found.classes == ("night", "day", "never")  # the data set's own order
    assert [len(y) for _, y in found.clients.values()] == [4, 4, 4] and len(found.test[1]) == 4
    for x, y in (*found.clients.values(), found.test):
        assert np.array_equal(x[:, 0], 20 * y)


def test_gaps_and_class_numbers(tmp_path: Path) -> None:
    features = datasets.Features(
        {"v": datasets.Value("float64"), "ward": datasets.ClassLabel(names=["icu", "er"]), "y": datasets.Value("bool")}
    )
    data = {"v": [1.0, None, 3.0, 5.0], "ward": [0, 1, 1, 0], "y": [True, False, True, False]}
    (tmp_path / "d").mkdir()
    datasets.Dataset.from_dict(data, features=features).to_parquet(tmp_path / "d" / "train.parquet")
    datasets.Dataset.from_dict(data, features=features).to_parquet(tmp_path / "d" / "test.parquet")
    found = HubData.load(str(tmp_path / "d")).partition(PartitionSpec("iid"), 1, "y", 0.5, None, scaling="none")
    assert found.classes == ("False", "True")
    assert sorted(found.clients["client-0"][0].tolist()) == [[1, 0, 1], [3, 1, 0], [3, 1, 0], [5, 0, 1]]


@pytest.mark.parametrize(
    ("how", "clients", "words"),
    [
        ("dirichlet:alpha=-1", 4, ("`partitioner` dirichlet",)),
        ("iid", 200, ("`partitioner` iid", "own.jsonl")),
        ("pathological:classes=9", 4, ("`partitioner` pathological",)),
        ("natural:column=nobody", None, ("`partitioner` natural", "own.jsonl")),
    ],
)
def test_what_cannot_be_partitioned(file: str, how: str, clients: int | None, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        imported(file, how, clients)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_what_cannot_be_loaded(tmp_path: Path, file: str) -> None:
    odd = tmp_path / "odd.pkl"
    odd.write_bytes(b"\x80\x04.")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    for name, word in (
        (str(odd), "is no data file"),
        (str(broken), "cannot be loaded"),
        ("pandas", "is a kind of file"),
        ("csv", "is a kind of file"),
        ("nobody/nothing", "cannot be loaded"),
    ):
        with pytest.raises(InputError) as caught:
            HubData.load(name)
        assert word in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no split held"):
        HubData.load(file, "held")
    with pytest.raises(InputError, match="`label`: "):
        HubData.load(file).partition(PartitionSpec("iid"), 2, "class", 0.5, None)
    with pytest.raises(InputError, match="`drop`: "):
        imported(file, "iid", drop=["nothing"])


def test_lists_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "lists.jsonl"
    path.write_text('{"v": [1, 2], "y": 0}\n{"v": [3, 4], "y": 1}\n')
    with pytest.raises(InputError, match="column v holds no numbers or texts; `drop` it"):
        HubData.load(str(path)).partition(PartitionSpec("iid"), 1, "y", 0.5, None)


def test_nothing_is_told_to_anybody() -> None:
    telemetry = importlib.import_module("flwr_datasets.common.telemetry")
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
