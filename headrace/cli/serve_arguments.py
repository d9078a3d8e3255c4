# SPDX-License-Identifier: Apache-2.0
"""The command line of `headrace serve` before Typer sees it: every way to write an option becomes `--name=value`.

So `--strict_readiness false`, `--strict-readiness` and `--strict-readiness=False` all work, options that mean nothing here
are taken out with a warning, and an unknown one is told with the nearest there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from headrace.cli.flags import Flag, Ignored, is_truth
from headrace.cli.flags_ignored import IGNORED
from headrace.cli.options import FLAGS
from headrace.core.errors import InvalidArgument

_HELP = ("--help", "-h")


def normalise(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments as Typer is to read them, and the warnings about those that do nothing."""
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
    # Folders last, behind `--`: one may begin with a dash.
    return [*options, *(["--", *folders] if folders else [])], warnings


class _Ahead:
    """Arguments, one at a time, with a look at the next."""

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
    """The value of an option that has none behind a `=`."""
    following = ahead.next
    if flag.kind == "truth":
        # Without a value it is true: what follows is a value only if it can be one.
        return ahead.take() or "" if following is not None and is_truth(following) else "true"
    if following is None or following.startswith("--"):
        shown = flag.shown if isinstance(flag, Flag) else "VALUE"
        raise InvalidArgument(f"--{flag.name} needs a value: write --{flag.name}={shown}")
    return ahead.take() or ""


def _unknown(name: str, known: dict[str, Flag | Ignored]) -> str:
    wanted = name.replace("_", "-").lower()
    begun = [each for each in known if each.startswith(wanted)] if len(wanted) > 2 else []
    near = begun[:1] or get_close_matches(wanted, known, n=1, cutoff=0.6)
    advice = f"did you mean --{near[0]}?" if near else "'headrace serve --help' lists the options"
    return f"there is no option --{name[:64]}: {advice}"
