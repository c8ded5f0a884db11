"""Train and learn through the parts of an installed package, by name, and check gradients against autograd."""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch

import fedunfold as fu
from fedunfold.core.algorithm import Absent
from fedunfold.core.parts import AGGREGATORS, LOCAL_OPTIMIZERS, OUTER_LOSSES, SERVER_OPTIMIZERS
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from tests.support.federations import mlp, participation, simulated, tiny
from tests.support.unrolled import Unrolled, gradients_of

LOCAL = ("nesterov:rho=0.6", "rmsprop:decay=0.3")
ABSENT: tuple[Absent, ...] = ("keep", "drop", "remember")


def algorithm(local: str, server: str = "lookahead:beta=0.4", absent: Absent = "keep") -> fu.Algorithm:
    return fu.Algorithm(LOCAL_OPTIMIZERS.parse(local), SERVER_OPTIMIZERS.parse(server), absent)


def check_compare() -> None:
    """Its rule by a method's name, its optimisers and its aggregator in a method."""
    env = tiny(participation_probability=0.8)
    sizes = torch.tensor(env.load().sizes, dtype=torch.float64).sqrt()
    methods = [fu.Method(local, algorithm(local), fu.size()) for local in LOCAL]
    methods.append(fu.Method("clipped", fu.Algorithm(aggregator=AGGREGATORS.parse("clipped-mean:norm=0.1")), fu.size()))
    table = fu.compare(env, ["fedavg", "power-of-size-fedavg", *methods], trials=2)
    by_name = table.methods[1].trials[0]
    torch.testing.assert_close(by_name.weights[0], sizes / sizes.sum())
    models = [result.trials[0].model for result in table.methods]
    for one, other in product(range(len(models)), repeat=2):
        assert one == other or not torch.equal(models[one], models[other])


def check_sampler() -> None:
    env = tiny(clients_per_round=1).replace(client_sampler="largest")
    assert fu.run(env).participated.tolist() == [[False, False, True]] * 3
    assert participation(env, "trial-0", 0).cohort.tolist() == [False, False, True]


def check_learn() -> None:
    """Learned through its parts, for its outer loss, and used again from a file."""
    env = tiny(participation_probability=0.8)
    for local, adjoint in product(LOCAL, get_args(AdjointKind)):
        used = algorithm(local, absent="remember")
        learning = fu.Learning(iterations=3, adjoint=adjoint, outer="margin", step_sizes="learned")
        learned = fu.learn_weights(env, algorithm=used, learning=learning)
        assert not torch.allclose(learned.weights, learned.history[0])
        with TemporaryDirectory() as folder:
            learned.save(Path(folder, "weights.safetensors"))
            again = fu.LearnedWeights.load(Path(folder, "weights.safetensors"))
        assert (again.algorithm.local, again.algorithm.server) == (used.local, used.server)
        assert torch.equal(fu.run(env, again).model, fu.run(env, learned).model)


def check_gradients() -> None:
    """In float64, against autograd through the unrolled graph."""
    env = tiny(participation_probability=0.7, clients_per_round=2, rounds=4, seed=1)
    theta = torch.linspace(0.3, 1.0, 12, dtype=torch.float64).view(4, 3)
    federation = simulated(env)
    start = federation.initial_model("learn-0")
    for local, absent, adjoint in product(LOCAL, ABSENT, get_args(AdjointKind)):
        used = algorithm(local, absent=absent)
        outer = OUTER_LOSSES.make("path")
        (ours,) = unroll_and_grad(federation, theta, used, outer, adjoint, runs=["learn-0"], models=[start])
        unrolled = Unrolled(env, mlp(env)(), used, "path", first_order=adjoint == "first_order")
        loss, gradient, _ = gradients_of(unrolled, theta, start, "learn-0")
        assert abs(ours.loss - loss) < 1e-9 * loss
        assert float(gradient.norm()) > 1e-4
        assert float((ours.gradient - gradient).norm()) < 1e-9 * float(gradient.norm()), (local, absent, adjoint)


if __name__ == "__main__":
    check_compare()
    check_sampler()
    check_learn()
    check_gradients()
