# SPDX-License-Identifier: Apache-2.0
"""Fault injection for tests: named points where a process dies, a write fails, a socket resets or a clock jumps.

The environment variable `HEADRACE_FAULTS` switches it on. It is read when this module is imported; without it,
`fault_point` does nothing.

    HEADRACE_FAULTS="batch.ledger.append:die@3,files.replace:disk_full" headrace batch ...

    die          SIGKILL to this process
    disk_full    OSError ENOSPC, as a write to a full disk raises it
    reset        ConnectionResetError, as a socket raises it
    stall=0.5    sleep for half a second
    jump=+3600   set the wall clock of this process (`SystemClock`) an hour ahead

`@3` is the third time that this process reaches the point; without it, the first time.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.clock import shift_wall_clock
from headrace.core.errors import InvalidArgument

log = logging.getLogger("headrace.faults")

VARIABLE = "HEADRACE_FAULTS"

POINTS: Mapping[str, str] = {
    "files.replace": "write_atomically: the temporary file is written and not renamed yet",
    "jobs.database.commit": "a change of records is in its transaction and not committed yet",
    "jobs.database.committed": "a change of records is committed, and its caller has no answer yet",
    "jobs.service.launched": "the process of a microservice is started, and its record does not say so",
    "jobs.batch.launched": "the process of a batch job is started, and its record does not say so",
    "jobs.batch.adopt": "a gateway is about to adopt the batch process of one that is gone",
    "jobs.batch.exit": "the end of a batch job is recorded, and the files of its process are not removed",
    "batch.ledger.append": "results are computed and not appended to the ledger",
    "batch.ledger.appended": "results are appended to the ledger and not in the progress file",
    "batch.ledger.checkpoint": "the ledger is synced, and the progress file is the one before",
    "batch.parquet.rename": "the Parquet file is written and not renamed yet",
    "batch.output.upload": "the results are complete and not uploaded yet",
    "batch.output.delivered": "the results are at their output, and the progress file does not say so",
    "storage.part.written": "a part of an object is on disk and not in the journal of the download",
    "storage.file.rename": "a file from an http(s) URL is complete and not renamed yet",
    "storage.entry.rename": "a download is complete and not in the cache yet",
    "storage.entry.renamed": "a download is in the cache, and its journal is not removed",
    "storage.mirror.move": "a mirrored file or version is downloaded and not moved into place",
    "agent.model.place": "a model of a node is downloaded, and its record says that it is being placed",
    "agent.model.placed": "the files of a model are in their folder, and its record does not say so",
    "fleet.document.write": "a document of the local fleet is changed in memory and not written",
    "fleet.document.written": "a document of the local fleet is written, and its watchers do not know yet",
    "fleet.objects.write": "the objects of a service are planned and not written",
    "fleet.container.record": "the process of a replica waits at its gate, and its record is not written",
    "fleet.rollout.step": "the next step of a rollout is decided and not written",
    "fleet.cluster.apply": "the operator is about to write one of several objects of a service",
}
"""What is done and what is not done when a process reaches the point."""

_FAULT = re.compile(
    r"(?P<point>[a-z_.]+):(?:(?P<plain>die|disk_full|reset)|(?P<kind>stall|jump)=(?P<seconds>[+-]?\d+(?:\.\d+)?))"
    r"(?:@(?P<time>[1-9]\d*))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what happens at a point, and at which of the times that the process reaches it."""

    point: str
    kind: str
    seconds: float = 0.0
    time: int = 1


def parse_faults(text: str) -> list[Fault]:
    """Parse the value of `HEADRACE_FAULTS`. Raises InvalidArgument."""
    faults = []
    for part in text.split(","):
        match = _FAULT.fullmatch(part.strip())
        if match is None:
            raise InvalidArgument(
                f"{VARIABLE}: {part.strip()[:80]!a} is not a fault: write POINT:KIND or POINT:KIND@TIME, where KIND is die, "
                "disk_full, reset, stall=SECONDS or jump=SECONDS"
            )
        if match["point"] not in POINTS:
            raise InvalidArgument(f"{VARIABLE}: unknown point {match['point'][:80]!a}: use one of {', '.join(POINTS)}")
        kind, seconds = match["plain"] or match["kind"], float(match["seconds"] or 0.0)
        faults.append(Fault(match["point"], kind, seconds, int(match["time"] or 1)))
    return faults


class FaultInjector:
    """Counts how often each point is reached, and makes its faults happen. Thread-safe."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._reached: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        """Count a point, and let its faults happen if this is their time."""
        with self._lock:
            self._reached[name] += 1
            count = self._reached[name]
        for fault in self._faults:
            if (fault.point, fault.time) == (name, count):
                _inject(fault)


def _inject(fault: Fault) -> None:
    # Not by a log handler: it may write later, and this process may have no later.
    os.write(2, f"headrace: injecting {fault.kind} at {fault.point}, time {fault.time}\n".encode())
    match fault.kind:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "disk_full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "reset":
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        case "stall":
            time.sleep(fault.seconds)
        case "jump":
            shift_wall_clock(fault.seconds)


def _read_environment() -> FaultInjector | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        faults = parse_faults(text)
    except InvalidArgument as error:
        raise SystemExit(f"error: {error.message}") from None
    log.warning("%s is set, for tests only: this process injects the faults %s", VARIABLE, text)
    return FaultInjector(faults)


_injector = _read_environment()


def fault_point(name: str) -> None:
    """Let the faults of this point happen, if `HEADRACE_FAULTS` names some. Raises OSError then."""
    if _injector is not None:
        _injector.reach(name)
