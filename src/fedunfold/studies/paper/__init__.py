"""The paper's figures and tables, and ours beyond it, made from the records of a study and from nothing else."""

from fedunfold.studies.paper.results import Results

__all__ = ["Results"]
