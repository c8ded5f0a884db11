"""A small learning written to the file named on the command line, so that two processes can be compared."""

import sys
from pathlib import Path

import torch

from fedunfold.unfolding import Learning, learn
from tests.support.federations import simulated, tiny


def save_learned(path: Path) -> None:
    """Single precision, where rounding would show a changed order of summation."""
    federation = simulated(tiny(participation_probability=0.8), dtype=torch.float32)
    learn(federation, 3, learning=Learning(iterations=2, lr=0.1)).save(path)


if __name__ == "__main__":
    save_learned(Path(sys.argv[1]))
