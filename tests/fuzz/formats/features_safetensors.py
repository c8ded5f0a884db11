"""Feature files as .safetensors."""

from collections.abc import Mapping

from tests.fuzz.formats import features_npz
from tests.fuzz.mutation import of_safetensors as mutate

__all__ = ["fuzz", "mutate", "seeds"]


def fuzz(data: bytes) -> bool:
    return features_npz.read(data, ".safetensors")


def seeds() -> Mapping[str, bytes]:
    return features_npz.made(".safetensors")
