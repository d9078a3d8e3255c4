# SPDX-License-Identifier: Apache-2.0
"""Parameters of a request: declared by profiles and kinds, read from JSON, refused by name when they are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.errors import InvalidArgument

Type = Literal["text", "texts", "integer", "number", "truth", "object", "any"]

MOST_TEXTS = 256
MOST_CHARACTERS = 4_000_000
"""Of one text that is no data: URL: more than the context of any model."""

_WORDS: Mapping[Type, str] = {
    "text": "a text",
    "texts": "a text or a list of texts",
    "integer": "a whole number",
    "number": "a number",
    "truth": "true or false",
    "object": "a JSON object",
    "any": "anything",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One thing that a request may say."""

    name: str
    type: Type
    default: Any = None
    """What it is when nobody says; None for nothing."""
    least: float | None = None
    most: float | None = None
    also: tuple[str, ...] = ()
    """Other names that clients use for it."""
    choices: tuple[str, ...] = ()
    ignored: bool = False
    """Accepted because clients send it, and without effect; of any type."""

    def describe(self) -> dict[str, Any]:
        """For people who ask what a model takes."""
        told = {"name": self.name, "type": self.type, "default": self.default}
        more = {"least": self.least, "most": self.most, "also": list(self.also), "choices": list(self.choices)}
        return told | {key: value for key, value in more.items() if value not in (None, [])}


def ignored(*names: str) -> tuple[Parameter, ...]:
    """Parameters that are accepted and do nothing."""
    return tuple(Parameter(name, "any", ignored=True) for name in names)


def changed(declared: Iterable[Parameter], *others: Parameter) -> tuple[Parameter, ...]:
    """The declared ones, with others in the places of their namesakes or at the end."""
    by_name = {each.name: each for each in declared}
    return tuple((by_name | {each.name: each for each in others}).values())


def read_parameters(declared: Sequence[Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every declared parameter by its own name, defaults filled in. Raises `InvalidArgument` that names what is wrong."""
    by_name = {name: each for each in declared for name in (each.name, *each.also)}
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, value in given.items():
        parameter = by_name.get(name)
        if parameter is None:
            known = ", ".join(each.name for each in declared if not each.ignored)
            raise InvalidArgument(f"{_shown(name)} is no parameter of this model: use {known}")
        if parameter.ignored or value is None:
            continue
        checked = _checked(name, parameter, value)
        if parameter.name in found and found[parameter.name] != checked:
            raise InvalidArgument(f"'{said[parameter.name]}' and '{name}' mean the same and differ: give one of them")
        found[parameter.name] = checked
        said[parameter.name] = name
    return {each.name: found.get(each.name, each.default) for each in declared if not each.ignored}


def _checked(name: str, parameter: Parameter, value: Any) -> Any:
    kind = parameter.type
    if kind == "any":
        return value
    if kind == "texts":
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _wrong(name, parameter, value)
        if len(value) > MOST_TEXTS:
            raise InvalidArgument(f"'{name}' has {len(value)} entries: at most {MOST_TEXTS} are allowed")
        return value
    if kind == "truth" and isinstance(value, bool):
        return value
    if kind == "object" and isinstance(value, Mapping):
        return value
    if kind == "text" and isinstance(value, str):
        return _checked_text(name, parameter, value)
    if kind in ("integer", "number"):
        return _checked_number(name, parameter, value)
    raise _wrong(name, parameter, value)


def _checked_text(name: str, parameter: Parameter, value: str) -> str:
    if parameter.choices and value not in parameter.choices:
        raise InvalidArgument(f"'{name}' is {_shown(value)}: use one of {', '.join(parameter.choices)}")
    if len(value) > MOST_CHARACTERS:
        raise InvalidArgument(f"'{name}' has {len(value)} characters: at most {MOST_CHARACTERS} are allowed")
    return value


def _checked_number(name: str, parameter: Parameter, value: Any) -> Any:
    whole = parameter.type == "integer"
    # True is an int to Python and a mistake to everyone else; 5.0 is what some clients make of 5.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, parameter, value)
    if whole and isinstance(value, float):
        if not value.is_integer():
            raise _wrong(name, parameter, value)
        value = int(value)
    if (parameter.least is not None and value < parameter.least) or (
        parameter.most is not None and value > parameter.most
    ):
        raise InvalidArgument(f"'{name}' is {value}: use {_WORDS[parameter.type]} {_range(parameter)}")
    return value if whole else float(value)


def _range(parameter: Parameter) -> str:
    if parameter.most is None:
        return f"of {parameter.least:g} or more"
    if parameter.least is None:
        return f"of {parameter.most:g} or less"
    return f"from {parameter.least:g} to {parameter.most:g}"


def _wrong(name: str, parameter: Parameter, value: Any) -> InvalidArgument:
    return InvalidArgument(f"'{name}' is {_shown(value)}: use {_WORDS[parameter.type]}")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return ascii(value[:64])
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float) and abs(value) < 10**15:
        return str(value)
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return "a very large number"
