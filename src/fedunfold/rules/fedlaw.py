"""FedLAW: weights and a scale of the model that are best on data of the server."""

import math

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.core.settings import is_count
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares

BETAS = (0.5, 0.999)
"""Adam's, as in the published code."""


@RULES.register("fedlaw")
def fedlaw(epochs: int = 20, *, lr: float = 0.01, batch_size: int = 128) -> Rule:
    """Choose the weights, and a scale of the whole model, by the loss F on rows that the server holds itself.

        w^(t+1) = e^γ Σ_k Θ_k w_k,   Θ = softmax(λ)
        λ, γ    = argmin F(e^γ Σ_k softmax(λ)_k w_k), by Adam from λ_k = log N_k and γ = 0 in every round

    and with g = ∇F at that model

        ∂F/∂λ_k = Θ_k (a_k − Σ_l Θ_l a_l),  a_k = e^γ ⟨g, Δ_k⟩,      ∂F/∂γ = ⟨g, e^γ Σ_l Θ_l w_l⟩

    For a server with some data of its own, alike those that the model is for: clients that help there gain weight, and
    e^γ < 1 acts as weight decay. It uses data that other rules do without (`uses`). Which rows these are is said by the
    environment: `server_rows`, or `server_data` of `Environment.from_arrays`.

    Only clients that enter the round get weight; where nobody does the weights are N_k/N, which then multiply nothing.
    It chooses for a server that averages: another server optimiser or step size makes another model of the same Θ.
    Running statistics of normalisation layers are averaged and not scaled, and F is taken without moving them.

    Args:
        epochs: Passes over the server's rows in a round; 20 in the paper.
        lr: Adam's step size. The published code has 0.01 for CIFAR-10 and 0.005 for other data.
        batch_size: Rows in a minibatch; 128 in the published code. With fewer rows every epoch is one step.

    Reference: Li et al. 2023, Revisiting Weighted Aggregation in Federated Learning with Neural Networks.

    >>> import fedunfold as fu
    >>> env = fu.environment("digits-label-skew").replace(server_rows=100, rounds=2)
    >>> weights = fu.run(env, fedlaw()).weights  # the first two clients have half of the rows, and labels nobody has
    >>> [round(float(row[:2].sum()), 2) for row in weights]
    [0.51, 0.56]
    """
    if not (is_count(epochs) and is_count(batch_size)):
        raise InputError(f"fedlaw needs whole numbers of epochs and of rows >= 1, not {epochs!r} and {batch_size!r}.")
    if not 0 < lr < math.inf:
        raise InputError(f"fedlaw needs a finite lr > 0, not {lr}.")

    def weigh(report: ClientUpdates, state: State) -> tuple[Tensor | RoundDecision, State]:
        server, model, clients = report.server_data, report.model, report.entering.clients
        assert server is not None
        if model is None:
            raise InputError(f"round {report.round} was reported without its model, which fedlaw reads.")
        if not len(clients):
            return size_shares(report), state
        updates, layout = report.entering.rows, report.layout
        scores = report.num_examples[clients].double().log().requires_grad_()
        log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([scores, log_scale], lr=lr, betas=BETAS)
        with torch.enable_grad():
            for epoch in range(epochs):
                for rows in server.minibatches(epoch, batch_size):
                    mean = model + scores.softmax(0).to(updates) @ updates
                    scaled = layout.with_buffers(log_scale.exp().to(mean) * mean, layout.buffers(mean))
                    _, gradient = server.loss_and_gradient(scaled.detach(), rows)
                    scores.grad, log_scale.grad = torch.autograd.grad(scaled, (scores, log_scale), gradient)
                    adam.step()
        weights = torch.zeros(len(report.client_ids), dtype=torch.float64)
        weights[clients] = scores.detach().softmax(0)
        return RoundDecision(weights, scale=math.exp(float(log_scale.detach()))), state

    given = {"epochs": (epochs, 20), "lr": (lr, 0.01), "batch_size": (batch_size, 128)}
    settings = ", ".join(f"{name}={value}" for name, (value, usual) in given.items() if value != usual)
    return Rule(f"fedlaw({settings})" if settings else "fedlaw", weigh, uses=frozenset({"server data"}))
