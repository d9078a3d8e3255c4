# SPDX-License-Identifier: Apache-2.0
"""The table of limits in `docs/guides/limits.md`, made from `headrace/core/limits.py`.

The tests compare the two. After a change of the limits: `python tests/docs/limits_table.py` writes the table anew.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from headrace.core import limits

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "limits.md"
START, END = "<!-- limits:start -->", "<!-- limits:end -->"


def limits_table() -> str:
    """Every limit with its default and what it bounds."""
    rows = ["| limit | default | what it bounds |", "| --- | ---: | --- |"]
    rows += [f"| `{name}` | {default_text(name)} | {text} |" for name, text in _described()]
    return "\n".join(rows)


def default_text(name: str) -> str:
    """A default as people write it."""
    value = getattr(limits.Limits(), name)
    if name.endswith("_seconds"):
        return f"{value:g} s"
    if name.endswith("_bytes"):
        size, unit = (value // limits.MIB, "MiB") if value % limits.MIB == 0 else (value // limits.KIB, "KiB")
        return f"{size} {unit}"
    return f"{value:,}"


def table_in(text: str) -> str:
    """What stands between the markers."""
    return text.partition(START)[2].partition(END)[0].strip()


def with_table(text: str) -> str:
    """The guide with the table made anew."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{limits_table()}\n{END}{rest.partition(END)[2]}"


def _described() -> list[tuple[str, str]]:
    """The fields of `Limits` and the docstring after each, which only the source has."""
    tree = ast.parse(inspect.getsource(limits))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Limits").body
    described = []
    for this, after in zip(body, body[1:], strict=False):
        if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            described.append((this.target.id, " ".join(str(text).split())))
    return described


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text()))
