"""Tasks: what a model is trained for.

| name           | outputs            | targets              | primary metric       | others                           |
|----------------|--------------------|----------------------|----------------------|----------------------------------|
| classification | logits [B, C]      | class numbers [B]    | accuracy             | balanced accuracy                |
| binary         | logits [B, 2]      | 0 or 1 [B]           | accuracy             | balanced accuracy, AUC, F1, Brier|
| multilabel     | logits [B, C]      | 0 or 1 [B, C]        | F1 (mean of labels)  | micro F1, accuracy of rows       |
| regression     | numbers [B, D]     | numbers [B] or [B,D] | RMSE (lower)         | MAE, R²                          |
| segmentation   | logits [B, C, …]   | masks [B, …]         | IoU                  | Dice, accuracy of pixels         |
| next_token     | logits [B, S, V]   | tokens [B, S]        | perplexity (lower)   | accuracy                         |
| survival       | risks [B, 1]       | (time, event) [B, 2] | concordance          |                                  |
"""

from fedunfold.tasks.classification import Binary as binary
from fedunfold.tasks.classification import Classification as classification
from fedunfold.tasks.custom import task
from fedunfold.tasks.multilabel import Multilabel as multilabel
from fedunfold.tasks.next_token import NextToken as next_token
from fedunfold.tasks.regression import Regression as regression
from fedunfold.tasks.segmentation import Segmentation as segmentation
from fedunfold.tasks.survival import Survival as survival

__all__ = [
    "binary",
    "classification",
    "multilabel",
    "next_token",
    "regression",
    "segmentation",
    "survival",
    "task",
]
