# SPDX-License-Identifier: Apache-2.0
"""What a service asks of its rollouts: annotations that begin with `ome.io/rollout-`, read and checked.

Read by `planning` and by `looking`, checked by `admission`. Reading never fails: what admission would refuse counts as if
it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

from headrace.fleet.names import ROLLOUT as PREFIX
from headrace.fleet.words import Document, Problem, annotations_of, whole

STEPS = f"{PREFIX}steps"
STEP_SECONDS = f"{PREFIX}step-seconds"
MAX_ERROR_PERCENT = f"{PREFIX}max-error-percent"
MAX_LATENCY_RATIO = f"{PREFIX}max-latency-ratio"
MIN_REQUESTS = f"{PREFIX}min-requests"
PAUSED = f"{PREFIX}paused"
COMMAND = f"{PREFIX}command"
"""What somebody asked for in the middle: `promote 2026-11-16T10:00:00Z`. Obeyed once; another time makes it another one."""

PROMOTE, UNDO, RETRY = "promote", "undo", "retry"
COMMANDS = (PROMOTE, UNDO, RETRY)
STEPPED = ("engine", "decoder")
"""The components that have steps. A router is told the shares: its own pods are replaced at once."""
_MOST_STEPS = 20
_DAY = 86_400
_SWITCH = ("true", "false")


@dataclass(frozen=True)
class Policy:
    """How a new revision comes."""

    steps: tuple[int, ...]
    """Its shares of the requests, in percent, rising; all of them follow the last."""
    step_seconds: float = 300.0
    max_error_percent: float = 1.0
    max_latency_ratio: float = 2.0
    """How many times as long as the old revision it may take; 0: any."""
    min_requests: int = 50
    """Fewer say nothing: a step lasts until there were so many."""
    paused: bool = False
    command: str = ""


def policy_of(annotations: Mapping[str, str]) -> Policy | None:
    """What a service asks for; None where it has no steps."""
    steps = _steps(annotations.get(STEPS, ""))
    if steps is None:
        return None
    read = {name: _READERS[key][0](annotations[key]) for key, name in _FIELDS.items() if key in annotations}
    given = {name: value for name, value in read.items() if value is not None}
    paused, command = annotations.get(PAUSED) == "true", annotations.get(COMMAND, "")
    return Policy(steps, paused=paused, command=command, **given)  # type: ignore[arg-type]


def rollout_problems(service: Document) -> Iterator[Problem]:
    """What cannot be meant so, by the names of the annotations."""
    annotations = annotations_of(service)
    mine = {name: value for name, value in annotations.items() if name.startswith(PREFIX)}
    for name, value in mine.items():
        if name not in _READERS:
            near = get_close_matches(name, _READERS, 1, 0.6)
            fix = f"did you mean {near[0]}?" if near else f"write one of {', '.join(_READERS)}"
            yield Problem(_place(name), "is not known, and would do nothing", fix)
            continue
        read, takes, example = _READERS[name]
        if read(value) is None:
            yield Problem(
                _place(name), f"takes {takes}, not {value[:40]!a}", f'write it in quotes, such as "{example}"'
            )
        elif STEPS not in mine and name != COMMAND:
            yield Problem(_place(name), f"does nothing without {STEPS}", f'add {STEPS}, such as "10,25,50"')
    if STEPS in mine:
        for component in STEPPED:
            share = whole(service, "spec", component, "canaryTrafficPercent")
            if share is not None and share < 100:
                said = f"stands beside the annotation {STEPS}, which says the shares"
                yield Problem(f"spec.{component}.canaryTrafficPercent", said, "remove one of them")


def verb_of(command: str, component: str) -> str:
    """What a command asks of a component: its first word, if its second names no other component."""
    words = command.split()
    if not words or words[0] not in COMMANDS:
        return ""
    return words[0] if words[1:2] in ([], [component]) or words[1] not in (*STEPPED, "router") else ""


def _place(name: str) -> str:
    return f"metadata.annotations[{name}]"


def _steps(said: str) -> tuple[int, ...] | None:
    words = [each.strip() for each in said.split(",")]
    if len(words) > _MOST_STEPS or not all(_is_whole(each, 2) for each in words):
        return None
    found = tuple(map(int, words))
    rising = all(low < high for low, high in pairwise(found))
    return found if rising and found[0] >= 1 else None


def _number(least: float, most: float) -> Callable[[str], float | None]:
    def read(said: str) -> float | None:
        try:
            value = float(said)
        except ValueError:
            return None
        return value if math.isfinite(value) and least <= value <= most else None

    return read


def _ratio(said: str) -> float | None:
    value = _number(0, 1000)(said)
    return value if value is None or value == 0 or value >= 1 else None


def _requests(said: str) -> int | None:
    return int(said) if _is_whole(said, 9) else None


def _switch(said: str) -> bool | None:
    return said == "true" if said in _SWITCH else None


def _command(said: str) -> str | None:
    return said if said.partition(" ")[0] in COMMANDS else None


def _is_whole(said: str, digits: int) -> bool:
    return said.isascii() and said.isdecimal() and len(said) <= digits


_READERS: dict[str, tuple[Callable[[str], object | None], str, str]] = {
    STEPS: (_steps, f"rising whole numbers from 1 to 99, at most {_MOST_STEPS}, with commas", "10,25,50"),
    STEP_SECONDS: (_number(1, 30 * _DAY), "seconds, 1 to 2592000", "300"),
    MAX_ERROR_PERCENT: (_number(0, 100), "a number from 0 to 100", "1"),
    MAX_LATENCY_RATIO: (_ratio, "a number of 1 or more, or 0 for any", "2"),
    MIN_REQUESTS: (_requests, "a whole number, 0 or more", "50"),
    PAUSED: (_switch, "true or false", "true"),
    COMMAND: (_command, f"one of {', '.join(COMMANDS)}, and a time", "promote 2026-01-15T10:30:00Z"),
}
"""By annotation: how it is read, what it takes, and an example."""
_FIELDS = {
    STEP_SECONDS: "step_seconds",
    MAX_ERROR_PERCENT: "max_error_percent",
    MAX_LATENCY_RATIO: "max_latency_ratio",
    MIN_REQUESTS: "min_requests",
}
