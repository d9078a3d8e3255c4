# SPDX-License-Identifier: Apache-2.0
"""`make docs`: the site builds strictly, has every document in its navigation, and asks no other host for anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from headrace.version import __version__

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import build_docs  # noqa: E402

EMPTY = {"img", "link", "meta", "input", "br", "hr", "source", "path", "rect", "use"}
COUNTED = ("li", "pre", "table", "tr", "h1", "h2", "h3", "img", "code")


class PageReader(HTMLParser):
    """What a page points to, what can be pointed to in it, and which elements its text has."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.navigation: list[str] = []
        self.elements: Counter[str] = Counter()
        self._open: list[tuple[str, str]] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given.get("id") or "", given.get("name") or ""}
        if tag not in EMPTY:
            self._open.append((tag, given.get("class") or ""))
        if tag == "a" and "href" in given:
            inside_primary = any(name == "nav" and "md-nav--primary" in classes for name, classes in self._open)
            (self.navigation if inside_primary else self.links).append(given["href"] or "")
        elif tag in ("img", "script", "link", "source", "iframe"):
            self.loads.append(given.get("src") or given.get("href") or given.get("srcset") or "")
        if ("article", "md-content__inner md-typeset") in self._open and (tag != "h1" or "id" in given):
            self.elements[tag] += 1  # a heading without an id is one that the theme adds where the text has none

    def handle_endtag(self, tag: str) -> None:
        while tag not in EMPTY and self._open and self._open.pop()[0] != tag:
            pass


@pytest.fixture(scope="module")
def pages(docs_site: Path) -> dict[Path, PageReader]:
    """Every page but the one for wrong addresses."""
    files = [file for file in sorted((docs_site / __version__).rglob("*.html")) if file.name != "404.html"]
    return {file: PageReader(file) for file in files}


def place(file: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = unquote(link).partition("#")
    return ((file.parent / path).resolve() if path else file), anchor


def documents() -> list[Path]:
    """The Markdown files that are pages of the site."""
    return [
        *sorted(ROOT.glob("docs/**/*.md")),
        *(path for item in build_docs.OUTSIDE for path in sorted(ROOT.glob(item))),
    ]


def page_of(document: Path, docs_site: Path) -> Path:
    inside = document.relative_to(ROOT / "docs" if document.is_relative_to(ROOT / "docs") else ROOT)
    name = "index" if inside.stem == "README" else inside.stem
    return docs_site / __version__ / inside.parent / f"{name}.html"


def test_every_document_is_a_page(docs_site: Path, pages: dict[Path, PageReader]) -> None:
    assert {page_of(document, docs_site) for document in documents()} == set(pages)
    assert len(pages) > 80


def test_every_page_is_in_the_navigation(docs_site: Path, pages: dict[Path, PageReader]) -> None:
    start = docs_site / __version__ / "index.html"
    assert {place(start, link)[0] for link in pages[start].navigation} == set(pages)


def test_links_and_pictures_are_there(pages: dict[Path, PageReader]) -> None:
    for file, page in pages.items():
        for link in (*page.links, *page.navigation, *page.loads):
            if link.startswith(("https://", "http://", "mailto:", "data:")):
                continue
            target, anchor = place(file, link)
            assert target.is_file(), f"{file.name}: {link}"
            assert not anchor or target.suffix != ".html" or anchor in pages[target].anchors, f"{file.name}: {link}"


def test_no_page_requests_another_host(docs_site: Path, pages: dict[Path, PageReader]) -> None:
    assert [link for page in pages.values() for link in page.loads if "//" in link] == []
    for style in docs_site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), style


def test_the_text_has_what_github_shows(docs_site: Path, pages: dict[Path, PageReader]) -> None:
    """Python-Markdown reads some lists, tables and blocks otherwise; a document must not depend on that."""
    github = MarkdownIt("commonmark").enable("table")
    for document in documents():
        if document.name == "index.md":  # its cards are for the site
            continue
        text = document.read_text()
        text += build_docs.files_section(build_docs.example_files(text, document))
        html = re.sub(r"<pre><code", "<pre", github.render(text))  # a block is counted once
        wanted = Counter(re.findall(r"<(\w+)[\s>/]", html))
        page = pages[page_of(document, docs_site)]
        result = page.elements - Counter(code=page.elements["pre"])
        differ = {
            counter: (result[counter], wanted[counter]) for counter in COUNTED if result[counter] != wanted[counter]
        }
        assert not differ, document


def test_cells_and_code_of_a_page_fit_a_phone() -> None:
    head = "<thead><tr><th>a</th><th><code>b</code></th></tr></thead>"
    table = f"<table>{head}<tbody><tr><td>1</td><td></td></tr></tbody></table>"
    assert '<tr><td data-label="a">1</td><td data-label="b"></td></tr>' in build_docs.on_page_content(table)
    html = "<td><code>GET /v2/models/{model}/infer</code></td><code>serve --http-port 1</code>"
    assert build_docs.on_page_content(html) == (
        "<td><code>GET /v2<wbr>/models<wbr>/{model}<wbr>/infer</code></td>"
        '<code>serve <span class="option">--http-port</span> 1</code>'
    )


def test_an_example_shows_its_files(docs_site: Path) -> None:
    page = docs_site / __version__ / "examples/10-kubernetes/index.html"
    assert 'href="#serviceyaml"' in page.read_text()
    assert "storageUri" in page.read_text().partition('id="files-of-this-example"')[2]


def test_the_release_is_shown_and_listed(docs_site: Path, tmp_path: Path) -> None:
    assert f"Headrace {__version__}" in (docs_site / __version__ / "index.html").read_text()
    assert json.loads((docs_site / "versions.json").read_text()) == [
        {"version": __version__, "title": __version__, "aliases": []}
    ]
    for release in ("0.9.0", "0.10.0", "notes"):
        (tmp_path / release).mkdir()
        (tmp_path / release / "index.html").touch()
    build_docs.list_releases(tmp_path)
    assert [item["version"] for item in json.loads((tmp_path / "versions.json").read_text())] == ["0.10.0", "0.9.0"]
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()


def test_the_gallery_has_every_picture() -> None:
    assert build_docs.gallery_problems() == []


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](none.md)\n")
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0].replace("hooks: [", "hooks: [] #")
    (tmp_path / "mkdocs.yml").write_text(settings)
    arguments = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "contains a link 'none.md'" in done.stderr


def test_make_docs_calls_the_script() -> None:
    result = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/.docs", "docs"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "scripts/build_docs.py build/site" in result.stdout
