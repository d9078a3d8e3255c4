# SPDX-License-Identifier: Apache-2.0
"""The page of all options of `headrace serve`, made from their tables. Run it to write the page anew."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from headrace.cli.flags import Flag
from headrace.cli.flags import IGNORED
from headrace.cli.options import FLAGS

PAGE = Path(__file__).parents[2] / "docs/guides/serve-options.md"

_HEAD = """# Options of headrace serve

Made from the tables in the code by `python tests/cli/options_page.py`.

Write `--option value` or `--option=value`; underscores will do for dashes. An option that is true or false may stand alone,
which is true: `--strict-readiness=false`, `--strict-readiness false`, `--exit-on-error`. A command line of Triton's or of
its first releases works as it is: the options that mean nothing here are taken with a warning, and the nearest there is is
told for one that does not exist.

Three defaults are not Triton's. Ports listen on loopback only: `--http-address 0.0.0.0` and `--grpc-address 0.0.0.0` let
other machines in. Models are followed (`--model-control-mode poll`), as in Triton's first releases. A model that fails to
load leaves the server up (`--exit-on-error false`).
"""

_OLD = """
## Old names

These work too. Written without the dashes in front:

| option | meaning |
| --- | --- |
"""

_IGNORED = """
## Taken, and without effect

Triton has these; here they only lead to a warning. Written without the dashes in front:

| option | why |
| --- | --- |
"""


def page() -> str:
    """The whole text."""
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
