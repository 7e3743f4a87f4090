"""Chromium opens reports from disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.remote.webdriver import WebDriver
from support.processes.browser import open_browser, resize, set_color_scheme
from support.processes.commands import call_accel
from support.runs.run_folders import RunWriter

pytestmark = pytest.mark.service("Chromium")

HOSTILE = "<script>document.title = 'changed'</script><img src=x onerror=alert(2)>"
SCROLL = """
const done = arguments[0], end = performance.now() + 20000
const missing = () => [...document.querySelectorAll(".plot")].filter(plot => !plot.querySelector("svg .scatter path"))
async function look() {
  while (missing().length && performance.now() < end) {
    missing()[0].scrollIntoView()
    await new Promise(resolve => setTimeout(resolve, 50))
  }
  done(missing().map(plot => plot.getAttribute("aria-label")))
}
look()
"""
WIDE = """
const done = arguments[0], end = performance.now() + 10000
const scrolls = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement))
function look() {
  const wide = document.documentElement.scrollWidth > innerWidth ? ["the page"] : []
  for (const e of document.querySelectorAll("body *")) {
    if (e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement)) wide.push(e.outerHTML.slice(0, 80))
  }
  wide.length && performance.now() < end ? setTimeout(look, 50) : done(wide)
}
look()
"""
TEXT_COLOR = """
const [dark, done] = arguments, end = performance.now() + 10000
const level = color => color.match(/[0-9]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3
const page = () => level(getComputedStyle(document.body).backgroundColor)
const plots = () => [...document.querySelectorAll(".plot .xtick text")].map(text => level(getComputedStyle(text).fill))
function look() {
  const right = page() < 128 == dark && plots().length && plots().every(text => text > 128 == dark)
  right || performance.now() > end ? done([page(), plots()]) : setTimeout(look, 50)
}
look()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with open_browser() as driver:
        yield driver


def write_run(base: Path, name: str, slow: float, metric: str = "train/loss") -> None:
    """Write a run of four ranks with all kinds of data."""
    folder = RunWriter(base, name, world_size=4, nproc_per_node=4)
    folder.events(
        (0, "start", {"attempt": 0, "world_size": 4, "ranks": [0, 1, 2, 3]}),
        (300, "stall", {"seconds": 60.0, "text": "rank 0 in gather at train.py:7"}),
        (330, "progress", {"seconds": 90.0}),
        (
            500,
            "failure",
            {"rank": 2, "host": "node-1", "cause": "ValueError: " + "x" * 300, "frames": ["y" * 300] * 20},
        ),
        (510, "restart", {"attempt": 1, "reason": "rank 2 failed"}),
        (1000, "end", {"exit_code": 0}),
    )
    steps = [
        (at, at, {metric: slow / (1 + at), "lr": 1e-4, "eval/accuracy": at / 1000}) for at in range(1000)
    ]
    steps[500] = (500, 500, {metric: "NaN"})
    folder.metrics(steps)
    for rank in range(4):
        beat = [(float(at), at * (0.1 + (rank == 2) * slow)) for at in range(1, 1000)]
        folder.beat(rank, beat)
    sizes = ((at, 2**30 * (1 + at / 1000)) for at in range(0, 1000, 5))
    folder.lines(
        "memory.jsonl",
        (
            {
                "time": at,
                "attempt": 0,
                "rss": {str(r): size + r * 2**27 for r in range(4)},
                "gpu": {"0": size},
            }
            for at, size in sizes
        ),
    )
    folder.lines(
        "attempt_0/rank_0/checkpoints.jsonl",
        ({"time": at, "path": f"/work/{at}", "seconds": 1.0, "kind": "save"} for at in range(100, 1000, 100)),
    )


@pytest.mark.full
@pytest.mark.parametrize("names", [["one"], ["one", "two"]], ids=["run", "runs"])
def test_a_report_is_drawn_at_any_width_in_both_schemes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], browser: WebDriver, names: list[str]
) -> None:
    for number, name in enumerate(names):
        write_run(tmp_path / "runs", name, 0.2 + number, HOSTILE if number else "train/loss")
    file = tmp_path / "report.html"
    result = call_accel(capfd, "report", "-o", file, *(tmp_path / "runs" / name for name in names))
    assert result.returncode == 0, result.stderr
    for width, scheme in itertools.product(("desktop", "phone"), ("light", "dark")):
        resize(browser, width)
        set_color_scheme(browser, scheme)
        browser.get(file.as_uri())
        assert browser.execute_async_script(SCROLL) == [], f"{width}: not drawn"
        assert browser.execute_async_script(WIDE) == [], f"{width}: too wide"
        page, plots = browser.execute_async_script(TEXT_COLOR, scheme == "dark")
        assert (page < 128) == (scheme == "dark")
        assert all((text > 128) == (scheme == "dark") for text in plots)
        assert browser.get_log("browser") == []
    set_color_scheme(browser, "light")
    page, plots = browser.execute_async_script(TEXT_COLOR, False)
    assert all(text < 128 for text in plots), "the plots follow a change of the scheme"
    assert browser.title.startswith("train.py")


def test_a_run_is_hidden_by_its_box(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], browser: WebDriver
) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "runs", name, 0.2)
    file = tmp_path / "report.html"
    call_accel(capfd, "report", "-o", file, *(tmp_path / "runs" / name for name in ("one", "two")))
    resize(browser, "desktop")
    browser.get(file.as_uri())
    assert browser.execute_async_script(SCROLL) == []
    count = "return document.querySelectorAll('#plot-0 g.trace.scatter').length"
    assert browser.execute_script(count) == 4, "a line and a cross of each run"
    browser.execute_script("document.querySelector('.runs input').click()")
    assert browser.execute_script(count) == 2
