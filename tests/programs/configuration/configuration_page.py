# SPDX-License-Identifier: Apache-2.0
"""Write the tables of keys in `docs/guides/configuration.md` from `headrace/programs/configuration/keys.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.programs.configuration.keys import KEYS, Key

GUIDE = Path(__file__).parents[3] / "docs/guides/configuration.md"
START, END = "<!-- keys:start -->", "<!-- keys:end -->"


def keys_table() -> str:
    """Every key, by section."""
    parts = []
    for section, keys in groupby(KEYS, key=lambda key: key.path.partition(".")[0]):
        rows = [f"| {_names(key)} | {_cell(key.help)} | {_takes(key)} | {_default(key.default)} |" for key in keys]
        parts.append(
            f"### {section}\n\n| key | meaning | takes | default |\n| --- | --- | --- | --- |\n" + "\n".join(rows)
        )
    return "\n\n".join(parts)


def table_in(text: str) -> str:
    """What stands between the markers."""
    return text.partition(START)[2].partition(END)[0].strip()


def with_table(text: str) -> str:
    """The guide with the table made anew."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{keys_table()}\n{END}{rest.partition(END)[2]}"


def _names(key: Key) -> str:
    names = [f"`{key.path}`", *(f"`{name}`" for name in dict.fromkeys(key.variables[:-1]))]
    return ", ".join([*names, *([f"`--{key.flag}`"] if key.flag else [])])


def _takes(key: Key) -> str:
    if key.kind == "rows":
        return f"a list of {', '.join(f'`{field.path}`' for field in key.fields)}"
    return _cell(key.takes)


def _default(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text()))
