"""What a result was made on and with."""

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedunfold.version import VERSION


def machine(device: str = "cpu") -> dict[str, Any]:
    """Names and versions, which differ from machine to machine.

    Args:
        device: Where it is computed: "cpu", or a GPU as torch names it.
    """
    return {
        "device": _processor() if device == "cpu" else _gpu(device),
        "cores": os.cpu_count(),
        "fedunfold": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _gpu(device: str) -> str:
    """Its name, or where there is none here, what it is called in the settings."""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else device


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
