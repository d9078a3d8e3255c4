# SPDX-License-Identifier: Apache-2.0
"""The names people give to versions: which is newer, and which number each has in the engine.

Called by `staging`. Knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LATEST = "latest"

_VERSION = re.compile(r"[vV]?[0-9][A-Za-z0-9_.+-]{0,63}")
_PIECE = re.compile(r"[0-9]+|[A-Za-z]+")
_MOST_DIGITS = 18

SortKey = tuple[tuple[int, int, str], ...]


def is_version(name: str) -> bool:
    """Whether a folder's name looks like a version: `1`, `v1.2.0`, `2024-05-01`."""
    return _VERSION.fullmatch(name) is not None


def sort_key(name: str) -> tuple[SortKey, str]:
    """Sorts versions from old to new: 1.10 behind 1.9, and 1.2.0-rc1 before 1.2.0."""
    # Words stand before the end, so that a release is newer than what was tried before it; numbers behind it.
    pieces = _PIECE.findall(name.removeprefix("v").removeprefix("V"))
    key = [(2, int(piece), "") if piece.isdigit() else (0, 0, piece.lower()) for piece in pieces]
    return (*key, (1, 0, "")), name


def is_numbered(names: Iterable[str]) -> bool:
    """Whether all of them are plain numbers, which then are those of the engine."""
    return all(name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS for name in names)


def numbers_of(names: Iterable[str], before: Mapping[str, int]) -> dict[str, int]:
    """A number for each name, in the order of the versions.

    Who had one keeps it, as long as the order allows. Otherwise all get new ones: a number never means two versions.
    """
    ordered = sorted(names, key=sort_key)
    if is_numbered(ordered):
        return {name: int(name) for name in ordered}
    highest = max(before.values(), default=0)
    numbers: dict[str, int] = {}
    for name in ordered:
        number = before.get(name)
        if number is None:
            highest += 1
            number = highest
        numbers[name] = number
    if list(numbers.values()) == sorted(numbers.values()):
        return numbers
    first = max(before.values(), default=0) + 1
    return {name: first + index for index, name in enumerate(ordered)}
