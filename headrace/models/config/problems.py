# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a configuration, said so that it can be put right: file, line, field, what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument


@dataclass(frozen=True)
class Problem:
    """One thing to put right. Prints as one line."""

    path: str
    """`<model>/config.pbtxt`: what a remote caller may know, and enough for whoever has the folder."""
    line: int | None
    """None when the file does not say it, or there is no file."""
    field: str
    """`input.dims`; "" for the file as a whole."""
    text: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        said = f"{place}: {self.field}: {self.text}" if self.field else f"{place}: {self.text}"
        # Names come from files that anybody may have written; a line break in one would forge a second problem.
        return said if said.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)


class ConfigError(InvalidArgument):
    """Raise when a configuration cannot be served; with everything that is wrong, at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        more = len(self.problems) - 1
        rest = f" (and {more} more; 'headrace models check' lists all)" if more > 0 else ""
        super().__init__(f"{self.problems[0]}{rest}")
