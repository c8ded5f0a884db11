"""CSV files in, arrays by client out."""

import csv
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.config import Client
from fedunfold.core.errors import InputError
from fedunfold.data.importers.csv import CsvTable, Table, guess_label, scan_tables
from fedunfold.data.importers.imported import ImportedData, client_keys, write_npz
from fedunfold.data.importers.tabular import encode

pytest.importorskip("pandas", reason="the extra 'tables' is not installed")

Row = dict[str, Any]
COLOURS = ("red", "light, blue", 'the "other"', "grün\nor so")
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "age": st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)),
            "size (cm)": st.integers(-1000, 1000),
            "colour": st.sampled_from(COLOURS),
            "kind": st.sampled_from(["ill", "well", "dead"]),
        }
    ),
    min_size=1,
    max_size=6,
)
FIRST = [  # every column has a value and every class a row, whatever is drawn
    {"age": 1.5, "size (cm)": 2, "colour": "red", "kind": "ill"},
    {"age": 2.5, "size (cm)": 3, "colour": "red", "kind": "well"},
    {"age": 0.5, "size (cm)": 3, "colour": "light, blue", "kind": "dead"},
]


def write(path: Path, rows: list[Row], columns: list[str]) -> CsvTable:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return CsvTable(path)


def expected(made: ImportedData, row: Row) -> tuple[float, ...]:
    """A row's features as the recipe says, worked out anew."""
    assert made.recipe is not None
    values = []
    for entry in made.recipe["features"]:
        cell = row[entry["column"]]
        if "is" in entry:
            values.append(float(cell == entry["is"]))
        else:
            values.append(((entry["missing"] if cell is None else cell) - entry["mean"]) / entry["scale"])
    return tuple(float(np.float32(value)) for value in values)


def rows_of(made: ImportedData, x: Any, y: Any) -> Counter[tuple[float, ...]]:
    return Counter((*map(float, row), int(label)) for row, label in zip(x, y, strict=True))


@given(
    sites=st.lists(ROWS, min_size=1, max_size=4),
    order=st.permutations(["age", "size (cm)", "colour", "kind"]),
    scaling=st.sampled_from(["standard", "none"]),
    test=st.sampled_from([0.3, 0.5, "given"]),
)
def test_every_row_comes_out_at_its_client(
    sites: list[list[Row]], order: list[str], scaling: Any, test: float | str
) -> None:
    """Whatever the rows, the order of columns in each file and the order of the clients."""
    sites = [FIRST * 3, *sites]
    with tempfile.TemporaryDirectory() as name:
        sheets: dict[str, Table] = {
            f"site-{i}": write(Path(name, f"{i}.csv"), rows, order[i % 4 :] + order[: i % 4])
            for i, rows in enumerate(sites)
        }
        held: Table | float = write(Path(name, "t.csv"), FIRST, order) if isinstance(test, str) else test
        made = encode(sheets, held, "kind", scaling=scaling)
        backwards = encode(dict(reversed(sheets.items())), held, "kind", scaling=scaling)
    assert made.classes == ("dead", "ill", "well")
    assert list(made.clients) == list(sheets)

    def wanted(rows: list[Row]) -> Counter[tuple[float, ...]]:
        return Counter((*expected(made, row), made.classes.index(row["kind"])) for row in rows)

    if isinstance(test, str):
        assert rows_of(made, *made.test) == wanted(FIRST)
        for (key, pair), rows in zip(made.clients.items(), sites, strict=True):
            assert rows_of(made, *pair) == wanted(rows), key
    else:
        assert len(made.test[1])
        trained = {key: rows_of(made, *pair) for key, pair in made.clients.items()}
        for key, rows in zip(trained, sites, strict=True):
            assert trained[key] <= wanted(rows)
            assert set(made.clients[key][1]) == {made.classes.index(row["kind"]) for row in rows}
        together = sum(trained.values(), rows_of(made, *made.test))
        assert together == sum(map(wanted, sites), Counter())
    # The clients' order decides only that of the columns.
    columns = [[entry["column"] for entry in each.recipe["features"]] for each in (made, backwards) if each.recipe]
    assert sorted(columns[0]) == sorted(columns[1])
    for key, (x, y) in made.clients.items():
        assert np.array_equal(y, backwards.clients[key][1])
        assert np.allclose(np.sort(x, axis=1), np.sort(backwards.clients[key][0], axis=1), atol=1e-4)


