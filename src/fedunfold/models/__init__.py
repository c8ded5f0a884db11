"""Models of which only a part is trained: what is frozen is loaded once and never sent."""

from fedunfold.models.lora import lora
from fedunfold.models.pretrained import Pretrained as pretrained

__all__ = ["lora", "pretrained"]
