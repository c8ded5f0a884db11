"""Adapters of tiny transformers that the tests save and load as anybody's."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.core.messages import OpenUpdates, TrainRequest
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer
from fedunfold.core.task import Task
from fedunfold.data.datasets import in_memory
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from tests.support.transformers import SIDE, TOKENS, tiny_decoder, tiny_encoder, tiny_vit
from tests.support.unrolled import Unrolled, gradients_of

SIZES = {"a": 5, "b": 3, "c": 4}
RANK, RUN = 2, "learn-0"


def images(n: int, stream: np.random.Generator) -> tuple[Any, np.ndarray]:
    return {"pixel_values": stream.normal(size=(n, 3, SIDE, SIDE))}, np.arange(n) % 3


def texts(n: int, stream: np.random.Generator) -> tuple[Any, np.ndarray]:
    ids = stream.integers(0, TOKENS, (n, 5))
    mask = (np.arange(4)[None] < stream.integers(2, 5, n)[:, None]).astype(np.int64)
    targets = np.where(mask == 1, ids[:, 1:], -100)
    return {"input_ids": ids[:, :-1], "attention_mask": mask}, targets


def token_losses(z: Tensor, y: Tensor) -> Tensor:
    per_token = nn.functional.cross_entropy(z.transpose(1, 2), y, ignore_index=-100, reduction="none")
    return per_token.sum(1) / (y != -100).sum(1)


def environment_of(kind: str, rounds: int = 2, lr: float = 0.2) -> fu.Environment:
    stream, draw = np.random.default_rng(3), images if kind == "vit" else texts
    task: Task = fu.classification(3) if kind == "vit" else fu.next_token(TOKENS)
    rows = {key: draw(n, stream) for key, n in SIZES.items()}
    return fu.Environment.from_arrays(rows, draw(6, stream), rounds=rounds, batch_size=3, lr=lr, task=task)


def folder_of(kind: str, tmp_path: Path, dtype: torch.dtype = torch.float32) -> Path:
    return tiny_vit(tmp_path / kind, dtype) if kind == "vit" else tiny_decoder(tmp_path / kind, dtype)


def adapted(kind: str, tmp_path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> fu.load_once:
    folder, task = folder_of(kind, tmp_path, dtype), fu.classification(3) if kind == "vit" else fu.next_token(TOKENS)
    return fu.lora(folder, task, r=RANK, **settings)


def warm(start: Tensor) -> Tensor:
    """Not at B = 0, where half of all derivatives vanish."""
    return start + 0.1 * torch.randn(start.shape, dtype=start.dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("local", [fu.sgd(), fu.clipped(fu.adamw(eps=0.01), 2.0)], ids=lambda local: local.name)
@pytest.mark.parametrize("kind", ["vit", "decoder"])
def test_gradients_against_autograd(kind: str, local: LocalOptimizer, adjoint: AdjointKind, tmp_path: Path) -> None:
    env, model = environment_of(kind), adapted(kind, tmp_path)
    federation = fu.SimulatedFederation(env, model=model, dtype=torch.float64)
    start, algorithm = warm(federation.initial_model(RUN)), fu.Algorithm(local)
    theta = torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.5
    parts = algorithm, OUTER_LOSSES.make("path"), adjoint
    (found,) = unroll_and_grad(federation, theta, *parts, runs=[RUN], models=[start])
    losses = None if kind == "vit" else token_losses
    unrolled = Unrolled(env, model(), algorithm, "path", adjoint == "first_order", losses)
    with sdpa_kernel(SDPBackend.MATH):
        loss, to_theta, _ = gradients_of(unrolled, theta, start, RUN)
    assert found.loss == pytest.approx(loss, rel=1e-10)
    assert to_theta.norm() > 1e-4
    torch.testing.assert_close(found.gradient, to_theta, rtol=0, atol=1e-8 * float(to_theta.norm()))


@pytest.mark.parametrize(
    ("kind", "entries"), [("vit", 2 * RANK * (4 * 16 + 2 * 20) + 27), ("decoder", 2 * RANK * (8 + 24))]
)
def test_only_adapters_cross_the_wire(kind: str, entries: int, tmp_path: Path) -> None:
    """A and B of every layer with an adapter, and the new head of the ViT: 8 × 3 + 3."""
    env, model = environment_of(kind), adapted(kind, tmp_path)
    federation = fu.SimulatedFederation(env, model=model)
    request = TrainRequest(RUN, 0, federation.initial_model(RUN), fu.sgd())
    (report,) = federation.train([request])
    assert isinstance(report.updates, OpenUpdates)
    update = report.updates.rows
    assert update.shape == (3, entries)
    assert update.nbytes == 3 * 4 * entries
    assert all("lora_" in name or "classifier" in name for name in federation.layout.names)
    assert entries < sum(p.numel() for p in model().parameters()) / 2


@pytest.mark.parametrize("kind", ["vit", "decoder"])
def test_a_base_in_half_precision_stays_as_it_is_and_is_there_once(kind: str, tmp_path: Path) -> None:
    env, model = environment_of(kind), adapted(kind, tmp_path, torch.bfloat16)
    federation = fu.SimulatedFederation(env, model=model)
    before = federation.frozen_digest
    result = fu.run(env, "fedavg", model=model)
    assert result.model.dtype == torch.float32
    modules = [federation._backend.kernel._module, federation.module(result.model), model()]  # type: ignore[attr-defined]
    frozen = [[p for p in module.parameters() if not p.requires_grad] for module in modules]
    assert {p.dtype for p in frozen[0]} == {torch.bfloat16}
    assert all(len({p.data_ptr() for p in same}) == 1 for same in zip(*frozen, strict=True))
    assert {p.dtype for module in modules for p in module.parameters() if p.requires_grad} == {torch.float32}
    assert federation.frozen_digest == before
    data = env.load()
    inputs = in_memory(data.test_inputs)
    assert not isinstance(inputs, Tensor)
    with torch.no_grad():
        outputs = modules[1](**{name: t if t.dtype == torch.int64 else t.float() for name, t in inputs.items()})
    metrics = data.task.metrics(data.task.statistics(outputs.float(), data.y_test))
    assert metrics[data.task.primary] == pytest.approx(result.scores[-1], rel=1e-3)


def test_a_run_starts_as_the_base_predicts_and_adamw_improves_it(tmp_path: Path) -> None:
    env, model = environment_of("decoder", rounds=4, lr=0.05), adapted("decoder", tmp_path)
    federation = fu.SimulatedFederation(env, model=model)
    starts = [federation.initial_model(run) for run in ("trial-0", "trial-0", "trial-1")]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    evaluations = federation.evaluate([starts[0], starts[2]])
    assert evaluations[0].loss == pytest.approx(evaluations[1].loss, rel=1e-6)  # B = 0
    assert ParamLayout.of(model()) == federation.layout
    size, algorithm = fu.size(), fu.Algorithm(fu.adamw())
    trained = fu.run(env, fu.Method("adamw", algorithm, size), model=model).model
    client_losses = []
    for w in (starts[0], trained):
        request = TrainRequest("trial-0", 0, w, fu.sgd(), required_metrics=frozenset({"start_loss"}))
        losses = federation.train([request])[0].metrics.start_loss
        assert losses is not None
        client_losses.append(float(losses.mean()))
    assert client_losses[1] < 0.8 * client_losses[0]


def test_dropout_of_adapters_is_drawn_again(tmp_path: Path) -> None:
    env, model = environment_of("decoder"), adapted("decoder", tmp_path, dropout=0.3)
    first, second = (fu.run(env, "fedavg", model=model).model for _ in range(2))
    assert torch.equal(first, second)


def test_the_digest_covers_the_base(tmp_path: Path) -> None:
    env, folder = environment_of("vit"), tiny_vit(tmp_path / "vit")
    quick = fu.Learning(iterations=1)
    learned = fu.learn_weights(env, model=fu.lora(folder, fu.classification(3), r=RANK), learning=quick)
    fu.run(env, learned, model=fu.lora(folder, fu.classification(3), r=RANK))
    other = tiny_vit(tmp_path / "other", hidden_act="relu")
    values = load_file(other / "model.safetensors")
    save_file({name: 1.01 * value for name, value in values.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="learned on another federation"):
        fu.run(env, learned, model=fu.lora(other, fu.classification(3), r=RANK))


def test_text_classification(tmp_path: Path) -> None:
    stream = np.random.default_rng(3)
    rows = {key: (texts(n, stream)[0], np.arange(n) % 2) for key, n in SIZES.items()}
    test = texts(4, stream)[0], np.arange(4) % 2
    env = fu.Environment.from_arrays(rows, test, rounds=1, batch_size=3, lr=0.1, task=fu.binary())
    model = fu.lora(tiny_encoder(tmp_path / "bert"), fu.binary(), r=RANK)
    assert fu.run(env, model=model).scores[-1] >= 0
    names = ParamLayout.of(model()).names
    assert {"model.classifier.weight", "model.classifier.bias"} < set(names)


def test_a_head_of_the_same_size_is_kept_and_one_of_another_is_new(tmp_path: Path) -> None:
    folder = tiny_vit(tmp_path / "vit", model="ViTForImageClassification", num_labels=3)
    kept, new = (ParamLayout.of(fu.lora(folder, fu.classification(n), r=RANK)()) for n in (3, 4))
    assert all("lora_" in name for name in kept.names)
    assert [name for name in new.names if "lora_" not in name] == ["model.classifier.weight", "model.classifier.bias"]


def test_a_module_of_ones_own_stays_as_it_is() -> None:
    pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    before = [p.clone() for p in net.parameters()]
    model = fu.lora(net, r=1, target_modules=["0"], train_modules=["2"])
    module = model()
    assert list(ParamLayout.of(module).names) == [
        "model.0.lora_A.default.weight",
        "model.0.lora_B.default.weight",
        "model.2.weight",
        "model.2.bias",
    ]
    assert all(map(torch.equal, before, net.parameters()))
    assert all(p.requires_grad for p in net.parameters())


def test_what_cannot_be_adapted_is_refused(tmp_path: Path) -> None:
    vit, task = tiny_vit(tmp_path / "vit"), fu.classification(3)
    with pytest.raises(InputError, match="name the task"):
        fu.lora(vit)()
    with pytest.raises(InputError, match="no vit model for the task next_token"):
        fu.lora(vit, fu.next_token(TOKENS))()
    with pytest.raises(InputError, match="takes no adapters: No modules were targeted"):
        fu.lora(vit, task, target_modules=["nothing"])()
    with pytest.raises(InputError, match="r >= 1"):
        fu.lora(vit, task, r=0)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"cannot be loaded .*the folder needs config.json and model.safetensors"):
        fu.lora(empty, task)()
    (vit / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot be loaded"):
        fu.lora(vit, task)()


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="pip install"):
        fu.lora(nn.Linear(2, 2))
