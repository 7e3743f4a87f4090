"""A headless Chromium for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

__all__ = ["WIDTHS", "open_browser", "resize", "set_color_scheme"]

WIDTHS = {"desktop": 1280, "phone": 390}


@contextmanager
def open_browser() -> Iterator[WebDriver]:
    """Open a headless Chromium that reaches loopback only."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for argument in (
        "--headless=new",
        "--no-sandbox",  # Chromium has none for root
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def resize(browser: WebDriver, width: str) -> None:
    """Set the width of the page to that of a screen."""
    screen = {"width": WIDTHS[width], "height": 900, "deviceScaleFactor": 1, "mobile": width == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def set_color_scheme(browser: WebDriver, scheme: str) -> None:
    """Set the preferred colour scheme to `dark` or `light`."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
