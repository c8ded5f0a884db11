"""Which classes go to which client, for the dogs."""

from collections.abc import Mapping

from fedunfold.config import environment
from fedunfold.studies.cases import read_assignment
from tests.fuzz.judging import understood, written
from tests.fuzz.mutation import of_json as mutate

__all__ = ["fuzz", "mutate", "seeds"]


def fuzz(data: bytes) -> bool:
    path = written("fuzzed.json", data)

    def use() -> None:
        environment("dogs-a").replace(partition={"kind": "shares", "shares": read_assignment(path)})

    return understood(use, "fuzzed.json", "field partition")


def seeds() -> Mapping[str, bytes]:
    clients = len(environment("dogs-a").clients)
    pairs = ", ".join(f"[[{k}, 119], [{k + 1}, 20.5]]" for k in range(clients))
    return {"dogs": f'{{"about": "classes and images", "clients": [{pairs}]}}'.encode()}
