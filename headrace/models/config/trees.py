# SPDX-License-Identifier: Apache-2.0
"""A configuration as it was written, with the line of everything: what the three syntaxes have in common.

Made by `text_syntax`, `json_syntax` and `yaml_syntax`, held against the schema by `fitting`. Knows no field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MAX_BYTES = 1 << 20
"""The largest configuration that is read. Real ones have a few thousand bytes."""

MAX_DEPTH = 32
"""How deep blocks and lists may lie in each other. The schema itself goes eight deep; parsers recurse."""

MAX_TOKENS = 200_000
"""How many names, values and brackets are read: what bounds the time, as the bytes bound the memory."""

TOO_MANY = f"there are more than {MAX_TOKENS} names, values and brackets; no configuration needs that"


class SyntaxFault(Exception):
    """What was written cannot be read as its syntax. Stays in this room: `drafts` makes a problem of it."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value without parts."""

    line: int
    kind: Literal["text", "word", "number", "bool", "null"]
    """"text" was in quotes, or is a string of YAML; "word" is what only protobuf text has: TYPE_FP32, true."""
    text: str
    start: int = -1
    """Where it is in the text; only protobuf text tells."""
    end: int = -1


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """A name and its value."""

    name: str
    line: int
    value: Node
    start: int = -1
    end: int = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Names with values, in the order they were written, repeated ones too."""

    line: int
    entries: list[Entry] = field(default_factory=list)


Node = Scalar | Items | Block
