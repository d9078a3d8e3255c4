# SPDX-License-Identifier: Apache-2.0
"""The settings of Triton's logging extension, in front of what `telemetry.logs` writes.

Changed over HTTP and gRPC. They hold for this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.logs import LogLevels, change_log_levels, log_levels

FORMATS = ("default", "ISO8601")
"""Triton's two ways to write the time. Ours is ISO 8601 in both."""

_FLAGS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
_NAMES = (*_FLAGS, "log_verbose_level", "log_format")
_MOST_VERBOSE = (1 << 31) - 1


class LogControl:
    """Shows and changes the settings."""

    def __init__(self) -> None:
        self._format = FORMATS[0]

    def shown(self) -> dict[str, Any]:
        """By Triton's names."""
        levels = log_levels()
        return {
            "log_file": "",
            "log_info": levels.info,
            "log_warning": levels.warning,
            "log_error": levels.error,
            "log_verbose_level": levels.verbose,
            "log_format": self._format,
        }

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply all changes, or none if one is wrong. A setting that is None stays as it is."""
        levels, form = log_levels(), self._format
        for name, value in changes.items():
            if value is None and name in _NAMES:
                continue
            if name == "log_format":
                if value not in FORMATS:
                    raise InvalidArgument(f"log_format must be one of {', '.join(FORMATS)}")
                form = value
            else:
                levels = _changed(levels, name, value)
        self._format = form
        change_log_levels(levels)


def _changed(levels: LogLevels, name: str, value: Any) -> LogLevels:
    if name == "log_file":
        raise InvalidArgument("log file location can not be updated through network protocol")
    if name in _FLAGS:
        if type(value) is not bool:
            raise InvalidArgument(f"log setting '{name}' must be true or false")
        return replace(levels, **{_FLAGS[name]: value})
    if name == "log_verbose_level":
        if type(value) is not int or not 0 <= value <= _MOST_VERBOSE:
            raise InvalidArgument("log setting 'log_verbose_level' must be a whole number of 0 or more")
        return replace(levels, verbose=value)
    raise InvalidArgument(f"unknown log setting {name[:64]!a}: use one of {', '.join(_NAMES)}")
