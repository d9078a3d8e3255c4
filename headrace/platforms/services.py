# SPDX-License-Identifier: Apache-2.0
"""A registered service combined with the status that its platform reports, and the choice of a service for a request. Pure.

A registered service may have ended, or been removed by hand; one that is registered as starting may belong to a launcher
that still runs, or to one that was killed. A request never goes to the latest service merely because it is the latest: if
there are several, a person chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from headrace.platforms.contract import Check, Handle, PlatformStatus
from headrace.platforms.processes import is_dead
from headrace.platforms.registry import STARTING, Entry

ServiceState = Literal["running", "starting", "ended", "stale", "unknown"]
"""`stale`: registered, but unknown to the platform. `unknown`: the platform does not answer."""

_FIELDS = ("host_port", "docker_url", "platform_job_id", "slurm_node", "tunnel_pid", "namespace", "instance_id")
_MAX_START = timedelta(minutes=60)
"""After this time a launcher on another machine counts as dead; pulling an image takes its time."""
ENDED_STATES: tuple[ServiceState, ...] = ("ended", "stale")
"""The states that `prune` removes."""


@dataclass(frozen=True, slots=True)
class Service:
    """A registered service and its current state."""

    entry: Entry
    state: ServiceState
    reason: str = ""
    pod_phase: str = ""
    """The status of the platform, in Kubernetes' words."""
    name: str = ""
    """The platform's name for it."""

    def as_json(self) -> dict[str, Any]:
        """Return the entry as it is stored, with the state of the service."""
        fields = {
            "state": self.state,
            "platform_status": self.pod_phase,
            "platform_name": self.name,
            "reason": self.reason,
        }
        return {**self.entry.as_json(), **{name: value for name, value in fields.items() if value}}


@dataclass(frozen=True, slots=True)
class Preflight:
    """The preflight checks of a platform."""

    platform: str
    checks: tuple[Check, ...]
    variables: tuple[tuple[str, str], ...]
    """Each is "SET" or "UNSET"; the values are never shown."""

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)


def service_of(
    entry: Entry, status: PlatformStatus, *, is_dead: Callable[[str], bool] = is_dead, now: datetime | None = None
) -> Service:
    """Return the state of a registered service, given the status of its platform."""
    reason = status.reason
    state: ServiceState
    if status.phase == "running":
        state = "running" if entry.host_url else "starting"
    elif status.phase in ("starting", "ended"):
        state = "starting" if status.phase == "starting" else "ended"
    elif entry.state == STARTING and not _is_abandoned(entry, is_dead, now or datetime.now(UTC)):
        state, reason = "starting", "its launcher is still running"
    else:
        state = "stale"
        reason = reason or (
            "its start was interrupted" if entry.state == STARTING else f"{entry.platform} does not know it any more"
        )
    return Service(entry, state, reason, status.pod_phase if status.phase != "gone" else "", status.name)


def _is_abandoned(entry: Entry, is_dead: Callable[[str], bool], now: datetime) -> bool:
    launcher = entry.more.get("launcher")
    if isinstance(launcher, str) and is_dead(launcher):
        return True
    return now - entry.started > _MAX_START


def handle_of(entry: Entry) -> Handle:
    """Return the handle of a registered service."""
    stored = entry.more.get("handle")
    data = {name: getattr(entry, name) for name in _FIELDS if getattr(entry, name) not in ("", None)}
    return Handle(entry.job_id, entry.platform, {**(stored if isinstance(stored, dict) else {}), **data})


def with_handle(entry: Entry, data: Mapping[str, Any]) -> Entry:
    """Return the entry with the data of a handle; data without a field of its own is stored under `handle`."""
    kinds = {field.name: int if field.name in ("host_port", "tunnel_pid") else str for field in fields(Entry)}
    known: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in data.items():
        if name in _FIELDS and value is not None:
            known[name] = kinds[name](value)
        elif isinstance(value, str | int | float | bool | list | dict):
            rest[name] = value
    return replace(entry, **known, more={**entry.more, **({"handle": rest} if rest else {})})


@dataclass(frozen=True, slots=True)
class Target:
    """The chosen service."""

    entry: Entry
    confirm: str = ""
    """The question to confirm first; "" if the service was named."""


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Several services match: a person must choose one."""

    text: str
    candidates: tuple[Entry, ...]
    shown: tuple[str, ...]
    """Fields of each entry that distinguish the candidates."""


@dataclass(frozen=True, slots=True)
class NoTarget:
    """No service matches, and why."""

    text: str


def request_target(
    entries: Mapping[str, Entry], job_id: str = "", network_arch: str = ""
) -> Target | Ambiguous | NoTarget:
    """Choose the service for a request: by job id, else by architecture, else the only one."""
    if job_id:
        return _by_job_id(entries, job_id)
    reachable = sorted(
        (entry for entry in entries.values() if entry.host_url), key=lambda entry: (entry.started_at, entry.job_id)
    )
    if network_arch:
        matching = tuple(entry for entry in reachable if entry.network_arch.lower() == network_arch.lower())
        if not matching:
            return NoTarget(f"no service for {network_arch[:64]!a} is running: start one, or see the list of services")
        if len(matching) == 1:
            return Target(matching[0])
        return Ambiguous(
            f"{len(matching)} services run {matching[0].network_arch}: choose one by its job id",
            matching,
            ("job_id", "started_at"),
        )
    if not reachable:
        return NoTarget("no service is running: start one first")
    if len(reachable) == 1:
        return Target(reachable[0])
    return Ambiguous(
        f"{len(reachable)} services are running: choose one by its job id or its architecture",
        tuple(reachable),
        ("job_id", "network_arch", "host_url"),
    )


def stop_target(entries: Mapping[str, Entry], latest: str | None, job_id: str = "") -> Target | NoTarget:
    """Choose the service to stop: by job id, else the latest one, which needs confirmation."""
    if job_id:
        entry = entries.get(job_id)
        return Target(entry) if entry is not None else _unknown_id(job_id)
    if latest is None or latest not in entries:
        return NoTarget(
            "no service is registered: there is nothing to stop"
            if not entries
            else "no service is registered as the latest: choose one by its job id"
        )
    entry = entries[latest]
    return Target(entry, f"Stop {entry.job_id} ({entry.network_arch} on {entry.platform}), the latest service?")


def _by_job_id(entries: Mapping[str, Entry], job_id: str) -> Target | NoTarget:
    entry = entries.get(job_id)
    if entry is None:
        return _unknown_id(job_id)
    if not entry.host_url:
        return NoTarget(f"service {job_id} is still being started: it has no address yet")
    return Target(entry)


def _unknown_id(job_id: str) -> NoTarget:
    return NoTarget(f"no service has the job id {job_id[:64]!a}: see the list of services")
