"""pfl-research: its federated averaging over PyTorch, with a test after every round."""

import itertools
import json
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Net(nn.Module):
    """An MLP with what pfl asks of a model."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        layers = [layer for below, above in pairs for layer in (nn.Linear(below, above), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}


class Test(TrainingProcessCallback):
    """Tests the model after a round, and notes when that was."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.ended = x, y, []

    @torch.no_grad()
    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        float((model.pytorch_model(self.x).argmax(1) == self.y).float().mean())
        self.ended.append(time.perf_counter())
        return False, Metrics()


def main(work: dict) -> list[float]:
    set_framework_module(pytorch_ops)
    draw = np.random.default_rng(0)

    def images(n: int) -> list[Tensor]:
        x = draw.random((n, work["features"]), dtype=np.float32)
        return [torch.from_numpy(x), torch.from_numpy(draw.integers(0, work["classes"], n))]

    (epochs,) = {epochs for _, epochs in work["clients"]}
    held = {f"client-{k}": images(samples) for k, (samples, _) in enumerate(work["clients"])}
    clients = FederatedDataset(
        lambda name: Dataset(held[name], user_id=name), get_user_sampler("minimize_reuse", list(held))
    )
    net = Net([work["features"], *work["hidden"], work["classes"]])
    test = Test(*images(work["test"]))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work["rounds"] + 1,
            evaluation_frequency=work["rounds"] + 2,
            train_cohort_size=len(held),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=None),
        model=PyTorchModel(
            net,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=epochs, local_learning_rate=work["lr"], local_batch_size=work["batch_size"]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=work["test"]),
        callbacks=[test],
    )
    return [after - before for before, after in itertools.pairwise(test.ended)]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
