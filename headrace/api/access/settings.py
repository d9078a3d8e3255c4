# SPDX-License-Identifier: Apache-2.0
"""What access can be told. Filled from the configuration, read by `apps` and the rest of this room."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Scope = Literal["infer", "read", "admin"]
"""infer: compute requests. read: metadata, statistics, metrics. admin: load, unload, change settings, and the others."""

RateBy = Literal["key", "user", "address"]


@dataclass(frozen=True, slots=True)
class RateLimit:
    """So many requests in so many seconds, for each of those the limit tells apart."""

    requests: int
    seconds: float = 60.0
    by: RateBy = "address"
    """key: the API key. user: what `RateLimits.user_header` says. address: the client's."""
    burst: int = 0
    """How many may come at once; 0 for `requests`."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """All limits, each of which a request must pass."""

    limits: tuple[RateLimit, ...] = ()
    user_header: str = "x-user-id"
    redis_url: str = ""
    """Where servers share their counts; "" to count in this machine's memory, for all workers of a server."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `x-forwarded-for` is believed; `unix` for who comes through a UNIX socket."""
    scopes: tuple[Scope, ...] = ("infer",)
    """Which requests count: those that need one of these scopes, whether or not there are keys."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests a server takes on before it says 429 at once."""

    in_flight: int = 0
    """Requests that may be computed or wait at the same time, in each process; 0 for any number."""
    timeout_seconds: float = 0.0
    """Refuse at once what could not be answered in this time, or in the deadline of a gRPC call; 0 to go by the latter."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may ask, and how much."""

    keys_file: Path | None = None
    """Hashed API keys with their scopes; None to let everyone in."""
    rates: RateLimits = field(default_factory=RateLimits)
    concurrency: Concurrency = field(default_factory=Concurrency)

    @property
    def guards(self) -> bool:
        """Whether anything is asked for."""
        limits = self.concurrency
        return self.keys_file is not None or bool(self.rates.limits or limits.in_flight or limits.timeout_seconds)
