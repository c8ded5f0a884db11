"""Models of which only a part is trained: what is frozen is loaded once and never sent."""

from fedunfold.models.load_once import LoadOnce as load_once
from fedunfold.models.lora import lora

__all__ = ["load_once", "lora"]
