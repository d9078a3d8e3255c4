# SPDX-License-Identifier: Apache-2.0
"""Build the documentation site: `python scripts/build_docs.py [FOLDER]` (default: build/site). `make docs` calls it.

FOLDER gets one subfolder per release, `versions.json` for the version switch, and an index.html that leads to the newest
release. Releases that are in FOLDER already stay, so that the switch can lead to them.

The functions named `on_...` are hooks of MkDocs (mkdocs.yml). They add pages from outside of docs/, such as the examples,
and translate GitHub's Markdown into Python-Markdown where the two differ.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from packaging.version import InvalidVersion, Version

from headrace.version import __version__

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "bench/README.md",
    "examples/README.md",
    "examples/*/README.md",
)
"""Pages outside of docs/. They keep their paths, below the site's root."""
LESS_SOUGHT = ("CHANGELOG", "CONTRIBUTING", "licences", "performance", "testing", "internals", "bench/", "decisions/")
"""Pages for people who work on Headrace: search lists them after the others."""
ICON = ROOT / "headrace/programs/console/assets/icon.svg"

_FENCED = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
_NAMED_FENCE = re.compile(r"^```(\w+) ([^\s=\"]+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_CODE = re.compile(r"(`[^`\n]+`)")
_LANGUAGES = {
    ".py": "python", ".sh": "sh", ".yaml": "yaml", ".json": "json", ".pbtxt": "text", ".txt": "text", ".env": "sh",
}  # fmt: skip
_HEAD_COMMENT = re.compile(r"\A<!--.*?-->\s*", re.DOTALL)
_NAME = re.compile(r"<td><code>[\w.\[\]{}]+</code>")
_ROUTE = re.compile(r"<td><code>(?:[A-Z]+ )?/[^<]+</code>")
_INLINE_CODE = re.compile(r"<code>[^<\n]+</code>")
_OPTION = re.compile(r"(?<![^\s>])--?[a-z][\w-]*")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_COLUMN = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_TABLE_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Headrace</title>
<link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0; url={release}/index.html">
<a href="{release}/index.html">Headrace {release}</a>
</html>
"""


def main(folder: Path) -> int:
    """Build this release into FOLDER and list all releases there. Returns the exit code."""
    problems = gallery_problems()
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    target = folder / __version__
    arguments = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    # Otherwise Material announces its end of life at every build: docs/decisions/0018-material-for-mkdocs.md.
    done = subprocess.run(arguments, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False)
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        return done.returncode
    list_releases(folder)
    print(f"{folder / 'index.html'}: {len(list(target.rglob('*.html')))} pages")
    return 0


def gallery_problems() -> list[str]:
    """Pictures that the gallery names and that do not exist, and those that it leaves out."""
    named = set(re.findall(r"\(pictures/([^)]+)\)", (ROOT / "docs/gallery.md").read_text()))
    there = {path.name for path in (ROOT / "docs/pictures").glob("*.png")}
    return [f"docs/gallery.md: docs/pictures/{name} does not exist" for name in sorted(named - there)] + [
        f"docs/gallery.md: add docs/pictures/{name}" for name in sorted(there - named)
    ]


def list_releases(folder: Path) -> None:
    """Write versions.json, newest release first, in mike's format, and the page that leads to the newest."""
    releases = sorted((path for path in folder.iterdir() if _is_release(path)), key=lambda each: Version(each.name))
    listed = [{"version": release.name, "title": release.name, "aliases": []} for release in reversed(releases)]
    (folder / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (folder / "index.html").write_text(_REDIRECT.format(release=listed[0]["version"]))


def _is_release(folder: Path) -> bool:
    try:
        Version(folder.name)
    except InvalidVersion:
        return False
    return (folder / "index.html").is_file()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the release at the foot of every page."""
    config.copyright = f"Headrace {__version__}. Apache License 2.0."
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, and the files there that pages link to."""
    from mkdocs.structure.files import File

    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, f"assets/{ICON.name}", abs_src_path=str(ICON)))
    for page in list(files.documentation_pages()):
        for path in _linked_files(page.content_string, _source(page.src_uri)):
            uri = path.relative_to(ROOT).as_posix()
            if not path.is_relative_to(ROOT / "docs") and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make what GitHub shows into what Python-Markdown reads."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri.startswith(LESS_SOUGHT):
        page.meta["search"] = {"boost": 0.2}
    markdown = _HEAD_COMMENT.sub("", markdown)  # MkDocs takes a title only from the first line
    source = _source(page.file.src_uri)
    here = Path(page.file.src_uri).parent
    shown = example_files(markdown, source)
    markdown += files_section(shown)

    def relative(link: str) -> str:
        path, mark, anchor = link.partition("#")
        target = _target(path, source)
        if target is None:
            return link
        if target in shown:
            return "#" + re.sub(r"[^\w-]", "", shown[target].lower())
        uri = target.relative_to(ROOT / "docs" if target.is_relative_to(ROOT / "docs") else ROOT)
        return os.path.relpath(uri, here) + mark + anchor

    return _NAMED_FENCE.sub(r'```\1 title="\2"', _change_prose(markdown, relative))


def example_files(markdown: str, source: Path) -> dict[Path, str]:
    """The text files of an example, or those that the list of examples links to, with their names in the page's folder.

    The site shows them at the end of the page.
    """
    folder = source.parent
    if not source.is_relative_to(ROOT / "examples"):
        return {}
    files = _linked_files(markdown, source)
    if folder != ROOT / "examples":
        files = (path for path in sorted(folder.rglob("*")) if path.suffix in _LANGUAGES)
    named = {path: path.relative_to(folder).as_posix() for path in files if path.is_relative_to(folder)}
    return {path: name for path, name in named.items() if not name.startswith("build/")}


def files_section(files: dict[Path, str]) -> str:
    """The files as Markdown."""
    parts = [
        f"\n### `{name}`\n\n```{_LANGUAGES[path.suffix]}\n{path.read_text().rstrip()}\n```\n"
        for path, name in files.items()
    ]
    return "".join(["\n## Files of this example\n", *parts]) if parts else ""


def on_page_content(html: str, **_: object) -> str:
    """Let lines break in names and paths of tables, not in options; give cells the name of their column (site.css)."""
    html = _NAME.sub(lambda match: re.sub(r"[._](?=\w)", r"\g<0><wbr>", match[0]), html)
    html = _ROUTE.sub(
        lambda match: re.sub(r"(?<=[\w}])/", r"<wbr>/", match[0].removesuffix("</code>")) + "</code>", html
    )
    html = _INLINE_CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
    return _TABLE.sub(lambda table: _name_cells(table[0]), html)


def _name_cells(table: str) -> str:
    columns = [_TAG.sub("", name).strip().replace('"', "&quot;") for name in _COLUMN.findall(table)]

    def name_row(row: re.Match[str]) -> str:
        names = iter(columns)
        return re.sub(r"<td\b", lambda _: f'<td data-label="{next(names, "")}"', row[0])

    return _TABLE_ROW.sub(name_row, table)


def _change_prose(markdown: str, change_link: Callable[[str], str]) -> str:
    """Change links, and pipes in the code of table cells: GitHub wants them escaped there, Python-Markdown does not."""
    parts = _FENCED.split(markdown)
    for index in range(0, len(parts), 2):
        lines = parts[index].split("\n")
        for number, line in enumerate(lines):
            pieces = _CODE.split(line)
            pieces[::2] = [_LINK.sub(lambda match: change_link(match[1]), piece) for piece in pieces[::2]]
            if line.startswith("|"):
                pieces[1::2] = [piece.replace(r"\|", "|") for piece in pieces[1::2]]
            lines[number] = "".join(pieces)
        parts[index] = "\n".join(lines)
    return "".join(parts)


def _linked_files(markdown: str, source: Path) -> Iterator[Path]:
    files: list[str] = []
    _change_prose(markdown, lambda link: files.append(link) or link)  # type: ignore[func-returns-value]
    for link in files:
        target = _target(link.partition("#")[0], source)
        if target is not None and target.suffix != ".md":
            yield target


def _source(uri: str) -> Path:
    """The file in the repository of a page of the site."""
    inside = ROOT / "docs" / uri
    return inside if inside.exists() else ROOT / uri


def _target(path: str, source: Path) -> Path | None:
    """The file in the repository that a link leads to; None for other links and for what is not there."""
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    target = (source.parent / unquote(path)).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "site"))
