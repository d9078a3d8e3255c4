# SPDX-License-Identifier: Apache-2.0
"""The 26 tests and the surfaces at one glance, drawn from the tables of `README.md` beside this, into the same file.

    python tests/security/matrix.py

A row of those tables names surfaces, or says `not` and why. `test_security_table` reads them by the same function.
"""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent / "README.md"
SERVER = ("HTTP", "gRPC", "WebSocket")
SURFACES = (*SERVER, "microservice", "gateway", "router", "launcher", "operator", "local fleet", "console")
HELD, NOT, EMPTY = "x", "-", "?"
_MARKED = re.compile(r"(<!-- matrix:start -->\n).*?(<!-- matrix:end -->)", re.DOTALL)
_ROW = re.compile(r"^\| *(.*?) *\| *(.*?) *\| *(.*?) *\| *(.*?) *\|$", re.MULTILINE)


def cells(text: str) -> dict[int, dict[str, str]]:
    """What the tables say of each surface, by the number of the test. Raises ValueError for a surface that is none."""
    results: dict[int, dict[str, str]] = {number: {} for number in range(1, 27)}
    number = 0
    for test, named, _, held_by in _ROW.findall(_MARKED.sub("", text)):
        if test in ("test", "---"):
            continue
        number = int(test.split(" ")[0]) if test else number
        mark = NOT if named.startswith("not ") else HELD
        for surface in named.removeprefix("not ").split(", "):
            for item in SERVER if surface == "server" else (surface,):
                if item not in SURFACES or not held_by or results[number].get(item, mark) != mark:
                    raise ValueError(f"{number}: {named} | {held_by}")
                results[number][item] = mark
    return results


def names(text: str) -> dict[int, str]:
    """What each test is called; 14 has two parts."""
    document: dict[int, list[str]] = {}
    for number, name in re.findall(r"^\| (\d+) (.*?) \|", _MARKED.sub("", text), re.MULTILINE):
        document.setdefault(int(number), []).append(name)
    return {number: " and ".join(parts) for number, parts in document.items()}


def drawn(text: str) -> str:
    """The text with its matrix."""
    called = names(text)
    lines = ["| | " + " | ".join(SURFACES) + " |", "| --- |" + " :-: |" * len(SURFACES)]
    for number, row in cells(text).items():
        marks = " | ".join(row.get(surface, EMPTY) for surface in SURFACES)
        lines.append(f"| {number} {called[number]} | {marks} |")
    output = f"{HELD}: there is a test. {NOT}: it does not apply; the row says why.\n"
    return _MARKED.sub(lambda found: found[1] + "\n".join(lines) + f"\n\n{output}" + found[2], text)


if __name__ == "__main__":
    README.write_text(drawn(README.read_text()))
