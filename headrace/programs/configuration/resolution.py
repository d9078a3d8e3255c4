# SPDX-License-Identifier: Apache-2.0
"""Merge options, environment, file and defaults into one configuration, with the origin of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace.core.errors import InvalidArgument
from headrace.models.config.problems import Problem
from headrace.models.config.schema_check import Misfit
from headrace.programs.configuration.keys import Key, SettingsError
from headrace.programs.configuration.sources import FileValues, checked, read_environment, read_file

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    kind: Literal["flag", "env", "file", "default"]
    name: str = ""
    """The option, the variable or the file."""
    line: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.name}:{self.line}"
        return f"{self.kind} {self.name}".rstrip()


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with its value."""

    key: Key
    value: Any
    origin: Origin


class Configuration:
    """One value for every key."""

    def __init__(self, settings: Mapping[str, Setting], warnings: Sequence[str] = (), file: str = "") -> None:
        self.settings = settings
        self.warnings = tuple(warnings)
        self.file = file

    def given(self, path: str) -> bool:
        """Return whether the key was set."""
        return self.settings[path].origin != DEFAULT

    def where(self, path: str) -> str:
        """Return how messages call a value: its origin and key."""
        origin = self.settings[path].origin
        return {"flag": origin.name, "env": origin.name}.get(origin.kind, f"{origin}: {path}")

    def wrong(self, path: str, text: str) -> InvalidArgument:
        """Return an error about a value."""
        return InvalidArgument(f"{self.where(path)}: {text}")

    def get(self, path: str) -> Any:
        """Return the value; None if there is none."""
        return self.settings[path].value

    def text(self, path: str) -> str:
        """Return a text; "" if there is none."""
        return cast("str", self.get(path) or "")

    def whole(self, path: str) -> int:
        """Return an integer; 0 if there is none."""
        return cast("int", self.get(path) or 0)

    def number(self, path: str) -> float:
        """Return a number; 0 if there is none."""
        return cast("float", self.get(path) or 0.0)

    def truth(self, path: str) -> bool:
        """Return a boolean; False if there is none."""
        return bool(self.get(path))

    def flag_values(self) -> dict[str, Any]:
        """Return the values of environment and file by their options, in the options' units."""
        found = {}
        for setting in self.settings.values():
            if setting.key.flag and setting.origin.kind in ("env", "file"):
                value = setting.value
                found[setting.key.flag] = round(value * setting.key.scale) if setting.key.scale != 1 else value
        return found


def resolve(
    keys: Sequence[Key],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: str = "",
    check: Callable[[Configuration], Sequence[Problem]] | None = None,
) -> Configuration:
    """Merge all sources. `flags` are the options that were given. Raises all mistakes at once.

    `check` finds mistakes that concern several keys.
    """
    written = read_file(file, keys) if file else FileValues("")
    around = read_environment(environment, keys)
    problems = [*written.problems, *around.problems]
    settings: dict[str, Setting] = {}
    for key in keys:
        setting = Setting(key, key.default, DEFAULT)
        if key.path in written.values:
            value, line = written.values[key.path]
            setting = Setting(key, value, Origin("file", file, line))
        if key.path in around.values:
            value, variable = around.values[key.path]
            setting = Setting(key, value, Origin("env", variable))
        if key.flag in flags:
            setting = Setting(key, _of_flag(key, flags[key.flag], problems), Origin("flag", f"--{key.flag}"))
        settings[key.path] = setting
    configuration = Configuration(settings, around.warnings, file)
    problems += check(configuration) if check is not None else ()
    if problems:
        raise SettingsError(problems)
    return configuration


def _of_flag(key: Key, value: Any, problems: list[Problem]) -> Any:
    if key.scale != 1:
        return value / key.scale
    try:
        return checked(key, value)
    except Misfit as misfit:
        problems.append(Problem(COMMAND_LINE, None, f"--{key.flag}", misfit.text))
        return None


_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")
_VALUE = re.compile(r"=.*", re.DOTALL)
_IN_QUERY = re.compile(r"(?i)(?<=[?&])([^=&\s]*(?:password|secret|token|key)[^=&\s]*)=[^&\s]*")


def shown_value(setting: Setting) -> Any:
    """Return the value as plain data, without passwords."""
    return _masked(setting.key, setting.value)


def value_text(value: Any) -> str:
    """Return a value as text for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(configuration: Configuration) -> dict[str, dict[str, Any]]:
    """Return every key with its value and origin."""
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
