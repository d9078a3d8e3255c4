# SPDX-License-Identifier: Apache-2.0
"""Write the tables of keys in `docs/guides/configuration.md` from the table of options."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.programs.configuration.option import OPTIONS, Option
from headrace.programs.configuration.option_table import KEYS

GUIDE = Path(__file__).parents[3] / "docs/guides/configuration.md"
START, END = "<!-- keys:start -->", "<!-- keys:end -->"


def keys_table() -> str:
    """Return the tables of all keys but `options`, by section."""
    parts = []
    keyed = [option for option in KEYS.values() if option.section != OPTIONS]
    for section, options in groupby(keyed, key=lambda option: option.section):
        rows = [
            f"| {_names(option)} | {_cell(option.help)} | {_takes(option)} | {_default(option.default)} |"
            for option in options
        ]
        parts.append(
            f"### {section}\n\n| key | meaning | takes | default |\n| --- | --- | --- | --- |\n" + "\n".join(rows)
        )
    return "\n\n".join(parts)


def table_in(text: str) -> str:
    """Return the text between the markers."""
    return text.partition(START)[2].partition(END)[0].strip()


def with_table(text: str) -> str:
    """Return the guide with new tables."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{keys_table()}\n{END}{rest.partition(END)[2]}"


def _names(option: Option) -> str:
    names = [option.key, *option.variables[:-1], *([f"--{option.flag}"] if option.flag else [])]
    return ", ".join(f"`{name}`" for name in names)


def _takes(option: Option) -> str:
    if option.type == "rows":
        return f"a list of {', '.join(f'`{field.key}`' for field in option.fields)}"
    return _cell(option.takes)


def _default(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text()))
