# SPDX-License-Identifier: Apache-2.0
"""What the tests read in a Markdown file: fenced blocks, commands with the output shown for them, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_FENCE = re.compile(r"^```(\S*) ?(.*)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def documents() -> list[Path]:
    """Every Markdown file that people read, except those beside other code."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def name_of(document: Path) -> str:
    """A document's path below the root of the repository."""
    return str(document.relative_to(ROOT))


@dataclass
class Block:
    """A fenced block: ```language name."""

    language: str
    name: str
    line: int
    """The line of the file that the first line of the block is on."""
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass
class Step:
    """A command of a `console` block, and the lines shown after it."""

    command: str
    line: int
    shown: list[str] = field(default_factory=list)


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    results: list[Block] = []
    current: Block | None = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if current is not None:
            if line.rstrip() == "```":
                results.append(current)
                current = None
            else:
                current.lines.append(line)
        elif fence is not None:
            current = Block(fence[1], fence[2].strip(), number + 1)
    if current is not None:
        raise ValueError(f"the block that begins on line {current.line} has no end")
    return results


def steps_of(block: Block) -> list[Step]:
    """The commands of a `console` block. A backslash at the end of a line continues the command."""
    steps: list[Step] = []
    continues = False
    for number, line in enumerate(block.lines, block.line):
        if continues:
            steps[-1].command += "\n" + line
        elif line.startswith("$ "):
            steps.append(Step(line[2:], number))
        elif steps:
            steps[-1].shown.append(line)
        else:
            raise ValueError(f"line {number}: output before the first command")
        continues = line.endswith("\\") and (continues or line.startswith("$ "))
    return steps


def prose_of(text: str) -> str:
    """A document without its fenced blocks."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links_of(text: str) -> Iterator[str]:
    """The targets of links."""
    return (match[1] for match in _LINK.finditer(_CODE.sub("code", prose_of(text))))


def code_spans_of(text: str) -> Iterator[str]:
    """What stands `like this` in the prose."""
    return (match[1] for match in _CODE.finditer(prose_of(text)))


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    headings = [line.lstrip("#").strip() for line in prose_of(text).splitlines() if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
