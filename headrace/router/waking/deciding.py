# SPDX-License-Identifier: Apache-2.0
"""How many replicas a load needs. Asked by `activator` every two seconds; pure: samples and time are passed in.

The rules and numbers are those of Knative's autoscaler (https://knative.dev/docs/serving/autoscaling/kpa-specific/), so that
a service scales alike with and without it. The average of a minute decides; a short window that asks for twice of what
there is starts a panic, in which the short window decides too and nobody is taken away until a minute after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from headrace.router.waking.settings import TargetScale

STABLE_SECONDS = 60.0
PANIC_SECONDS = 6.0
PANIC_THRESHOLD = 2.0
"""Times of what there is."""
UTILISATION = 0.7
"""The part of a replica's target that is meant to be used: the rest is there for what comes while one starts."""
MOST_UP = 1000.0
MOST_DOWN = 2.0
"""Times as many, and as few, in one step."""
TICK_SECONDS = 2.0


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
    """How many there should be, and what to remember for the next time."""

    replicas: int
    panic: Panic


CALM = Panic()


def decide(
    samples: Iterable[Sample], now: float, scale: TargetScale, ready: int, panic: Panic = CALM
) -> Decision | None:
    """From 1 to `scale.most`; None if nothing was measured in the stable window. `ready`: replicas that answer."""
    kept = [each for each in samples if now - STABLE_SECONDS < each.time <= now]
    if not kept:
        return None
    recent = [each for each in kept if now - PANIC_SECONDS < each.time]
    there = max(1, ready)
    stable = _needed(kept, scale.target)
    urgent = _needed(recent, scale.target) if recent else stable
    until = now + STABLE_SECONDS if urgent >= PANIC_THRESHOLD * there else panic.until
    few, many = int(there / MOST_DOWN), ceil(there * MOST_UP)
    wanted = min(max(stable, few), many)
    if now < until:
        wanted = max(wanted, min(max(urgent, few), many), panic.least if now < panic.until else 0)
        panic = Panic(until, min(wanted, scale.most))
    else:
        panic = CALM
    return Decision(max(1, min(wanted, scale.most)), panic)


def _needed(samples: list[Sample], target: float) -> int:
    average = sum(each.value for each in samples) / len(samples)
    return ceil(average / (target * UTILISATION) - _ROUNDING)


_ROUNDING = 1e-9
"""7 requests for a target of 10 are one replica, whatever 10 * 0.7 is in binary."""