def folder(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    return tmp_path


def made(tmp_path: Path, label: str = "y", test: float = 0.5, **options: Any) -> ImportedData:
    clients, held = scan_tables(tmp_path)
    return encode(clients, held or test, label, **options)


def test_worked_by_hand(tmp_path: Path) -> None:
    """The median fills the gap; mean and deviation are those of the filled training rows, and not of the test's."""
    folder(tmp_path, a="v,w,y\n1,u,no\n,v,yes\n", b="y,v,w\nyes,3,u\nno,8,u\n", test="v,w,y\n100,x,no\n")
    found = made(tmp_path)
    values = np.array([1, 3, 3, 8])
    mean, deviation = values.mean(), values.std()
    assert found.clients["a"][0] == pytest.approx(
        np.array([[(1 - mean) / deviation, 1, 0], [(3 - mean) / deviation, 0, 1]])
    )
    assert found.clients["b"][0] == pytest.approx(
        np.array([[(3 - mean) / deviation, 1, 0], [(8 - mean) / deviation, 1, 0]])
    )
    assert found.test[0] == pytest.approx(np.array([[(100 - mean) / deviation, 0, 0]]))  # no client has an x
    assert found.clients["a"][1].tolist() == [0, 1] and found.test[1].tolist() == [0]
    assert found.classes == ("no", "yes")
    assert "filled with the median over all clients: v (1)" in " ".join(found.notes)


def test_split_is_stratified_and_stays(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'ab'[i % 2]}\n" for i in range(20))
    folder(tmp_path, one="v,y\n" + rows, two="v,y\n" + rows[:24])
    first, again = made(tmp_path, test=0.2, scaling="none"), made(tmp_path, test=0.2, scaling="none")
    assert np.array_equal(first.test[0], again.test[0])
    assert np.bincount(first.clients["one"][1]).tolist() == [8, 8]
    assert np.bincount(first.test[1]).tolist() == [3, 3]
    other = made(tmp_path, test=0.2, scaling="none", seed=1)
    assert not np.array_equal(first.test[0], other.test[0])


def test_integer_labels_are_in_order_of_size(tmp_path: Path) -> None:
    folder(tmp_path, a="v,y\n1,10\n2,2\n3,2.0\n", b="v,y\n1,02\n2,10\n3,-1\n")
    found = made(tmp_path, test=0.5)
    assert found.classes == ("-1", "2", "10")


def test_semicolons_tabs_marks_and_blank_lines(tmp_path: Path) -> None:
    folder(tmp_path, a="\ufeffv;w;y\n1;2;a\n\n3;4;b\n", b="v\tw\ty\r\n5\t6\ta\r\n7\t8\tb\r\n", test="v,w,y\n1,1,a\n")
    found = made(tmp_path, scaling="none")
    assert found.clients["a"][0].tolist() == [[1, 2], [3, 4]]
    assert found.clients["b"][0].tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize("cells", [1 << 20, 3])
def test_a_text_anywhere_makes_texts_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """As they were written, but for 1.0, though another client's cells could be read as numbers or truth values."""
    monkeypatch.setattr("fedunfold.data.importers.csv.BLOCK_CELLS", cells)
    folder(tmp_path, a="v,w,y\n1,TRUE,a\n02,true,b\n", b="v,w,y\nx, True ,a\n1.0,null ,b\n", test="v,w,y\n1,True,a\n")
    found = made(tmp_path)
    assert found.recipe is not None
    texts = [(entry["column"], entry["is"]) for entry in found.recipe["features"]]
    assert texts == [
        *(("v", text) for text in ("02", "1", "x")),
        *(("w", text) for text in ("TRUE", "True", "true")),
    ]
    assert found.clients["a"][0].tolist() == [[0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]]
    assert found.clients["b"][0].tolist() == [[0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert found.test[0].tolist() == [[0, 1, 0, 0, 1, 0]]


def test_large_offsets_keep_their_digits(tmp_path: Path) -> None:
    """Seconds since 1970 differ in their last digits, which float32 has not."""
    folder(tmp_path, a="t,y\n1700000000,a\n1700000001,b\n", test="t,y\n1700000001,a\n")
    assert made(tmp_path).clients["a"][0].ravel().tolist() == [-1, 1]


def test_a_constant_column_is_zero_and_no_more(tmp_path: Path) -> None:
    """The deviation of many 0.1 is not quite 0 in floating point; dividing by it would make a test row explode."""
    rows = "".join(f"0.1,{'ab'[i % 2]}\n" for i in range(11))
    folder(tmp_path, a="v,y\n" + rows, test="v,y\n1.1,a\n")
    found = made(tmp_path)
    assert not found.clients["a"][0].any()
    assert found.test[0].tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a": ""}, ("a.csv", "empty")),
        ({"a": "v,y\n"}, ("a.csv", "no row")),
        ({"a": "v,v,y\n1,2,a\n"}, ("a.csv", "two columns v")),
        ({"a": "v,,y\n1,2,a\n"}, ("a.csv", "column 2")),
        ({"a": "v,y\n1,a\n1\n"}, ("a.csv, line 3", "1 cells", "2")),
        ({"a": "v,y\n1,a\n", "b": "w,y\n1,b\n"}, ("b.csv", "column v", "a.csv")),
        ({"a": "v,y\n1,a\n2,\n"}, ("a.csv, line 3", "label column y")),
        ({"a": "v,y\n1,a\n2,a\n"}, ("column y", "only the value a")),
        ({"a": "v,y\n1,0.5\n2,0.7\n"}, ("a.csv, line 2", "measurement", "`label`")),
        ({"a": "v,y\n1,a\ninf,b\n"}, ("a.csv, line 3, column v", "inf")),
        ({"a": "v,y\n,a\n,b\n"}, ("column v", "`drop`")),
        ({"a": 'v,y\n1,a\n"2,b\n'}, ("a.csv", "line")),
        ({"a": "v,y\n1,a\n2,b\n", "test": "v,y\n1,c\n"}, ("test.csv, line 2", "'c'")),
        ({"a": "v,y\n1,a\n2,b\n", "test": "v,y\nx,a\n"}, ("test.csv, line 2, column v", "'x'")),
        ({"a": "v,y\n1,a\n2,b\n", "test": "v,y\n"}, ("test.csv", "no row")),
        ({"a": "v;y\n1,5;a\n2;b\n"}, ("column v", "decimal commas")),
        ({"a": "v,y\n1e39,a\n2,b\n", "test": "v,y\n1,a\n"}, ("column v", "unit")),
        ({"a": "y\na\nb\n"}, ("a.csv", "no column but the label")),
        ({"a": "v,y\n1,a\n2,b\n"}, ("`test`: ", "fraction")),
        (
            {"a": "n,y\n" + "".join(f"name {i % 101},{i % 2}\n" for i in range(202))},
            ("column n", "a.csv, line 2", "`drop`", "FEDUNFOLD_MAX_TABLE_TEXTS"),
        ),
        ({"a": "v,y\n" + "".join(f"1,{i}\n" for i in range(1001))}, ("a.csv, line 1002", "column y", "1000")),
    ],
)
def test_refusals_say_where(tmp_path: Path, files: dict[str, str], words: tuple[str, ...]) -> None:
    folder(tmp_path, **files)
    with pytest.raises(InputError) as caught:
        made(tmp_path, test=0.1)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "z"}, ("`label`: ", "a.csv", "z", "v, y")),
        ({"drop": ["z"]}, ("`drop`: ", "z")),
        ({"drop": ["y"]}, ("`drop`: ", "y", "label")),
        ({"test": 1.5}, ("`test`: ", "1.5")),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], words: tuple[str, ...]) -> None:
    folder(tmp_path, a="v,y\n1,a\n2,b\n")
    with pytest.raises(InputError) as caught:
        made(tmp_path, **options)
    for word in words:
        assert word in str(caught.value), caught.value


