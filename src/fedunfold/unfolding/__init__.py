"""Learning the aggregation weights: outer losses differentiated through the unfolded rounds."""

from fedunfold.unfolding.learner import FAST, Learning, check_learnable, check_learning, learn, published

__all__ = ["FAST", "Learning", "check_learnable", "check_learning", "learn", "published"]
