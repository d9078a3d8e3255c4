# SPDX-License-Identifier: Apache-2.0
"""All that is wrong with a configuration, told at once."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import InvalidArgument
from headrace.models.config.problems import Problem

MOST = 50
"""After so many, nobody reads on."""

ENVIRONMENT = "environment"


class SettingsError(InvalidArgument):
    """Raise when the configuration of a server has mistakes; one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems[:MOST])
        count = len(problems)
        head = "" if count == 1 else f"the configuration has {count} mistakes:\n"
        super().__init__(head + "\n".join(str(problem) for problem in self.problems))