def test_a_dropped_column_may_differ(tmp_path: Path) -> None:
    folder(tmp_path, a="v,id,y\n1,x,a\n2,z,b\n", b="v,y\n3,a\n4,b\n", test="v,y\n1,a\n")
    assert made(tmp_path, drop=["id"], scaling="none").clients["a"][0].tolist() == [[1], [2]]


def test_dropping_one_column_excuses_no_other(tmp_path: Path) -> None:
    folder(tmp_path, a="id,v,w,y\n1,1,1,a\n2,2,2,b\n", b="v,y\n3,a\n4,b\n")
    with pytest.raises(InputError, match=r"b\.csv has no column w"):
        made(tmp_path, drop=["id"])


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"v,y\n1,a\n2,caf\xe9\n")
    with pytest.raises(InputError, match=r"a\.csv, line 3: is not UTF-8"):
        made(tmp_path)


def test_a_file_without_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDUNFOLD_MAX_LINE_BYTES", "64")
    folder(tmp_path, a="v,y\n1,a\n" + "x" * 100)
    with pytest.raises(InputError, match=r"a\.csv, line 3"):
        made(tmp_path)


@pytest.mark.parametrize("text", ["v,y\n1,a\n2,b\n3,a\n", "v,y\nred,a\nblue,b\n"])
def test_too_much_for_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FEDUNFOLD_MAX_TABLE_NUMBERS", "2")
    folder(tmp_path, a=text)
    with pytest.raises(InputError, match=r"\.npz"):
        made(tmp_path)


