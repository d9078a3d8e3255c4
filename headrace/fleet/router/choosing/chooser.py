# SPDX-License-Identifier: Apache-2.0
"""Which backend gets a request, and why: sessions first, then the policy; backends that are full are left out.

Made by `proxy` where the settings ask for any of it. Asked by `flows`, by the gRPC half with a request that has no body yet,
and by `explaining`, which changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from headrace.fleet.router.choosing.policies import CacheAware, PrefixHash, PromptPolicy, Why
from headrace.fleet.router.choosing.ring import Ring
from headrace.fleet.router.choosing.sticky import Sessions

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.choosing.request import Request
    from headrace.fleet.router.settings import RouterSettings

PROMPT_POLICIES = ("cache_aware", "prefix_hash")
Pick = Callable[[Sequence["Backend"]], "Backend"]


class Chooser:
    """See the module. Used from the loop's thread only."""

    def __init__(self, settings: RouterSettings, backends: Backends) -> None:
        self._backends = backends
        self._most = settings.max_outstanding
        self.policy: PromptPolicy | None = _prompt_policy(settings, backends)
        self.sessions = Sessions(settings.sticky) if settings.sticky.wanted else None
        self._all: Sequence[Backend] = backends.all
        self._ring = Ring(backends.all)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Choices so far, by the backend's name and `Why`."""

    def pick(self, request: Request, exclude: Collection[Backend] = (), why: str = "") -> Backend | None:
        """The backend for the request, not among `exclude`; None when there is none. It counts as given."""
        live = self.candidates(exclude)
        if not live:
            return None
        backend, reason = self.decide(request, live, self._backends.choose)
        if self.policy is not None:
            self.policy.given(backend, request)
        self.counts[backend.name, why or reason] += 1
        return backend

    def candidates(self, exclude: Collection[Backend] = ()) -> Sequence[Backend]:
        """Those that can take a request."""
        live: Sequence[Backend] = self._backends.live
        if exclude:
            live = [backend for backend in live if backend not in exclude]
        most = self._most
        return [backend for backend in live if backend.outstanding < most] if most else live

    def decide(self, request: Request, live: Sequence[Backend], plain: Pick) -> tuple[Backend, str]:
        """The choice, and why; nothing is changed but by `plain`, which chooses by number alone."""
        if self.sessions is not None:
            key = request.session or self.sessions.key(request)
            if key:
                return self._of_session(key, live)
        if self.policy is not None:
            return self.policy.choose(live, request)
        if len(live) == 1:
            return live[0], Why.ONLY
        return plain(live), Why.POLICY

    def explain(self, request: Request, live: Sequence[Backend]) -> dict[str, Any]:
        """What the choice is made from, for people."""
        told: dict[str, Any] = {}
        if self.sessions is not None:
            key = self.sessions.key(request)
            told["session"] = bool(key)
            if key:
                told["session_order"] = [each.name for each in self._ring.walk(key)]
        if self.policy is not None and live:
            told |= self.policy.explain(live, request)
        return told

    def keep(self, now: float) -> None:
        """Time has passed. Call about once a second or more often, and when backends have come or gone."""
        everybody = self._backends.all
        if everybody is not self._all:
            names = {each.name for each in everybody}
            self._ring = Ring(everybody)
            self._all = everybody
            self.counts = Counter({key: count for key, count in self.counts.items() if key[0] in names})
        if self.policy is not None:
            self.policy.keep(everybody, now)

    def _of_session(self, key: bytes, live: Sequence[Backend]) -> tuple[Backend, str]:
        why = Why.STICKY
        for backend in self._ring.walk(key):
            if backend in live:
                return backend, why
            why = Why.MOVED
        return live[0], why


def make_chooser(settings: RouterSettings, backends: Backends) -> Chooser | None:
    """A chooser, if the settings ask for anything that looks at requests."""
    wanted = settings.policy in PROMPT_POLICIES or settings.sticky.wanted or settings.max_outstanding
    return Chooser(settings, backends) if wanted or settings.hedging.wanted else None


def reads_bodies(settings: RouterSettings) -> bool:
    """Whether a choice looks into bodies, so that they have to be there before it is made."""
    return settings.policy in PROMPT_POLICIES or bool(settings.sticky.body) or settings.paired


def _prompt_policy(settings: RouterSettings, backends: Backends) -> PromptPolicy | None:
    if settings.policy == "cache_aware":
        return CacheAware(settings.cache_aware)
    if settings.policy == "prefix_hash":
        return PrefixHash(settings.prefix_hash, backends)
    return None
