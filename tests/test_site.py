"""Chromium shows every page of the documentation.

A browser without a network opens the site from loopback, so a request to another host is an error on the console.
"""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait
from support.processes.browser import open_browser, resize, set_color_scheme
from support.sources.docs_reader import DOCS, blocks, commands, sides

pytestmark = pytest.mark.service("Chromium")

WORDS = {
    "multi-node": "several-machines", "multi-gpu": "multi-gpu", "docker": "docker", "jupyter": "notebooks",
    "lora": "cookbook/lora", "tutorial": "five-lines", "faq": "troubleshooting",
    "troubleshooting": "troubleshooting", "performance": "performance", "streaming": "cookbook/streaming",
    # Guides are above the reference and the design notes.
    "slurm": "slurm", "kubernetes": "kubernetes", "ddp": "from-ddp",
    "wandb": "tracking", "fp8": "precision", "mps": "devices", "rocm": "devices", "ema": "ema", "inference": "inference",
    "vs code": "vscode", "optuna": "cookbook/optuna", "glossary": "glossary", "quickstart": "install",
}  # fmt: skip
"""Words of the field, and the page that the search shows first."""

# Each change of the window is seen a moment later, so a script waits until the page is as expected, or ten seconds.
FIT = """
const [done, end] = [arguments[0], performance.now() + 10000]
const scrolls = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement))
function look() {
  const wide = document.documentElement.scrollWidth > innerWidth ? ["the page"] : []
  for (const code of document.querySelectorAll("article :not(pre) > code")) {
    if (code.getBoundingClientRect().right > innerWidth + 1 && !scrolls(code.parentElement)) wide.push(code.textContent)
  }
  const text = document.createRange()
  for (const cell of document.querySelectorAll("article td")) {
    text.selectNodeContents(cell)
    // A narrow and high column, because another one is wide.
    if (text.getBoundingClientRect().height > 4 * cell.offsetWidth) wide.push(`the column beside ${cell.textContent}`)
  }
  wide.length && performance.now() < end ? setTimeout(look, 50) : done(wide)
}
look()
"""
COLORS = """
const [expected, done] = arguments, end = performance.now() + 10000
function look() {
  const scheme = document.body.dataset.mdColorScheme
  scheme != expected && performance.now() < end ? setTimeout(look, 10) : done(scheme)
}
look()
"""
FIND = """
const [page, done] = arguments, end = performance.now() + 10000
function look() {
  const first = document.querySelector(".md-search-result__link")?.pathname
  first == page || performance.now() > end ? done(first) : setTimeout(look, 50)
}
look()
"""
ROWS = """
const [selector, done] = arguments, end = performance.now() + 10000
function look() {
  const rows = {}
  for (const box of [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect())) {
    rows[Math.round(box.top)] = (rows[Math.round(box.top)] || 0) + 1
  }
  const counts = Object.values(rows)
  new Set(counts).size > 1 && performance.now() < end ? setTimeout(look, 50) : done(counts)
}
look()
"""
READ = """
const links = [...document.querySelectorAll("a[href]")].map(a => a.href)
const next = document.querySelector(".md-footer__link--next")
return [links, [...document.querySelectorAll("[id]")].map(e => e.id), next && next.href]
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with open_browser() as driver:
        yield driver


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class WithoutScripts(Quiet):
    """Two thirds of the time of a page are its scripts, which set no width."""

    def translate_path(self, path: str) -> str:
        return os.devnull if path.startswith("/assets/javascripts/bundle.") else super().translate_path(path)


@contextmanager
def serve(site: Path, handler: type[Quiet]) -> Iterator[str]:
    """Serve the site on loopback, and return its address."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of the site."""
    with serve(site, Quiet) as served:
        yield served


SCHEMES = ("default", "slate")


@pytest.mark.parametrize("page", ["", "five-lines/", "api/accelerator/"])
def test_a_page_has_the_colors_of_the_system_and_scripts_without_an_error(
    address: str, browser: WebDriver, page: str
) -> None:
    browser.get_log("browser")
    browser.get(f"{address}{page}")
    for scheme in SCHEMES:
        set_color_scheme(browser, "dark" if scheme == "slate" else "light")
        assert browser.execute_async_script(COLORS, scheme) == scheme
    assert not browser.get_log("browser")


VIEWS = {
    "one": (WithoutScripts, {"phone": ()}),
    "all": (Quiet, {"desktop": SCHEMES, "phone": SCHEMES[::-1]}),
}
"""Widths and color schemes: each page is shown in one in `make test-services`, and in all in `make test-full`."""


