# SPDX-License-Identifier: Apache-2.0
"""Which services were started from here, in the file that TAO's own tools read too: job ids to entries, and `latest`.

Called by the launcher and the command line, from threads: a lock file may have to be waited for. Every change is one step
under the lock, so that services can be started at the same time. Whether what is recorded really runs is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import AlreadyExists, InvalidArgument, ResourceExhausted
from headrace.platforms import registry_file
from headrace.platforms.entries import RUNNING, STARTING, Entry, entry_from
from headrace.platforms.folders import is_id
from headrace.platforms.ports import is_free

__all__ = ["DEFAULT_PATH", "LATEST", "RUNNING", "STARTING", "Entry", "Registry", "now"]

DEFAULT_PATH = Path("/tmp/tao-inf-ms-state.json")  # noqa: S108  # TAO's; its owner is checked
LATEST = "latest"
FIRST_PORT, LAST_PORT = 8080, 8199
_HERE = ("process", "local-docker", "slurm")
"""Platforms whose `host_port` is one of this machine."""
_EVERYWHERE = "0.0.0.0"  # noqa: S104  # to see whether anybody listens on any interface; nothing listens there


def now() -> str:
    """For `started_at`."""
    return datetime.now(UTC).isoformat()


def nobody_listens(port: int) -> bool:
    """Whether a port of this machine is free on every interface."""
    return is_free(_EVERYWHERE, port)


class Registry:
    """One file."""

    def __init__(self, path: Path = DEFAULT_PATH, *, lock_seconds: float = 30.0) -> None:
        self.path = path
        self._lock_seconds = lock_seconds

    def entries(self) -> dict[str, Entry]:
        """All, by job id, in the order in which they were started."""
        return self.read()[0]

    @property
    def latest(self) -> str | None:
        """The service that was started last; None if there is none."""
        return self.read()[1]

    def read(self) -> tuple[dict[str, Entry], str | None]:
        """Both in one look."""
        if not os.path.lexists(self.path):
            # To look changes nothing: not even a lock file is made.
            return {}, None
        with registry_file.alone(self.path, self._lock_seconds):
            document = registry_file.read(self.path)
        found = _entries(document)
        return dict(sorted(found.items(), key=lambda item: (item[1].started, item[0]))), _latest(document, found)

    def begin(self, entry: Entry, *, wants_port: bool, free: Callable[[int], bool] = nobody_listens) -> Entry:
        """Record a service before it is launched, as `STARTING`; with the lowest free port if it wants one.

        Free is what no other of its platform and instance has, and, on this machine, where nobody listens. Raises
        AlreadyExists if the job is recorded, ResourceExhausted if every port is taken.
        """
        _check_id(entry.job_id)
        with registry_file.alone(self.path, self._lock_seconds):
            document = registry_file.read(self.path)
            if entry.job_id in document:
                raise AlreadyExists(f"a service with the job id {entry.job_id} is recorded already: stop it first")
            port = _free_port(_entries(document), entry, free) if wants_port else entry.host_port
            entry = replace(entry, host_port=port, state=STARTING, started_at=entry.started_at or now())
            _put(document, entry)
            registry_file.write(self.path, document)
        return entry

    def reserve_port(
        self, platform: str, instance: str, job_id: str, *, free: Callable[[int], bool] = nobody_listens
    ) -> int:
        """The same for who knows no more than this; `instance` is "" where a platform has none."""
        entry = self.begin(Entry(job_id, platform, instance_id=instance), wants_port=True, free=free)
        return entry.host_port or 0

    def put(self, entry: Entry) -> None:
        """Record it as it is now. It becomes the latest if it runs and none was started after it."""
        _check_id(entry.job_id)
        with registry_file.alone(self.path, self._lock_seconds):
            document = registry_file.read(self.path)
            _put(document, entry)
            registry_file.write(self.path, document)

    def update(self, job_id: str, change: Callable[[Entry], Entry]) -> Entry | None:
        """Change one that is recorded; None, and nothing is done, if it is not: somebody has removed it."""
        with registry_file.alone(self.path, self._lock_seconds):
            document = registry_file.read(self.path)
            found = _entries(document).get(job_id)
            if found is None:
                return None
            changed = change(found)
            if changed != found:
                _put(document, changed)
                registry_file.write(self.path, document)
        return changed

    def remove(self, job_id: str) -> bool:
        """Forget it; whether it was there. If it was the latest, the latest of the others is."""
        with registry_file.alone(self.path, self._lock_seconds):
            document = registry_file.read(self.path)
            if job_id not in _entries(document):
                return False
            del document[job_id]
            if document.get(LATEST) == job_id:
                del document[LATEST]
                running = [entry for entry in _entries(document).values() if entry.state != STARTING]
                if running:
                    document[LATEST] = max(running, key=lambda entry: (entry.started, entry.job_id)).job_id
            registry_file.write(self.path, document)
        return True


def _check_id(job_id: str) -> None:
    if not is_id(job_id):
        raise InvalidArgument(f"the job id {job_id[:64]!a} is no UUID in its usual form")


def _entries(document: Mapping[str, Any]) -> dict[str, Entry]:
    return {
        job_id: entry_from(job_id, given)
        for job_id, given in document.items()
        if job_id != LATEST and isinstance(given, dict)
    }


def _latest(document: Mapping[str, Any], found: Mapping[str, Entry]) -> str | None:
    latest = document.get(LATEST)
    return latest if isinstance(latest, str) and latest in found else None


def _put(document: dict[str, Any], entry: Entry) -> None:
    document[entry.job_id] = entry.as_json()
    if entry.state == STARTING:
        return
    found = _entries(document)
    latest = _latest(document, found)
    if latest is None or found[latest].started <= entry.started:
        document[LATEST] = entry.job_id


def _free_port(found: Mapping[str, Entry], entry: Entry, free: Callable[[int], bool]) -> int:
    here = entry.platform in _HERE
    taken = {
        other.host_port
        for other in found.values()
        if (other.platform == entry.platform and other.instance_id == entry.instance_id)
        # Given out to another platform of this machine, and perhaps not bound yet.
        or (other.state == STARTING and here and other.platform in _HERE)
    }
    for port in range(FIRST_PORT, LAST_PORT + 1):
        if port not in taken and (not here or free(port)):
            return port
    raise ResourceExhausted(
        f"no port from {FIRST_PORT} to {LAST_PORT} is free for a service on {entry.platform}: "
        "stop one, or prune the registry"
    )
