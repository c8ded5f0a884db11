"""Dropout that can be met again: its masks come from a generator that is seeded before every step of a client.

The masks are drawn on the CPU, so that they are the same on every device.
"""

import torch
from torch import Tensor, nn

from fedunfold.core.errors import InputError

WHOLE_CHANNELS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}
"""Kinds of dropout, and whether they drop whole channels."""
ALL_DROPOUTS = (*WHOLE_CHANNELS, nn.AlphaDropout, nn.FeatureAlphaDropout)


class SeededDropout(nn.Module):
    """x ⊙ m / (1 − p) in training, m being 0 with probability p; x otherwise."""

    def __init__(self, p: float, whole_channels: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.p, self.whole_channels, self.generator = p, whole_channels, generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.whole_channels else x.shape
        kept = torch.rand(shape, generator=self.generator, dtype=torch.float64) >= self.p
        return x * (kept.to(x.device, x.dtype) / (1 - self.p))


def seed_dropout(module: nn.Module, generator: torch.Generator) -> None:
    """Put seeded dropout in the place of torch's, wherever the module has it."""
    named = dict(module.named_modules())
    for path, parent in named.items():
        for name, layer in list(parent._modules.items()):  # a layer may stand there under several names
            if not isinstance(layer, ALL_DROPOUTS) or layer.p == 0:
                continue
            if type(layer) not in WHOLE_CHANNELS:
                where = f"layer '{'.'.join(filter(None, (path, name)))}' ({type(layer).__name__})"
                raise InputError(f"{where} draws at random in a way that cannot be repeated; take nn.Dropout.")
            setattr(parent, name, SeededDropout(layer.p, WHOLE_CHANNELS[type(layer)], generator))