def test_without_pandas_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, a="v,y\n1,a\n2,b\n")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"^tables need pandas; run: pip install 'fedunfold\[tables\]'$"):
        made(tmp_path)


def test_equal_files_make_equal_bytes(tmp_path: Path) -> None:
    """In blocks of any size, and whatever the bits of a decimal."""
    (tmp_path / "sites").mkdir()
    stream = np.random.default_rng(0)
    rows = "".join(
        f"{value!r},{'uvw'[i % 3]},{'ab'[i % 2]}\n" for i, value in enumerate(stream.normal(size=40).tolist())
    )
    folder(tmp_path / "sites", a="v,w,y\n" + rows, b="v,w,y\n" + rows)
    written = []
    for cells in (1 << 20, 7):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("fedunfold.data.importers.csv.BLOCK_CELLS", cells)
            write_npz(tmp_path / "made.npz", made(tmp_path / "sites", test=0.25))
        written.append((tmp_path / "made.npz").read_bytes())
    assert written[0] == written[1]


def test_names_make_keys() -> None:
    assert client_keys({"B.csv": "B", "St. Ann.csv": "St. Ann"}, "here") == {"B": "B.csv", "St.-Ann": "St. Ann.csv"}
    for name in ("Zürich", "Zu\u0308rich"):  # one sign, or two
        assert client_keys({"z.csv": name}, "here") == {"Zürich": "z.csv"}
        assert Client(key=name).key == "Zürich"
    for names, word in (
        ({"a b.csv": "a b", "a-b.csv": "a-b"}, "a b.csv and a-b.csv"),
        ({"a.csv": "a", "a.CSV": "a"}, "a.csv and a.CSV"),
        ({"Train.csv": "Train"}, "Train"),
        ({"…": "…"}, "letters"),
    ):
        with pytest.raises(InputError, match="here: ") as caught:
            client_keys(names, "here")
        assert word in str(caught.value)


def test_label_is_guessed() -> None:
    assert guess_label(["y", "Label"]) == "Label"
    assert guess_label(["a", "b"]) == "b"
