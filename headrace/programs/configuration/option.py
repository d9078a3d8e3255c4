# SPDX-License-Identifier: Apache-2.0
"""The definition of an option of `headrace serve`: its names, type, range, default and help.

An option is set on the command line, in the environment or in the configuration file. `option_table` lists all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

ValueType = Literal["str", "int", "float", "bool", "rows", "tree"]
"""rows: a list of mappings with `fields`. tree: a mapping that is validated by its user."""

BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

PREFIX = "INFERENCE_"
OPTIONS = "options"
"""Section of the file for options by their command-line names."""

_PLACEHOLDERS = {"str": "TEXT", "int": "COUNT", "float": "NUMBER", "bool": "true|false"}


@dataclass(frozen=True, slots=True)
class Option:
    """An option of `headrace serve`, or (`fields`) a field of a row."""

    key: str
    """Path in the file: `safeguards.rate_limit.enabled`. The table leaves out `options.FLAG`."""
    flag: str
    """Name on the command line, without dashes; "" for an option that only the file and the environment have."""
    help: str
    type: ValueType = "str"
    default: Any = None
    """None if leaving it out differs from any value, and for lists."""
    metavar: str = ""
    """Placeholder of the value in the help."""
    env: str = ""
    """Short name of its environment variable, without the prefix."""
    aliases: tuple[str, ...] = ()
    """Other names on the command line."""
    many: bool = False
    """Whether it is a list; repeatable on the command line."""
    min: float = -math.inf
    max: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: str = ""
    """Regular expression of the value; `pattern_text` describes it."""
    pattern_text: str = ""
    scale: int = 1
    """Factor from the file's unit to the command line's: the file has MiB, the command line bytes."""
    fields: tuple[Option, ...] = ()
    """Fields of each row."""
    secret: bool = False
    """Whether it may contain a password."""
    deprecated: bool = False
    """Whether a newer option replaces it; the help leaves it out."""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", f"{OPTIONS}.{self.flag}")

    @property
    def section(self) -> str:
        """Return the section of the file."""
        return self.key.partition(".")[0]

    @property
    def variable(self) -> str:
        """Return the environment variable."""
        return PREFIX + self.key.upper().replace(".", "_").replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """Return all its environment variables, the short one first."""
        return (*([PREFIX + self.env] if self.env else []), self.variable)

    @property
    def flags(self) -> tuple[str, ...]:
        """Return all its names on the command line."""
        return (self.flag, *self.aliases)

    @property
    def takes(self) -> str:
        """Return a description of valid values."""
        if self.choices:
            return " or ".join(self.choices)
        if self.pattern:
            return self.pattern_text
        if self.type == "bool":
            return "true or false"
        if self.type in ("rows", "tree"):
            return "a list of mappings" if self.type == "rows" else "a mapping"
        if self.type == "str":
            return "a list of texts" if self.many else "a text"
        noun = "a whole number" if self.type == "int" else "a number"
        if math.isfinite(self.max):
            return f"{noun} from {self.min:.15g} to {self.max:.15g}"
        return f"{noun} of {self.min:.15g} or more" if math.isfinite(self.min) else noun

    @property
    def placeholder(self) -> str:
        """Return the placeholder of the value in the help."""
        return self.metavar or "|".join(self.choices) or self.pattern_text or _PLACEHOLDERS[self.type]

    @property
    def default_text(self) -> str:
        """Return the default in the command line's unit; "" if there is none."""
        default = self.on_command_line().default
        return "" if default is None else str(default).removesuffix(".0").lower()

    @property
    def help_text(self) -> str:
        """Return the help, with the default and the aliases."""
        parts = [self.help]
        if self.default_text:
            parts.append(f"Default: {self.default_text}.")
        if self.aliases:
            parts.append(f"Also {', '.join(f'--{alias}' for alias in self.aliases)}.")
        return " ".join(parts)

    def on_command_line(self) -> Option:
        """Return the option in the command line's unit."""
        if self.scale == 1:
            return self
        return replace(
            self,
            type="int",
            default=round(self.default * self.scale),
            min=math.ceil(self.min),  # one byte, unless 0 is a valid size
            max=self.max * self.scale,
            scale=1,
        )
