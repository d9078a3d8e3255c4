# SPDX-License-Identifier: Apache-2.0
"""`make docs`: the site is whole. Every page can be reached, every link and picture is there, and nobody else is asked."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]


class Looked(HTMLParser):
    """What a page points to, and what can be pointed to in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.navigation: list[str] = []
        self._in_navigation = False
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or "")
        if tag == "nav":
            self._in_navigation = given.get("class") == "site"
        if tag == "a" and "href" in given:
            (self.navigation if self._in_navigation else self.links).append(given["href"] or "")
        elif tag in ("img", "script", "link", "source", "iframe"):
            self.loads.append(given.get("src") or given.get("href") or given.get("srcset") or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "nav":
            self._in_navigation = False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Looked]:
    folder = tmp_path_factory.mktemp("docs") / "site"
    subprocess.run([sys.executable, ROOT / "scripts/build_docs.py", folder], check=True, capture_output=True)
    return {file: Looked(file) for file in sorted(folder.rglob("*.html"))}


def place(file: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = unquote(link).partition("#")
    return ((file.parent / path).resolve() if path else file), anchor


def test_every_document_is_a_page(site: dict[Path, Looked]) -> None:
    documents = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/[0-9]*/README.md")]
    assert len(site) > len(documents) > 50
    assert len({file.name for file in site}) > 50


def test_links_and_pictures_are_there(site: dict[Path, Looked]) -> None:
    for file, page in site.items():
        for link in (*page.links, *page.navigation, *page.loads):
            if link.startswith(("https://", "http://", "mailto:", "data:")):
                continue
            target, anchor = place(file, link)
            assert target.is_file(), f"{file.name}: {link}"
            assert not anchor or target.suffix != ".html" or anchor in site[target].anchors, f"{file.name}: {link}"


def test_every_page_is_in_the_navigation_of_every_page(site: dict[Path, Looked]) -> None:
    for file, page in site.items():
        assert {place(file, link)[0] for link in page.navigation} == set(site), file


def test_no_page_asks_another_host(site: dict[Path, Looked]) -> None:
    assert [link for page in site.values() for link in page.loads if "//" in link] == []
    (styles,) = next(iter(site)).parent.glob("site.css")
    assert "url(" not in styles.read_text() and "@import" not in styles.read_text()


def test_make_docs_calls_the_script() -> None:
    told = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/.installed", "docs"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "scripts/build_docs.py build/site" in told.stdout
