"""Pages about asynchronous rounds and many clients, from records."""

from benchmarks.asynchronous import CHOSEN_ON, METHODS, NEAR, Asynchronous, Run, asynchronous_page
from benchmarks.many_clients import Case, ManyClients, many_clients_page

from fedunfold.config import Clock

MACHINE = {"device": "a processor", "cores": 2, "torch": "2"}


def test_times_are_to_the_synchronous_runs_accuracy() -> None:
    """Synchronous runs end at 80 % after 100 s, and reach 79 % after 50; the first discount reaches both after 10."""
    chosen = {name: next(iter(grid)) for name, grid in METHODS.items()}
    curves = {"synchronous": ((50.0, 100.0), (0.8 - NEAR, 0.8)), "constant": ((5.0, 10.0), (0.5, 0.9))}
    runs = [
        Run(name, chosen[name], trial, *curves.get(name, ((5.0, 10.0), (0.1, 0.2))), 1.5)
        for name in METHODS
        for trial in (0, 1, CHOSEN_ON)
    ]
    described = {"clients": 7, "at_once": 3, "rounds": 2, **Clock(buffer=2).model_dump()}
    found = Asynchronous(MACHINE, described, 2, chosen, runs)
    page = asynchronous_page(Asynchronous.from_json(found.as_json()))
    assert "| synchronous | server lr 1 | 100 ± 0 (2 of 2) | 50 ± 0 (2 of 2) | 80.0 ± 0.0 |" in page
    assert "| constant | server lr 1 | 10 ± 0 (2 of 2, 10 times sooner) | 10 ± 0 (2 of 2, 5 times sooner) |" in page
    assert "| 1/√(1+s) | server lr 1 | – (0 of 2) | – (0 of 2) | 20.0 ± 0.0 | 10 ± 0 | 1.5 |" in page


def test_rounds_are_what_the_set_up_does_not_take() -> None:
    found = ManyClients(MACHINE, "mnist", 51, 100, [Case("synchronous", 1000, 12.0, 7.0, 2**30, 3 * 2**19, 81.25)])
    page = many_clients_page(ManyClients.from_json(found.as_json()))
    assert "| synchronous | 1,000 | 12.0 | 7.0 | 100 | 1024 | 1.5 | 81.2 |" in page
