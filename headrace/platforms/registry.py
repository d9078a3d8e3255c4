# SPDX-License-Identifier: Apache-2.0
"""The registry file of started services, shared with TAO's own tools: job ids to entries, and `latest`.

The launcher calls it in threads: the lock may have to be waited for. Every change is one step under the lock, so that
services can be started at the same time. The file is in /tmp, where every user may put files and links: only a plain file
of this user is used. A file that is not JSON is renamed and logged, since it may list lost services. The registry does not
know whether a service actually runs, and stores no secrets.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
    Unavailable,
)
from headrace.core.files import FileLock, write_atomically
from headrace.platforms.contract import is_job_id
from headrace.platforms.node_resources import is_port_free

log = logging.getLogger("headrace.launch")

DEFAULT_PATH = Path("/tmp/tao-inf-ms-state.json")  # noqa: S108  # TAO's; its owner is checked
LATEST = "latest"
FIRST_PORT, LAST_PORT = 8080, 8199
_LOCAL_PLATFORMS = ("process", "local-docker", "slurm")
"""Platforms whose `host_port` is a port of this machine."""
_ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # to check all interfaces; nothing listens there
_MAX_BYTES = 16 * 1024 * 1024
STARTING = "starting"
"""State of a service that is registered but not launched yet, so that its port is reserved."""
RUNNING = "running"
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Entry:
    """One service: TAO's fields, and some that TAO lacks. Empty texts and None are not written."""

    job_id: str
    platform: str = ""
    network_arch: str = ""
    host_url: str = ""
    """Its URL; "" until it is known."""
    started_at: str = ""
    """ISO 8601, UTC."""
    state: str = ""
    """`STARTING` or `RUNNING`; other tools write no state, and only services that run."""
    host_port: int | None = None
    docker_url: str = ""
    platform_job_id: str = ""
    """Lepton's id, Slurm's number, the name of the Kubernetes Job."""
    slurm_node: str = ""
    tunnel_pid: int | None = None
    namespace: str = ""
    instance_id: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Unknown keys, written by other tools; they are kept."""

    @property
    def started(self) -> datetime:
        """When it was started; long ago if that is unknown."""
        try:
            moment = datetime.fromisoformat(self.started_at)
        except ValueError:
            return _LONG_AGO
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

    def as_json(self) -> dict[str, Any]:
        """Return the entry as it is stored."""
        values = {name: getattr(self, name) for name in _NAMES}
        return {**self.more, **{name: value for name, value in values.items() if value not in ("", None)}}


_NAMES = tuple(entry_field.name for entry_field in fields(Entry) if entry_field.name != "more")
_NUMBERS = ("host_port", "tunnel_pid")


def parse_entry(job_id: str, document: Mapping[str, Any]) -> Entry:
    """Return an entry of the file. A known key with an invalid value is kept among the unknown keys."""
    known: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for name, value in document.items():
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


def utc_now() -> str:
    """Return the date and time for `started_at`."""
    return datetime.now(UTC).isoformat()


def is_unused(port: int) -> bool:
    """Whether a port of this machine is free on every interface."""
    return is_port_free(_ANY_ADDRESS, port)


class Registry:
    """One registry file."""

    def __init__(self, path: Path = DEFAULT_PATH, *, lock_seconds: float = 30.0) -> None:
        self.path = path
        self._lock_seconds = lock_seconds

    def entries(self) -> dict[str, Entry]:
        """Return all entries by job id, in the order of their start."""
        return self.read()[0]

    @property
    def latest(self) -> str | None:
        """The job id of the service that was started last; None if there is none."""
        return self.read()[1]

    def read(self) -> tuple[dict[str, Entry], str | None]:
        """Return the entries and the latest job id."""
        if not os.path.lexists(self.path):
            # Reading creates no lock file.
            return {}, None
        with locked(self.path, self._lock_seconds):
            document = read_document(self.path)
        entries = _entries(document)
        return dict(sorted(entries.items(), key=lambda item: (item[1].started, item[0]))), _latest(document, entries)

    def begin(self, entry: Entry, *, wants_port: bool, free: Callable[[int], bool] = is_unused) -> Entry:
        """Register a service as `STARTING` before it is launched; with the lowest free port if it wants one.

        A port is free if no other service of its platform and instance has it and, on this machine, no program listens
        on it. Raises AlreadyExists if the job is registered, ResourceExhausted if every port is taken.
        """
        _check_id(entry.job_id)
        with locked(self.path, self._lock_seconds):
            document = read_document(self.path)
            if entry.job_id in document:
                raise AlreadyExists(f"a service with the job id {entry.job_id} is registered already: stop it first")
            port = _free_port(_entries(document), entry, free) if wants_port else entry.host_port
            entry = replace(entry, host_port=port, state=STARTING, started_at=entry.started_at or utc_now())
            _put(document, entry)
            write_document(self.path, document)
        return entry

    def reserve_port(
        self, platform: str, instance: str, job_id: str, *, free: Callable[[int], bool] = is_unused
    ) -> int:
        """Register a service and return its port; `instance` is "" if the platform has none."""
        entry = self.begin(Entry(job_id, platform, instance_id=instance), wants_port=True, free=free)
        return entry.host_port or 0

    def put(self, entry: Entry) -> None:
        """Store an entry. It becomes the latest if it runs and no other was started after it."""
        _check_id(entry.job_id)
        with locked(self.path, self._lock_seconds):
            document = read_document(self.path)
            _put(document, entry)
            write_document(self.path, document)

    def update(self, job_id: str, change: Callable[[Entry], Entry]) -> Entry | None:
        """Change an entry; return None if it is not registered any more."""
        with locked(self.path, self._lock_seconds):
            document = read_document(self.path)
            entry = _entries(document).get(job_id)
            if entry is None:
                return None
            changed = change(entry)
            if changed != entry:
                _put(document, changed)
                write_document(self.path, document)
        return changed

    def remove(self, job_id: str) -> bool:
        """Remove an entry; return whether it existed. If it was the latest, the latest of the others becomes it."""
        with locked(self.path, self._lock_seconds):
            document = read_document(self.path)
            if job_id not in _entries(document):
                return False
            del document[job_id]
            if document.get(LATEST) == job_id:
                del document[LATEST]
                running = [entry for entry in _entries(document).values() if entry.state != STARTING]
                if running:
                    document[LATEST] = max(running, key=lambda entry: (entry.started, entry.job_id)).job_id
            write_document(self.path, document)
        return True


def _check_id(job_id: str) -> None:
    if not is_job_id(job_id):
        raise InvalidArgument(f"the job id {job_id[:64]!a} is not a UUID in its usual form")


def _entries(document: Mapping[str, Any]) -> dict[str, Entry]:
    return {
        job_id: parse_entry(job_id, document_entry)
        for job_id, document_entry in document.items()
        if job_id != LATEST and isinstance(document_entry, dict)
    }


def _latest(document: Mapping[str, Any], entries: Mapping[str, Entry]) -> str | None:
    latest = document.get(LATEST)
    return latest if isinstance(latest, str) and latest in entries else None


def _put(document: dict[str, Any], entry: Entry) -> None:
    document[entry.job_id] = entry.as_json()
    if entry.state == STARTING:
        return
    entries = _entries(document)
    latest = _latest(document, entries)
    if latest is None or entries[latest].started <= entry.started:
        document[LATEST] = entry.job_id


def _free_port(entries: Mapping[str, Entry], entry: Entry, free: Callable[[int], bool]) -> int:
    is_local = entry.platform in _LOCAL_PLATFORMS
    taken = {
        other.host_port
        for other in entries.values()
        if (other.platform == entry.platform and other.instance_id == entry.instance_id)
        # A port that another platform of this machine has assigned may not be bound yet.
        or (other.state == STARTING and is_local and other.platform in _LOCAL_PLATFORMS)
    }
    for port in range(FIRST_PORT, LAST_PORT + 1):
        if port not in taken and (not is_local or free(port)):
            return port
    raise ResourceExhausted(
        f"no port from {FIRST_PORT} to {LAST_PORT} is free for a service on {entry.platform}: "
        "stop one, or prune the registry"
    )


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file of the registry. Raises Unavailable if another process holds it for longer than `seconds`."""
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        _check_owner(lock.path, lock.descriptor)
        lock.acquire(seconds)
    except TimeoutError:
        raise Unavailable(
            f"another process keeps the registry locked: `fuser {lock.path}` shows which one", retry_after_seconds=1
        ) from None
    except OSError as error:
        raise _file_error(lock.path, error) from None
    except BaseException:
        lock.release()
        raise
    try:
        yield
    finally:
        lock.release()


def read_document(path: Path) -> dict[str, Any]:
    """Return the content of the file; empty if there is none. Call it while `locked`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _file_error(path, error) from None
    try:
        _check_owner(path, descriptor)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            text = file.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > _MAX_BYTES:
        raise TooLarge(f"{path} has more than {_MAX_BYTES} bytes: it is not a registry of services; name another file")
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
    path.rename(aside)
    log.warning("Renamed %s to %s: it cannot be read, and its services are not known any more", path, aside)
    return {}


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replace the file atomically. Call it while `locked`, after `read_document`."""
    try:
        write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as error:
        raise _file_error(path, error) from None


def _check_owner(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise PermissionDenied(f"{path} is not a plain file: name another one by --registry")
    if status.st_uid != os.geteuid():
        raise PermissionDenied(f"{path} belongs to another user: name a file of your own by --registry")
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.fchmod(descriptor, 0o600)


def _file_error(path: Path, error: OSError) -> Exception:
    if error.errno == errno.ELOOP:
        return PermissionDenied(
            f"{path} is a symbolic link, which may lead anywhere: name the file itself by --registry"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(f"{path} may not be used by you: name a file of your own by --registry")
    return FailedPrecondition(f"{path} cannot be used as the registry: {error.strerror}")
