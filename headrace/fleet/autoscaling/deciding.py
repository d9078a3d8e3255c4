# SPDX-License-Identifier: Apache-2.0
"""How many replicas a load needs: a function of samples and time. Asked by `router.waking` and `local.scaling`.

The rules and numbers are those of Knative's autoscaler (https://knative.dev/docs/serving/autoscaling/kpa-specific/), so that
a service scales alike with and without it. The average of a minute decides; a short window that asks for twice of what
there is starts a panic, in which the short window decides too and nobody is taken away until a minute after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf

UTILISATION = 0.7
"""The part of a replica's target that is meant to be used: the rest is there for what comes while one starts."""
MOST_UP = 1000.0
MOST_DOWN = 2.0
"""Times as many, and as few, in one step."""
TICK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Windows:
    """What a decision looks back at."""

    stable_seconds: float = 60.0
    panic_seconds: float = 6.0
    panic_threshold: float = 2.0
    """Times of what there is."""

    @property
    def tick_seconds(self) -> float:
        """Between two decisions."""
        return min(TICK_SECONDS, self.panic_seconds / 3)


KNATIVE = Windows()


@dataclass(frozen=True, slots=True)
class Aim:
    """What is to be held, and within which numbers of replicas."""

    target: float
    """How much of it one replica is to have."""
    most: int
    """Replicas there may be."""
    least: int = 1
    utilisation: float = UTILISATION
    tolerance: float = 0.0
    """A load that is off by so small a part of what is wanted changes nothing."""
    windows: Windows = KNATIVE


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured at a time."""

    time: float
    value: float


@dataclass(frozen=True, slots=True)
class Panic:
    """What is remembered between decisions: until when nobody is taken away, and how many there are at least."""

    until: float = -inf
    least: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """How many there should be, what to remember for the next time, and why."""

    replicas: int
    panic: Panic
    average: float
    """Of the window that decided."""
    seconds: float
    """How long that window is."""


CALM = Panic()


def decide(
    samples: Iterable[Sample], now: float, aim: Aim, ready: int, panic: Panic = CALM, wanted: int = 0
) -> Decision | None:
    """From `aim.least` to `aim.most`; None if nothing was measured in the stable window.

    ready: replicas that answer. wanted: those that there should be so far, which a load within the tolerance leaves alone.
    """
    windows = aim.windows
    kept = [each for each in samples if now - windows.stable_seconds < each.time <= now]
    if not kept:
        return None
    recent = [each for each in kept if now - windows.panic_seconds < each.time] or kept
    there = max(1, ready)
    slow, fast = _average(kept), _average(recent)
    stable, urgent = _needed(slow, aim, wanted), _needed(fast, aim, wanted)
    until = now + windows.stable_seconds if urgent >= windows.panic_threshold * there else panic.until
    few, many = int(there / MOST_DOWN), ceil(there * MOST_UP)
    calm = min(max(stable, few), many)
    if now >= until:
        return Decision(_within(calm, aim), CALM, slow, windows.stable_seconds)
    hasty = min(max(urgent, few), many)
    held = max(calm, hasty, panic.least if now < panic.until else 0)
    found = Decision(_within(held, aim), Panic(until, min(held, aim.most)), slow, windows.stable_seconds)
    return replace(found, average=fast, seconds=windows.panic_seconds) if hasty > calm else found


def _within(replicas: int, aim: Aim) -> int:
    return max(1, aim.least, min(replicas, aim.most))


def _average(samples: list[Sample]) -> float:
    return sum(each.value for each in samples) / len(samples)


def _needed(average: float, aim: Aim, wanted: int) -> int:
    exact = average / (aim.target * aim.utilisation)
    if abs(exact - wanted) <= aim.tolerance * wanted:
        return wanted
    return ceil(exact - _ROUNDING)


_ROUNDING = 1e-9
"""7 requests for a target of 10 are one replica, whatever 10 * 0.7 is in binary."""
