"""Public files: brought, cached or downloaded with the right checksum; and those that a user has to bring, parsed."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

import fedunfold as fu
from fedunfold.core.errors import InputError, WriteError
from fedunfold.data.natural import heart_disease, shakespeare, tcga_brca, wisdm
from fedunfold.data.natural.base import standardise
from fedunfold.data.natural.files import PublicFile, locate, parse_numbers

CONTENT = b"To be, or not to be"
HEART_ROWS = {"cleveland": 303, "hungarian": 261, "switzerland": 46, "va": 130}
"""Complete rows of each hospital, of which FLamby's README lists 199 + 104, 172 + 89, 30 + 16 and 85 + 45."""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(what FEDUNFOLD_DATA names, the cache), both empty."""
    monkeypatch.setenv("FEDUNFOLD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDUNFOLD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "natural").mkdir(parents=True)
    return tmp_path / "data" / "natural", tmp_path / "cache" / "natural"


class Server(BaseHTTPRequestHandler):
    """Serves one file, and counts how often."""

    served = 0

    def do_GET(self) -> None:
        Server.served += 1
        self.send_response(200 if self.path == "/play.txt" else 404)
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Server.served = 0
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def public(url: str | None, content: bytes = CONTENT, path: str = "play.txt") -> PublicFile:
    return PublicFile("play.txt", "https://plays.example", url and f"{url}/{path}", hashlib.sha256(content).hexdigest())


def one_sentence(caught: pytest.ExceptionInfo[Any], *named: str) -> None:
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    for text in named:
        assert text in message


def test_a_download_is_cached(folders: tuple[Path, Path], url: str) -> None:
    path = locate(public(url))
    assert path == folders[1] / "play.txt" and path.read_bytes() == CONTENT
    assert locate(public(url)) == path and Server.served == 1
    assert [file.name for file in folders[1].iterdir()] == ["play.txt"]


def test_a_file_that_was_brought_comes_first(folders: tuple[Path, Path], url: str) -> None:
    (folders[0] / "play.txt").write_text("mine", encoding="utf-8")
    assert locate(public(url)) == folders[0] / "play.txt" and Server.served == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [({"content": b"another"}, "checksum differs"), ({"path": "absent.txt"}, "could not be downloaded")],
)
def test_what_is_not_the_known_file_is_refused(
    folders: tuple[Path, Path], url: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError) as caught:
        locate(public(url, **change))
    one_sentence(caught, "play.txt", named, "https://plays.example", "FEDUNFOLD_DATA")
    assert not folders[1].exists()


def test_without_a_network_or_an_address_the_page_is_named(folders: tuple[Path, Path], url: str) -> None:
    for file in (public(None), public("http://127.0.0.1:1"), PublicFile("play.txt", "https://plays.example", url)):
        with pytest.raises(InputError) as caught:
            locate(file)
        one_sentence(caught, "play.txt", "https://plays.example")
    assert Server.served == 0  # nothing is read of which no checksum is known


def test_a_cache_that_cannot_be_written_is_named(folders: tuple[Path, Path], url: str) -> None:
    folders[1].parent.parent.joinpath("cache").write_text("a file", encoding="utf-8")
    with pytest.raises(WriteError) as caught:
        locate(public(url))
    one_sentence(caught, "FEDUNFOLD_CACHE")


@pytest.mark.parametrize(
    "name",
    ["heart-disease", "vowel", "wisdm"],
)
def test_an_environment_whose_file_is_missing_says_where_to_get_it(folders: tuple[Path, Path], name: str) -> None:
    with pytest.raises(InputError) as caught:
        fu.environment(name).load()
    one_sentence(caught, "is missing", "https://", "FEDUNFOLD_DATA")


def test_numbers_and_gaps_are_read() -> None:
    assert parse_numbers([["1", " 2.5 "], ["?", ""]], "t").tolist()[0] == [1.0, 2.5]
    assert np.isnan(parse_numbers([["1", "2"], ["?", ""]], "t")[1]).all()
    for rows, named in (
        ([["1"], ["1", "2"]], "line 8: has 2 cells, where 1 belong"),
        ([["1"], ["x"]], "line 8: 'x' is no number"),
        ([["1"], ["inf"]], "line 8: has an infinite number"),
        ([], "no rows"),
    ):
        with pytest.raises(InputError) as caught:
            parse_numbers(rows, "t.csv", 7)
        one_sentence(caught, "t.csv", named)


def test_test_rows_do_not_move_the_scale() -> None:
    rng = np.random.default_rng(0)
    x, train = rng.normal(3, 2, (50, 4)), np.arange(40)
    moved = x.copy()
    moved[40:] = 1e6
    assert np.array_equal(standardise(x, train)[:40], standardise(moved, train)[:40])
    assert np.allclose(standardise(x, train)[:40].mean(0), 0, atol=1e-6)
    assert np.allclose(standardise(x, train)[:40].std(0), 1, atol=1e-6)
    x[:, 2] = np.nan  # a column that nobody has
    assert not standardise(x, train)[:, 2].any()


