"""Adapters of transformers over Flower: they alone cross the wire, and the numbers are the simulation's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.common.serde import message_to_proto
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.params import ModelFactory, place_model
from fedunfold.core.run_result import RunResult
from fedunfold.data.arrays import take
from fedunfold.data.datasets import in_memory
from fedunfold.engines.flower import (
    FederationConfig,
    LocalClient,
    RemoteFederation,
    client_app,
    client_from_npz,
    federation_from_config,
    federation_from_environment,
)
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import adamw, clipped
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind
from tests.models.test_lora import RANK, SIZES, adapted, environment_of
from tests.support.grid import LocalGrid

ENTRIES = {"vit": 2 * RANK * (4 * 16 + 2 * 20) + 27, "decoder": 2 * RANK * (8 + 24)}
"""Of A and B of every layer with an adapter, and of the ViT's new head."""
ROUNDS = 3
ALGORITHM = Algorithm(clipped(adamw(weight_decay=0.01), 1.0))
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}


def client_of(env: Environment, key: str, model: ModelFactory) -> LocalClient:
    data = env.load()
    k = data.keys.index(key)
    rows = slice(data.offsets[k], data.offsets[k + 1])
    return LocalClient(key, take(in_memory(data.inputs), rows), data.y[rows], data.task, model)


def grid_of(client: Callable[[str], LocalClient], replies: list[Message] | None = None) -> LocalGrid:
    """Every client loads its own base, and has it once."""
    made = {key: client(key) for key in SIZES}

    def listen(reply: Message, node: int) -> Message:
        if replies is not None:
            replies.append(reply)
        return reply

    app = client_app(lambda context: made[str(context.node_config["client-id"])])
    return LocalGrid(app, {k: {"client-id": key} for k, key in enumerate(SIZES)}, listen)


def trained(federation: RemoteFederation | SimulatedFederation) -> RunResult:
    (result,) = run_rounds(federation, size(), ROUNDS, algorithm=ALGORITHM)
    assert (result.model - federation.initial_model("trial-0")).abs().max() > 0.02
    return result


@pytest.mark.parametrize("kind", ENTRIES)
def test_only_adapters_cross_the_wire_and_the_model_is_the_simulations(kind: str, tmp_path: Path) -> None:
    env, replies = environment_of(kind, rounds=ROUNDS, lr=0.02), list[Message]()
    grid = grid_of(lambda key: client_of(env, key, adapted(kind, tmp_path)), replies)
    there = trained(federation_from_environment(grid, env, model=adapted(kind, tmp_path)))
    here = trained(SimulatedFederation(env, model=adapted(kind, tmp_path)))
    torch.testing.assert_close(there.model, here.model, **CLOSE)
    torch.testing.assert_close(there.scores, here.scores, rtol=1e-4, atol=0)

    sent = [message for message in grid.sent if message.metadata.message_type == "train"]
    answers = [reply for reply in replies if reply.metadata.message_type == "train"]
    assert len(sent) == len(answers) == ROUNDS * len(SIZES)
    payload, base = 4 * ENTRIES[kind], sum(p.nbytes for p in adapted(kind, tmp_path)().parameters())
    for message in (*sent, *answers):
        (arrays,) = message.content.array_records.values()
        assert [array.numpy().nbytes for array in arrays.values()] == [payload]
        assert payload < message_to_proto(message).ByteSize() < payload + 2000
    others = [message for message in (*grid.sent, *replies) if message.metadata.message_type != "train"]
    assert not any(record for message in others for record in message.content.array_records.values())
    assert payload < base / 2


@pytest.mark.parametrize(("kind", "adjoint"), [("vit", "exact"), ("decoder", "exact"), ("decoder", "first_order")])
def test_weights_are_learned_as_in_the_simulation(kind: str, adjoint: AdjointKind, tmp_path: Path) -> None:
    env, model = environment_of(kind, lr=0.02), adapted(kind, tmp_path)
    remote = federation_from_environment(grid_of(lambda key: client_of(env, key, model)), env, model=model)
    learning = Learning(iterations=2, adjoint=adjoint)
    here, there = (
        learn(federation, 2, algorithm=ALGORITHM, learning=learning)
        for federation in (SimulatedFederation(env, model=model), remote)
    )
    assert (here.weights - torch.tensor(list(SIZES.values())) / sum(SIZES.values())).abs().max() > 0.01
    torch.testing.assert_close(there.weights, here.weights, **CLOSE)


def test_from_files(tmp_path: Path) -> None:
    """Token ids and masks of a file stay whole numbers, and the server needs no row."""
    env = environment_of("decoder", rounds=ROUNDS, lr=0.02)
    model, data = adapted("decoder", tmp_path), env.load()
    inputs = in_memory(data.inputs)
    assert not isinstance(inputs, Tensor)
    for k, key in enumerate(data.keys):
        rows = slice(data.offsets[k], data.offsets[k + 1])
        named: dict[str, Any] = {name: tensor[rows].numpy() for name, tensor in inputs.items()}
        np.savez(tmp_path / f"{key}.npz", **named, y=data.y[rows].numpy())
    settings = {name: getattr(env, name) for name in ("rounds", "batch_size", "lr", "seed")}
    config = FederationConfig(client_ids=tuple(SIZES), task=data.task, **settings)
    grid = grid_of(lambda key: client_from_npz(tmp_path / f"{key}.npz", key, config, model=model))
    there = trained(federation_from_config(grid, config, model=model))
    torch.testing.assert_close(there.model, trained(SimulatedFederation(env, model=model)).model, **CLOSE)


def test_a_base_in_half_precision_stays_so_at_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, model = environment_of("decoder"), adapted("decoder", tmp_path, torch.bfloat16)
    placed: list[nn.Module] = []

    def place(*given: Any) -> nn.Module:
        placed.append(place_model(*given))
        return placed[-1]

    monkeypatch.setattr("fedunfold.engines.flower.local_client.place_model", place)
    grid = grid_of(lambda key: client_of(env, key, model))
    there = trained(federation_from_environment(grid, env, model=model))
    torch.testing.assert_close(there.model, trained(SimulatedFederation(env, model=model)).model, **CLOSE)
    assert {p.dtype for module in placed for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}
    frozen = {p.data_ptr() for module in (*placed, model()) for p in module.parameters() if not p.requires_grad}
    assert len(frozen) == sum(not p.requires_grad for p in model().parameters())
