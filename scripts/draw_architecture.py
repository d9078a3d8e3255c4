# SPDX-License-Identifier: Apache-2.0
"""Draw the two pictures of `docs/architecture.md`; `--check` compares them only.

rooms.svg: the rooms in their layers, from the import contract in pyproject.toml that `make check` holds them to.
request.svg: the way of an HTTP request through them, from the steps in `docs/architecture.md`.
Both follow the colours of who looks, light or dark, and say in words what they show.
"""

from __future__ import annotations

import re
import sys
import tomllib
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
WIDTH, MARGIN, GAP = 1120, 20, 10
_STYLE = """
  .back { fill: #ffffff; } .box { fill: #eef4f7; stroke: #0b5c7a; } .lane { fill: #f6f7f8; stroke: #cfd6dc; }
  text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #16202a; } .name { font-weight: 600; font-size: 14px; }
  .soft { fill: #55626e; font-size: 11.5px; } .way { stroke: #b3471d; fill: none; stroke-width: 2; } .tip { fill: #b3471d; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #11161b; } .box { fill: #1a2a33; stroke: #6cc5e8; } .lane { fill: #1a2128; stroke: #3a454f; }
    text { fill: #e8edf1; } .soft { fill: #a9b5c0; } .way { stroke: #ffa477; } .tip { fill: #ffa477; }
  }
"""
_STEP = re.compile(r"^(\d+)\. (.+?)(?=^\d+\. |\Z)", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([a-z0-9_]+(?:/[a-z0-9_]+)+\.py)`")
_GOES_ON = re.compile(r"([^,;.:()`]+)\(`([a-z0-9_]+(?:/[a-z0-9_]+)+\.py)`\)")
_HOME = re.compile(r"`(\w+)` \(`([a-z0-9_/]+\.py)`\)")


def main() -> int:
    """Draw, or compare."""
    stale = [name for name, made in pictures().items() if not _same(PICTURES / name, made)]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"{', '.join(stale)} out of date, run 'python scripts/draw_architecture.py'")
        return int(bool(stale))
    for name, made in pictures().items():
        (PICTURES / name).write_text(made)
    print(f"{len(stale)} pictures drawn")
    return 0


def pictures() -> dict[str, str]:
    """By file name."""
    return {"rooms.svg": rooms(), "request.svg": request()}


def _same(file: Path, text: str) -> bool:
    return file.exists() and file.read_text() == text


