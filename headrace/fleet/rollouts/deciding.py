# SPDX-License-Identifier: Apache-2.0
"""What to do with a step: stay, go on, give the new revision everything, or take it back. A pure function of what was seen.

Errors count from the first request: a new revision is taken back as soon as no good answer to come could bring it under its
limit within `min_requests`. How long it takes is judged at the end of a step, when both revisions had `min_requests`, and by
two numbers that must agree: the mean, which one slow request can move, and the 90th percentile, which a wide bucket can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.fleet.rollouts.counts import Counts
from headrace.fleet.rollouts.policy import Policy

Verb = Literal["stay", "next", "promote", "undo"]


@dataclass(frozen=True)
class Numbers:
    """What came of requests since a step began."""

    new: Counts
    old: Counts
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sight:
    """What is seen of the pods, and of who counts."""

    ready: bool
    """Whether pods of the new revision answer."""
    stuck: str = ""
    """Why they will not, as far as one can tell."""
    sees: bool = True
    """Whether a router of ours splits the requests, so that errors are seen at all."""
    numbers: Numbers | None = None
    """None: nobody sees them, or who does has not answered."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why, in words."""

    verb: Verb
    reason: str


def decide(policy: Policy, step: int, seconds: float, sight: Sight) -> Decision:
    """What follows from a step, so many seconds after it began."""
    percent = policy.steps[min(step, len(policy.steps) - 1)]
    numbers, label = sight.numbers, f"step {percent} %"
    said = f"{label}: {told(numbers.new)}" if numbers is not None else f"{label}: {_unseen(sight)}"
    if numbers is not None and _too_many(policy, numbers.new):
        return Decision("undo", f"{errors_told(numbers.new)} at {percent} %, {policy.max_error_percent:g} % allowed")
    if sight.stuck:
        return Decision("undo", f"{sight.stuck}, at {percent} %")
    if not sight.ready:
        return Decision("stay", f"{label}: its pods do not answer")
    if seconds < policy.step_seconds:
        return Decision("stay", said)
    if sight.sees and numbers is None:
        return Decision("stay", said)
    if numbers is not None:
        missing = policy.min_requests - numbers.new.requests
        if missing > 0:
            return Decision("stay", f"{said}; {missing} more are needed")
        slow = _too_slow(policy, numbers)
        if slow:
            return Decision("undo", f"{slow} at {percent} %, {policy.max_latency_ratio:g} times allowed")
    if policy.paused:
        return Decision("stay", f"{said}; paused")
    return Decision("promote" if step >= len(policy.steps) - 1 else "next", said)


def told(counts: Counts) -> str:
    """`212 requests, 0.0 % errors`."""
    return f"{counts.requests} requests, {counts.error_percent:.1f} % errors"


def errors_told(counts: Counts) -> str:
    """`7.1 % errors of 120 requests`."""
    return f"{counts.error_percent:.1f} % errors of {counts.requests} requests"


def _too_many(policy: Policy, counts: Counts) -> bool:
    of = max(counts.requests, policy.min_requests, 1)
    return 100 * counts.errors > policy.max_error_percent * of


def _too_slow(policy: Policy, numbers: Numbers) -> str:
    """In words; "" where it is not, or where nobody can tell."""
    new, old, most = numbers.new, numbers.old, policy.max_latency_ratio
    least = max(policy.min_requests, 1)
    if not most or new.timed < least or old.timed < least:
        return ""
    slow, usual = new.quantile_seconds(numbers.bounds), old.quantile_seconds(numbers.bounds)
    if new.mean_seconds <= most * old.mean_seconds or slow <= most * usual:
        return ""
    times = new.mean_seconds / old.mean_seconds if old.mean_seconds else float("inf")
    means = f"a mean of {_ms(new.mean_seconds)} against {_ms(old.mean_seconds)}"
    return f"{times:.1f} times as slow as before ({means}, nine in ten {_ms(slow)} against {_ms(usual)})"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _unseen(sight: Sight) -> str:
    return "its router has not told anything yet" if sight.sees else "errors are not seen here, so time alone counts"