def heart_files(folder: Path) -> dict[str, list[int]]:
    """Files in the format of UCI's, with rows that lack a value; the targets of the complete rows by hospital."""
    rng = np.random.default_rng(7)
    kept = {}
    for hospital, count in HEART_ROWS.items():
        lines, targets = [], []
        for row in range(count + 9):
            cells = [*map(str, rng.integers(1, 4, 13)), str(rng.integers(0, 5))]
            cells[10:13] = ["?", "?", "3"]  # slope, ca and thal count for nothing
            if row % 5 == 0 and row < 45:
                cells[int(rng.integers(0, 10))] = "?"
            else:
                targets.append(min(int(cells[-1]), 1))
            lines.append(",".join(cells))
        kept[hospital] = targets
        (folder / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return kept


def test_heart_disease_is_prepared_and_split_as_in_flamby(folders: tuple[Path, Path]) -> None:
    kept = heart_files(folders[0])
    data = fu.environment("heart-disease").load()
    assert data.sizes == (199, 172, 30, 85) and len(data.y_test) == 104 + 89 + 16 + 45
    assert data.task.name == "binary" and data.features == (13,)
    expected = []
    for targets in kept.values():
        _, test = train_test_split(
            np.arange(len(targets)), train_size=0.66, test_size=0.34, random_state=43, stratify=targets
        )
        expected += [targets[row] for row in sorted(test)]
    assert data.y_test.flatten().tolist() == expected
    assert float(data.x.mean(0).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("text", "named"),
    [("1,2,3\n", "3 columns"), ("a" + ",1" * 13 + "\n", "'a' is no number"), ("1" + ",?" * 13 + "\n", "without a gap")],
)
def test_a_wrong_hospital_file_is_named(folders: tuple[Path, Path], text: str, named: str) -> None:
    heart_files(folders[0])
    (folders[0] / "processed.va.data").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        heart_disease.HeartDiseaseSource().load_clients()
    one_sentence(caught, "processed.va.data", named)


@pytest.mark.parametrize("separator", [", ", "  "])
def test_vowels_are_divided_by_speaker(folders: tuple[Path, Path], separator: str) -> None:
    rng = np.random.default_rng(3)
    lines = [
        separator.join(
            [str(int(speaker > 7)), str(speaker), "0", *(f"{v:.3f}" for v in rng.normal(size=10)), str(vowel)]
        )
        for speaker in range(15)
        for _ in range(6)
        for vowel in range(11)
    ]
    file = folders[0] / "vowel-context.data"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    env = fu.environment("vowel")
    data = env.load()
    assert data.keys == tuple(f"speaker-{k}" for k in range(15)) and data.features == (10,)
    assert data.sizes == (44,) * 15 and data.label_counts.eq(4).all() and len(data.y_test) == 15 * 22
    again = fu.environment("vowel").replace(data={"source": "vowel", "seed": 1}).load()
    assert fu.environment("vowel").load().checksum == data.checksum != again.checksum
    file.write_text("\n".join([*lines[:4], lines[4].replace("0", "20", 2)]), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        fu.environment("vowel").load()
    one_sentence(caught, "vowel-context.data, line 5", "no speaker")


def test_damaged_files_are_named(folders: tuple[Path, Path]) -> None:
    header = "pid," + ",".join(f"f{i}" for i in range(39)) + ",E,T\n"
    row = "TCGA-A" + ",0" * 39 + ",1,30\n"
    split = "pid,fold,fold2\nTCGA-A,train,train_0\n"
    cases: list[tuple[Any, dict[str, str], str]] = [
        (tcga_brca.TcgaBrcaSource(), {"tcga_brca.csv": "age\n1\n"}, "no first column pid"),
        (tcga_brca.TcgaBrcaSource(), {"tcga_brca.csv": "pid,E,T\nA,0,1\n"}, "39 features"),
        (tcga_brca.TcgaBrcaSource(), {"tcga_brca.csv": header + row + row}, "lists a pid twice"),
        (tcga_brca.TcgaBrcaSource(), {"tcga_brca.csv": header + "TCGA-A,0\n"}, "line 2: has 2 cells"),
        (
            tcga_brca.TcgaBrcaSource(),
            {"tcga_brca.csv": header + row, "tcga_train_test_split.csv": split.replace("TCGA-A", "TCGA-B")},
            "lists patient TCGA-B",
        ),
        (
            tcga_brca.TcgaBrcaSource(),
            {"tcga_brca.csv": header + row, "tcga_train_test_split.csv": split},
            "train_0 to test_5",
        ),
        (wisdm.WisdmSource(), {"wisdm_transformed.arff": "@relation x\n"}, "no @data"),
        (wisdm.WisdmSource(), {"wisdm_transformed.arff": "@relation x\n@data\n1,2,Walking\n"}, "line 3: is not an id"),
        (shakespeare.ShakespeareSource(), {"shakespeare.txt": "No name\nat all\n"}, "no speaker before"),
        (shakespeare.ShakespeareSource(), {"shakespeare.txt": "KENT:\nMy lord!\n"}, "no speaker with 20"),
        (shakespeare.ShakespeareSource(), {"shakespeare.txt": "KENT:\nÉdgar!\n\n" * 20}, "the character 'É'"),
    ]
    for source, files, named in cases:
        for name, text in files.items():
            (folders[0] / name).write_text(text, encoding="utf-8")
        with pytest.raises(InputError) as caught:
            source.load_clients()
        one_sentence(caught, str(folders[0]), named)
    (folders[0] / "shakespeare.txt").write_bytes(b"KENT:\n\xff\n")
    with pytest.raises(InputError, match="not UTF-8"):
        shakespeare.ShakespeareSource().load_clients()
