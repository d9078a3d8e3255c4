# SPDX-License-Identifier: Apache-2.0
"""A tab of a real Chromium, for tests of the consoles.

Whatever a test does, the browser must have nothing to complain of and must have asked this server only. With
HEADRACE_PICTURES set to a folder, pictures of the pages are written there (`docs/pictures` has such), and of every page
that axe checks: light and dark, desktop and phone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[3]
BROWSER = ROOT / "build/browser"
PICTURES = os.environ.get("HEADRACE_PICTURES", "")
MISSING = "run 'bash scripts/platforms/browser.sh install' first"
BRIGHTNESS = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"

T = TypeVar("T")


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser."""
    assert (BROWSER / "python").is_dir(), MISSING
    sys.path.insert(0, str(BROWSER / "python"))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        running = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        yield running
        running.close()


def aside(work: Callable[[], T]) -> T:
    """What a function says that runs a loop of its own: Playwright has one in the thread of the tests."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


class Tab:
    """A page of the browser, and what it complained of. Playwright is given functions: the page runs no texts."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._late: list[int] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, place: str = "") -> Any:
        self.page.goto(f"{self.url}/console{place}")
        self.page.wait_for_function("() => document.querySelector('#status').textContent !== 'connecting'")
        return self.page

    def expect(self, status: int, *, late: bool = False) -> None:
        """A browser tells of each answer that is a refusal; those with this status were meant.

        The page may show it before the browser has told of it. late: also those to come until the end, for a page looks now
        and then, and a look may be under way.
        """
        for _ in range(0 if late else 500):
            if any(f"status of {status}" in text for text in self.complaints):
                break
            self.page.wait_for_timeout(20)
        self.complaints = [text for text in self.complaints if f"status of {status}" not in text]
        if late:
            self._late.append(status)

    def close(self) -> None:
        self.context.close()
        for status in tuple(self._late):
            self.expect(status, late=True)
        others = {url for url in self.asked if not url.startswith((self.url, "blob:", "data:"))}
        assert not others and not self.complaints, (others, self.complaints)

    def picture(self, name: str) -> None:
        if PICTURES:
            self.page.screenshot(path=str(Path(PICTURES) / f"console-{name}.png"))

    def findings(self) -> list[tuple[str, str, list[str]]]:
        """What axe-core finds wrong with the page as it is now."""
        if PICTURES:
            page, dark = self.page, self.page.evaluate(BRIGHTNESS) < 128
            brand, title = page.locator(".brand").inner_text(), page.title().split(" – ")[0]
            name = "-".join([brand, title, "dark" if dark else "light", str(page.viewport_size["width"])])
            page.screenshot(
                path=str(Path(PICTURES) / f"{name.replace(' ', '_').replace('/', '_')}.png"), full_page=True
            )
        (axe,) = BROWSER.glob("axe-*.js")
        self.page.evaluate(axe.read_text())
        reported = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            (violation["id"], violation["impact"], [node["html"] for node in violation["nodes"]])
            for violation in reported["violations"]
        ]

    def focused(self) -> str:
        """The name of what has the keyboard."""
        return str(
            self.page.evaluate(
                "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
            )
        )

    def tab_to(self, name: str) -> None:
        """Press Tab until something has the keyboard."""
        for _ in range(60):
            if self.focused() == name:
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{name} is not to be reached; focus is on {self.focused()}")