@pytest.mark.parametrize("views", ["one", pytest.param("all", marks=pytest.mark.full)])
def test_every_page_is_reached_and_shown_at_any_width_in_both_schemes(
    site: Path, browser: WebDriver, views: str
) -> None:
    handler, shown = VIEWS[views]
    with serve(site, handler) as address:
        check_pages(site, address, browser, shown)


def check_pages(site: Path, address: str, browser: WebDriver, views: Mapping[str, tuple[str, ...]]) -> None:
    """Follow the links to the next page, and show each page with each width and color scheme."""
    browser.get_log("browser")
    problems: list[str] = []
    anchors: dict[str, list[str]] = {}
    links: dict[str, list[str]] = {}
    url: str | None = address
    while url:
        browser.get(url)
        for width, schemes in views.items():
            resize(browser, width)
            problems += [f"{url}: {width}: {code} is too wide" for code in browser.execute_async_script(FIT)]
            for scheme in schemes:
                set_color_scheme(browser, "dark" if scheme == "slate" else "light")
                shown = browser.execute_async_script(COLORS, scheme)
                problems += [f"{url}: {width}: {scheme} is shown as {shown}"] * (shown != scheme)
        problems += [f"{url}: {entry['message']}" for entry in browser.get_log("browser")]
        links[url], anchors[url], url = browser.execute_script(READ)
    for origin, targets in links.items():
        for target in {target for target in targets if target.startswith(address)}:
            path, _, anchor = target.partition("#")
            if path not in anchors and not (site / path.removeprefix(address)).is_file():
                problems.append(f"{origin}: {target} does not exist")
            elif anchor and anchor not in anchors.get(path, [anchor]):
                problems.append(f"{origin}: {target} has no such anchor")
    pages = {f"{address}{file.parent.relative_to(site).as_posix()}/" for file in site.rglob("index.html")}
    assert set(links) == {page.replace("/./", "/") for page in pages}, "the navigation leads to every page"
    assert not problems, "\n".join(problems)


def test_no_card_or_button_of_the_first_page_is_left_over_on_a_desktop(
    address: str, browser: WebDriver
) -> None:
    resize(browser, "desktop")
    browser.get(address)
    cards = browser.execute_async_script(ROWS, ".grid.cards > ul > li")
    assert sum(cards) == 4
    assert len(set(cards)) == 1
    assert browser.execute_async_script(ROWS, ".start-buttons a") == [3]


def test_the_menu_of_a_phone_leads_to_a_page(address: str, browser: WebDriver) -> None:
    resize(browser, "phone")
    browser.get(address)
    browser.find_element(By.CSS_SELECTOR, "label[for=__drawer].md-header__button").click()
    link = browser.find_element(By.CSS_SELECTOR, ".md-nav--primary a[href='troubleshooting/']")
    WebDriverWait(browser, 20).until(lambda _: link.is_displayed())
    browser.execute_script("arguments[0].click()", link)
    WebDriverWait(browser, 20).until(lambda _: browser.current_url.endswith("/troubleshooting/"))


def test_the_search_finds_the_words_of_the_field(address: str, browser: WebDriver) -> None:
    resize(browser, "desktop")
    browser.get(address)
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    field.click()
    shown = {}
    for word, page in WORDS.items():
        field.clear()
        field.send_keys(word)
        shown[word] = browser.execute_async_script(FIND, f"/{page}/")
    assert shown == {word: f"/{page}/" for word, page in WORDS.items()}


def test_the_copy_button_takes_the_commands_of_a_console_block_and_the_new_side_of_a_diff(
    address: str, browser: WebDriver
) -> None:
    grant = {"origin": address, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", grant)
    resize(browser, "desktop")
    browser.get(f"{address}five-lines/")
    buttons = browser.find_elements(
        By.CSS_SELECTOR, ":is(.language-console, .language-diff) .md-code__button"
    )
    shown = [block for block in blocks(DOCS / "five-lines.md") if block.language in {"console", "diff"}]
    assert {block.language for block in shown} == {"console", "diff"}
    for button, block in zip(buttons, shown, strict=True):
        button.click()
        copied = [command.text for command in commands(block)] or sides(block.text)[1].splitlines()
        expected = "\n".join(copied)
        WebDriverWait(browser, 20).until(
            lambda _, expected=expected: clipboard(browser) == expected, expected
        )


def clipboard(browser: WebDriver) -> str:
    return str(browser.execute_script("return navigator.clipboard.readText()"))
