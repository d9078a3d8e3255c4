# SPDX-License-Identifier: Apache-2.0
"""Make a site of the documents: `python scripts/build_docs.py [FOLDER]`, build/site unless told. `make docs` calls it.

The Markdown files that people read become pages with one navigation; links between them become links between pages,
and what else they point to is copied. Plain files without scripts, which ask nobody for anything: open index.html.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "bench/README.md",
    "docs/**/*.md",
    "examples/**/README.md",
)
GROUPS = {
    "Start here": "/docs/start install /README /examples/README /docs/comparison from-*",
    "Examples": "/examples/*/README",
    "Models": (
        "serve-a-folder model-[cf]* /docs/formats write-a-* language-models prefill-decode other-engines "
        "media-and-storage ab-testing batch"
    ),
    "Clients": "use-from-clients python-client predict openai console",
    "Running it": "configuration serve-options run-several-processes router measure-and-tune metrics doctor-and-top asgi",
    "Security": "/SECURITY threat-model serve-over-tls limits-and-keys limits",
    "Jobs and platforms": "microservice job-api services containers slurm kubernetes-services cloud-platforms",
    "Fleets": "local-fleet explain install-on-kubernetes inference-services fleet-commands model-agent",
    "More guides": "*",
    "Reference": "/docs/reference/*",
    "How it is made": (
        "/docs/architecture /docs/performance /docs/reliability /bench/* /docs/decisions/* /CONTRIBUTING /CHANGELOG /*"
    ),
}
"""The navigation: a page is in the first group with a pattern that fits it, in their order. Those without / are guides."""

_TARGET = re.compile(r'(?<=[ "])(href|src)="([^"]*)"')
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{up}site.css">
</head>
<body>
<a class="skip" href="#text">Skip to the text</a>
<nav class="site" aria-label="Site"><a href="{up}index.html">Headrace</a>{navigation}</nav>
<main id="text">{body}</main>
</body>
</html>
"""


@dataclass
class Page:
    """A document on its way to the site."""

    source: Path
    place: Path
    """Below the site's folder."""
    tokens: list[Token]
    headings: list[tuple[int, str, str]] = field(default_factory=list)
    """Level, anchor, text."""

    @property
    def title(self) -> str:
        """Its first heading."""
        return self.headings[0][2] if self.headings else self.source.stem


def main(folder: Path) -> None:
    """Make the site anew."""
    parser = MarkdownIt("commonmark", {"html": True, "highlight": _coloured}).enable("table")
    sources = sorted({path for pattern in PAGES for path in ROOT.glob(pattern) if "build" not in path.parts[:-1]})
    pages = {source: _read(source, parser) for source in sources}
    groups = grouped(list(pages.values()))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    style = (ROOT / "scripts/build_docs.css").read_text()
    light, dark = (HtmlFormatter(style=name).get_style_defs("pre") for name in ("default", "github-dark"))
    dark = re.sub(r"^pre \{[^}]*\}$", "", dark, flags=re.MULTILINE)
    (folder / "site.css").write_text(f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{style}")
    for page in pages.values():
        target = folder / page.place
        target.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(page.place.parts) - 1)
        body = _TARGET.sub(
            lambda match, page=page: f'{match[1]}="{_followed(match[2], page, pages, folder)}"',
            parser.renderer.render(page.tokens, parser.options, {}),
        )
        body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
        body = body.replace("</h1>", "</h1>" + _contents(page), 1)
        title = html.escape(page.title if page.title == "Headrace" else f"{page.title} - Headrace")
        target.write_text(_PAGE.format(title=title, up=up, navigation=_navigation(groups, page, up), body=body))
    print(f"{folder / 'index.html'}: {len(pages)} pages")


def grouped(pages: list[Page]) -> dict[str, list[Page]]:
    """Every page in one group."""
    left = {str(page.source.relative_to(ROOT).with_suffix("")): page for page in pages}
    groups: dict[str, list[Page]] = {}
    for name, patterns in GROUPS.items():
        for pattern in patterns.split():
            whole = pattern[1:] if pattern.startswith("/") else f"docs/guides/{pattern}"
            for path in [each for each in left if fnmatchcase(each, whole)]:
                groups.setdefault(name, []).append(left.pop(path))
    return groups


def _read(source: Path, parser: MarkdownIt) -> Page:
    path = source.relative_to(ROOT)
    if path == Path("docs/start.md"):
        place = Path("index.html")
    else:
        inside = path.relative_to("docs") if path.parts[0] == "docs" else path
        place = inside.with_suffix(".html")
    page = Page(source, place, parser.parse(source.read_text()))
    for index, token in enumerate(page.tokens):
        if token.type == "heading_open":
            text = page.tokens[index + 1]
            plain = "".join(each.content for each in text.children or () if each.type in ("text", "code_inline"))
            anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")  # as GitHub has them
            token.attrSet("id", anchor)
            page.headings.append((int(token.tag[1]), anchor, plain))
    return page


def _followed(link: str, page: Page, pages: dict[Path, Page], folder: Path) -> str:
    """A link of a document as one of its page; a file that is no page is copied to where the link finds it."""
    path, mark, anchor = html.unescape(link).partition("#")
    if not path or "://" in path or path.startswith(("mailto:", "data:")):
        return link
    target = (page.source.parent / unquote(path)).resolve()
    if target.is_dir():  # its own page, or the first of those in it
        target = min((each for each in pages if target in each.parents), key=lambda each: (each.stem != "README", each))
    if target in pages:
        place = pages[target].place
    elif target.is_file() and target.is_relative_to(ROOT):
        place = "files" / target.relative_to(ROOT)
        (folder / place.parent).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, folder / place)
    else:
        raise SystemExit(f"{page.source}: {link} leads to nothing that the site could show")
    return html.escape(os.path.relpath(place, page.place.parent) + mark + anchor)


def _contents(page: Page) -> str:
    links = [f'<a href="#{anchor}">{html.escape(text)}</a>' for level, anchor, text in page.headings if level == 2]
    return f'<nav class="contents" aria-label="On this page">{" ".join(links)}</nav>' if len(links) > 2 else ""


def _navigation(groups: dict[str, list[Page]], current: Page, up: str) -> str:
    parts = []
    for name, pages in groups.items():
        rows = []
        for page in pages:
            mark = ' aria-current="page"' if page is current else ""
            rows.append(f'<li><a href="{up}{page.place}"{mark}>{html.escape(page.title)}</a></li>')
        opened = " open" if current in pages or name == "Start here" else ""
        parts.append(f"<details{opened}><summary>{name}</summary><ul>{''.join(rows)}</ul></details>")
    return "".join(parts)


def _coloured(code: str, language: str, file: str) -> str:
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    caption = f'<span class="file">{html.escape(file)}</span>' if file else ""
    return f"<pre>{caption}<code>{highlight(code, lexer, HtmlFormatter(nowrap=True))}</code></pre>"


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "site")