def layers() -> list[list[str]]:
    """The rooms from the top to the bottom; those of one layer know nothing of each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if each["name"] == "Rooms import only what stands below them"]
    return [[room.strip().removeprefix("headrace.") for room in layer.split("|")] for layer in contract["layers"]]


def rooms() -> str:
    """One row of boxes for each layer."""
    high, top, words = 62, MARGIN, _about()
    parts = []
    for layer in layers():
        wide = (WIDTH - 2 * MARGIN - GAP * (len(layer) - 1)) / len(layer)
        for place, room in enumerate(layer):
            parts.append(_box(MARGIN + place * (wide + GAP), top, wide, high, room, words[room]))
        top += high + GAP
    parts.append(_text(MARGIN, top + 16, "A room imports only rooms that stand below it.", "soft"))
    named = "; ".join(", ".join(layer) for layer in layers())
    return _svg(top + 30, "The rooms of Headrace in their layers", f"From the top: {named}.", parts)


def _document() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def _about() -> dict[str, str]:
    """What the document says of each room."""
    block = _document().partition("## Rooms\n")[2].partition("```text\n")[2].partition("```")[0]
    found: dict[str, str] = {}
    room = ""
    for line in block.splitlines():
        name, words = line[:12].strip(), line[12:].strip()
        if line and not line.startswith(" "):
            room, words = (line.strip(), "") if " " not in line.strip() else (name, words)
        found[room] = f"{found.get(room, '')} {words}".strip().replace("`", "")
    return found


def request() -> str:
    """A column for each room that a request passes, and its steps in them from the top to the bottom."""
    steps = way()
    lanes = list(dict.fromkeys(step.room for step in steps))
    wide = (WIDTH - 2 * MARGIN - GAP * (len(lanes) - 1)) / len(lanes)
    high, step_gap, first = 62, 16, MARGIN + 36
    bottom = first + len(steps) * (high + step_gap)
    parts = []
    for place, lane in enumerate(lanes):
        left = MARGIN + place * (wide + GAP)
        shape = f'x="{left:.0f}" y="{MARGIN}" width="{wide:.0f}" height="{bottom - MARGIN}"'
        parts += [f'<rect class="lane" {shape} rx="8"/>', _text(left + 12, MARGIN + 22, lane, "name")]
    centres = []
    for place, step in enumerate(steps):
        left = MARGIN + lanes.index(step.room) * (wide + GAP) + 8
        top = first + place * (high + step_gap)
        centres.append((left + (wide - 16) / 2, top))
        parts.append(_box(left, top, wide - 16, high, f"{step.number}. {step.file}", step.words))
    for (x, y), (next_x, next_y) in pairwise(centres):
        middle = y + high + step_gap / 2
        parts.append(f'<path class="way" d="M{x:.0f} {y + high} V{middle:.0f} H{next_x:.0f} V{next_y - 5:.0f}"/>')
        parts.append(f'<path class="tip" d="M{next_x - 5:.0f} {next_y - 7:.0f} h10 l-5 7 z"/>')
    told = "; ".join(f"{step.number} {step.room}/{step.file}: {step.words}" for step in steps)
    return _svg(bottom + MARGIN, "The way of an HTTP request through the rooms", told, parts)


class Step(NamedTuple):
    """One box of the way."""

    number: str
    room: str
    file: str
    words: str


def way() -> list[Step]:
    """The steps as the document has them: the first file of each, and files of other rooms that it goes on to."""
    section = _document().partition("## The way of an HTTP request\n")[2].partition("\n\nOver HTTP/2")[0]
    homes = dict(_HOME.findall(section))
    found = []
    for number, text in _STEP.findall(section):
        words = " ".join(text.split()).removeprefix("Back: ")
        files = _FILE.findall(words)
        if not files:
            raise SystemExit(f"step {number} of the way of a request names no file")
        said = words.replace(f"`{files[0]}`", "", 1).lstrip(":; ").replace("`", "")
        room, _, inside = files[0].partition("/")
        found.append(Step(number, room, inside, re.split(r"[.;:] ", said)[0]))
        for clause, file in _GOES_ON.findall(words):
            other, _, inside = file.partition("/")
            if other not in (room, "core"):  # core has what is carried, and does nothing with it
                found.append(Step(number, other, inside, clause.strip()))
        # A method that is named without its file: the class was, in a step before.
        for name, deed in re.findall(r"`(\w+)\.(\w+)`", words):
            if name in homes:
                other, _, inside = homes[name].partition("/")
                found.append(
                    Step(number, other, inside, f"{name}.{deed}{words.partition(f'{name}.{deed}`')[2]}".rstrip("."))
                )
    return found


def _box(left: float, top: float, wide: float, high: float, name: str, words: str) -> str:
    parts = [f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{high:.0f}" rx="6"/>']
    parts.append(_text(left + 12, top + 20, name, "name"))
    lines = _wrapped(words, int((wide - 24) / 6.3))
    if len(lines) > 2:
        lines = [lines[0], f"{lines[1].rstrip(',')} ..."]
    parts += [_text(left + 12, top + 37 + 15 * place, line, "soft") for place, line in enumerate(lines)]
    return "".join(parts)


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def _wrapped(text: str, most: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > most and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _svg(high: float, title: str, told: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high:.0f}" role="img" aria-labelledby="t d">\n'
        "<!-- Made by scripts/draw_architecture.py; do not edit. -->\n"
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(told)}</desc>\n<style>{_STYLE}</style>\n'
        f'<rect class="back" width="{WIDTH}" height="{high:.0f}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main())
