"""The server's part of local optimisers with control variates (`core.control`)."""

from torch import Tensor

from fedunfold.core.control import Control, ControlledOptimizer
from fedunfold.core.messages import ClientUpdates


def next_control(
    model: Tensor, control: Control, optimizer: ControlledOptimizer, report: ClientUpdates, lr: float
) -> tuple[Tensor, Control]:
    """w^(t+1) and the control variates after a round that updates have entered.

    Args:
        model: What the server's optimiser made of w^(t).
        control: Before the round.
        optimizer: The clients' optimiser.
        report: What entered the round: who was rejected is absent from it, and keeps its own.
        lr: η.
    """
    updates, layout = report.updates, report.layout
    clients = updates.clients.tolist()
    change = optimizer.change(control.shared, updates.rows, report.num_steps[updates.clients], lr)
    shared = control.shared + change.sum(0) / len(report.client_ids)
    layout.buffers(shared).zero_()
    own = dict(control.own)
    if (rows := report.metrics.controls) is not None:
        # Rows of their own: a view would keep those of all clients of its round alive.
        own |= {k: row.clone() for k, row in zip(clients, rows, strict=True)}
    rounds = {**control.rounds, **dict.fromkeys(clients, report.round)}
    after = Control(shared, dict(sorted(own.items())), dict(sorted(rounds.items())))
    return optimizer.corrected_model(model, shared), after
