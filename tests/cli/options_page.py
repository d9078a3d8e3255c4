# SPDX-License-Identifier: Apache-2.0
"""Generate the page with all options of `headrace serve` from their tables. Run it to update the page."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from headrace.cli.flags import IGNORED, Flag
from headrace.cli.options import FLAGS

PAGE = Path(__file__).parents[2] / "docs/guides/serve-options.md"

_HEAD = """# Options of headrace serve

Generated from the tables in the code by `python tests/cli/options_page.py`.

Write `--option value` or `--option=value`, with dashes or underscores. A boolean option without a value is true:
`--strict-readiness=false`, `--strict-readiness false`, `--exit-on-error`. Command lines of all Triton releases work
unchanged: options without effect here log a warning, and the error for an unknown option suggests the nearest known one.

Three defaults differ from Triton's. Ports listen on loopback only: `--http-address 0.0.0.0` and `--grpc-address
0.0.0.0` accept other machines. Changed models are reloaded (`--model-control-mode poll`), as in Triton's first
releases. The server keeps running if a model fails to load (`--exit-on-error false`).
"""

_OLD = """
## Old names

These still work. The leading dashes are omitted:

| option | meaning |
| --- | --- |
"""

_IGNORED = """
## Options without effect

These options of Triton only log a warning. The leading dashes are omitted:

| option | why |
| --- | --- |
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    shown = [flag for flag in FLAGS if not flag.old]
    for panel, flags in groupby(shown, key=lambda flag: flag.panel):
        parts.append(f"\n## {panel}\n\n| option | meaning | default |\n| --- | --- | --- |\n")
        parts += [_row(flag) for flag in flags]
    parts.append(_OLD)
    parts += [
        f"| {', '.join(f'`{name}`' for name in flag.names)} | {_cell(flag.help)} |\n" for flag in FLAGS if flag.old
    ]
    parts.append(_IGNORED)
    parts += [f"| `{ignored.name}` | {ignored.why} |\n" for ignored in IGNORED]
    return "".join(parts)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`--{name}`" for name in flag.names)
    several = " Several times, if need be." if flag.many else ""
    default = "" if flag.default is None else f"{flag.default}".removesuffix(".0").lower()
    return f"| {names} `{_cell(flag.shown)}` | {_cell(flag.help)}{several} | {default} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
