"""results.md and what goes with it: figures, all records in one JSON file, and how they were made."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.io.atomic import read_json, write_atomically
from fedunfold.plotting import save
from fedunfold.runs.system_info import machine
from fedunfold.studies.paper import attack, figures, tables
from fedunfold.studies.paper.findings import findings
from fedunfold.studies.reproduction import Records, Setting, Study, StudyCase, StudyRow, cases, entries
from fedunfold.studies.reproduction.records import write_json

Studied = list[tuple[StudyCase, list[StudyRow]]]


@dataclass(frozen=True)
class Results:
    """What is to be run and shown: the cases of every study, each with its entries."""

    setting: Setting
    studies: dict[Study, Studied]

    @classmethod
    def of(
        cls, studies: Iterable[Study], setting: Setting, assignment: Path | None = None, only: Sequence[str] = ()
    ) -> "Results":
        """All of the studies, or what `only` names of environments and methods."""
        found: dict[Study, Studied] = {
            study: [(case, entries(study, case.env, setting)) for case in cases(study, setting, assignment)]
            for study in studies
        }
        listed = [(case, entry) for studied in found.values() for case, run in studied for entry in run]
        envs, methods = {case.env.name for case, _ in listed}, {entry.name for _, entry in listed}
        for name in only:
            if name not in envs | methods:
                raise InputError(f"--only {name}: there is no such environment or method in the study.")
        chosen_envs, chosen_methods = envs & set(only) or envs, methods & set(only) or methods
        kept: dict[Study, Studied] = {}
        for study, studied in found.items():
            chosen = [
                (case, _with_weights(run, chosen_methods)) for case, run in studied if case.env.name in chosen_envs
            ]
            if any(run for _, run in chosen):
                kept[study] = [(case, run) for case, run in chosen if run]
        if not kept:
            raise InputError(f"--only {', '.join(only)}: no environment has such a method.")
        return cls(setting, kept)

    def cases(self) -> Iterator[tuple[StudyCase, list[StudyRow]]]:
        for studied in self.studies.values():
            yield from studied

    def write(self, folder: Path, command: str, records: Records, *, computed: bool = True) -> Path:
        """Everything into `folder`; results.md, which is returned, depends on the records alone.

        Where nothing was `computed`, made.json goes on naming the machine that the records were made on.
        """
        parts = [self._head(command), self._findings(records)]
        for study, studied in self.studies.items():
            if study == "rate":
                case = studied[0][0]
                save(figures.rate(case, records), folder / "rate.png")
                parts += ["![Variance of the weights against rounds](rate.png)\n", tables.rate(case, records)]
                continue
            if study == "attack":
                save(attack.figure(studied, records), folder / "attack.png", dpi=80)
                parts.append(attack.section(studied, records, "attack.png"))
                continue
            if study != "variants":
                save(figures.composite(studied, records), folder / f"{study}.png", dpi=80)
                parts.append(f"![Data, accuracy and learned weights]({study}.png)\n")
            parts += [tables.comparison(case, run, records) for case, run in studied]
        write_json(folder / "results.json", self._documents(records))
        made = folder / "made.json"
        on = machine(self.setting.device) if computed or not made.exists() else _made_before(made)
        write_json(made, on | self._made(command, records), indent=2)
        file, text = folder / "results.md", "\n".join(part for part in parts if part)
        write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return file

    def files(self, records: Records) -> list[str]:
        """What `write` leaves that is the same whenever the same is reproduced, and the weights it rests on."""
        learned = [
            records.weights_file(case, entry.name) for case, run in self.cases() for entry in run if entry.learning
        ]
        folder = records.folder.parent
        return ["results.md", "results.json", *(str(file.relative_to(folder)) for file in learned)]

    def _head(self, command: str) -> str:
        setting = self.setting
        if list(self.studies) == ["attack"]:
            return (
                f"# Attacks\n\n`{command}`, on {setting.device}; accuracies are those after the last round, mean ± "
                f"standard deviation over the trials. Weights are learned by the {setting.schedule} schedule. Machine "
                "and duration are in made.json, all records in results.json.\n"
            )
        text = (
            "# The paper's experiments, reproduced\n\n"
            f"`{command}`, on {setting.device}; accuracies are mean ± standard deviation over the trials. The "
            f"paper's methods learn by the {setting.schedule} schedule, `fedunfold` by its own. Machine and duration "
            "are in made.json, all records in results.json.\n\n"
            "Published figures: A. Nakai-Kasai and T. Wadayama, deep unfolding-based weighted averaging; their "
            "dogs figures are for ViT-B/16 features, ours for the features named in the environment, so compare "
            "methods, not columns. Rounds, client steps and megabytes are those of one run and of the learning of "
            "its weights, where the line learns any; weights are learned once and used in all trials, each with its "
            "own initial model, minibatches and absences.\n"
        )
        if "variants" in self.studies:
            text += (
                "\nVariants are trained on four fifths of every client's training data and tested on the rest, as "
                "the mean over the classes; the test set is not touched. Rounds and falls are those of the "
                "accuracy over all samples, as the mean of the trials: the largest fall is how far, in points, it "
                "lies below its best so far at any round.\n"
            )
        return text

    def _findings(self, records: Records) -> str:
        found = [finding for case, run in self.cases() for finding in findings(case, run, records)]
        if not found:
            return ""
        lines = ["| | the paper | seen here | holds |", "|---|---|---|---|"]
        lines += [f"| {f.case} | {f.claim} | {f.seen} | {'yes' if f.holds else 'no'} |" for f in found]
        return "\n".join(lines) + "\n"

    def _documents(self, records: Records) -> dict[str, Any]:
        """Every record in plain values: accuracies are fractions, [trials][rounds]."""
        return {
            "setting": asdict(self.setting),
            "cases": {
                case.name: {entry.name: _document(case, entry, records) for entry in run} for case, run in self.cases()
            },
            "findings": [asdict(found) for case, run in self.cases() for found in findings(case, run, records)],
        }

    def _made(self, command: str, records: Records) -> dict[str, Any]:
        seconds = round(records.seconds([case for case, _ in self.cases()]))
        return {"command": command, "seed": self.setting.seed, "process_seconds": seconds}


def _made_before(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; mend that, or delete it.") from error
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; delete it, and run the same command again.") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no JSON object; delete it, and run the same command again.")
    return found


def _with_weights(run: list[StudyRow], names: set[str]) -> list[StudyRow]:
    """The entries of these names, and those whose weights they use."""
    owners = {entry.weights_from for entry in run if entry.name in names}
    return [entry for entry in run if entry.name in names | owners]


def _document(case: StudyCase, entry: StudyRow, records: Records) -> dict[str, Any]:
    trials = records.trials(case, entry.name, entry.trials)
    document: dict[str, Any] = {}
    if trials:
        document["accuracies"] = [np.round(trial["accuracies"], 5).tolist() for trial in trials]
        document["client_steps"] = [trial["client_steps"] for trial in trials]
        document["participations"] = [trial["participations"] for trial in trials]
        if entry.screen is not None:
            document["rejected"] = [trial["rejected"] for trial in trials]
    learned = records.weights(case, entry.name) if entry.learning is not None else None
    if learned is not None:
        document["weights"] = np.round(learned.weights.numpy(), 5).tolist()
        document["outer_loss"] = np.round(learned.losses.numpy(), 3).tolist()
        document["settings"] = learned.settings
    return document
