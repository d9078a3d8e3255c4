# SPDX-License-Identifier: Apache-2.0
"""A service as the registry has it: TAO's fields, those that TAO forgot, and whatever other tools wrote beside them.

Made by `registry` and the launcher. Others take it from `registry`. Nothing secret has a place here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

STARTING = "starting"
"""The state of what is recorded before it is launched, so that nobody else takes its port."""
RUNNING = "running"
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Entry:
    """One service. Texts that are "" and numbers that are None are not written."""

    job_id: str
    platform: str = ""
    network_arch: str = ""
    host_url: str = ""
    """Where it is asked; "" until that is known."""
    started_at: str = ""
    """ISO 8601, UTC."""
    state: str = ""
    """`STARTING` or `RUNNING`; other tools write none, and only what runs."""
    host_port: int | None = None
    docker_url: str = ""
    platform_job_id: str = ""
    """Lepton's id, Slurm's number, the name of the Kubernetes Job."""
    slurm_node: str = ""
    tunnel_pid: int | None = None
    namespace: str = ""
    instance_id: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are not known here; they are kept."""

    @property
    def started(self) -> datetime:
        """When; long ago where nobody can tell."""
        try:
            when = datetime.fromisoformat(self.started_at)
        except ValueError:
            return _LONG_AGO
        return when if when.tzinfo is not None else when.replace(tzinfo=UTC)

    def as_json(self) -> dict[str, Any]:
        """As it is written."""
        made = {name: getattr(self, name) for name in _NAMES}
        return {**self.more, **{name: value for name, value in made.items() if value not in ("", None)}}


_NAMES = tuple(each.name for each in fields(Entry) if each.name != "more")
_NUMBERS = ("host_port", "tunnel_pid")


def entry_from(job_id: str, given: Mapping[str, Any]) -> Entry:
    """An entry of a file. A known key with a value that makes no sense is kept among the unknown ones."""
    known: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for name, value in given.items():
        if name in _NUMBERS:
            number = _number(value)
            if number is not None:
                known[name] = number
                continue
        elif name in _NAMES and isinstance(value, str):
            known[name] = value
            continue
        elif name == "platform_job_id" and isinstance(value, int) and not isinstance(value, bool):
            known[name] = str(value)
            continue
        more[name] = value
    return Entry(**{**known, "job_id": job_id}, more=more)


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
