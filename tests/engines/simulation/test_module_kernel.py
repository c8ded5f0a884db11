"""Models with running statistics and dropout: what a client by itself would train in plain PyTorch."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import TrainRequest
from fedunfold.core.params import ModelFactory, ParamLayout, flatten_model, load_model
from fedunfold.core.participation import RoundRng
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.engines.simulation.kernels.dropout import SeededDropout, seed_dropout
from fedunfold.local import accumulated, sgd
from fedunfold.rules import fixed, size
from fedunfold.server import adam, momentum
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.outer_loss import Path
from tests.support.federations import RUN, simulated, tiny, train


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


SIZES = {"a": 8, "b": 6, "c": 12}  # in minibatches of 4: no single row


def trained_alone(module: nn.Module, key: str, round: int, generator: torch.Generator) -> Tensor:
    """A client's local training, by torch's own optimiser."""
    env = tiny(SIZES, batch_size=4, epochs=2)
    data = env.load()
    x, y = data.client(data.keys.index(key))
    draw, step = RoundRng(env.seed, RUN, round), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=env.lr)
    module.train()
    for epoch in range(2):
        for rows in torch.split(torch.from_numpy(draw.permutation(key, epoch, len(y))), 4):
            generator.manual_seed(draw.noise_seed(key, step))
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(module(x[rows].double()), y[rows]))
            optimizer.step()
            step += 1
    return flatten_model(module)


@pytest.mark.parametrize("build", [normalised, dropping])
def test_rounds_are_what_plain_pytorch_trains(build: ModelFactory) -> None:
    """Two rounds by size: parameters and running statistics alike, and the test by the averaged statistics."""
    env = tiny(SIZES, batch_size=4, epochs=2, rounds=2)
    federation = simulated(env, build)
    result = run_rounds(federation, size(), 2)[0]
    model, generator = federation.initial_model(RUN), torch.Generator()
    total = sum(SIZES.values())
    for t in range(2):
        mean = torch.zeros_like(model)
        for key, samples in SIZES.items():
            module = build().double()
            seed_dropout(module, generator)
            load_model(module, model)
            mean += samples / total * trained_alone(module, key, t, generator)
        model = mean
    torch.testing.assert_close(result.model, model, rtol=1e-12, atol=1e-14)
    data, module = env.load(), federation.module(model).double().eval()
    right = (module(data.x_test.double()).argmax(1) == data.y_test).double().mean()
    assert result.scores[-1] == pytest.approx(right.item())


@pytest.mark.parametrize("algorithm", [Algorithm(server=adam(0.1)), Algorithm(step_sizes=(3.0,))], ids=["adam", "s"])
def test_statistics_are_averaged_whatever_the_server_does(algorithm: Algorithm) -> None:
    env = tiny(SIZES, batch_size=4)
    federation = simulated(env, normalised)
    count = ParamLayout.of(normalised()).num_buffer_entries
    weights = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    plain, other = (
        run_rounds(federation, fixed(weights), 1, algorithm=chosen)[0].model for chosen in (Algorithm(), algorithm)
    )
    torch.testing.assert_close(other[-count:], plain[-count:], rtol=1e-12, atol=0)
    assert not torch.allclose(other[:-count], plain[:-count])


def test_statistics_are_not_stretched_by_the_local_update() -> None:
    """The accumulated form scales w_k − w^(t); means and variances stay those that were met."""
    env = tiny(SIZES, batch_size=4, epochs={"a": 1, "b": 2, "c": 3})
    federation = simulated(env, normalised)
    count = ParamLayout.of(normalised()).num_buffer_entries
    start = federation.initial_model(RUN)
    reports = [federation.train([TrainRequest(RUN, 0, start, update)])[0] for update in (sgd(), accumulated(sgd()))]
    torch.testing.assert_close(reports[0].updates.rows[:, -count:], reports[1].updates.rows[:, -count:])
    assert not torch.allclose(reports[0].updates.rows[:, :-count], reports[1].updates.rows[:, :-count])
    needs = TrainRequest(RUN, 0, start, sgd(), frozenset({"gradients"}))
    gradients = federation.train([needs])[0].metrics.gradients
    assert gradients is not None
    assert not gradients[:, -count:].any()


@pytest.mark.parametrize(("kind", "shape"), [(nn.Dropout, (1000, 50)), (nn.Dropout2d, (1000, 50, 2, 3))])
def test_dropout_keeps_the_mean_and_drops_a_share_p(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    module = nn.Sequential(kind(0.3))
    seed_dropout(module, generator)
    assert isinstance(module[0], SeededDropout)
    ones = torch.ones(shape)
    out = module(ones)
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    if len(shape) > 2:
        assert torch.equal(out, out[:, :, :1, :1].expand_as(out)), "whole channels"
    assert torch.equal(module.eval()(ones), ones)
    assert not nn.Sequential(SeededDropout(1.0, False, generator))(ones).any()


def test_remembered_clients_do_not_move_statistics_again() -> None:
    """A change of a running variance, added in every round that its client is away, would make it negative."""
    env = tiny(SIZES, batch_size=4, participation_probability=0.5, rounds=8)
    federation = simulated(env, normalised)
    result = run_rounds(federation, size(), 8, algorithm=Algorithm(absent="remember"))[0]
    assert not result.participated.all()
    variance = dict(federation.module(result.model).named_buffers())["1.running_var"]
    assert (variance > 0).all()
    assert all(math.isfinite(evaluation.loss) for evaluation in result.evaluations)


def test_a_step_of_nothing_still_averages_statistics() -> None:
    env = tiny(SIZES, batch_size=4, rounds=2)
    federation = simulated(env, normalised)
    count = ParamLayout.of(normalised()).num_buffer_entries
    still = Algorithm(server=momentum(), step_sizes=(0.0,))
    start, end = federation.initial_model(RUN), run_rounds(federation, size(), 2, algorithm=still)[0].model
    assert torch.equal(end[:-count], start[:-count])
    report = federation.train([TrainRequest(RUN, 0, start, sgd())])[0]
    first = run_rounds(federation, size(), 1, algorithm=still)[0].model
    shares = report.num_examples / report.num_examples.sum()
    torch.testing.assert_close(first[-count:], (start + shares @ report.updates.rows)[-count:])


def test_a_trained_module_is_ready_to_predict() -> None:
    federation = simulated(tiny(), dropping)
    assert not federation.module(federation.initial_model(RUN)).training


def test_a_layer_of_dropout_may_be_used_twice() -> None:
    def build() -> nn.Module:
        layer = nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(5, 4), layer, nn.ReLU(), nn.Linear(4, 4), layer, nn.Linear(4, 3))

    assert simulated(tiny(), build).kernel == "ModuleKernel"


def test_a_client_with_one_row_is_named() -> None:
    with pytest.raises(InputError, match="client 'a': its last minibatch is a single row"):
        simulated(tiny({"a": 1}), normalised)


class Bounded(nn.Linear):
    """Holds its weights within bounds whenever it is run."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(min=0)
        return super().forward(x)


def test_a_model_that_is_only_read_stays_as_it_is() -> None:
    federation = simulated(tiny(participation_probability=0.5), model=lambda: Bounded(5, 3))
    model = federation.initial_model(RUN)
    before = model.clone()
    federation.evaluate([model])[0]
    federation.client_accuracies(model)
    federation.train([TrainRequest(RUN, 0, model, sgd(), required_metrics=frozenset({"loss"}), outer=Path())])[0]
    federation.outer_loss([TrainRequest(RUN, 0, model, sgd(), outer=Path())])[0]
    assert torch.equal(model, before)
    assert bool((model < 0).any()), "or there would be nothing to hold within bounds"


def test_running_statistics_that_overflow_set_a_client_aside() -> None:
    """The variance of c's features is too large for single precision, what is made of them is not."""
    env = tiny(SIZES, batch_size=4)
    data = env.load()
    data.x[data.offsets[2] :] *= 1e25
    model = lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))  # noqa: E731
    report = train(SimulatedFederation(env, data, model=model))
    assert list(report.rejected) == ["c"]
    assert report.participated.tolist() == [True, True, False]
    assert bool(torch.isfinite(report.updates.rows).all())
