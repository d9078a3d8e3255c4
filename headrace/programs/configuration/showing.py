# SPDX-License-Identifier: Apache-2.0
"""A configuration for people: rows of a table, without passwords. Called by `headrace config show`."""

from __future__ import annotations

import json
import re
from typing import Any

from headrace.programs.configuration.keys import Key
from headrace.programs.configuration.merging import Configuration, Setting

_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")
_VALUE = re.compile(r"=.*", re.DOTALL)
_IN_QUERY = re.compile(r"(?i)(?<=[?&])([^=&\s]*(?:password|secret|token|key)[^=&\s]*)=[^&\s]*")


def shown_value(setting: Setting) -> Any:
    """The value as plain data, without passwords."""
    return _masked(setting.key, setting.value)


def value_text(value: Any) -> str:
    """A value in a cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(configuration: Configuration) -> dict[str, dict[str, Any]]:
    """Every key with its value and its origin."""
    return {
        path: {
            "value": shown_value(setting),
            "origin": str(setting.origin),
            "kind": setting.origin.kind,
            "variable": setting.key.variable,
        }
        for path, setting in configuration.settings.items()
    }


def _masked(key: Key, value: Any) -> Any:
    if isinstance(value, str):
        if key.secret and "://" not in value:
            return _VALUE.sub("=***", value)
        return _IN_QUERY.sub(r"\1=***", _CREDENTIALS.sub(_hidden, value))
    if isinstance(value, list | tuple):
        return [_masked(key, each) for each in value]
    if isinstance(value, dict):
        return {name: _masked(key, each) for name, each in value.items()}
    return value


def _hidden(found: re.Match[str]) -> str:
    user, colon, _ = found.group().partition(":")
    return f"{user}:***@" if colon else "***@"
