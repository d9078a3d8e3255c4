# SPDX-License-Identifier: Apache-2.0
"""The documentation site in a real Chromium: on a desktop, on a phone, in dark colours; search, copy buttons, versions."""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT

from headrace.version import __version__

sys.path.insert(0, str(ROOT / "scripts"))
import build_docs  # noqa: E402

pytestmark = [pytest.mark.platform, pytest.mark.worker("docs-browser")]

PAGES = (
    "index",
    "start",
    "guides/model-configuration",
    "guides/from-kserve",
    "reference/commands",
    "reference/kinds",
    "reference/routes",
    "gallery",
)
DESKTOP = {"viewport": {"width": 1360, "height": 1000}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
BRIGHTNESS = "() => Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(docs_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site with an older release beside this one."""
    folder = tmp_path_factory.mktemp("published") / "site"
    shutil.copytree(docs_site, folder)
    shutil.copytree(docs_site / __version__, folder / "0.0.9")
    build_docs.list_releases(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from console_tab import chromium

    with chromium() as running:
        yield running


class Visit:
    """A visitor of the site. The browser must have nothing to complain of, and must have asked this server only."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self._url = url
        self._context = browser.new_context(**options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(60_000)
        self._complaints: list[str] = []
        self._asked: list[str] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self._complaints.append(said.text))
        self.page.on("pageerror", lambda error: self._complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked.append(request.url))

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._context.close()
        if kind is None:
            others = {asked for asked in self._asked if not asked.startswith((self._url, "blob:", "data:"))}
            assert not others and not self._complaints, (others, self._complaints)

    def open(self, name: str = "index") -> Any:
        self.page.goto(f"{self._url}/{__version__}/{name}.html")
        self.page.wait_for_selector(".md-version__current")
        return self.page


def test_the_root_leads_to_the_newest_release(browser: Any, url: str) -> None:
    with Visit(browser, url, **DESKTOP) as visit:
        visit.page.goto(f"{url}/")
        visit.page.wait_for_url(f"{url}/{__version__}/index.html")
        visit.page.wait_for_selector(".md-version__current")
        tabs = visit.page.locator(".md-tabs__link").all_inner_texts()
        assert [tab.strip() for tab in tabs] == ["Home", "Serve", "Language models", "Fleets", "Operate", "Reference"]
        assert visit.page.locator(".grid.cards > ul > li").count() == 4


def test_another_release_can_be_chosen(browser: Any, url: str) -> None:
    with Visit(browser, url, **DESKTOP) as visit:
        page = visit.open("start")
        assert page.inner_text(".md-version__current").strip() == __version__
        page.hover(".md-version")
        page.click(".md-version__link:text('0.0.9')")
        page.wait_for_url(f"{url}/0.0.9/**")
        page.wait_for_selector(".md-version__current:text('0.0.9')")


def test_search_finds_dynamic_batching(browser: Any, url: str) -> None:
    with Visit(browser, url, **DESKTOP) as visit:
        page = visit.open()
        page.click(".md-search__input")
        page.keyboard.type("dynamic batching")
        first = page.locator(".md-search-result__item").first
        first.wait_for()
        assert "Configure a model" in first.inner_text()
        first.locator("a:has-text('Dynamic batching')").click()
        page.wait_for_url("**/guides/model-configuration.html*#dynamic-batching")
        page.wait_for_selector(".md-version__current")


def test_the_copy_button_takes_the_commands_only(browser: Any, url: str) -> None:
    with Visit(browser, url, permissions=["clipboard-read", "clipboard-write"], **DESKTOP) as visit:
        page = visit.open("guides/serve-a-folder")
        block = page.locator(".language-console").first
        block.hover()
        block.locator("button.md-code__button").click()
        page.wait_for_selector(".md-dialog--active")
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied.split("\n") == ["mkdir models/echo/1", "headrace models check models"]


def test_the_next_page_is_at_the_foot(browser: Any, url: str) -> None:
    with Visit(browser, url, **DESKTOP) as visit:
        page = visit.open("guides/install")
        assert "Start here" in page.inner_text(".md-footer__link--prev")
        page.click(".md-footer__link--next")
        page.wait_for_url("**/guides/model-formats.html")
        page.wait_for_selector(".md-version__current")


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_a_phone(browser: Any, url: str, name: str) -> None:
    with Visit(browser, url, **PHONE) as visit:
        page = visit.open(name)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        wide = "tables => tables.filter(table => table.getBoundingClientRect().right > 390).length"
        assert page.locator(".md-content table:not([class])").evaluate_all(wide) == 0, "a table has to be scrolled"
        name_in_head = page.locator(".md-header__topic .md-ellipsis").first
        assert name_in_head.evaluate("element => element.scrollWidth <= element.clientWidth"), "the name is cut off"
        page.click("label.md-header__button[for=__drawer]")
        page.wait_for_selector(".md-nav--primary .md-nav__link:visible")


def test_colours_follow_the_system_and_the_button(browser: Any, url: str) -> None:
    for scheme, dark in (("dark", True), ("light", False)):
        with Visit(browser, url, color_scheme=scheme, **DESKTOP) as visit:
            page = visit.open("guides/install")
            assert (page.evaluate(BRIGHTNESS) < 80) is dark
            page.click("label[title='Use light colours']")
            assert page.evaluate(BRIGHTNESS) > 200
            page.click("label[title='Use dark colours']")
            assert page.evaluate(BRIGHTNESS) < 80


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "guides/model-configuration", "reference/commands"])
def test_text_can_be_read(browser: Any, url: str, name: str, scheme: str) -> None:
    """axe-core finds no text with too little contrast in what we write."""
    from console_tab import BROWSER

    (axe,) = BROWSER.glob("axe-*.js")
    with Visit(browser, url, color_scheme=scheme, **DESKTOP) as visit:
        page = visit.open(name)
        page.evaluate(axe.read_text())
        rules = "['color-contrast', 'image-alt', 'link-name', 'button-name']"
        reported = page.evaluate(f"axe.run('.md-content', {{runOnly: {rules}}})")
        assert [
            (violation["id"], [node["html"] for node in violation["nodes"]]) for violation in reported["violations"]
        ] == []
