"""What may be wrong with tables, one fault a case: refused with its place, reported, or read as it is meant; none is
passed over."""

from pathlib import Path

import numpy as np
import pytest

from fedunfold.core.errors import InputError
from fedunfold.data.importers.csv import scan_tables
from fedunfold.data.importers.imported import ImportedData
from fedunfold.data.importers.tabular import encode
from tests.data.importers.column_faults import COLUMN_FAULTS, NUMBER_FAULTS
from tests.data.importers.file_faults import FILE_FAULTS, LABEL_FAULTS
from tests.data.importers.tables import PLAIN, SITES, Case, Hospitals, parts

pytest.importorskip("pandas", reason="the extra 'tables' is not installed")


def _encode(folder: Path, case: Case) -> ImportedData:
    clients, held = scan_tables(folder)
    return encode(clients, held or 0.25, case.label, **case.options)


@pytest.fixture(scope="module")
def unspoiled(tmp_path_factory: pytest.TempPathFactory) -> ImportedData:
    return _encode(Hospitals().write(tmp_path_factory.mktemp("plain") / "sites"), Case(lambda files: None))


CASES = NUMBER_FAULTS | COLUMN_FAULTS | LABEL_FAULTS | FILE_FAULTS


@pytest.mark.parametrize("name", CASES)
def test_fault(name: str, tmp_path: Path, unspoiled: ImportedData) -> None:
    case, files = CASES[name], Hospitals()
    case.edit(files)
    folder = files.write(tmp_path / "sites")
    if case.error:
        with pytest.raises(InputError) as caught:
            _encode(folder, case)
        message = str(caught.value)
        assert "\n" not in message and "--" not in message
        assert [word for word in case.error if word not in message] == [], message
        return
    made = _encode(folder, case)
    found = [(finding.kind, finding.message) for finding in made.findings]
    assert {kind for kind, _ in found} == set(case.finding[:1]), found
    assert [word for word in case.finding[1:] if word not in " ".join(text for _, text in found)] == [], found
    assert list(made.clients) == list(SITES)
    assert case.check(made)
    if case.same:
        assert made.classes == unspoiled.classes
        for (x, y), (x_plain, y_plain) in zip(parts(made), parts(unspoiled), strict=True):
            order = np.argsort(
                [PLAIN.index(entry["column"]) for entry in (made.recipe or {})["features"]], kind="stable"
            )
            assert np.array_equal(x[:, order], x_plain) and np.array_equal(y, y_plain)


def test_there_are_more_than_sixty_faults() -> None:
    assert len(CASES) == sum(map(len, (NUMBER_FAULTS, COLUMN_FAULTS, LABEL_FAULTS, FILE_FAULTS))) > 60
