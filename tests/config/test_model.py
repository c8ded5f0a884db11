"""Models that an environment names."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.config.model import Gru, GruSpec, ModelSpec, model_factory
from fedunfold.core.errors import InputError
from fedunfold.io.limits import LimitError


def test_a_gru_reads_ids_and_never_ahead() -> None:
    torch.manual_seed(0)
    model = model_factory(GruSpec(embedding=4, hidden=(6, 5)), (7,), 9)()
    ids = torch.randint(9, (3, 7))
    logits = model(ids)
    assert logits.shape == (3, 7, 9)
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 9
    assert torch.equal(model(changed)[:, :4], logits[:, :4]) and not torch.equal(model(changed), logits)


def test_a_gru_is_torchs_own() -> None:
    model = Gru(9, 4, (6,))
    reference = nn.GRU(4, 6, batch_first=True)
    reference.load_state_dict(model.layers[0].state_dict())
    ids = torch.randint(9, (3, 7))
    assert torch.equal(model(ids), model.output(reference(model.embedding(ids))[0]))


def test_its_size_is_known_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GruSpec(embedding=4, hidden=(6, 5))
    size = sum(p.numel() for p in Gru(9, 4, (6, 5)).parameters())
    monkeypatch.setenv("FEDUNFOLD_MAX_PARAMETERS", str(size))
    model_factory(spec, (7,), 9)
    monkeypatch.setenv("FEDUNFOLD_MAX_PARAMETERS", str(size - 1))
    with pytest.raises(LimitError, match=rf"field model\.hidden: {size} is more than"):
        model_factory(spec, (7,), 9)
    with pytest.raises(InputError, match="reads rows of token ids"):
        model_factory(spec, (7, 2), 9)


def tokens(rows: int, seed: int) -> tuple[Any, Any]:
    ids = np.random.default_rng(seed).integers(0, 5, (rows, 1)) + np.arange(7)
    return ids[:, :-1] % 5, ids[:, 1:] % 5  # counting up


def test_an_environment_trains_a_gru() -> None:
    env = Environment.from_arrays(
        {"a": tokens(40, 0), "b": tokens(20, 1)},
        tokens(10, 2),
        rounds=4,
        batch_size=5,
        lr=1.0,
        epochs=2,
        task=fu.next_token(5),
        model=GruSpec(embedding=4, hidden=(8,)),
    )
    perplexity = [e.metrics["perplexity"] for e in fu.run(env).evaluations]
    assert perplexity[-1] < 1.5 < perplexity[0]


def test_the_kind_of_a_model_is_checked_and_defaults_to_a_perceptron() -> None:
    env = fu.environment("digits-flaky")
    assert env.replace(model={"hidden": [3]}).model == ModelSpec(hidden=(3,))
    assert env.replace(model={"kind": "gru", "hidden": [3]}).model == GruSpec(hidden=(3,))
    for given, named in (
        ({"kind": "lstm"}, r"field model: 'kind' must be one of 'mlp', 'gru', not 'lstm'"),
        ({"kind": "gru", "hidden": []}, r"field model\.hidden: "),
        ({"kind": "gru", "embedding": 0}, r"field model\.embedding: must be at least 1, got 0"),
        ({"hidden": [2.5]}, r"field model\.hidden\.0: "),
        ({"embedding": 3}, r"field model\.embedding: is not a known field"),
        ([3], r"field model: "),
    ):
        with pytest.raises(InputError, match=named):
            env.replace(model=given)
