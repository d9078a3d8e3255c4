# SPDX-License-Identifier: Apache-2.0
"""The tables of limits in `docs/guides/limits.md`, made from `headrace/core/limits.py`.

The tests compare the two. After a change of the limits: `python tests/docs/limits_table.py` writes the tables anew.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from headrace.core import limits

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "limits.md"
TABLES = {"Limits": "limits", "BatchLimits": "batch-limits"}
"""The classes, and the names of the markers around their tables."""


def limits_table(kind: str = "Limits") -> str:
    """Every limit of a class with its default and what it bounds."""
    rows = ["| limit | default | what it bounds |", "| --- | ---: | --- |"]
    rows += [f"| `{name}` | {default_text(name, kind)} | {text} |" for name, text in _described(kind)]
    return "\n".join(rows)


def default_text(name: str, kind: str = "Limits") -> str:
    """A default as people write it."""
    value = getattr(getattr(limits, kind)(), name)
    if name.endswith("_seconds"):
        if value >= limits.DAY_SECONDS:
            return f"{value / limits.DAY_SECONDS:g} d"
        return f"{value:g} s"
    if name.endswith("_bytes"):
        size, unit = (value // limits.MIB, "MiB") if value % limits.MIB == 0 else (value // limits.KIB, "KiB")
        return f"{size} {unit}"
    return f"{value:,}"


def table_in(text: str, kind: str = "Limits") -> str:
    """What stands between the markers."""
    start, end = _markers(kind)
    return text.partition(start)[2].partition(end)[0].strip()


def with_tables(text: str) -> str:
    """The guide with the tables made anew."""
    for kind in TABLES:
        start, end = _markers(kind)
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{limits_table(kind)}\n{end}{rest.partition(end)[2]}"
    return text


def _markers(kind: str) -> tuple[str, str]:
    return f"<!-- {TABLES[kind]}:start -->", f"<!-- {TABLES[kind]}:end -->"


def _described(kind: str) -> list[tuple[str, str]]:
    """The fields of a class and the docstring after each, which only the source has."""
    tree = ast.parse(inspect.getsource(limits))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind).body
    described = []
    for this, after in zip(body, body[1:], strict=False):
        if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            described.append((this.target.id, " ".join(str(text).split())))
    return described


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text()))
