"""Weights and a step size that descend the loss while the model is trained, without data at the server."""

import math

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares

LOG_SCALE = math.log(10)  # γ stays between 1/10 and 10


@RULES.register("online-hypergradient")
def online_hypergradient(step_size: float = 0.3, lr: float | None = None) -> Rule:
    """Learn Θ = softmax(λ) and a scale γ online, from what the next round's updates say of this one's.

        w^(t+1) = w^(t) + γ Σ_k Θ_k Δ_k^(t)
        ∇f(w^(t+1)) ≈ −Σ_l p_l Δ_l^(t+1)/(η τ_l)                                 p_l = N_l/ΣN of those who participate
        dL/dλ_k = γ Θ_k (h_k − Σ_j Θ_j h_j),  dL/d log γ = γ Σ_j Θ_j h_j,        h_k = ⟨∇f(w^(t+1)), Δ_k^(t)⟩
        λ ← λ − α dL/dλ,   log γ ← log γ − α dL/d log γ

    Whose update was followed by others like it gains weight; whose update the next round undoes loses it. γ grows while
    the steps of successive rounds point the same way, and stays between 1/10 and 10. Weights go to the clients that
    enter a round; λ is kept by client id, from log N_k, and that of a client changes in rounds that follow one it
    entered. Where nobody participates nothing is learned. It needs single updates, and remembers those of one round, so
    that it does not work with secure sums.

    τ_l steps of SGD with η is what clients are taken to have made; another local optimiser scales ∇f, and so α.

    Args:
        step_size: α ≥ 0; the default is ours. 0 is FedAvg.
        lr: η; by default the clients' learning rate. Ordinary Flower clients do not tell theirs: give it there.

    Reference: after FedHAW, Nakai-Kasai and Wadayama 2026. Ours is not theirs: their published code scales models,
    w^(t+1) = γ Σ Θ_k w_k, takes ⟨∇f, w_k⟩ and the diagonal of the softmax's derivative alone, and does not divide by
    τ_l.

    In the second round all updates point right, as only ann's did in the first one:

    >>> from fedunfold.core.messages import OpenUpdates
    >>> state, rule = None, online_hypergradient(step_size=1.0, lr=0.5)
    >>> for t, updates in enumerate([[[1.0], [-0.5]], [[0.5], [0.5]]]):
    ...     report = ClientUpdates(
    ...         round=t, client_ids=("ann", "bob"), num_examples=torch.tensor([10, 10]),
    ...         participated=torch.tensor([True, True]), num_steps=torch.tensor([1, 1]),
    ...         updates=OpenUpdates(torch.tensor([0, 1]), torch.tensor(updates)))
    ...     decision, state = rule(report, state)
    >>> [round(weight, 3) for weight in decision.weights.tolist()], round(decision.step, 3)
    ([0.679, 0.321], 1.284)
    """
    if not 0 <= step_size < math.inf:
        raise InputError(f"online-hypergradient needs a finite step_size >= 0, not {step_size}.")
    if lr is not None and not 0 < lr < math.inf:
        raise InputError(f"online-hypergradient needs a finite lr > 0, not {lr}.")

    def weigh(report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
        known = {"logits": {}, "log_scale": 0.0, "last": None} | (state or {})
        logits, log_scale, last = dict(known["logits"]), known["log_scale"], known["last"]
        shares = _gradient_shares(report, lr)  # also in the first round, where a run without what they need is to end
        if last is not None and len(shares):
            slope = shares.to(report.updates.rows) @ report.layout.params(report.updates.rows)
            along = (last["updates"].to(slope) @ slope).cpu().double()
            theta = torch.tensor(last["weights"], dtype=torch.float64)
            mean, pace = float(theta @ along), step_size * math.exp(log_scale)
            for name, change in zip(last["client_ids"], (theta * (along - mean)).tolist(), strict=True):
                logits[name] -= pace * change
            log_scale = max(-LOG_SCALE, min(LOG_SCALE, log_scale - pace * mean))
        known = {"logits": logits, "log_scale": log_scale, "last": None}
        clients = report.entering.clients.cpu()
        if not len(clients):
            return RoundDecision(size_shares(report)), known | {"last": last}  # w stays, and so what is to be learned
        names = [report.client_ids[k] for k in clients.tolist()]
        for name, start in zip(names, report.num_examples.cpu().double()[clients].log().tolist(), strict=True):
            logits.setdefault(name, start)
        theta = torch.tensor([logits[name] for name in names], dtype=torch.float64).softmax(0)
        rows = report.layout.params(report.entering.rows)
        known["last"] = {"client_ids": names, "weights": theta.tolist(), "updates": rows}
        weights = torch.zeros(len(report.client_ids), dtype=torch.float64)
        weights[clients] = theta
        return RoundDecision(weights, step=math.exp(log_scale)), known

    settings = f"step_size={step_size:g}" if lr is None else f"step_size={step_size:g}, lr={lr:g}"
    name = "online-hypergradient"
    return Rule(name if (step_size, lr) == (0.3, None) else f"{name}({settings})", weigh)


def _gradient_shares(report: ClientUpdates, lr: float | None) -> Tensor:
    """c [P] with ∇f(w^(t)) ≈ Σ_l c_l Δ_l^(t) over the clients that participated."""
    clients = report.updates.clients.cpu()
    steps, sizes = report.num_steps.cpu().double()[clients], report.num_examples.cpu().double()[clients]
    eta = report.lr if lr is None else lr
    if eta is None:
        raise InputError(
            f"round {report.round}: rule 'online-hypergradient' needs the clients' learning rate, which they do not "
            "tell here; give it as online_hypergradient(lr=…)."
        )
    if not (steps > 0).all():
        silent = report.client_ids[int(clients[(steps <= 0).nonzero()[0]])]
        raise InputError(
            f"round {report.round}: rule 'online-hypergradient' needs the number of local steps of every client, and "
            f"'{silent}' does not report it; have clients report 'num_steps'."
        )
    return -sizes / sizes.sum() / (eta * steps)
