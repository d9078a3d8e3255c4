# SPDX-License-Identifier: Apache-2.0
"""Settings of access control, filled from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.net.http.routes import Scope

RateBy = Literal["key", "user", "address"]


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `requests` in `seconds`, for each API key, user or address."""

    requests: int
    seconds: float = 60.0
    by: RateBy = "address"
    """key: the API key. user: the value of `RateLimits.user_header`. address: the client's address."""
    burst: int = 0
    """How many may arrive at once; 0 for `requests`."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """All limits; a request must pass each of them."""

    limits: tuple[RateLimit, ...] = ()
    user_header: str = "x-user-id"
    redis_url: str = ""
    """The Redis in which servers share their counts; "" to count in this machine's memory, for all workers of a server."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `x-forwarded-for` is trusted; `unix` for clients on a UNIX socket."""
    scopes: tuple[Scope, ...] = ("infer",)
    """Requests that need one of these scopes are counted, with or without API keys."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests a server accepts before it answers 429."""

    in_flight: int = 0
    """Maximum requests in flight (computed or queued) per process; 0: unlimited."""
    timeout_seconds: float = 0.0
    """Refuse a request at once if it could not be answered within this time or its gRPC deadline; 0: gRPC deadline only."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """API keys, rate limits and the limit on requests in flight."""

    keys_file: Path | None = None
    """File of hashed API keys with their scopes; None: no key is needed."""
    rates: RateLimits = field(default_factory=RateLimits)
    concurrency: Concurrency = field(default_factory=Concurrency)

    @property
    def guards(self) -> bool:
        """Whether any limit or key file is configured."""
        limits = self.concurrency
        return self.keys_file is not None or bool(self.rates.limits or limits.in_flight or limits.timeout_seconds)
