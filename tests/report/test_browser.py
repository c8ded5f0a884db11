"""The report in a browser, as a reader meets it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from fedunfold.report.render import build
from fedunfold.runs.reader import read_runs
from tests.report.test_render import HOSTILE, LINK
from tests.support.run_records import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("plotly", reason="the report needs plotly (extra report)")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("FEDUNFOLD_CHROMIUM") or shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; FEDUNFOLD_CHROMIUM can name one"),
]

QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]
MINUTE = 60_000  # the machines that test are slow at times


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, timeout=MINUTE)
        yield started
        started.close()


class Reader:
    """Opens reports, and keeps what went wrong in them and what they asked the network for."""

    def __init__(self, browser: "Browser", folder: Path) -> None:
        self._browser, self._folder = browser, folder
        self.complaints: list[str] = []

    def open(self, *runs: Path, width: int = 1280, dark: bool = False) -> "Page":
        file = self._folder / f"report-{len(self._browser.contexts)}.html"
        file.write_text(build(read_runs(runs)).html, encoding="utf-8")
        scheme: Literal["dark", "light"] = "dark" if dark else "light"
        context = self._browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        context.set_default_timeout(MINUTE)
        page = context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self._note(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    def _note(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(url)


@pytest.fixture(scope="module")
def opened(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(browser, tmp_path_factory.mktemp("reports"))


@pytest.fixture
def reader(opened: Reader) -> Iterator[Reader]:
    yield opened
    assert opened.complaints == []


@pytest.fixture(scope="module")
def kept(opened: Reader, tmp_path_factory: pytest.TempPathFactory) -> "Page":
    """A comparison's report, opened once: that takes longer than what is done with it."""
    return opened.open(write_run(tmp_path_factory.mktemp("runs") / "kept", methods=("fedavg", "duw")))


def weights(page: "Page") -> list[list[float]]:
    """What the heatmap shows, [K][T]."""
    found: list[list[float]] = page.evaluate(
        "document.querySelector('#weights .chart').data[0].z.map((row) => Array.from(row))"
    )
    return found


LEARNED = [pytest.approx([0.5, 0.7], abs=1e-4), pytest.approx([0.5, 0.3], abs=1e-4)]


def test_all_charts_are_drawn(reader: Reader, kept: "Page") -> None:
    assert kept.locator(".chart").count() == 6
    for number in range(6):
        assert kept.locator(".chart").nth(number).locator(".scatterlayer path, .heatmaplayer image").count() > 0
    assert kept.locator("#findings .verdict").inner_text().startswith("Use duw: of 2 federated methods")


def test_the_slider_moves_by_keyboard_and_the_weights_with_it(reader: Reader, kept: "Page") -> None:
    slider = kept.get_by_role("slider", name="Outer iteration")
    slider.focus()
    kept.keyboard.press("End")
    assert weights(kept) == LEARNED
    kept.keyboard.press("ArrowLeft")
    assert weights(kept) == [pytest.approx([0.5, 0.5], abs=1e-4)] * 2
    assert slider.get_attribute("aria-valuetext") == "After iteration 1 of 2, outer loss 3"
    kept.keyboard.press("End")
    assert weights(kept) == LEARNED
    assert kept.locator("#weights output").inner_text() == "After iteration 2 of 2: learned"


def test_playing_goes_through_the_iterations_and_stops(reader: Reader, kept: "Page") -> None:
    kept.get_by_role("slider", name="Outer iteration").press("Home")
    button = kept.locator("#weights .play")
    button.click()
    sync_api.expect(button).to_have_text("Pause")
    sync_api.expect(button).to_have_text("Play", timeout=MINUTE)
    assert weights(kept) == LEARNED


def test_another_methods_weights_are_chosen_by_keyboard(reader: Reader, kept: "Page") -> None:
    slider = kept.get_by_role("slider", name="Outer iteration")
    kept.locator("#weights input[type=radio]:checked").focus()
    kept.keyboard.press("ArrowRight")
    assert weights(kept) == [pytest.approx([0.4, 0.4], abs=1e-4), pytest.approx([0.6, 0.6], abs=1e-4)]
    assert slider.is_disabled()
    kept.keyboard.press("ArrowLeft")
    assert weights(kept) == LEARNED
    assert slider.is_enabled()


def test_light_and_dark_can_be_changed_by_keyboard(reader: Reader, kept: "Page") -> None:
    colours = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.chart').layout.font.color]"
    toggle = kept.get_by_role("button", name="Dark theme")
    assert toggle.get_attribute("aria-pressed") == "false"
    light = kept.evaluate(colours)
    toggle.press("Enter")
    assert toggle.get_attribute("aria-pressed") == "true"
    assert all(old != new for old, new in zip(light, kept.evaluate(colours), strict=True))
    toggle.press("Enter")
    assert kept.evaluate(colours) == light


def test_dark_is_the_readers_own_choice_and_a_phone_needs_no_scrolling_sideways(reader: Reader, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"a-run-with-quite-a-long-name-{n}", keys=("n" * 64, "south")) for n in range(2)]
    page = reader.open(*runs, width=375, dark=True)
    assert page.get_by_role("button", name="Dark theme").get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_names_from_a_hostile_folder_are_shown_as_they_are(reader: Reader, tmp_path: Path) -> None:
    page = reader.open(write_run(tmp_path / "kept", name=HOSTILE, keys=(LINK, HOSTILE), methods=(HOSTILE, "fedavg")))
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator("img, .chart a, svg b, svg i").count() == 0
    assert page.locator("script").count() == 4
    labels = page.locator("#weights .chart").first.locator(".ytick text").all_text_contents()
    assert {LINK, HOSTILE} == set(labels)
