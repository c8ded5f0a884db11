"""The contract between everything above a round and the engine below it.

An engine (the simulation in one process, or real clients over a network) offers four functions; rules, server
optimisers, unfolding and comparisons are written once against them. Each takes a list of runs that are in the same
round, one run being a list of one, so that an engine may carry them out together.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fedunfold.core.messages import ClientInfo, ClientUpdates, TrainRequest
from fedunfold.core.outcomes import Evaluation, OuterLossResult
from fedunfold.core.params import ParamLayout


class Federation(Protocol):
    """One round forward, the same round backward, the final evaluation, and a test."""

    @property
    def clients(self) -> Sequence[ClientInfo]:
        """All K clients; per-client tensors have their order."""

    @property
    def lr(self) -> float:
        """η, the clients' learning rate."""

    @property
    def layout(self) -> ParamLayout:
        """What the entries of a model are."""

    @property
    def max_parallel_runs(self) -> int:
        """How many runs are worth passing at once: 1 where they are carried out one after the other anyway."""

    @property
    def sums_only(self) -> bool:
        """Whether the server sees sums of updates only, so that no update may enter two of them."""

    def initial_model(self, run: str) -> Tensor:
        """w^(0) of a run, [d]."""

    def train(self, requests: Sequence[TrainRequest]) -> Sequence[ClientUpdates]:
        """One round of local training from w^(t), for every run."""

    def vjp(
        self, requests: Sequence[TrainRequest], participated: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The exact local part of the adjoint: round t backward, for every run.

        Given q_k = dL/d(w_k − w^(t)) of the P clients that participated, Σ_k (∂(w_k − w^(t))/∂w^(t))ᵀ q_k, their
        outer losses along the path included: what they add to λ_t.

        Args:
            requests: What was requested of the rounds.
            participated: Who participated, [K] each; in every round somebody did.
            adjoints: q_k, [P, d] each.

        Returns:
            What is added to λ_t, [d] each.
        """

    def outer_loss(self, requests: Sequence[TrainRequest]) -> Sequence[OuterLossResult]:
        """The final evaluation at w^(T): all clients, all minibatches of all epochs, no update."""

    def evaluate(self, models: Sequence[Tensor]) -> Sequence[Evaluation]:
        """Accuracy and loss on the test set, which no client ever sees."""
