# SPDX-License-Identifier: Apache-2.0
"""Advance a rollout by steps: decide from the routers' statistics whether to wait, go on, promote or roll back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from headrace.fleet.rollouts.policy import PROMOTE, RETRY, STEPPED, UNDO, RolloutPolicy, command_for
from headrace.fleet.rollouts.revision_stats import RequestStats, RouterStats, StatsKey
from headrace.fleet.rollouts.state import (
    PROMOTED,
    ROLLED_BACK,
    STEPPING,
    WAITING,
    RolloutState,
    read_state,
    state_to_json,
)
from headrace.platforms.kubernetes_client.objects import Document, get_mapping

if TYPE_CHECKING:
    from headrace.fleet.planning import Plan


def advance_rollouts(
    service: Document, plan: Plan, counted: RouterStats | None, now: datetime
) -> tuple[Document, Sequence[RolloutEvent]]:
    """Return the service with the next rollout states in its status, and the Events.

    The same object if nothing changed.
    """
    components = get_mapping(service, "status", "components")
    changed: dict[str, Any] = {}
    events: list[RolloutEvent] = []
    for name in STEPPED:
        rollout = plan.rollouts.get(name)
        if rollout is None:
            continue
        before = get_mapping(components, name)
        ready = rollout.percent > 0 or rollout.settled
        counted_here = name in plan.counted
        observation = RolloutObservation(
            name,
            rollout.latest,
            rollout.stable,
            rollout.judged,
            ready,
            rollout.settled,
            rollout.stuck,
            counted_here,
            counted,
        )
        state, new_events = advance(rollout.policy, read_state(before), observation, now)
        events += new_events
        after = {key: value for key, value in before.items() if key != "rollout"}
        if state is not None:
            after["rollout"] = state_to_json(state, rollout.policy)
        if after != before:
            changed[name] = after
    if not changed:
        return service, events
    return {**service, "status": {**get_mapping(service, "status"), "components": {**components, **changed}}}, events


def is_in_progress(service: Document) -> bool:
    """Whether a rollout of a service is in progress, so that the service must be reconciled regularly."""
    states = (read_state(get_mapping(service, "status", "components", name)) for name in STEPPED)
    return any(state is not None and not state.over for state in states)


@dataclass(frozen=True)
class RolloutEvent:
    """A Kubernetes Event about a rollout."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class RolloutObservation:
    """What a controller observes of one component."""

    component: str
    latest: str
    """The revision of the current spec."""
    stable: str
    two: bool
    """Whether it runs next to the stable revision and its steps are not over."""
    ready: bool
    settled: bool
    """Whether all its pods are of this revision and ready."""
    stuck: str = ""
    counted: bool = True
    """Whether our own router splits the requests and counts errors."""
    stats: RouterStats | None = None


Advance = tuple[RolloutState | None, Sequence[RolloutEvent]]


def advance(
    policy: RolloutPolicy | None, before: RolloutState | None, observation: RolloutObservation, now: datetime
) -> Advance:
    """Return the next state; None if there is no rollout."""
    current = before if before is not None and before.revision == observation.latest else None
    if policy is None or not observation.two:
        # The outcome stays until the next rollout, or until the old revision is requested again.
        ended = current is not None and (
            current.phase == PROMOTED or (current.phase == ROLLED_BACK and observation.two)
        )
        return (current if ended else None), ()
    if current is None:
        steps = ", ".join(f"{step} %" for step in policy.steps)
        started = RolloutState(observation.latest, command=policy.command, message="waits until its pods answer")
        message = f"{observation.component}: a new revision gets {steps}, then all requests"
        return started, [RolloutEvent("Normal", "RolloutStarted", message)]
    if policy.command != current.command:
        outcome = _execute_command(policy, replace(current, command=policy.command), observation, now)
        if outcome is not None:
            return outcome
        current = replace(current, command=policy.command)
    if current.over:
        return current, ()
    if current.phase == WAITING or current.since is None:
        return _start_step(current, policy, observation, now)
    # If the clock was set back, the step does not wait until that time comes again.
    since = min(current.since, now)
    current, seconds = replace(current, since=since), (now - since).total_seconds()
    return _apply_decision(
        policy,
        current,
        observation,
        decide(policy, current.step, seconds, _step_observation(current, observation)),
        now,
    )


def _execute_command(
    policy: RolloutPolicy, state: RolloutState, observation: RolloutObservation, now: datetime
) -> Advance | None:
    """Execute a new command of the user."""
    verb = command_for(policy.command, observation.component)
    if verb == PROMOTE and state.phase != PROMOTED:
        return _finish(state, PROMOTED, "by hand", observation, now)
    if verb == UNDO and state.phase != ROLLED_BACK:
        return _finish(state, ROLLED_BACK, "by hand", observation, now)
    if verb == RETRY and state.over:
        started = RolloutState(state.revision, command=state.command, message="waits until its pods answer")
        return started, [
            RolloutEvent("Normal", "RolloutStarted", f"{observation.component}: the same revision once more")
        ]
    return None


def _start_step(state: RolloutState, policy: RolloutPolicy, observation: RolloutObservation, now: datetime) -> Advance:
    """Start the first step: its time runs from when all pods are ready, but requests count from the first one."""
    if observation.stuck:
        return _finish(state, ROLLED_BACK, observation.stuck, observation, now)
    if not state.counts:
        state = replace(state, counts=_baseline(observation))
    if not observation.settled:
        return replace(state, message="waits until its pods answer"), ()
    if observation.counted and not state.counts:
        return replace(state, message="waits until its router answers"), ()
    percent = policy.steps[min(state.step, len(policy.steps) - 1)]
    return replace(state, phase=STEPPING, since=now, message=f"step {percent} %"), ()


