# SPDX-License-Identifier: Apache-2.0
"""A recorded service beside what its platform says of it. Called by `launcher`; pure.

What is recorded may have ended, or been removed by hand; and what is recorded as starting may be in the hands of a launcher
that still lives, or of one that was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from headrace.platforms.contract import Check, Handle, Observed
from headrace.platforms.entries import STARTING, Entry
from headrace.platforms.identity import is_surely_dead

State = Literal["running", "starting", "ended", "stale", "unknown"]
"""`stale`: recorded, and the platform knows nothing of it. `unknown`: the platform could not be asked."""

_FIELDS = ("host_port", "docker_url", "platform_job_id", "slurm_node", "tunnel_pid", "namespace", "instance_id")
_START_LIMIT = timedelta(minutes=60)
"""After so long a launcher elsewhere, of which nothing can be known, is taken for dead; pulling an image takes its time."""
OVER: tuple[State, ...] = ("ended", "stale")
"""What `prune` removes."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service as it is now."""

    entry: Entry
    state: State
    reason: str = ""
    word: str = ""
    """The platform's own status, in Kubernetes' words."""
    name: str = ""
    """What the platform calls it."""

    def as_json(self) -> dict[str, Any]:
        """The entry as it is recorded, and how the service is."""
        told = {"state": self.state, "platform_status": self.word, "platform_name": self.name, "reason": self.reason}
        return {**self.entry.as_json(), **{name: value for name, value in told.items() if value}}


@dataclass(frozen=True, slots=True)
class Preflight:
    """Whether services can be started on a platform."""

    platform: str
    checks: tuple[Check, ...]
    variables: tuple[tuple[str, str], ...]
    """Each is "SET" or "UNSET"; what they hold is told to nobody."""

    @property
    def passed(self) -> bool:
        """Whether all that was looked at is there."""
        return all(check.passed for check in self.checks)


def service_of(
    entry: Entry, observed: Observed, *, is_dead: Callable[[str], bool] = is_surely_dead, now: datetime | None = None
) -> Service:
    """What is recorded and what was seen, together."""
    reason = observed.reason
    state: State
    if observed.phase == "running":
        state = "running" if entry.host_url else "starting"
    elif observed.phase in ("starting", "ended"):
        state = "starting" if observed.phase == "starting" else "ended"
    elif entry.state == STARTING and not _abandoned(entry, is_dead, now or datetime.now(UTC)):
        state, reason = "starting", "its launcher is still at work"
    else:
        state = "stale"
        reason = reason or (
            "its start was cut short" if entry.state == STARTING else f"{entry.platform} does not know it any more"
        )
    return Service(entry, state, reason, observed.word if observed.phase != "gone" else "", observed.name)


def _abandoned(entry: Entry, is_dead: Callable[[str], bool], now: datetime) -> bool:
    launcher = entry.more.get("launcher")
    if isinstance(launcher, str) and is_dead(launcher):
        return True
    return now - entry.started > _START_LIMIT


def handle_of(entry: Entry) -> Handle:
    """What a driver is given to find it again."""
    kept = entry.more.get("handle")
    known = {name: getattr(entry, name) for name in _FIELDS if getattr(entry, name) not in ("", None)}
    return Handle(entry.job_id, entry.platform, {**(kept if isinstance(kept, dict) else {}), **known})


def with_handle(entry: Entry, data: Mapping[str, Any]) -> Entry:
    """An entry with what a driver told of what it started; other keys are kept beside."""
    kinds = {each.name: int if each.name in ("host_port", "tunnel_pid") else str for each in fields(Entry)}
    known: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in data.items():
        if name in _FIELDS and value is not None:
            known[name] = kinds[name](value)
        elif isinstance(value, str | int | float | bool | list | dict):
            rest[name] = value
    return replace(entry, **known, more={**entry.more, **({"handle": rest} if rest else {})})
