"""Natural federations: who holds how much of what, that draws repeat, and that nothing trained on is tested on."""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.data import FederatedData
from fedunfold.data.natural.shakespeare import VOCABULARY, read_speeches

NAMES = (
    "breast-cancer-sites",
    "diabetes-sites",
    "heart-disease",
    "shakespeare",
    "tcga-brca",
    "vowel",
    "wisdm",
    "wisdm-sampled",
)
FOLDER = Path(os.environ.get("FEDUNFOLD_DATA") or "no-data-folder") / "natural"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not (FOLDER / name).exists(), reason=f"needs natural/{name} in the folder that FEDUNFOLD_DATA names"
    )


def rows(x: torch.Tensor, y: torch.Tensor) -> Iterator[bytes]:
    for features, target in zip(x, y, strict=True):
        yield features.numpy().tobytes() + target.numpy().tobytes()


def all_rows(data: FederatedData) -> Counter[bytes]:
    return Counter([*rows(data.x, data.y), *rows(data.x_test, data.y_test)])


@needs("tcga_brca.csv")
def test_tcga_brca_has_flambys_centres_and_split() -> None:
    data = fu.environment("tcga-brca").load()
    assert data.keys == ("northeast", "south", "west", "midwest", "europe", "canada")
    assert data.sizes == (248, 156, 164, 129, 129, 40) and len(data.y_test) == 63 + 40 + 42 + 33 + 33 + 11
    assert data.features == (39,) and data.task.name == "survival"
    rates = [float(data.client(k)[1][:, 1].mean()) for k in range(6)]
    assert [round(rate * size) for rate, size in zip(rates, data.sizes, strict=True)] == [45, 35, 14, 16, 7, 2]
    assert int(data.y_test[:, 1].sum()) == 32
    assert float(data.y[:, 0].min()) == 0 and float(data.y[:, 0].max()) > 3000  # days
    assert float(data.x.mean(0).abs().max()) < 1e-5  # standardised over the training rows, and those alone
    assert float(data.x_test.mean(0).abs().max()) > 1e-3


@needs("tcga_brca.csv")
def test_tcga_brca_keeps_patients_apart_and_can_stay_unscaled() -> None:
    env = fu.environment("tcga-brca").replace(data={"source": "tcga-brca", "scaling": "none"})
    data = env.load()
    assert set(data.x[:, 1:].flatten().tolist()) == {0.0, 1.0} and float(data.x[:, 0].min()) == 26  # the age
    lines = (FOLDER / "tcga_brca.csv").read_text(encoding="utf-8").splitlines()[1:]
    split = dict(line.split(",")[::2] for line in (FOLDER / "tcga_train_test_split.csv").read_text().splitlines()[1:])
    ages = {part: Counter[float]() for part in ("train", "test")}
    for line in lines:
        patient, age, *_ = line.split(",")
        if patient in split:
            ages[split[patient].partition("_")[0]][float(age)] += 1
    assert Counter(data.x[:, 0].tolist()) == ages["train"] and Counter(data.x_test[:, 0].tolist()) == ages["test"]


@needs("wisdm_transformed.arff")
def test_wisdm_holds_out_a_fifth_of_every_user() -> None:
    env = fu.environment("wisdm")
    data = env.load()
    assert data.keys == tuple(f"user-{k}" for k in range(1, 37)) and data.features == (43,)
    assert len(data.y) + len(data.y_test) == 5418
    tested = torch.bincount(data.y_test, minlength=6)
    assert (data.label_counts.sum(0) + tested).tolist() == [2081, 1625, 632, 528, 306, 246]
    assert env.class_names == ("Walking", "Jogging", "Upstairs", "Downstairs", "Sitting", "Standing")
    assert 0.19 < len(data.y_test) / 5418 < 0.21
    text = (FOLDER / "wisdm_transformed.arff").read_text(encoding="utf-8").partition("@data\n")[2]
    totals = Counter(f"user-{line.split(',')[1]}" for line in text.splitlines())
    for key, size in zip(data.keys, data.sizes, strict=True):
        assert 0.15 < 1 - size / totals[key] < 0.25
    assert bool(torch.isfinite(data.x).all()) and bool(torch.isfinite(data.x_test).all())


@needs("wisdm_transformed.arff")
def test_wisdm_draws_by_its_seed_and_loses_no_row() -> None:
    env = fu.environment("wisdm")
    sampled = fu.environment("wisdm-sampled")
    assert sampled.clients_per_round == 6 and sampled.load().checksum == env.load().checksum
    other = env.replace(data={"source": "wisdm", "seed": 1}).load()
    assert other.sizes == env.load().sizes and other.checksum != env.load().checksum
    text = (FOLDER / "wisdm_transformed.arff").read_text(encoding="utf-8").partition("@data\n")[2]
    # XAVG … RESULTANT, standardised: a row of the file is in training or in the test, and as often as in the file.
    cells = [line.split(",") for line in text.splitlines()]
    found = Counter(zip(*_ranks(env.load()), strict=True))
    expected = Counter(
        zip(*_ranks_of(np.array([[float(v) for v in (c[3], c[32], c[-2])] for c in cells])), strict=True)
    )
    assert sorted(found.values()) == sorted(expected.values())


def _ranks(data: FederatedData) -> list[list[int]]:
    x = torch.cat([data.x, data.x_test]).double().numpy()[:, [1, 30, 42]]
    return _ranks_of(x)


def _ranks_of(x: np.ndarray) -> list[list[int]]:
    return [np.unique(column, return_inverse=True)[1].tolist() for column in x.T]


