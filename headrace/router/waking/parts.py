# SPDX-License-Identifier: Apache-2.0
"""One cold start in parts: from the request that was held to the first byte of its answer. Kept by `activator`.

    decided      somebody was asked to start what sleeps
    started      its process began
    loading      it was found to be ready: what the model takes, and less than one look of a probe
    seen         the router heard of it
    connected    a backend took a connection
    first_byte   the answer began

Where nobody tells when a process began, as on Kubernetes, its part is in the one after it. Moments are seconds since the
epoch: one of them is another process's. Pure, but for `trace`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.telemetry.tracing import Tracer

PARTS = ("decided", "started", "loading", "seen", "connected", "first_byte")


@dataclass
class Wake:
    """When each part ended; 0 for what is not known, or has not come."""

    held: float
    """When the first request began to wait."""
    decided: float = 0.0
    started: float = 0.0
    loading: float = 0.0
    seen: float = 0.0
    connected: float = 0.0
    first_byte: float = 0.0

    def spans(self, since: float = 0.0) -> Iterator[tuple[str, float, float]]:
        """Name, begin and end of each part that has come, one after the other; for a request that came later, from then."""
        before = max(self.held, since)
        for name in PARTS:
            ended: float = getattr(self, name)
            if ended:
                # What was started by somebody else may have begun before.
                yield name, before, max(before, ended)
                before = max(before, ended)

    def seconds(self) -> dict[str, float]:
        """How long each part took."""
        return {name: round(ended - began, 6) for name, began, ended in self.spans()}


def trace(tracer: Tracer, wake: Wake, parent: bytes, since: float, until: float, failure: str = "") -> None:
    """One request's wait as spans: all of it, and below that its parts."""
    whole = tracer.start("cold start", parent or None, at=since)
    for name, began, ended in wake.spans(since):
        tracer.start(name.replace("_", " "), whole, at=began).end(at=ended)
    whole.end(failure, at=until)
