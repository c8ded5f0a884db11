"""The paper's experiments and ours beyond it, run once and kept in records that a later call goes on from."""

from fedunfold.studies.reproduction.records import Records, check_same
from fedunfold.studies.reproduction.studies import (
    ENVIRONMENTS,
    RATE_ROUNDS,
    STUDIES,
    Setting,
    Study,
    StudyCase,
    StudyRow,
    cases,
    entries,
    read_assignment,
)
from fedunfold.studies.reproduction.tasks import Task, tasks
from fedunfold.studies.reproduction.workers import run_jobs

__all__ = [
    "ENVIRONMENTS",
    "RATE_ROUNDS",
    "STUDIES",
    "Records",
    "Setting",
    "Study",
    "StudyCase",
    "StudyRow",
    "Task",
    "cases",
    "check_same",
    "entries",
    "read_assignment",
    "run_jobs",
    "tasks",
]
