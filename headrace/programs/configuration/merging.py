# SPDX-License-Identifier: Apache-2.0
"""Flag, environment, file and default in this order: one value for every key, and where it came from.

`resolve` is called by `headrace serve` and `headrace config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace.core.errors import InvalidArgument
from headrace.models.config.problems import Problem
from headrace.models.config.scalars import Misfit
from headrace.programs.configuration.environment import read_environment
from headrace.programs.configuration.files import FileValues, read_file
from headrace.programs.configuration.keys import Key
from headrace.programs.configuration.problems import SettingsError
from headrace.programs.configuration.values import checked

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    kind: Literal["flag", "env", "file", "default"]
    name: str = ""
    """The flag, the variable or the file."""
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
        """Whether somebody set it."""
        return self.settings[path].origin != DEFAULT

    def where(self, path: str) -> str:
        """What to call a value in a message about it: its origin and its key."""
        origin = self.settings[path].origin
        return {"flag": origin.name, "env": origin.name}.get(origin.kind, f"{origin}: {path}")

    def wrong(self, path: str, text: str) -> InvalidArgument:
        """An error about a value, for others to raise."""
        return InvalidArgument(f"{self.where(path)}: {text}")

    def get(self, path: str) -> Any:
        """The value; None where there is none."""
        return self.settings[path].value

    def text(self, path: str) -> str:
        """A text; "" where there is none."""
        return cast("str", self.get(path) or "")

    def whole(self, path: str) -> int:
        """A whole number; 0 where there is none."""
        return cast("int", self.get(path) or 0)

    def number(self, path: str) -> float:
        """A number; 0 where there is none."""
        return cast("float", self.get(path) or 0.0)

    def truth(self, path: str) -> bool:
        """True or false; false where there is none."""
        return bool(self.get(path))

    def flag_values(self) -> dict[str, Any]:
        """What environment and file say, by the flag that says the same, in the flag's unit."""
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
    """Put all together. `flags` are those that were given, with their values. Raises all mistakes at once.

    `check` is asked for those that only the whole shows.
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
