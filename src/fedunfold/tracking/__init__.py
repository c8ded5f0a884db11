"""Following a run: a live file, TensorBoard, MLflow, early stopping, or anything with a `Callback`'s methods."""

from fedunfold.tracking.callback import Callback, CallbackList, callback_scope

__all__ = ["Callback", "CallbackList", "callback_scope"]
