"""The paper's experiments, on an environment small enough for a test."""

import json
from pathlib import Path

import pytest

from fedunfold.environments import Environment, environment
from fedunfold.errors import InputError
from fedunfold.experiments import reproduction as rep
from fedunfold.report import paper
from tests.federations import tiny

SETTING = rep.Setting(trials=2)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rep, "FAST", (2, 0.02))


def do_all(env: Environment, records: rep.Records, most: int | None = None) -> int:
    """Work off what is not done yet, at most so many tasks; how many there were."""
    todo = [task for task in rep.tasks(env, SETTING, records) if not task.done()]
    for task in todo[:most]:
        task.do()
    return len(todo)


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    env = tiny(reliability=0.8)
    whole, parts = rep.Records(tmp_path / "whole"), rep.Records(tmp_path / "parts")
    total = do_all(env, whole)
    assert do_all(env, parts, most=total // 2) == total
    assert do_all(env, parts) == total - total // 2
    assert do_all(env, parts) == 0
    one, other = (paper.comparison_markdown(env, SETTING, records) for records in (whole, parts))
    assert one == other
    assert "duw-fedavg-exact" in one


def test_records_hold_what_the_trials_cost(tmp_path: Path) -> None:
    env = tiny()  # 3, 4 and 6 steps a round
    records = rep.Records(tmp_path)
    do_all(env, records)
    trials = records.trials(env.name, "fedavg")
    assert [trial["client_steps"] for trial in trials] == [39, 39]
    assert [trial["participations"] for trial in trials] == [9, 9]
    assert [trial["rounds"] for trial in records.trials(env.name, "fedavg-budget")] == [9, 9]


def test_price_of_learning_by_hand(tmp_path: Path) -> None:
    """5-4-3 network: 39 numbers. Once over 7, 4 and 9 samples in threes: 3 + 2 + 3 steps."""
    env = tiny()
    records = rep.Records(tmp_path)
    do_all(env, records)

    def cost(name: str) -> tuple[float, float, float]:
        return paper.price(env, SETTING, name, records.trials(env.name, name))

    megabyte = 39 * 4 / 1e6
    assert cost("fedavg") == pytest.approx((3, 39, 18 * megabyte))
    assert cost("duw-fedavg") == pytest.approx((3 + 2 * 3, 39 + 2 * (39 + 8), (18 + 2 * (18 + 6)) * megabyte))
    exact = (3 + 2 * 6, 39 + 2 * (4 * 39 + 8), (18 + 2 * (45 + 6)) * megabyte)
    assert cost("duw-fedavg-exact") == pytest.approx(exact)


def test_rate_figures(tmp_path: Path) -> None:
    records = rep.Records(tmp_path)
    env = tiny()
    for task in list(rep.rate_tasks(env, SETTING, records))[:3]:
        task.do()
    rounds, variances = paper.rate_points(records, env.name)
    assert rounds == [4, 6, 8]
    assert all(0 < variance < 1 for variance in variances)
    assert paper.rate_fit([4, 16], [0.5, 0.25])[0] == pytest.approx(-0.5)
    assert "| 4 |" in paper.rate_markdown(records, env.name)


def test_records_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    records = rep.Records(tmp_path)
    rep.check_same(records, SETTING)
    rep.check_same(records, rep.Setting(trials=5))
    with pytest.raises(InputError, match="another schedule, seed or device"):
        rep.check_same(records, rep.Setting(seed=1))


def test_assignment(tmp_path: Path) -> None:
    file = tmp_path / "clients.json"
    file.write_text(json.dumps({"clients": [[[0, 3], [2, 1]], [[1, 5]]]}))
    assert rep.read_assignment(file) == [[(0, 3.0), (2, 1.0)], [(1, 5.0)]]
    for wrong in ("", "[]", '{"clients": [[[1]]]}', '{"clients": 3}'):
        file.write_text(wrong)
        with pytest.raises(InputError, match="must hold"):
            rep.read_assignment(file)
    with pytest.raises(InputError, match="cannot be read"):
        rep.read_assignment(tmp_path / "nowhere.json")


def test_presets_have_the_papers_settings() -> None:
    """Table of the experiments: clients, epochs, reliabilities, rounds, batch size, outer schedule."""
    names = [name for study in rep.ENVIRONMENTS.values() for name in study]
    found = {name: environment(name) for name in names}
    epochs = {name: [client.epochs for client in env.clients] for name, env in found.items()}
    assert epochs["mnist-3"] == [2, 1, 1, 1, 1]
    assert epochs["mnist-rate"] == [3, 1]
    assert epochs["dogs-b"] == [4, 7, 1, 2, 7]
    assert [client.reliability for client in found["mnist-4"].clients] == [0.2, 0.3, 0.8, 0.9, 1]
    assert [client.reliability for client in found["dogs-a"].clients] == [0.96, 0.6995, 0.9999, 0.2201, 0.3611]
    assert [client.reliability for client in found["dogs-b"].clients] == [0.5173, 0.947, 0.7655, 0.2824, 0.221]
    rounds = {name: env.rounds for name, env in found.items()}
    assert (rounds["mnist-1"], rounds["dogs-a"], rounds["dogs-b"]) == (10, 100, 70)
    batches = {name: env.batch_size for name, env in found.items()}
    assert set(batches.values()) == {50, 100}
    assert (batches["mnist-2"], batches["dogs-b"]) == (50, 100)
    outer = {name: (env.paper.iterations, env.paper.lr) for name, env in found.items()}
    assert outer["mnist-2"] == (400, 0.001)
    assert outer["mnist-4"] == (1000, 0.001)
    assert outer["mnist-rate"] == (1000, 0.0005)
