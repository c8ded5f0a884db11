"""Who is there in a round, and the minibatches of those who are, for the clients of an environment."""

import numpy as np
import torch

from fedunfold.config import Environment
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.plan import BatchPlan, Clients, plan, sample_coefficients
from fedunfold.engines.simulation.schedule import ClientSlice, DeviceBatchPlan, RoundRng


class BatchSampler:
    """Schedules are for walks on a device and in some precision; so many threads may draw them."""

    def __init__(
        self, environment: Environment, data: FederatedData, device: torch.device, dtype: torch.dtype, threads: int = 1
    ) -> None:
        self._environment, self._data, self._device, self._dtype = environment, data, device, dtype
        self._threads = threads
        self._shares: tuple[int, list[ClientSlice]] | None = None
        self._ahead: tuple[Clients, BatchPlan] | None = None
        self._sent: DeviceBatchPlan | None = None

    @property
    def most_rows(self) -> int:
        """Of a minibatch of any client."""
        return min(self._environment.batch_size, max(self._data.sizes))

    def draw(self, run: str, round: int) -> RoundRng:
        return RoundRng(self._environment.seed, run, round)

    def present(self, draw: RoundRng) -> np.ndarray:
        participation_probability = [client.participation_probability for client in self._environment.clients]
        return draw.present(self._data.keys, participation_probability, self._environment.clients_per_round)

    def shares(self, round: int) -> list[ClientSlice]:
        """The clients' parts in a round, made once for all runs that are in it."""
        if self._shares is None or self._shares[0] != round:
            offsets = self._data.offsets
            shares = [
                ClientSlice(key, offsets[k], offsets[k + 1] - offsets[k], self._environment.epochs(k, round))
                for k, key in enumerate(self._data.keys)
            ]
            self._shares = round, shares
        return self._shares[1]

    def schedule(self, clients: Clients) -> DeviceBatchPlan:
        """The minibatches of clients, unless they were drawn ahead."""
        if self._ahead is None or self._ahead[0] != clients:
            return self._plan(clients).on(self._device, self._dtype)
        self.send_ahead()
        assert self._sent is not None
        return self._sent

    def draw_ahead(self, clients: Clients) -> None:
        """Draw minibatches that will be asked for next."""
        self._ahead, self._sent = (clients, self._plan(clients)), None

    def send_ahead(self) -> None:
        """Send what was drawn ahead to the device, where that has not been done; it may wait for what this is at."""
        if self._ahead is not None and self._sent is None:
            self._sent = self._ahead[1].on(self._device, self._dtype)

    def coefficients(self, clients: Clients) -> np.ndarray:
        """How much each of their samples counts where all minibatches meet the same model."""
        return sample_coefficients(clients, self._environment.batch_size)

    def _plan(self, clients: Clients) -> BatchPlan:
        return plan(clients, self._environment.batch_size, self.most_rows, self._threads)
