"""Client samplers: who is sampled for a round."""

from fedunfold.selection.uniform import Uniform

__all__ = ["Uniform"]
