"""A run's folder, as a zip archive here: its records, what `theory` reads of it, and what replacing it takes away."""

import contextlib
import io
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

from fedunfold.cli import main
from fedunfold.config import environment
from fedunfold.core.errors import InputError
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.reader import list_files, read_settings
from fedunfold.studies.theory.analysis import analyse_learned
from fedunfold.studies.theory.quantities import Constants
from tests.fuzz import mutation
from tests.fuzz.judging import scratch, understood

LEARN = ("learn", "digits-flaky", "--iterations", "1", "--rounds", "2", "--format", "json")
KEPT = ("settings.json", "metrics.jsonl", "environment.toml", "weights.safetensors")


def fuzz(data: bytes) -> bool:
    folder, beside = scratch() / "fuzzed", scratch() / "beside.txt"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "inside").mkdir(parents=True)
    for own in (beside, folder / "inside" / "notes.txt"):
        own.write_text("mine")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                if name in KEPT:
                    (folder / name).write_bytes(archive.read(name))
    except Exception:  # not a folder at all
        return False
    with contextlib.suppress(InputError):
        read_settings(folder)
    answer = understood(lambda: _analysed(folder), "fuzzed", "weights", "environment", "client", "Client", "field")
    for file in list_files(folder):
        file.unlink()
    assert beside.exists(), "a file beside the folder was taken away"
    assert (folder / "inside" / "notes.txt").exists(), "a file in a folder of the user's was taken away"
    return answer


def _analysed(folder: Path) -> None:
    env, learned = environment(folder / "environment.toml"), LearnedWeights.load(folder / "weights.safetensors")
    if env.data.source == "digits":
        analyse_learned(learned, env, Constants(L=1.0, sigma=1.0), recast=False).as_json()


def seeds() -> Mapping[str, bytes]:
    folder = scratch() / "learned"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*LEARN, "--out", str(folder), "--overwrite"])
    return {"learned": mutation.zipped([(name, (folder / name).read_bytes()) for name in KEPT])}


def mutate(data: bytes, rng: Random) -> bytes:
    inner = {".json": mutation.of_json, ".jsonl": mutation.of_bytes, ".safetensors": mutation.of_safetensors}
    return mutation.of_archive(data, rng, inner)
