# SPDX-License-Identifier: Apache-2.0
"""The next state of a rollout, and what is to be told of it. Pure: for the controllers of a cluster and of one machine.

`advance` is called at each look with what is live; whoever calls it writes the state into the status and looks again when it
has changed, so that `planning` gives the revision its new share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from headrace.fleet.rollouts.counts import Counted, Counts, Seen
from headrace.fleet.rollouts.deciding import Decision, Numbers, Sight, decide
from headrace.fleet.rollouts.policy import PROMOTE, RETRY, UNDO, Policy, verb_of
from headrace.fleet.rollouts.state import PROMOTED, ROLLED_BACK, STEPPING, WAITING, State


@dataclass(frozen=True)
class Note:
    """An event."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Look:
    """What a controller sees of one component."""

    component: str
    latest: str
    """The revision that the service asks for."""
    stable: str
    two: bool
    """Whether it stands beside the one before, waiting to be judged."""
    ready: bool
    settled: bool
    """Whether all its pods are of this revision, and answer."""
    stuck: str = ""
    sees: bool = True
    counted: Counted | None = None


Advance = tuple[State | None, Sequence[Note]]


def advance(policy: Policy | None, before: State | None, look: Look, now: datetime) -> Advance:
    """The state after a look; None where there is nothing to tell of."""
    known = before if before is not None and before.revision == look.latest else None
    if policy is None or not look.two:
        # How it ended is told until the next one comes, or what ran before is asked for again.
        ended = known is not None and (known.phase == PROMOTED or (known.phase == ROLLED_BACK and look.two))
        return (known if ended else None), ()
    if known is None:
        steps = ", ".join(f"{each} %" for each in policy.steps)
        begun = State(look.latest, command=policy.command, message="waits until its pods answer")
        said = f"{look.component}: a new revision gets {steps}, then all requests"
        return begun, [Note("Normal", "RolloutStarted", said)]
    if policy.command != known.command:
        obeyed = _obeyed(policy, replace(known, command=policy.command), look, now)
        if obeyed is not None:
            return obeyed
        known = replace(known, command=policy.command)
    if known.over:
        return known, ()
    if known.phase == WAITING or known.since is None:
        return _begun(known, policy, look, now)
    seconds = (now - known.since).total_seconds()
    return _moved(policy, known, look, decide(policy, known.step, seconds, _sight(known, look)), now)


def _obeyed(policy: Policy, known: State, look: Look, now: datetime) -> Advance | None:
    """What somebody asked for in the middle."""
    verb = verb_of(policy.command, look.component)
    if verb == PROMOTE and known.phase != PROMOTED:
        return _over(known, PROMOTED, "by hand", look, now)
    if verb == UNDO and known.phase != ROLLED_BACK:
        return _over(known, ROLLED_BACK, "by hand", look, now)
    if verb == RETRY and known.over:
        begun = State(known.revision, command=known.command, message="waits until its pods answer")
        return begun, [Note("Normal", "RolloutStarted", f"{look.component}: the same revision once more")]
    return None


def _begun(known: State, policy: Policy, look: Look, now: datetime) -> Advance:
    """A first step: its time runs from when all pods answer, but requests count from the first that one of them got."""
    if look.stuck:
        return _over(known, ROLLED_BACK, look.stuck, look, now)
    if not known.counts:
        known = replace(known, counts=_baseline(look))
    if not look.settled:
        return replace(known, message="waits until its pods answer"), ()
    if look.sees and not known.counts:
        return replace(known, message="waits until its router answers"), ()
    percent = policy.steps[min(known.step, len(policy.steps) - 1)]
    return replace(known, phase=STEPPING, since=now, message=f"step {percent} %"), ()


def _sight(known: State, look: Look) -> Sight:
    numbers = None
    if look.sees and look.counted is not None:
        new, old = (look.counted.of(each, known.counts) for each in (look.latest, look.stable))
        numbers = Numbers(new, old, look.counted.bounds)
    return Sight(look.ready, look.stuck, look.sees, numbers)


def _moved(policy: Policy, known: State, look: Look, found: Decision, now: datetime) -> Advance:
    if found.verb == "undo":
        return _over(known, ROLLED_BACK, found.reason, look, now)
    if found.verb == "promote":
        return _over(known, PROMOTED, found.reason, look, now)
    if found.verb == "next":
        step = known.step + 1
        message, counts = f"step {policy.steps[step]} %", _baseline(look)
        moved = replace(known, step=step, since=now, message=message, counts=counts)
        return moved, [Note("Normal", "RolloutStep", f"{look.component}: {found.reason}; {policy.steps[step]} % now")]
    return replace(known, message=found.reason), ()


def _baseline(look: Look) -> Mapping[Seen, Counts]:
    return look.counted.at(look.latest, look.stable) if look.sees and look.counted is not None else {}


def _over(known: State, phase: Literal["RolledBack", "Promoted"], why: str, look: Look, now: datetime) -> Advance:
    message = f"{'promoted' if phase == PROMOTED else 'rolled back'}: {why}"
    note = Note("Normal" if phase == PROMOTED else "Warning", f"Rollout{phase}", f"{look.component}: {message}")
    return replace(known, phase=phase, since=now, message=message, counts={}), [note]
