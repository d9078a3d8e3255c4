# SPDX-License-Identifier: Apache-2.0
"""What `brev ls` and docker on an instance tell, in the launcher's words. Called by `driver`; does nothing by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import Unavailable
from headrace.platforms.contract import Observed
from headrace.platforms.folders import is_id

_OWN = "headrace-"


def own_instance(job_id: str) -> str:
    """What the instance of a service that has one of its own is called."""
    return _OWN + job_id


def job_of_instance(name: str) -> str | None:
    """The job whose own instance this is; None of another's."""
    job_id = name.removeprefix(_OWN)
    return job_id if job_id != name and is_id(job_id) else None


def instances_of(printed: str) -> dict[str, str]:
    """Names and statuses out of `brev ls --json`."""
    try:
        told = json.loads(printed or "null")
    except ValueError:
        raise Unavailable("what `brev ls --json` prints is no JSON; is brev too old? Update it") from None
    listed = told.get("workspaces") if isinstance(told, Mapping) else told
    return {
        str(each["name"]): str(each.get("status") or "UNKNOWN").upper()
        for each in listed or ()
        if isinstance(each, Mapping) and each.get("name")
    }


@dataclass(frozen=True, slots=True)
class Seen:
    """A container, and where docker publishes it on the instance."""

    observed: Observed
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What is on an instance, by job."""

    containers: Mapping[str, Seen] = field(default_factory=dict)
    cut_short: frozenset[str] = frozenset()
    """Jobs of which only files are there."""


def look_of(printed: str) -> Look:
    """Out of what `remote.LOOK` prints."""
    containers: dict[str, Seen] = {}
    files: set[str] = set()
    for line in printed.splitlines():
        upload = re.fullmatch(r"file \.headrace-([0-9a-f-]{36})-[0-9a-f]+\.(?:tar|key)", line.strip())
        if upload:
            files.add(upload[1])
            continue
        name, _, rest = line.strip().partition(" ")
        job_id = name.lstrip("/")
        if not is_id(job_id):
            continue
        try:
            state, end = json.JSONDecoder().raw_decode(rest)
            ports = json.loads(rest[end:] or "null")
        except ValueError:
            raise Unavailable(
                "what docker tells on the instance cannot be read; look at it with `brev shell`"
            ) from None
        containers[job_id] = Seen(container(job_id, state), _port(ports))
    return Look(containers, frozenset(files - containers.keys()))


def container(job_id: str, state: Mapping[str, Any]) -> Observed:
    """Docker's state of a container."""
    status = str(state.get("Status") or "")
    code = state.get("ExitCode") if isinstance(state.get("ExitCode"), int) else None
    if status in ("running", "paused"):
        return Observed("running", job_id, "Running")
    if status in ("created", "restarting"):
        return Observed("starting", job_id, "Pending", reason=str(state.get("Error") or ""))
    if status == "exited":
        told = str(state.get("Error") or "")
        if state.get("OOMKilled"):
            told = "it was out of memory"
        reason = f"the container has ended with code {code}" + (f": {told}" if told else "")
        return Observed("ended", job_id, "Succeeded" if code == 0 else "Failed", code, reason)
    return Observed("ended", job_id, "Failed", code, f"docker says that the container is {status or 'unknown'}")


def instance(name: str, status: str) -> Observed:
    """An instance of a service's own on which no container can be seen."""
    if status in ("RUNNING", "STARTING", "DEPLOYING", "BUILDING", "CREATING", "PENDING"):
        return Observed("starting", name, "Pending", reason=f"the instance is {status}, its container not there yet")
    return Observed("ended", name, "Failed", reason=f"the instance is {status}")


def never_started() -> Observed:
    """Of a job of which there are files and no container."""
    return Observed("ended", word="Failed", reason="it was never started: its start was cut short")


def _port(ports: Any) -> int | None:
    for bindings in ports.values() if isinstance(ports, Mapping) else ():
        for binding in bindings or ():
            if str(binding.get("HostPort", "")).isdigit():
                return int(binding["HostPort"])
    return None
