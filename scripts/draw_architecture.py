# SPDX-License-Identifier: Apache-2.0
"""Draw `docs/pictures/packages.svg`: the packages of Headrace and their imports; `--check` only compares.

The arrows are the imports in the code, without those that follow from others (where `a` imports `b` and `b` imports `c`,
`a` may import `c`, too). The text in a box is the first line of the package's docstring.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from html import escape
from pathlib import Path

from generated_files import write_or_check

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "headrace"
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
WIDTH, MARGIN, BOX_HEIGHT, ROW_HEIGHT = 1120, 20, 66, 100
PLACES = {
    # package: (row, left, right), in eighths of the width
    "cli": (0, 0, 8),
    "programs": (1, 0, 8),
    "jobs": (2, 0, 6),
    "api": (3, 0, 2.6),
    "fleet": (3, 3.4, 6),
    "engine": (4, 0, 2),
    "platforms": (4, 4, 6),
    "backends": (5, 0, 2),
    "models": (6, 0, 2),
    "net": (6, 2.2, 3.8),
    "client": (6, 6.2, 8),
    "core": (7, 0, 8),
}
_STYLE = """
  .back { fill: #ffffff; } .box { fill: #eef4f7; stroke: #0b5c7a; }
  text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #16202a; } .name { font-weight: 600; font-size: 14px; }
  .soft { fill: #55626e; font-size: 11.5px; } .line { stroke: #b3471d; fill: none; stroke-width: 2; } .tip { fill: #b3471d; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #11161b; } .box { fill: #1a2a33; stroke: #6cc5e8; }
    text { fill: #e8edf1; } .soft { fill: #a9b5c0; } .line { stroke: #ffa477; } .tip { fill: #ffa477; }
  }
"""


def main() -> int:
    """Write, or compare."""
    return write_or_check({PICTURE: draw()})


def imports() -> dict[str, set[str]]:
    """Return which packages each package imports directly, imports inside functions and for types included."""
    edges: dict[str, set[str]] = defaultdict(set)
    for package in PLACES:
        for file in (PACKAGE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                modules = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names] if isinstance(node, ast.Import)
                    else []
                )  # fmt: skip
                for module in modules:
                    parts = module.split(".")
                    if parts[0] == "headrace" and len(parts) > 1 and parts[1] in PLACES and parts[1] != package:
                        edges[package].add(parts[1])
    return edges


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out the edges that follow from others."""

    def reachable(package: str) -> set[str]:
        return edges[package].union(*(reachable(below) for below in edges[package]))

    return {
        package: {target for target in targets if not any(target in reachable(other) for other in targets - {target})}
        for package, targets in list(edges.items())
    }


def draw() -> str:
    """Return the picture as SVG."""
    edges = imports()
    parts = [_arrow(package, target) for package, below in sorted(reduced(edges).items()) for target in sorted(below)]
    parts += [_box(package) for package in PLACES]
    height = 8 * ROW_HEIGHT + MARGIN
    parts.append(_text(MARGIN, height - 12, "A package imports only packages below it.", "soft"))
    description = "; ".join(
        f"{package} imports {', '.join(sorted(targets))}" for package, targets in sorted(edges.items())
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d">\n'
        "<!-- Made by scripts/draw_architecture.py; do not edit. -->\n"
        f'<title id="t">The packages of Headrace and what they import</title><desc id="d">{escape(description)}.</desc>\n'
        f'<style>{_STYLE}</style>\n<rect class="back" width="{WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )


def _edges_of_box(package: str) -> tuple[float, float, float]:
    """Return left, right and top of a package's box."""
    row, left, right = PLACES[package]
    unit = (WIDTH - 2 * MARGIN) / 8
    return MARGIN + left * unit, MARGIN + right * unit, MARGIN + row * ROW_HEIGHT


def _arrow(package: str, target: str) -> str:
    """Draw a line from the bottom of a box to the top of another, straight down where one is above the other."""
    left, right, top = _edges_of_box(package)
    target_left, target_right, target_top = _edges_of_box(target)
    overlap_left, overlap_right = max(left, target_left), min(right, target_right)
    if overlap_left < overlap_right:
        start = end = (overlap_left + overlap_right) / 2
    else:
        is_right = target_left >= right
        start, end = (right - 30, target_left + 30) if is_right else (left + 30, target_right - 30)
    bottom = top + BOX_HEIGHT
    return (
        f'<path class="line" d="M{start:.0f} {bottom} L{end:.0f} {target_top - 6:.0f}"/>'
        f'<path class="tip" d="M{end - 5:.0f} {target_top - 8:.0f} h10 l-5 8 z"/>'
    )


def _box(package: str) -> str:
    left, right, top = _edges_of_box(package)
    docstring = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or ""
    lines = _wrapped(docstring.splitlines()[0], int((right - left - 24) / 6.2))
    if len(lines) > 2:
        lines = [lines[0], f"{lines[1].rstrip(',')} ..."]
    shape = f'x="{left:.0f}" y="{top}" width="{right - left:.0f}" height="{BOX_HEIGHT}"'
    parts = [f'<rect class="box" {shape} rx="6"/>', _text(left + 12, top + 20, package, "name")]
    parts += [_text(left + 12, top + 38 + 15 * number, line, "soft") for number, line in enumerate(lines)]
    return "".join(parts)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _wrapped(text: str, columns: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > columns and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


if __name__ == "__main__":
    sys.exit(main())
