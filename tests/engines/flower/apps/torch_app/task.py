"""The network, each client's part of the digits, local training and testing."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Net(nn.Module):
    """A convolution with batch normalisation, whose counter is an array of whole numbers, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(36, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        z: Tensor = self.out(self.hidden(x.flatten(1)).relu())
        return z


def load_data(partition_id: int, num_partitions: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test rows of a client; the later its number, the more it has, and the larger its digits."""
    x, y = load_digits(return_X_y=True)
    draw = np.random.default_rng(partition_id)
    wanted = np.exp(-((y / 9 - partition_id / max(1, num_partitions - 1)) ** 2) * 4)
    rows = draw.choice(len(y), 60 + 30 * partition_id, replace=False, p=wanted / wanted.sum())
    images = torch.tensor(x[rows] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels, split = torch.tensor(y[rows]), len(rows) * 4 // 5
    return images[:split], labels[:split], images[split:], labels[split:]


def train(net: Net, x: Tensor, y: Tensor, epochs: int, lr: float, seed: int) -> float:
    """SGD on shuffled minibatches; gives the mean of the losses met."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    draw, losses = torch.Generator().manual_seed(seed), []
    net.train()
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(y), generator=draw), 16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net: Net, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    net.eval()
    with torch.no_grad():
        z = net(x)
    return nn.functional.cross_entropy(z, y).item(), (z.argmax(1) == y).double().mean().item()
