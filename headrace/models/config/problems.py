# SPDX-License-Identifier: Apache-2.0
"""Problems of a configuration: file, line, field, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration. Prints as one line."""

    path: str
    """`<model>/config.pbtxt`: without the folders above, which a remote caller must not see."""
    line: int | None
    """None if the file does not mention the field, or there is no file."""
    field: str
    """`input.dims`; "" for the whole file."""
    text: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        message = f"{place}: {self.field}: {self.text}" if self.field else f"{place}: {self.text}"
        # Names come from files of unknown origin; a line break in one would forge a second problem.
        return message if message.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


class ConfigError(InvalidArgument):
    """Raised when a configuration cannot be served, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        more = len(self.problems) - 1
        rest = f" (and {more} more; 'headrace models check' lists all)" if more > 0 else ""
        super().__init__(f"{self.problems[0]}{rest}")