@needs("shakespeare.txt")
def test_shakespeare_has_99_speakers_and_their_text_ends_in_the_test() -> None:
    env = fu.environment("shakespeare")
    data = env.load()
    assert len(data.keys) == 99 and env.clients_per_round == 10 and env.rounds == 30
    assert data.features == (80,) and data.x.dtype == torch.int64 and len(VOCABULARY) == 65
    text = (FOLDER / "shakespeare.txt").read_text(encoding="utf-8")
    assert set(text) == set(VOCABULARY)
    spoken = "\n".join(read_speeches(text, "shakespeare.txt")["ROMEO"])
    x, y = data.client(data.keys.index("ROMEO"))
    train = spoken_text(x, y)
    assert spoken.startswith(train) and abs(len(train) / len(spoken) - 0.8) < 1e-3
    # The next window goes on where the last ended, and every target is the input after it.
    assert torch.equal(y[:-1, -1], x[1:, 0]) and torch.equal(x[0, 1:], y[0, :-1])
    tested = data.y_test[data.y_test >= 0]
    total = sum(len("\n".join(s)) for s in read_speeches(text, "").values() if len(s) >= 20)
    trained = int((data.y >= 0).sum())
    assert trained + len(tested) == total - 2 * 99  # the first character of either part is never a target
    rest = spoken[len(train) :]
    assert any(spoken_text(data.x_test[i : i + 1], data.y_test[i : i + 1]) in rest for i in range(len(data.y_test)))


def spoken_text(x: torch.Tensor, y: torch.Tensor) -> str:
    return VOCABULARY[int(x[0, 0])] + "".join(VOCABULARY[i] for i in y[y >= 0].tolist())


@pytest.mark.parametrize(
    ("name", "task", "features", "total"),
    [("diabetes-sites", "regression", 10, 442), ("breast-cancer-sites", "binary", 30, 569)],
)
def test_sites_are_quarters_of_a_covariate(name: str, task: str, features: int, total: int) -> None:
    env = fu.environment(name)
    data = env.load()
    assert data.keys == ("site-a", "site-b", "site-c", "site-d") and data.features == (features,)
    assert data.task.name == task and len(data.y) + len(data.y_test) == total
    assert 0.19 < len(data.y_test) / total < 0.21
    column = 2 if task == "regression" else 1  # body mass, mean texture
    bounds = [(float(x[:, column].min()), float(x[:, column].max())) for x, _ in map(data.client, range(4))]
    assert all(upper < lower for (_, upper), (lower, _) in itertools.pairwise(bounds))
    assert float(data.x.mean(0).abs().max()) < 1e-5
    assert len(all_rows(data)) == total  # all different, so none is in both parts
    assert fu.environment(name).load().checksum == data.checksum
    other = env.replace(data={"source": name, "seed": 1}).load()
    assert other.checksum != data.checksum and other.sizes == data.sizes


def test_sites_have_scikit_learns_targets() -> None:
    diabetes, cancer = (fu.environment(f"{name}-sites").load() for name in ("diabetes", "breast-cancer"))
    assert sorted(torch.cat([diabetes.y, diabetes.y_test]).flatten().tolist()) == sorted(load_diabetes().target)
    means = [float(diabetes.client(k)[1].mean()) for k in range(4)]
    assert means == sorted(means)  # heavier, and worse
    assert int(cancer.y.sum() + cancer.y_test.sum()) == int(load_breast_cancer().target.sum()) == 357


def test_a_natural_federation_is_not_divided_again() -> None:
    env = fu.environment("diabetes-sites")
    with pytest.raises(InputError, match="field partition: data of diabetes-sites are divided already; use 'given'"):
        env.replace(partition={"kind": "iid"})
    with pytest.raises(InputError, match="diabetes-sites: client site-d is only in the data"):
        env.replace(clients=env.clients[:3]).load()
    with pytest.raises(InputError, match=r"field data\.test_fraction: must be more than 0"):
        env.replace(data={"source": "diabetes-sites", "test_fraction": 0})


@pytest.mark.parametrize("name", ["diabetes-sites", "breast-cancer-sites"])
def test_training_on_sites_beats_a_constant(name: str) -> None:
    metrics = fu.run(name).evaluations[-1].metrics
    if name == "diabetes-sites":
        assert metrics["r2"] > 0.3  # a constant has 0; least squares over all rows 0.5
    else:
        assert metrics["auc"] > 0.95


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_one_is_written_and_read_again(name: str) -> None:
    env = fu.environment(name)
    assert env.name == name and env.description and env.partition.kind == "given"
    assert fu.Environment.parse(env.to_toml(), Path(f"{name}.toml")) == env


@needs("tcga_brca.csv")
def test_fedavg_orders_patients_by_risk() -> None:
    concordance = fu.run("tcga-brca").evaluations[-1].metrics["concordance"]
    assert concordance > 0.7  # FLamby has .735; chance is .5


@needs("wisdm_transformed.arff")
def test_fedavg_recognises_activities() -> None:
    accuracy = fu.run(fu.environment("wisdm").replace(rounds=10)).evaluations[-1].metrics["accuracy"]
    assert accuracy > 0.6  # the most frequent activity has 38 %


@needs("shakespeare.txt")
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_weights_are_learned_through_a_recurrent_model(adjoint: Literal["first_order", "exact"]) -> None:
    env = fu.environment("shakespeare")
    env = env.replace(rounds=2, clients_per_round=2, model=fu.GruSpec(embedding=4, hidden=(8,)), batch_size=64)
    learned = fu.learn_weights(env, learning=fu.Learning(iterations=1, adjoint=adjoint), fraction=0.02)
    assert bool(torch.isfinite(learned.weights).all()) and not torch.equal(learned.history[0], learned.history[1])
