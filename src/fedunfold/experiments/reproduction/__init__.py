"""The paper's experiments and ours beyond it, run once and kept in records that a later call goes on from."""

from fedunfold.experiments.reproduction.records import Records, check_same
from fedunfold.experiments.reproduction.studies import (
    ENVIRONMENTS,
    RATE_ROUNDS,
    STUDIES,
    Case,
    Entry,
    Setting,
    Study,
    cases,
    entries,
    read_assignment,
)
from fedunfold.experiments.reproduction.tasks import Task, tasks
from fedunfold.experiments.reproduction.workers import work_off

__all__ = [
    "ENVIRONMENTS",
    "RATE_ROUNDS",
    "STUDIES",
    "Case",
    "Entry",
    "Records",
    "Setting",
    "Study",
    "Task",
    "cases",
    "check_same",
    "entries",
    "read_assignment",
    "tasks",
    "work_off",
]
