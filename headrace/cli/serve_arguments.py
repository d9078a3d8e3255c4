# SPDX-License-Identifier: Apache-2.0
"""Normalise the arguments of `headrace serve`: every way to write an option becomes `--name=value`.

`--strict_readiness false`, `--strict-readiness` and `--strict-readiness=False` all work. Options of Triton without
effect here are removed with a warning; an unknown option is reported with the nearest known one.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from headrace.cli.flags import IGNORED, Flag, Ignored, is_truth
from headrace.cli.options import FLAGS
from headrace.core.errors import InvalidArgument

_HELP = ("--help", "-h")


def normalise(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments for Typer, and the warnings about options without effect."""
    known: dict[str, Flag | Ignored] = {name: flag for flag in FLAGS for name in flag.names}
    known |= {ignored.name: ignored for ignored in IGNORED}
    options: list[str] = []
    folders: list[str] = []
    warnings: list[str] = []
    ahead = _Ahead(arguments)
    while (argument := ahead.take()) is not None:
        if argument == "--":
            folders += ahead.all()
        elif argument in _HELP:
            options.append("--help")
        elif not argument.startswith("-"):
            folders.append(argument)
        else:
            name, equals, value = argument.lstrip("-").partition("=")
            flag = known.get(name.replace("_", "-").lower())
            if flag is None:
                raise InvalidArgument(_unknown(name, known))
            text = value if equals else _value_of(flag, ahead)
            if isinstance(flag, Flag):
                options.append(f"--{flag.name}={text}")
            elif warning := flag.says(text):
                warnings.append(warning)
    # Folders last, after `--`: one may begin with a dash.
    return [*options, *(["--", *folders] if folders else [])], warnings


class _Ahead:
    """An argument iterator that can peek at the next argument."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._left = list(reversed(arguments))

    @property
    def next(self) -> str | None:
        return self._left[-1] if self._left else None

    def take(self) -> str | None:
        return self._left.pop() if self._left else None

    def all(self) -> list[str]:
        left, self._left = self._left[::-1], []
        return left


def _value_of(flag: Flag | Ignored, ahead: _Ahead) -> str:
    """Return the value of an option that has none after a `=`."""
    following = ahead.next
    if flag.kind == "truth":
        # Without a value it is true: the next argument is a value only if it is a boolean.
        return ahead.take() or "" if following is not None and is_truth(following) else "true"
    if following is None or following.startswith("--"):
        shown = flag.shown if isinstance(flag, Flag) else "VALUE"
        raise InvalidArgument(f"--{flag.name} needs a value: write --{flag.name}={shown}")
    return ahead.take() or ""


def _unknown(name: str, known: dict[str, Flag | Ignored]) -> str:
    wanted = name.replace("_", "-").lower()
    prefixed = [option for option in known if option.startswith(wanted)] if len(wanted) > 2 else []
    near = prefixed[:1] or get_close_matches(wanted, known, n=1, cutoff=0.6)
    advice = f"did you mean --{near[0]}?" if near else "'headrace serve --help' lists the options"
    return f"there is no option --{name[:64]}: {advice}"
