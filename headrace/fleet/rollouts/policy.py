# SPDX-License-Identifier: Apache-2.0
"""The rollout policy of a service: its annotations `ome.io/rollout-*`, parsed and validated.

Parsing never fails: a value that admission would refuse is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from headrace.core.names import nearest
from headrace.fleet.documents import Problem
from headrace.fleet.names import ROLLOUT as PREFIX
from headrace.platforms.kubernetes_client.objects import Document, annotations_of, get_int

STEPS = f"{PREFIX}steps"
STEP_SECONDS = f"{PREFIX}step-seconds"
MAX_ERROR_PERCENT = f"{PREFIX}max-error-percent"
MAX_LATENCY_RATIO = f"{PREFIX}max-latency-ratio"
MIN_REQUESTS = f"{PREFIX}min-requests"
PAUSED = f"{PREFIX}paused"
COMMAND = f"{PREFIX}command"
"""A command of the user: `promote 2026-11-16T10:00:00Z`. Executed once; the time makes it a new command."""

PROMOTE, UNDO, RETRY = "promote", "undo", "retry"
COMMANDS = (PROMOTE, UNDO, RETRY)
STEPPED = ("engine", "decoder")
"""Components that are rolled out by steps. A router has no steps: its own pods are replaced at once."""
_MAX_STEPS = 20
_DAY = 86_400
_SWITCH = ("true", "false")


@dataclass(frozen=True)
class RolloutPolicy:
    """How a new revision is rolled out."""

    steps: tuple[int, ...]
    """Rising shares of the requests, in percent; after the last step it gets all."""
    step_seconds: float = 300.0
    max_error_percent: float = 1.0
    max_latency_ratio: float = 2.0
    """Maximum latency relative to the old revision; 0: unlimited."""
    min_requests: int = 50
    """Minimum number of requests of a step."""
    paused: bool = False
    command: str = ""


def parse_policy(annotations: Mapping[str, str]) -> RolloutPolicy | None:
    """Parse the policy of a service; None if it has no steps."""
    steps = _steps(annotations.get(STEPS, ""))
    if steps is None:
        return None
    read = {name: _PARSERS[key][0](annotations[key]) for key, name in _FIELDS.items() if key in annotations}
    given = {name: value for name, value in read.items() if value is not None}
    paused, command = annotations.get(PAUSED) == "true", annotations.get(COMMAND, "")
    return RolloutPolicy(steps, paused=paused, command=command, **given)  # type: ignore[arg-type]


def rollout_problems(service: Document) -> Iterator[Problem]:
    """Yield the problems of the rollout annotations."""
    annotations = annotations_of(service)
    mine = {name: value for name, value in annotations.items() if name.startswith(PREFIX)}
    for name, value in mine.items():
        if name not in _PARSERS:
            closest = nearest(name, _PARSERS)
            fix = f"did you mean {closest}?" if closest else f"write one of {', '.join(_PARSERS)}"
            yield Problem(_field(name), "is unknown, and would have no effect", fix)
            continue
        read, takes, example = _PARSERS[name]
        if read(value) is None:
            yield Problem(
                _field(name), f"takes {takes}, not {value[:40]!a}", f'write it in quotes, such as "{example}"'
            )
        elif STEPS not in mine and name != COMMAND:
            yield Problem(_field(name), f"has no effect without {STEPS}", f'add {STEPS}, such as "10,25,50"')
    if STEPS in mine:
        for component in STEPPED:
            share = get_int(service, "spec", component, "canaryTrafficPercent")
            if share is not None and share < 100:
                message = f"conflicts with the annotation {STEPS}, which sets the shares"
                yield Problem(f"spec.{component}.canaryTrafficPercent", message, "remove one of them")


def command_for(command: str, component: str) -> str:
    """Return the command for a component: its first word, unless the second names another component."""
    words = command.split()
    if not words or words[0] not in COMMANDS:
        return ""
    return words[0] if words[1:2] in ([], [component]) or words[1] not in (*STEPPED, "router") else ""


def _field(name: str) -> str:
    return f"metadata.annotations[{name}]"


def _steps(value: str) -> tuple[int, ...] | None:
    words = [word.strip() for word in value.split(",")]
    if len(words) > _MAX_STEPS or not all(_is_integer(word, 2) for word in words):
        return None
    steps = tuple(map(int, words))
    rising = all(low < high for low, high in pairwise(steps))
    return steps if rising and steps[0] >= 1 else None


def _number(minimum: float, maximum: float) -> Callable[[str], float | None]:
    def parse(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        return value if math.isfinite(value) and minimum <= value <= maximum else None

    return parse


def _ratio(text: str) -> float | None:
    value = _number(0, 1000)(text)
    return value if value is None or value == 0 or value >= 1 else None


def _requests(value: str) -> int | None:
    return int(value) if _is_integer(value, 9) else None


def _switch(value: str) -> bool | None:
    return value == "true" if value in _SWITCH else None


def _command(value: str) -> str | None:
    return value if value.partition(" ")[0] in COMMANDS else None


def _is_integer(value: str, digits: int) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= digits


_PARSERS: dict[str, tuple[Callable[[str], object | None], str, str]] = {
    STEPS: (_steps, f"rising whole numbers from 1 to 99, at most {_MAX_STEPS}, with commas", "10,25,50"),
    STEP_SECONDS: (_number(1, 30 * _DAY), "seconds, 1 to 2592000", "300"),
    MAX_ERROR_PERCENT: (_number(0, 100), "a number from 0 to 100", "1"),
    MAX_LATENCY_RATIO: (_ratio, "a number of 1 or more, or 0 for any", "2"),
    MIN_REQUESTS: (_requests, "a whole number, 0 or more", "50"),
    PAUSED: (_switch, "true or false", "true"),
    COMMAND: (_command, f"one of {', '.join(COMMANDS)}, and a time", "promote 2026-01-15T10:30:00Z"),
}
"""By annotation: its parser, the values it takes, and an example."""
_FIELDS = {
    STEP_SECONDS: "step_seconds",
    MAX_ERROR_PERCENT: "max_error_percent",
    MAX_LATENCY_RATIO: "max_latency_ratio",
    MIN_REQUESTS: "min_requests",
}
