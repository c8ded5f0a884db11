"""Run as a program: SIGKILL at random moments, the same command again until it ends, and the same bytes in the end.

    python -m tests.support.kills --kills 100 --seed 0

Commands run in forks of this process, which has loaded everything and computes with one thread: a start takes no time,
so that the moments fall into the work. Checkpoints are written after every step instead of every few seconds, and the
reproduction learns in four steps.
"""

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMANDS = {
    "learn": ("learn", "digits-flaky", "--iterations", "8", "--rounds", "3", "--out", "out"),
    "reproduce": (
        *("reproduce", "digits", "--trials", "1", "--jobs", "1", "--out", "out"),
        *("--only", "digits-flaky", "--only", "fedavg", "--only", "duw-fedavg"),
    ),
}
DONE = "out already holds a run; choose another --out, or replace it with --overwrite.\n"
TIMED = ("made.json", "learning.json", "trial-0.json")
"""Files that hold how long something took."""


@dataclass
class Study:
    """How often a command was killed, and how it ended."""

    seed: int
    killed: int = 0
    endings: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


def load(scratch: Path) -> None:
    """All that the commands import, so that forks have it; some of it is imported only by the work."""
    import torch

    import fedunfold as fu
    import fedunfold.cli.app
    import fedunfold.cli.trackers
    import fedunfold.runs.folder
    import fedunfold.studies.results
    from fedunfold.io import checkpoint
    from fedunfold.studies import cases
    from fedunfold.unfolding import FAST

    torch.set_num_threads(1)
    learned = fu.learn_weights(fu.environment("digits-flaky").replace(rounds=1), learning=fu.Learning(iterations=1))
    fu.plot.save(fu.plot.weights(learned), scratch / "warm.png")
    checkpoint.CHECKPOINT_SECONDS = 0.0
    vars(cases)["FAST"] = {**FAST, "iterations": 4}
    gc.freeze()


def start(folder: Path, command: Sequence[str]) -> int:
    """The command in a fork, in that folder; its output goes to a file there."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        from fedunfold.cli import main

        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        main(command)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(child: int, seconds: float | None = None) -> int | None:
    """The exit code, negative for a signal; None where it has not ended by then."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        found, status = os.waitpid(child, 0 if deadline is None else os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def content(folder: Path) -> dict[str, bytes]:
    """All files of a run that hold no times."""
    files = [file for file in (folder / "out").rglob("*") if file.is_file() and file.name not in TIMED]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def study(name: str, kills: int, seed: int, root: Path) -> Study:
    """So many runs of a command, each killed at least once, compared with one that was not."""
    command, draw, found = COMMANDS[name], random.Random(f"{name} {seed}"), Study(seed)
    began = time.monotonic()
    assert ended(start(root / f"{name}-whole", command)) == 0, (root / f"{name}-whole" / "output").read_text()
    length, expected = time.monotonic() - began, content(root / f"{name}-whole")
    number = 0
    while len(found.endings) < kills:
        number += 1
        folder, killed = root / f"{name}-{number}", 0
        while True:
            child = start(folder, command)
            # Once for certain, and then as often as not: what goes on is cut off again, too.
            wanted = not killed or draw.random() < 0.5
            code = ended(child, draw.random() * length) if wanted else ended(child)
            if code is not None:
                break
            os.kill(child, signal.SIGKILL)
            code = ended(child)
            if code != -signal.SIGKILL:
                break  # it ended by itself in the very last moment
            killed += 1
        if not killed:
            continue  # it had ended before its moment came; another one
        # The last kill may come when all is written and the process has only to end: then there is nothing to go on.
        good = code == 0 or (folder / "output").read_text().endswith(DONE)
        found.killed += killed
        found.endings.append("same" if good and content(folder) == expected else "different")
        if len(found.endings) % 10 == 0:
            print(f"{name}: {len(found.endings)} of {kills} so far", file=sys.stderr)
        if found.endings[-1] == "different":
            found.different.append(f"{folder}: exit code {code}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", default=list(COMMANDS), help="learn, reproduce")
    parser.add_argument("--kills", type=int, default=100, help="killed runs in all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as root:
        load(Path(root))
        for position, name in enumerate(asked.commands):
            share = (asked.kills + position) // len(asked.commands)
            found = study(name, share, asked.seed, Path(root))
            same = found.endings.count("same")
            print(f"{name}: {same} of {share} ended with the same bytes after {found.killed} kills, seed {asked.seed}")
            for line in found.different:
                print(f"  {line}")
            failed |= same < share
    sys.exit(failed)


if __name__ == "__main__":
    main()
