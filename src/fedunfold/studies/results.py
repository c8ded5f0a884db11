"""results.md and what goes with it: figures, all records in one JSON file, and how they were made."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.npz import first_line
from fedunfold.io.atomic import read_json
from fedunfold.plotting import save
from fedunfold.runs.artifacts import text_writer
from fedunfold.runs.system_info import machine
from fedunfold.studies import attack_results, figures, tables
from fedunfold.studies.cases import Setting, Study, StudyCase, list_cases
from fedunfold.studies.findings import Finding, findings
from fedunfold.studies.records import CaseRecords, StudyRecords
from fedunfold.studies.rows import StudyRow, list_rows

Studied = list[tuple[StudyCase, list[StudyRow]]]


@dataclass(frozen=True)
class Results:
    """What is to be run and shown.

    Attributes:
        setting: How it is run.
        studies: The cases of every study, each with its rows.
    """

    setting: Setting
    studies: dict[Study, Studied]

    @classmethod
    def of(
        cls, studies: Iterable[Study], setting: Setting, assignment: Path | None = None, only: Sequence[str] = ()
    ) -> "Results":
        """All of some studies, or a part of them.

        Args:
            studies: Which ones.
            setting: How they are run.
            assignment: A file that assigns the dogs' classes to clients.
            only: Names of environments and rows; of those that a kind is named of, the others are left out.

        Raises:
            InputError: There is no such environment or row, or no environment with such a row.
        """
        found: dict[Study, Studied] = {
            study: [(case, list_rows(study, case.env, setting)) for case in list_cases(study, setting, assignment)]
            for study in studies
        }
        every = [pair for studied in found.values() for pair in studied]
        envs, names = {case.env.name for case, _ in every}, {row.name for _, run in every for row in run}
        for name in only:
            if name not in envs | names:
                raise InputError(f"there is no environment or method '{name}' in the study.")
        envs, names = envs & set(only) or envs, names & set(only) or names
        chosen = {
            study: [(case, part) for case, run in studied if case.env.name in envs and (part := _part_of(run, names))]
            for study, studied in found.items()
        }
        if not any(chosen.values()):
            raise InputError(f"no environment in the study has such a method: {', '.join(only)}.")
        return cls(setting, {study: studied for study, studied in chosen.items() if studied})

    def cases(self) -> Iterator[tuple[StudyCase, list[StudyRow]]]:
        """All cases with their rows."""
        for studied in self.studies.values():
            yield from studied

    def write(self, folder: Path, command: str, records: StudyRecords, *, computed: bool = True) -> Path:
        """Write everything that is made from the records.

        Args:
            folder: Where to.
            command: What is said to have made it.
            records: The records.
            computed: Whether something was computed for it; else made.json still names the machine that the records
                were made on.

        Returns:
            results.md, which depends on the records alone.
        """
        parts = [self._head(command)]
        found: list[Finding] = []
        documents: dict[str, Any] = {}
        for study, studied in self.studies.items():
            seen = [CaseRecords(case, run, records) for case, run in studied]
            found += [finding for one in seen for finding in findings(one)]
            documents |= {one.case.name: {row.name: _document(one, row) for row in one.rows} for one in seen}
            parts += _write_study(folder, study, seen)
        if found:
            lines = [[f.case, f.claim, f.seen, "yes" if f.holds else "no"] for f in found]
            parts.insert(1, tables.markdown(["case", "the paper", "seen here", "holds"], lines))
        content = {
            "setting": asdict(self.setting),
            "cases": documents,
            "findings": [asdict(finding) for finding in found],
        }
        text_writer(json.dumps(content) + "\n")(folder / "results.json")
        made = folder / "made.json"
        about = machine(self.setting.device) if computed or not made.exists() else _read_made(made)
        seconds = round(records.seconds([case for case, _ in self.cases()]))
        about |= {"command": command, "seed": self.setting.seed, "process_seconds": seconds}
        text_writer(json.dumps(about, indent=2) + "\n")(made)
        text_writer("\n".join(parts))(folder / "results.md")
        return folder / "results.md"

    def files(self, records: StudyRecords) -> list[str]:
        """What `write` leaves that is the same whenever the same is reproduced, and the weights it rests on."""
        learned = [records.weights_file(case, row.name) for case, run in self.cases() for row in run if row.learning]
        folder = records.folder.parent
        return ["results.md", "results.json", *(str(file.relative_to(folder)) for file in learned)]

    def _head(self, command: str) -> str:
        about = {"command": command, "device": self.setting.device, "schedule": self.setting.schedule}
        if list(self.studies) == ["attack"]:
            return tables.template("attacks").format_map(about)
        text = tables.template("paper").format_map(about)
        return f"{text}\n{tables.template('variants')}" if "variants" in self.studies else text


def _write_study(folder: Path, study: Study, seen: Sequence[CaseRecords]) -> list[str]:
    """Write a study's figure; what results.md says about it."""
    if study == "rate":
        save(figures.rate(seen[0]), folder / "rate.png")
        return ["![Variance of the weights against rounds](rate.png)\n", tables.rate(seen[0])]
    if study == "attack":
        save(attack_results.figure(seen), folder / "attack.png", dpi=80)
        return [attack_results.section(seen, "attack.png")]
    compared = [tables.comparison(one) for one in seen]
    if study == "variants":
        return compared
    save(figures.composite(seen), folder / f"{study}.png", dpi=80)
    return [f"![Data, accuracy and learned weights]({study}.png)\n", *compared]


def _read_made(file: Path) -> dict[str, Any]:
    try:
        return {**read_json(file)}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({first_line(error)}); delete it, and run the same again.") from error


def _part_of(run: list[StudyRow], names: set[str]) -> list[StudyRow]:
    """The rows of these names, and those whose weights they use."""
    owners = {row.weights_from for row in run if row.name in names}
    return [row for row in run if row.name in names | owners]


def _document(seen: CaseRecords, row: StudyRow) -> dict[str, Any]:
    """The records of a row in plain values: accuracies are fractions, [trials][rounds]."""
    trials = seen.trials(row.name)
    document: dict[str, Any] = {}
    if trials:
        document["accuracies"] = [np.round(trial["accuracies"], 5).tolist() for trial in trials]
        document["client_steps"] = [trial["client_steps"] for trial in trials]
        document["participations"] = [trial["participations"] for trial in trials]
        if row.filter is not None:
            document["rejected"] = [trial["rejected"] for trial in trials]
    learned = seen.records.weights(seen.case, row.name) if row.learning is not None else None
    if learned is not None:
        document["weights"] = np.round(learned.weights.numpy(), 5).tolist()
        document["outer_loss"] = np.round(learned.losses.numpy(), 3).tolist()
        document["settings"] = learned.settings
    return document
