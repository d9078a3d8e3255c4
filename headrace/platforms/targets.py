# SPDX-License-Identifier: Apache-2.0
"""Which service a request goes to, and which is stopped, when there may be several. Called by the command line; pure.

A request never goes to the latest service merely because it is the latest: where there is more than one, people choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.platforms.registry import Entry


@dataclass(frozen=True, slots=True)
class Target:
    """The service it is."""

    entry: Entry
    confirm: str = ""
    """What to ask before anything is done; "" where it was said which one is meant."""


@dataclass(frozen=True, slots=True)
class Question:
    """Several could be meant: somebody must choose one."""

    text: str
    candidates: tuple[Entry, ...]
    shown: tuple[str, ...]
    """The fields of an entry by which they are told apart."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """None can be meant, and why."""

    text: str


def request_target(
    entries: Mapping[str, Entry], job_id: str = "", network_arch: str = ""
) -> Target | Question | Refusal:
    """By the job's id, else by the architecture, else the only one there is."""
    if job_id:
        return _named(entries, job_id)
    reachable = sorted(
        (entry for entry in entries.values() if entry.host_url), key=lambda entry: (entry.started_at, entry.job_id)
    )
    if network_arch:
        matching = tuple(entry for entry in reachable if entry.network_arch.lower() == network_arch.lower())
        if not matching:
            return Refusal(
                f"no service for {network_arch[:64]!a} is running: start one, or look at the list of services"
            )
        if len(matching) == 1:
            return Target(matching[0])
        return Question(
            f"{len(matching)} services run {matching[0].network_arch}: say which by its job id",
            matching,
            ("job_id", "started_at"),
        )
    if not reachable:
        return Refusal("no service is running: start one first")
    if len(reachable) == 1:
        return Target(reachable[0])
    return Question(
        f"{len(reachable)} services are running: say which by its job id or its architecture",
        tuple(reachable),
        ("job_id", "network_arch", "host_url"),
    )


def stop_target(entries: Mapping[str, Entry], latest: str | None, job_id: str = "") -> Target | Refusal:
    """By the job's id, else the latest one, which is to be confirmed."""
    if job_id:
        found = entries.get(job_id)
        return Target(found) if found is not None else _unknown(job_id)
    if latest is None or latest not in entries:
        return Refusal(
            "no service is recorded: there is nothing to stop"
            if not entries
            else "no service is recorded as the latest: say which to stop by its job id"
        )
    entry = entries[latest]
    return Target(entry, f"Stop {entry.job_id} ({entry.network_arch} on {entry.platform}), the latest service?")


def _named(entries: Mapping[str, Entry], job_id: str) -> Target | Refusal:
    found = entries.get(job_id)
    if found is None:
        return _unknown(job_id)
    if not found.host_url:
        return Refusal(f"service {job_id} is still being started: it has no address yet")
    return Target(found)


def _unknown(job_id: str) -> Refusal:
    return Refusal(f"no service has the job id {job_id[:64]!a}: look at the list of services")
