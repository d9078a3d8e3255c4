# SPDX-License-Identifier: Apache-2.0
"""What an option of `headrace serve` is: a row of the tables in `options` and `flags_ignored`, and how its value reads.

Must not know what any option means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace.core.errors import InvalidArgument

Kind = Literal["text", "whole", "number", "truth"]
Value = str | int | float | bool

_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Flag:
    """An option that does something here."""

    name: str
    """Without the dashes in front."""
    panel: str
    """The heading it stands under in the help."""
    help: str
    kind: Kind = "text"
    default: Value | None = None
    """None when leaving it out is not the same as giving any value, and where there may be several."""
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    many: bool = False
    """Whether it may be given several times."""
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    old: bool = False
    """Whether another option says the same today; the help leaves it out."""

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the others it goes by."""
        return (self.name, *self.aliases)

    @property
    def shown(self) -> str:
        """What stands for the value in the help."""
        usual = {"text": "TEXT", "whole": "COUNT", "number": "NUMBER", "truth": "true|false"}
        return self.metavar or "|".join(self.choices) or usual[self.kind]

    @property
    def explained(self) -> str:
        """The help, with its default and its other names."""
        words = [self.help]
        if self.default not in (None, ""):
            words.append(f"Default: {str(self.default).removesuffix('.0').lower()}.")
        if self.aliases:
            words.append(f"Also {', '.join(f'--{alias}' for alias in self.aliases)}.")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option of Triton's or of its first releases that means nothing here."""

    name: str
    why: str
    """The rest of the sentence 'NAME does nothing here: ...'."""
    kind: Kind = "text"
    harmless: tuple[str, ...] = ()
    """Values that ask for what happens anyway: no word about those."""

    def says(self, value: str) -> str:
        """The warning; "" if there is no need for one."""
        return "" if value.lower() in self.harmless else f"--{self.name} does nothing here: {self.why}"


def is_truth(text: str) -> bool:
    """Whether a word may be the value of an option that is true or false."""
    return text.lower() in _TRUTHS


def parse(flag: Flag, text: str) -> Value:
    """The value of an option, or a sentence about what is wrong with it."""
    if flag.kind == "truth":
        return flag_of(f"--{flag.name}", text)
    if flag.kind == "text":
        if flag.choices and text not in flag.choices:
            raise InvalidArgument(f"--{flag.name} is {' or '.join(flag.choices)}, not {text!r}")
        return text
    value = _number(text, whole=flag.kind == "whole")
    if value is None or not flag.least <= value <= flag.most:
        raise InvalidArgument(f"--{flag.name} is {_range_of(flag)}, not {text!r}")
    return value


def flag_of(option: str, text: str) -> bool:
    """The value of an option that is written `--option=false`, as Triton's are."""
    if not is_truth(text):
        raise InvalidArgument(f"{option} is true or false, not {text!r}")
    return _TRUTHS[text.lower()]


def _number(text: str, *, whole: bool) -> int | float | None:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _range_of(flag: Flag) -> str:
    noun = "a whole number" if flag.kind == "whole" else "a number"
    if math.isfinite(flag.most):
        return f"{noun} from {flag.least:.15g} to {flag.most:.15g}"
    return f"{noun} of {flag.least:.15g} or more" if math.isfinite(flag.least) else noun


class Given:
    """The values of all options: what was given, otherwise what is `settled` elsewhere, otherwise the defaults."""

    def __init__(
        self,
        flags: Mapping[str, Flag],
        texts: Mapping[str, str | list[str] | None],
        settled: Mapping[str, Any] | None = None,
    ) -> None:
        self._values: dict[str, Any] = {}
        self._given = {name for name, text in texts.items() if text}
        settled = {} if settled is None else settled
        for name, flag in flags.items():
            text = texts.get(name)
            if name in settled and name not in self._given:
                self._values[name] = settled[name]
                self._given.add(name)
            elif isinstance(text, list) or flag.many:
                self._values[name] = tuple(parse(flag, each) for each in text or ())
            else:
                self._values[name] = flag.default if text is None else parse(flag, text)

    def has(self, name: str) -> bool:
        """Whether it was given."""
        return name in self._given

    def given(self) -> dict[str, Any]:
        """Those that were given."""
        return {name: value for name, value in self._values.items() if name in self._given}

    def text(self, name: str) -> str:
        """A text; "" for one that was not given and has no default."""
        return cast("str", self._values[name] or "")

    def texts(self, name: str) -> tuple[str, ...]:
        """All texts of an option that may be given several times."""
        return cast("tuple[str, ...]", self._values[name])

    def whole(self, name: str) -> int:
        """A whole number."""
        return cast("int", self._values[name])

    def number(self, name: str) -> float:
        """A number."""
        return cast("float", self._values[name])

    def truth(self, name: str) -> bool:
        """True or false."""
        return cast("bool", self._values[name])
