"""Who hears of a run as it goes: a live file, TensorBoard, MLflow, or anything with a `Tracker`'s methods."""

from fedunfold.tracking.protocol import Learner, Tracker, Trackers, telling

__all__ = ["Learner", "Tracker", "Trackers", "telling"]