def _step_observation(state: RolloutState, observation: RolloutObservation) -> StepObservation:
    stats = None
    if observation.counted and observation.stats is not None:
        new, old = (
            observation.stats.since(revision, state.counts) for revision in (observation.latest, observation.stable)
        )
        stats = StepStats(new, old, observation.stats.bounds)
    return StepObservation(observation.ready, observation.stuck, observation.counted, stats)


def _apply_decision(
    policy: RolloutPolicy, state: RolloutState, observation: RolloutObservation, decision: Decision, now: datetime
) -> Advance:
    if decision.verb == "undo":
        return _finish(state, ROLLED_BACK, decision.reason, observation, now)
    if decision.verb == "promote":
        return _finish(state, PROMOTED, decision.reason, observation, now)
    if decision.verb == "next":
        step = state.step + 1
        message, counts = f"step {policy.steps[step]} %", _baseline(observation)
        stepped = replace(state, step=step, since=now, message=message, counts=counts)
        return stepped, [
            RolloutEvent(
                "Normal", "RolloutStep", f"{observation.component}: {decision.reason}; {policy.steps[step]} % now"
            )
        ]
    return replace(state, message=decision.reason), ()


def _baseline(observation: RolloutObservation) -> Mapping[StatsKey, RequestStats]:
    return (
        observation.stats.baseline(observation.latest, observation.stable)
        if observation.counted and observation.stats is not None
        else {}
    )


def _finish(
    state: RolloutState,
    phase: Literal["RolledBack", "Promoted"],
    reason: str,
    observation: RolloutObservation,
    now: datetime,
) -> Advance:
    message = f"{'promoted' if phase == PROMOTED else 'rolled back'}: {reason}"
    event = RolloutEvent(
        "Normal" if phase == PROMOTED else "Warning", f"Rollout{phase}", f"{observation.component}: {message}"
    )
    return replace(state, phase=phase, since=now, message=message, counts={}), [event]


Action = Literal["stay", "next", "promote", "undo"]


@dataclass(frozen=True)
class StepStats:
    """Statistics of the requests since a step began."""

    new: RequestStats
    old: RequestStats
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepObservation:
    """State of the new pods, and the statistics of the step."""

    ready: bool
    """Whether pods of the new revision are ready."""
    stuck: str = ""
    """Why they will not become ready; "" if that is not known."""
    counted: bool = True
    """Whether our own router splits the requests and counts errors."""
    stats: StepStats | None = None
    """None: no router counts, or it has not answered."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why."""

    verb: Action
    reason: str


def decide(policy: RolloutPolicy, step: int, seconds: float, observed: StepObservation) -> Decision:
    """Decide about a step, `seconds` after it began."""
    percent = policy.steps[min(step, len(policy.steps) - 1)]
    stats, label = observed.stats, f"step {percent} %"
    message = f"{label}: {describe_stats(stats.new)}" if stats is not None else f"{label}: {_no_stats_reason(observed)}"
    if stats is not None and _too_many_errors(policy, stats.new):
        return Decision("undo", f"{describe_errors(stats.new)} at {percent} %, {policy.max_error_percent:g} % allowed")
    if observed.stuck:
        return Decision("undo", f"{observed.stuck}, at {percent} %")
    if not observed.ready:
        return Decision("stay", f"{label}: its pods do not answer")
    if seconds < policy.step_seconds:
        return Decision("stay", message)
    if observed.counted and stats is None:
        return Decision("stay", message)
    if stats is not None:
        missing = policy.min_requests - stats.new.requests
        if missing > 0:
            return Decision("stay", f"{message}; {missing} more are needed")
        slow = _too_slow(policy, stats)
        if slow:
            return Decision("undo", f"{slow} at {percent} %, {policy.max_latency_ratio:g} times allowed")
    if policy.paused:
        return Decision("stay", f"{message}; paused")
    return Decision("promote" if step >= len(policy.steps) - 1 else "next", message)


def describe_stats(counts: RequestStats) -> str:
    """Return `212 requests, 0.0 % errors`."""
    return f"{counts.requests} requests, {counts.error_percent:.1f} % errors"


def describe_errors(counts: RequestStats) -> str:
    """Return `7.1 % errors of 120 requests`."""
    return f"{counts.error_percent:.1f} % errors of {counts.requests} requests"


def _too_many_errors(policy: RolloutPolicy, counts: RequestStats) -> bool:
    total = max(counts.requests, policy.min_requests, 1)
    return 100 * counts.errors > policy.max_error_percent * total


def _too_slow(policy: RolloutPolicy, stats: StepStats) -> str:
    """Return why the new revision is too slow; "" if it is not, or if there are too few requests."""
    new, old, max_ratio = stats.new, stats.old, policy.max_latency_ratio
    min_requests = max(policy.min_requests, 1)
    if not max_ratio or new.timed < min_requests or old.timed < min_requests:
        return ""
    slow, usual = new.quantile_seconds(stats.bounds), old.quantile_seconds(stats.bounds)
    if new.mean_seconds <= max_ratio * old.mean_seconds or slow <= max_ratio * usual:
        return ""
    times = new.mean_seconds / old.mean_seconds if old.mean_seconds else float("inf")
    means = f"a mean of {_duration(new.mean_seconds)} against {_duration(old.mean_seconds)}"
    return f"{times:.1f} times as slow as before ({means}, nine in ten {_duration(slow)} against {_duration(usual)})"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _no_stats_reason(observed: StepObservation) -> str:
    return "its router has not answered yet" if observed.counted else "errors are not counted here, so only time counts"
