"""Who hears of a run as it goes: a live file, TensorBoard, MLflow, or anything with a `Callback`'s methods."""

from fedunfold.tracking.callback import Callback, CallbackList, Learner, callback_scope

__all__ = ["Callback", "CallbackList", "Learner", "callback_scope"]
