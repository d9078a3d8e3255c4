# SPDX-License-Identifier: Apache-2.0
"""The variables of the environment that begin with INFERENCE_, as values by key. Called by `merging`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.models.config.problems import Problem
from headrace.models.config.scalars import Misfit, nearest, shown
from headrace.programs.configuration.keys import PREFIX, Key
from headrace.programs.configuration.problems import ENVIRONMENT
from headrace.programs.configuration.values import from_text

CONFIG = f"{PREFIX}CONFIG"
"""Names the file."""


@dataclass(slots=True)
class EnvironmentValues:
    """What the environment says."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """By the path of the key: value and variable."""
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_environment(environment: Mapping[str, str], keys: Sequence[Key]) -> EnvironmentValues:
    """Read it. An unknown variable may be another program's: it is a warning, not a mistake."""
    found = EnvironmentValues()
    known = {variable: key for key in keys for variable in key.variables}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable == CONFIG or not text:
            continue
        key = known.get(variable)
        if key is None:
            found.warnings.append(_unknown(variable, list(known)))
            continue
        before = found.values.get(key.path)
        try:
            value = from_text(key, text)
        except Misfit as misfit:
            found.problems.append(Problem(ENVIRONMENT, None, variable, misfit.text))
            continue
        if before is not None and before[0] != value:
            said = f"says something else than {before[1]}, and both mean {key.path}: keep one"
            found.problems.append(Problem(ENVIRONMENT, None, variable, said))
        found.values[key.path] = (value, variable)
    return found


def _unknown(variable: str, known: list[str]) -> str:
    # Without what all of them begin with, which would make any two look alike.
    near = nearest(variable.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in (*known, CONFIG)])
    advice = f"did you mean {PREFIX}{near}?" if near else "'headrace config show' lists what can be set"
    return f"the environment's {shown(ascii(variable)[1:-1])} is not known: {advice}"
