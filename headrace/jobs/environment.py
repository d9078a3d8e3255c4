# SPDX-License-Identifier: Apache-2.0
"""Variables that users set for their services, checked by the list of `launch`. Called by `service` and `services`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.jobs.checks import check_text
from headrace.platforms.variables import ALLOWED, MOST_VALUE


def check_variables(given: object) -> dict[str, str]:
    """The variables as texts. Raises InvalidArgument that names one, never its value."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument("docker_env_vars must be an object of names and texts")
    made: dict[str, str] = {}
    for name, value in given.items():
        if name not in ALLOWED:
            raise InvalidArgument(f"docker_env_vars: {str(name)[:64]!a} is not among the variables that may be set")
        if value is None:
            continue
        if not isinstance(value, str | int | float):
            raise InvalidArgument(f"docker_env_vars: {name} must be a string")
        made[name] = check_text(str(value), f"docker_env_vars: {name}", MOST_VALUE)
    return made


def shown(variables: Mapping[str, Any]) -> list[str]:
    """What of them may be told: their names."""
    return sorted(variables)
