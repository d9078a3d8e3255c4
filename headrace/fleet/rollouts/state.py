# SPDX-License-Identifier: Apache-2.0
"""How far a rollout is, as `status.components.NAME.rollout` has it. Read with care: others may write there, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

from headrace.fleet.rollouts.counts import Counts, Seen
from headrace.fleet.rollouts.policy import Policy
from headrace.fleet.words import Document, items, part, text, whole

Phase = Literal["Waiting", "Stepping", "RolledBack", "Promoted"]
WAITING: Final = "Waiting"
STEPPING: Final = "Stepping"
ROLLED_BACK: Final = "RolledBack"
PROMOTED: Final = "Promoted"
PHASES: tuple[str, ...] = get_args(Phase)


@dataclass(frozen=True)
class State:
    """Of one component."""

    revision: str
    """The digest of the pods that come."""
    phase: Phase = WAITING
    step: int = 0
    """From 0."""
    since: datetime | None = None
    """When the step began, or the rollout ended; None while the pods of a first step are not ready."""
    message: str = ""
    command: str = ""
    """The last one that was seen: it is not obeyed again."""
    counts: Mapping[Seen, Counts] = field(default_factory=dict)
    """What routers had counted when the step began."""

    @property
    def over(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.phase in (ROLLED_BACK, PROMOTED)


def state_of(told: Document) -> State | None:
    """Of a component's entry in `status.components`; None where nothing of use is said."""
    said = part(told, "rollout")
    revision, phase = text(said, "revision"), text(said, "phase")
    if not revision or phase not in PHASES:
        return None
    step = max(0, (whole(said, "step") or 1) - 1)
    since = _moment(text(said, "since"))
    if phase == STEPPING and since is None:
        phase = WAITING
    found = [each for each in items(said, "counts") if isinstance(each, Mapping)]
    counts = {(text(each, "router"), text(each, "revision")): _counts(each) for each in found}
    return State(revision, phase, step, since, text(said, "message"), text(said, "command"), counts)  # type: ignore[arg-type]


def told_of(state: State, policy: Policy | None) -> dict[str, Any]:
    """As the status has it."""
    told: dict[str, Any] = {"revision": state.revision, "phase": state.phase, "step": state.step + 1}
    if policy is not None:
        told |= {"steps": list(policy.steps), "percent": share_of(policy, state, state.revision)}
    if state.since is not None:
        told["since"] = _written(state.since)
    told |= {name: value for name, value in (("message", state.message), ("command", state.command)) if value}
    if state.counts:
        told["counts"] = [_told(seen, each) for seen, each in sorted(state.counts.items())]
    return told


def asked_share(policy: Policy | None, state: State | None, latest: str, asked: int | None) -> int | None:
    """What takes the place of `canaryTrafficPercent`: by the steps, where there are any.

    What was taken back stays back when the steps are removed: only a share that somebody wrote brings it.
    """
    if policy is not None:
        return share_of(policy, state, latest)
    back = state is not None and state.revision == latest and state.phase == ROLLED_BACK
    return 0 if back and asked is None else asked


def share_of(policy: Policy, state: State | None, latest: str) -> int:
    """The share of the requests that a revision is to get now."""
    if state is None or state.revision != latest:
        return policy.steps[0]
    if state.over:
        return 100 if state.phase == PROMOTED else 0
    return policy.steps[min(state.step, len(policy.steps) - 1)]


def _told(seen: Seen, counts: Counts) -> dict[str, Any]:
    told: dict[str, Any] = {
        "router": seen[0],
        "revision": seen[1],
        "requests": counts.requests,
        "errors": counts.errors,
        "seconds": round(counts.seconds, 6),
    }
    if counts.times:  # an API server of 1.20 takes an empty string for null, and refuses it
        told["times"] = ",".join(map(str, counts.times))
    return told


def _counts(said: Document) -> Counts:
    words = [each for each in text(said, "times").split(",") if each.isascii() and each.isdecimal() and len(each) < 16]
    times = tuple(map(int, words))
    seconds = part(said).get("seconds")
    took = float(seconds) if isinstance(seconds, int | float) else 0.0
    return Counts(whole(said, "requests") or 0, whole(said, "errors") or 0, sum(times), took, times)


def _moment(said: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(said)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
