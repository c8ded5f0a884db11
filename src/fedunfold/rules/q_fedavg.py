"""q-FedAvg: the worse a client fares, the more it counts, with a step size to match."""

import math

import torch

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules.rule import RULES, Rule, State
from fedunfold.rules.size import size_shares

ZERO_LOSS = 1e-10  # stands for a loss of 0, which has no negative power; so in the authors' code


@RULES.register("q-fedavg")
def q_fedavg(q: float = 1.0, lr: float | None = None) -> Rule:
    """Weigh the participating clients by a power of their loss, and step by an estimate of the curvature.

        w ← w − Σ_k F_k^q g_k / Σ_k h_k,    g_k = (w − w_k)/η,   h_k = q F_k^(q−1) ‖g_k‖² + F_k^q/η

    which as weights and a step size is

        Θ_k = F_k^q / Σ_l F_l^q,            s = Σ_k F_k^q / Σ_k (q F_k^(q−1) ‖w_k − w‖²/η + F_k^q)

    F_k is client k's mean loss on all its data at w^(t). It descends Σ F_k^(q+1)/(q+1), so that losses become more
    alike; h_k bounds the curvature of that, with 1/η in the place of the loss's own. At q = 0 it is FedAvg with equal
    weights of the participating clients, as the authors sample them by size, and the step 1. The larger q and the
    longer local training, the shorter the steps: h_k takes the whole of w − w_k for one step of size η. So choose q for
    the federation; the authors have between 0.001 and 5.

    Only participating clients that report a loss get weight, so that `keep`, `drop` and `remember` come to the same;
    without any the weights are N_k/N.

    Args:
        q: q ≥ 0.
        lr: η; by default the clients' learning rate. Ordinary Flower clients do not tell theirs: give it there.

    Reference: Li et al. 2020, Fair Resource Allocation in Federated Learning.

    F = (1, 3), both ‖w_k − w‖ = 1 and η = 0.5: s = 4 / ((2 + 1) + (2 + 3)).

    >>> from fedunfold.core.messages import ClientMetrics
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([10, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([1, 1]),
    ...     metrics=ClientMetrics(start_loss=torch.tensor([1.0, 3.0]), norm=torch.tensor([1.0, 1.0])))
    >>> decision, _ = q_fedavg(q=1, lr=0.5)(report, None)
    >>> decision.weights.tolist(), decision.step
    ([0.25, 0.75], 0.5)
    """
    if not 0 <= q < math.inf:
        raise InputError(f"q-fedavg needs a finite q >= 0, not {q}.")
    if lr is not None and not 0 < lr < math.inf:
        raise InputError(f"q-fedavg needs a finite lr > 0, not {lr}.")

    def weigh(report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
        losses = report.metric("start_loss").cpu().double()
        reported = report.participated.cpu().bool() & ~losses.isnan()
        if not reported.any():
            return RoundDecision(size_shares(report)), state
        eta = report.lr if lr is None else lr
        if eta is None and q == 0:
            eta = 1.0  # anything: nothing depends on it
        if eta is None:
            raise InputError(
                f"round {report.round}: rule 'q-fedavg' needs the clients' learning rate, which they do not tell here; "
                "give it as q_fedavg(lr=…)."
            )
        losses, squares = losses[reported], report.metric("norm").cpu().double()[reported].square()
        if not (losses >= 0).all():
            raise InputError(
                f"round {report.round}: rule 'q-fedavg' takes powers of losses >= 0, of which "
                f"{float(losses.min()):g} is none; choose another rule for this task."
            )
        losses = losses.clamp(min=ZERO_LOSS)
        # Over the largest loss, because F^q leaves the range of floats for a large q; that cancels in Θ and s.
        largest = losses.max()
        powers = (losses / largest) ** q
        curvature = q * (losses / largest) ** (q - 1) * squares / (eta * largest)
        weights = torch.zeros(len(report.client_ids), dtype=torch.float64)
        weights[reported] = powers / powers.sum()
        return RoundDecision(weights, float(powers.sum() / (curvature + powers).sum())), state

    settings = f"q={q:g}" if lr is None else f"q={q:g}, lr={lr:g}"
    name = "q-fedavg" if (q, lr) == (1, None) else f"q-fedavg({settings})"
    return Rule(name, weigh, frozenset({"start_loss", "norm"}))
