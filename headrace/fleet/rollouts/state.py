# SPDX-License-Identifier: Apache-2.0
"""The state of a rollout, as stored in `status.components.NAME.rollout`. Invalid values are tolerated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

from headrace.fleet.rollouts.policy import RolloutPolicy
from headrace.fleet.rollouts.revision_stats import RequestStats, StatsKey
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str

Phase = Literal["Waiting", "Stepping", "RolledBack", "Promoted"]
WAITING: Final = "Waiting"
STEPPING: Final = "Stepping"
ROLLED_BACK: Final = "RolledBack"
PROMOTED: Final = "Promoted"
PHASES: tuple[str, ...] = get_args(Phase)


@dataclass(frozen=True)
class RolloutState:
    """State of the rollout of one component."""

    revision: str
    """Digest of the new pods."""
    phase: Phase = WAITING
    step: int = 0
    """Index of the step, from 0."""
    since: datetime | None = None
    """When the step began or the rollout ended; None while the pods of the first step are not ready."""
    message: str = ""
    command: str = ""
    """The last command that was executed."""
    counts: Mapping[StatsKey, RequestStats] = field(default_factory=dict)
    """Statistics of the routers when the step began."""

    @property
    def over(self) -> bool:
        """Whether the rollout has ended."""
        return self.phase in (ROLLED_BACK, PROMOTED)


def read_state(component: Document) -> RolloutState | None:
    """Read the state from a component's status; None if there is no valid one."""
    value = get_mapping(component, "rollout")
    revision, phase = get_str(value, "revision"), get_str(value, "phase")
    if not revision or phase not in PHASES:
        return None
    step = max(0, (get_int(value, "step") or 1) - 1)
    since = _parse_time(get_str(value, "since"))
    if phase == STEPPING and since is None:
        phase = WAITING
    stored = [count for count in get_list(value, "counts") if isinstance(count, Mapping)]
    counts = {(get_str(item, "router"), get_str(item, "revision")): _parse_stats(item) for item in stored}
    return RolloutState(revision, phase, step, since, get_str(value, "message"), get_str(value, "command"), counts)  # type: ignore[arg-type]


def state_to_json(state: RolloutState, policy: RolloutPolicy | None) -> dict[str, Any]:
    """Return the state as it is stored in the status."""
    document: dict[str, Any] = {"revision": state.revision, "phase": state.phase, "step": state.step + 1}
    if policy is not None:
        document |= {"steps": list(policy.steps), "percent": current_share(policy, state, state.revision)}
    if state.since is not None:
        document["since"] = _format_time(state.since)
    document |= {name: value for name, value in (("message", state.message), ("command", state.command)) if value}
    if state.counts:
        document["counts"] = [_stats_to_json(key, item) for key, item in sorted(state.counts.items())]
    return document


def effective_share(
    policy: RolloutPolicy | None, state: RolloutState | None, latest: str, requested: int | None
) -> int | None:
    """Return the share to use for `canaryTrafficPercent`: that of the current step, if there are steps.

    A revision that was rolled back stays so when the steps are removed, until the user writes a share.
    """
    if policy is not None:
        return current_share(policy, state, latest)
    back = state is not None and state.revision == latest and state.phase == ROLLED_BACK
    return 0 if back and requested is None else requested


def current_share(policy: RolloutPolicy, state: RolloutState | None, latest: str) -> int:
    """Return the current share of a revision."""
    if state is None or state.revision != latest:
        return policy.steps[0]
    if state.over:
        return 100 if state.phase == PROMOTED else 0
    return policy.steps[min(state.step, len(policy.steps) - 1)]


def _stats_to_json(key: StatsKey, counts: RequestStats) -> dict[str, Any]:
    document: dict[str, Any] = {
        "router": key[0],
        "revision": key[1],
        "requests": counts.requests,
        "errors": counts.errors,
        "seconds": round(counts.seconds, 6),
    }
    if counts.times:  # an API server of 1.20 reads an empty string as null, and refuses it
        document["times"] = ",".join(map(str, counts.times))
    return document


def _parse_stats(value: Document) -> RequestStats:
    words = [
        word for word in get_str(value, "times").split(",") if word.isascii() and word.isdecimal() and len(word) < 16
    ]
    times = tuple(map(int, words))
    seconds = get_mapping(value).get("seconds")
    took = float(seconds) if isinstance(seconds, int | float) else 0.0
    return RequestStats(get_int(value, "requests") or 0, get_int(value, "errors") or 0, sum(times), took, times)


def _parse_time(value: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _format_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
