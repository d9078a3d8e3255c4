# SPDX-License-Identifier: Apache-2.0
"""Generate the page with all options of `headrace serve` from their table. Run it to update the page."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.serve_arguments import IGNORED
from headrace.programs.configuration.option import Option
from headrace.programs.configuration.option_table import FLAGS, PANELS

PAGE = Path(__file__).parents[2] / "docs/guides/serve-options.md"

_HEAD = """<!-- Made by tests/cli/options_page.py; do not edit. -->
# Options of headrace serve

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
    for panel, options in PANELS.items():
        parts.append(f"\n## {panel}\n\n| option | meaning | default |\n| --- | --- | --- |\n")
        parts += [_row(option) for option in options if option.flag and not option.deprecated]
    parts.append(_OLD)
    parts += [
        f"| {', '.join(f'`{flag}`' for flag in option.flags)} | {_cell(option.help)} |\n"
        for option in FLAGS.values()
        if option.deprecated
    ]
    parts.append(_IGNORED)
    parts += [f"| `{ignored.flag}` | {ignored.reason} |\n" for ignored in IGNORED]
    return "".join(parts)


def _row(option: Option) -> str:
    names = ", ".join(f"`--{flag}`" for flag in option.flags)
    repeatable = " Repeatable." if option.many else ""
    return f"| {names} `{_cell(option.placeholder)}` | {_cell(option.help)}{repeatable} | {option.default_text} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
