"""A small U-Net learns to outline generated shapes; sites see other shapes and other light."""

import numpy as np
import torch
from torch import Tensor, nn

import fedunfold as fu

SIDE = 16


class UNet(nn.Module):
    """One step down, one up, joined by a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 12, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(12, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        out: Tensor = self.out(torch.cat([skip, self.up(self.deep(skip))], 1))
        return out


def shapes(n: int, seed: int, light: float, only: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Discs are of class 1, squares of class 2; brighter than the background by different amounts."""
    stream = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    images, masks = stream.normal(0, 0.2, (n, 1, SIDE, SIDE)) + light, np.zeros((n, SIDE, SIDE), dtype=np.int64)
    for image, mask in zip(images, masks, strict=True):
        kind = only or int(stream.integers(1, 3))
        (y, x), radius = stream.integers(5, SIDE - 5, 2), stream.integers(3, 5)
        far = np.hypot(rows - y, columns - x) if kind == 1 else np.maximum(abs(rows - y), abs(columns - x))
        mask[far <= radius] = kind
        image[0] += np.where(mask > 0, 1.0 if kind == 1 else 2.0, 0.0)
    return images, masks


def test_a_u_net_over_sites_with_different_shapes() -> None:
    env = fu.Environment.from_arrays(
        {"discs": shapes(24, 1, 0.0, 1), "squares": shapes(12, 2, 0.3, 2), "both": shapes(24, 3, -0.3)},
        shapes(40, 4, 0.0),
        task=fu.segmentation(3),
        rounds=12,
        batch_size=6,
        lr=0.3,
        epochs=2,
    )
    result = fu.run(env, fu.size(), model=UNet)
    first, last = result.evaluations[0].metrics, result.evaluations[-1].metrics
    assert set(last) == {"iou", "dice", "accuracy"}
    assert last["iou"] > 0.6 > first["iou"]
    assert last["dice"] > last["iou"]
