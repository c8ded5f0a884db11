"""What a strategy's aggregation costs is measured in processes of its own, and shown beside FedAvg's."""

import json

import pytest
from benchmarks.strategy_cost import Cost, Costs, strategies_page
from benchmarks.subprocesses import run_python


@pytest.mark.parametrize("name", ["FedAvg", "learned"])
def test_a_strategy_is_measured(name: str) -> None:
    found = json.loads(run_python("-m", "benchmarks.strategy_round", name, "3", "200000"))
    assert len(found["seconds"]) == len(found["processor"]) == 5
    assert all(second > 0 for second in found["seconds"])
    assert found["all"] >= found["round"] >= 0
    assert found["all"] >= found["kept"]


def test_the_page_sets_it_beside_fedavg() -> None:
    rows = [Cost("FedAvg", 0.2, 0.3, 2**20, 2**22, 2**20), Cost("size", 0.1, 0.24, 2**19, 2**21, 3 * 2**20)]
    page = strategies_page(Costs({"cores": 2}, 1.5, 3, 10, 11_000_000, rows))
    assert "Aggregation of 10 replies of 11 M parameters, 42 MiB each" in page
    assert "3 processes of 5 rounds, on 2 cores of which 1.5 processes" in page
    assert "| size | 100 | 0.50 | 240 | 0.80 | 0 | 0.50 | 2 | 0.50 | 3 |" in page
