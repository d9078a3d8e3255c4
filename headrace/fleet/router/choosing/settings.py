# SPDX-License-Identifier: Apache-2.0
"""What a router can be told about its choices. Part of `router.settings.RouterSettings`, read from a file by section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """The policy `cache_aware`. The names are those that routers for language models use."""

    cache_threshold: float = 0.3
    """The share of a prompt that a backend must have seen before it gets the prompt for this reason."""
    balance_abs_threshold: int = 64
    """More requests than the least busy one has by so many, and by the factor below: then load alone decides."""
    balance_rel_threshold: float = 1.5
    eviction_interval_seconds: float = 60.0
    """How often a full tree is made an eighth smaller, so that requests seldom have to; 0 for never."""
    max_tree_size: int = 1 << 22
    """Characters that are remembered for each backend. Every branch counts as 64 more."""


@dataclass(frozen=True, slots=True)
class PrefixHashSettings:
    """The policy `prefix_hash`."""

    characters: int = 256
    """Prompts that begin with the same so many go to the same backend."""
    load_factor: float = 1.25
    """A backend with more than so many times its part of all requests is passed over."""


@dataclass(frozen=True, slots=True)
class StickySettings:
    """Sessions. One of the three names what a session is known by; none: there are no sessions."""

    cookie: str = ""
    """A cookie; clients without it are given one."""
    header: str = ""
    body: str = ""
    """A key of a JSON body, with dots for one inside another: `user`, `parameters.sequence_id`."""

    @property
    def wanted(self) -> bool:
        """Whether there are sessions."""
        return bool(self.cookie or self.header or self.body)


@dataclass(frozen=True, slots=True)
class HedgingSettings:
    """A second backend is asked when the first is slow. Off unless there is a time or a percentile."""

    after_seconds: float = 0.0
    """Ask another after so long."""
    percentile: float = 0.0
    """Or after as long as this share of the last requests took, such as 0.95; never sooner than `after_seconds`."""
    inference: bool = False
    """Also for inference requests, which change nothing; else only GET and HEAD."""
    budget: float = 0.05
    """Second requests per request, over time."""

    @property
    def wanted(self) -> bool:
        """Whether there is hedging."""
        return self.after_seconds > 0 or self.percentile > 0


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What happens when every backend has `max_outstanding` requests."""

    requests: int = 1000
    """So many may wait; one more is refused."""
    wait_seconds: float = 30.0
    """For so long at most."""
