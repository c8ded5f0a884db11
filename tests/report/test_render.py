"""The page as a file: it holds what it should, and nothing from a folder becomes markup or script."""

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.report.grouping import group_runs
from fedunfold.report.panels import cards_of
from fedunfold.report.render import build
from fedunfold.report.tables import settings_table
from fedunfold.report.text import escaped
from fedunfold.runs.labels import LONGEST, distinct, plain
from fedunfold.runs.reader import read_runs
from tests.support.run_records import write_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
LINK = '<a href="https://example.org">north</a>'


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def page_of(*folders: Path) -> str:
    pytest.importorskip("plotly", reason="the report needs plotly (extra report)")
    return build(read_runs(folders)).html


def test_nothing_from_a_folder_becomes_markup(tmp_path: Path) -> None:
    kept = write_run(tmp_path / "kept")
    hostile = write_run(
        tmp_path / "<b>bold",
        name=HOSTILE,
        keys=(LINK, HOSTILE),
        methods=(HOSTILE, "fedavg"),
        class_names=(HOSTILE, "<b>", LINK),
        nested={"<i>": ["<u>"], HOSTILE: HOSTILE},
    )
    found = Elements(page_of(kept, hostile))
    harmless = Elements(page_of(kept, write_run(tmp_path / "other", name="elsewhere", nested={"a": ["b"], "c": "d"})))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in harmless.tags]
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    (data,) = [script for script in found.scripts if script.startswith("{")]
    assert "<" not in data
    assert json.loads(data).keys() == json.loads(next(s for s in harmless.scripts if s.startswith("{"))).keys()


def test_labels_in_charts_have_no_tags_of_the_charts_own(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "kept", keys=(LINK, "<b>south</b>"), methods=("fedavg", "<i>duw"), class_names=("<b>", "a", LINK)
    )

    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for inner in value.values() for text in strings(inner)]
        if isinstance(value, list | tuple):
            return [text for inner in value for text in strings(inner)]
        return [value] if isinstance(value, str) else []

    cards = cards_of([""], group_runs(read_runs([folder])))
    texts = [text for found in cards.values() for card in found for d in card.drawings for text in strings(d.chart)]
    assert escaped(LINK) in texts
    assert not [text for text in texts if re.search(r"<(?!extra></extra>|/extra>)", text)]


def test_only_the_pages_own_scripts_may_run_and_nothing_is_loaded(tmp_path: Path) -> None:
    html = page_of(write_run(tmp_path / "kept"))
    found = Elements(html)
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "content-security" in str(a).lower())
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    code = [script for script in found.scripts if not script.startswith("{")]
    assert len(code) == 3
    assert {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in code} == allowed
    assert not [a for _, a in found.tags if a.get("src") or str(a.get("href", "#"))[:1] not in "#d"]


def test_every_chart_is_one_that_plotly_knows(tmp_path: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="the report needs plotly (extra report)")
    cards = cards_of([""], group_runs(read_runs([write_run(tmp_path / "kept", methods=("fedavg", "duw"))])))
    assert all(cards.values())
    for found in cards.values():
        for card in found:
            for drawing in card.drawings:
                # Colours are the page's business: any will do to have the rest checked.
                text = re.sub(r"var\(--[\w-]+\)[0-9a-f]{0,2}", "#123456", json.dumps(drawing.chart))
                graph_objects.Figure(json.loads(text))


def test_a_folder_of_learned_weights_only(tmp_path: Path) -> None:
    html = page_of(write_run(tmp_path / "kept", command="learn"))
    assert "Not in this report: test results." in html
    assert 'id="weights"' in html
    assert 'id="scores"' not in html


def test_settings_within_settings_end_somewhere(tmp_path: Path) -> None:
    deep: object = 1
    for _ in range(12):
        deep = {"a": [deep], "b": deep}
    folder = write_run(tmp_path / "kept", deep=deep, lr=0.1 + 0.2)
    rows = settings_table(read_runs([folder])[0]).rows
    assert {("lr", "0.3"), ("deep.b.a", "…"), ("deep.b.b.b.b.b.b.b", "…")} <= set(rows)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_runs([write_run(tmp_path / "kept")])
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InputError, match=r"pip install 'fedunfold\[report\]'") as caught:
        build(runs)
    assert "\n" not in str(caught.value)


@given(st.text())
def test_labels_are_one_printable_line_and_hold_no_tag(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= LONGEST
    assert shown.isprintable()
    assert not {"<", ">"} & set(escaped(shown))


@given(st.lists(st.sampled_from(["a", "b", "a (2)", "a (3)"])))
def test_labels_are_told_apart_and_keep_their_order(labels: list[str]) -> None:
    found = distinct(labels)
    assert len(set(found)) == len(labels)
    assert all(new.startswith(old) for new, old in zip(found, labels, strict=True))


def test_only_a_mean_is_called_one(tmp_path: Path) -> None:
    averaged, robust = "models are averaged", "median, trimmed mean or Krum where"
    mean = page_of(write_run(tmp_path / "mean"))
    assert averaged in mean
    assert robust not in mean
    for name in ("median-fedavg", "fedavg trimmed:share=0.2", "fedavg krum"):
        page = page_of(write_run(tmp_path / name, methods=("fedavg", name)))
        assert robust in page
        assert averaged not in page


def test_long_names_of_classes_are_cut_on_axes_only(tmp_path: Path) -> None:
    long = "squamous cell carcinoma"
    folder = write_run(tmp_path / "kept", class_names=("melanoma", long, long + " II"))
    cards = cards_of([""], group_runs(read_runs([folder])))
    short = ["melanoma", "squamous cell car…", "squamous cell car… (2)"]
    assert cards["labels"][0].drawings[0].chart["data"][0]["x"] == short
    assert cards["classes"][0].drawings[0].chart["layout"]["xaxis"]["categoryarray"] == short
    assert cards["classes"][0].numbers is not None
    assert [row[0] for row in cards["classes"][0].numbers.rows] == ["melanoma", long, long + " II"]


def test_the_page_opens_with_the_verdict_and_folds_the_rest(tmp_path: Path) -> None:
    html = page_of(write_run(tmp_path / "kept"))
    opening = html[html.index('<section id="findings">') : html.index("<h3>Final models")]
    shown, folded = opening.split("<details>")
    assert '<p class="verdict">Use duw-fedavg: of 2 federated methods' in shown
    assert "<summary>6 more findings</summary>" in folded
    assert (shown.count("<li>"), folded.count("<li>")) == (0, 6), "10 points of ±25 are within noise"


def test_warnings_stand_before_findings_and_say_what_they_are(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "kept")
    lines = folder / "metrics.jsonl"
    lines.write_text(lines.read_text().replace("[0.4, 0.6]", "[0.05, 0.95]"))
    html = page_of(folder)
    warned = html.index("<li>Warning: duw-fedavg all but silences client north: its mean weight over the 2 rounds is")
    assert html.index('<p class="verdict">') < warned < html.index("6 more findings")
