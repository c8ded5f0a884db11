"""Learning the aggregation weights: outer losses differentiated through the unfolded rounds."""

from fedunfold.unfolding.learner import SCHEDULES, Learning, check_learnable, learn

__all__ = ["SCHEDULES", "Learning", "check_learnable", "learn"]
