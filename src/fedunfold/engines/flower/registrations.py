"""What clients say of themselves when they register, held against each other and against the server."""

from collections.abc import Sequence

from fedunfold.config import Environment
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.task import Task
from fedunfold.engines.flower.schema import ClientDescription, shapes_text, task_text


def registered_clients(
    found: Sequence[ClientDescription], environment: Environment, task: Task
) -> list[ClientDescription]:
    """The environment's clients as they described themselves: all have its task, and the same kind of data."""
    by_id = {entry.client_id: entry for entry in found}
    expected = [client.key for client in environment.clients]
    if missing := [client_id for client_id in expected if client_id not in by_id]:
        raise FederationError(f"client '{missing[0]}' has not registered; start it, or take it out of the environment.")
    clients, text = [by_id[client_id] for client_id in expected], task_text(task)
    first = clients[0]
    for other in clients:
        if other.task != text:
            raise InputError(
                f"client {other.client_id} has the task {other.task or '(none)'}, the server has {text}; "
                "make them alike."
            )
        if other.shapes != first.shapes:
            raise InputError(
                f"client {other.client_id} has rows of shape {shapes_text(other.shapes)}, {first.client_id} has "
                f"{shapes_text(first.shapes)}; make them alike."
            )
        counted = len(other.label_counts), other.num_statistics
        if counted != (task.num_groups, first.num_statistics):
            raise InputError(
                f"client {other.client_id} has {counted[0]} classes and {counted[1]} statistics for the task {text}, "
                f"where {task.num_groups} and {first.num_statistics} are expected; install the same version everywhere."
            )
    return clients
