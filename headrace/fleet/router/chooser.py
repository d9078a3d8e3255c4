# SPDX-License-Identifier: Apache-2.0
"""Choose a backend by the request: session affinity first, then a prompt policy, then load. Full backends are left out.

`proxy` makes a `Chooser` only where the settings need one; otherwise `backends.Backends` choose by load alone. The gRPC
proxy passes a request without a body: only its headers are known when the choice is made.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from headrace.fleet.router.policies import CacheAware, ChoiceReason, HashRing, PrefixHash, PromptPolicy, RequestView

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.settings import RouterSettings, SessionAffinitySettings
    from headrace.net.http.heads import RequestHead

PROMPT_POLICIES = ("cache_aware", "prefix_hash", "kv_events", "predicted_latency")
PickByLoad = Callable[[Sequence["Backend"]], "Backend"]
_MAX_KEY_BYTES = 4096


class Chooser:
    """Chooses backends and counts the reasons. Used from the loop's thread only."""

    def __init__(self, settings: RouterSettings, backends: Backends, policy: PromptPolicy | None = None) -> None:
        """`policy`: used instead of one created from the settings alone."""
        self._backends = backends
        self._limit = settings.max_outstanding
        self.policy: PromptPolicy | None = policy or _prompt_policy(settings, backends)
        self.sessions = SessionAffinity(settings.sticky) if settings.sticky.is_enabled else None
        self._all: Sequence[Backend] = backends.all
        self._ring = HashRing(backends.all)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Choices so far, by the backend's name and `ChoiceReason`."""

    def pick(self, request: RequestView, exclude: Collection[Backend] = (), reason: str = "") -> Backend | None:
        """Choose a backend that is not in `exclude`, and record the choice; None if there is none."""
        live = self.candidates(exclude)
        if not live:
            return None
        backend, choice_reason = self.decide(request, live, self._backends.pick_by_load)
        if self.policy is not None:
            self.policy.record(backend, request)
        self.counts[backend.name, reason or choice_reason] += 1
        return backend

    def candidates(self, exclude: Collection[Backend] = ()) -> Sequence[Backend]:
        """Return the backends that can take a request."""
        live: Sequence[Backend] = self._backends.live
        if exclude:
            live = [backend for backend in live if backend not in exclude]
        limit = self._limit
        return [backend for backend in live if backend.outstanding < limit] if limit else live

    def decide(self, request: RequestView, live: Sequence[Backend], pick_by_load: PickByLoad) -> tuple[Backend, str]:
        """Return one of `live` and the `ChoiceReason`. Only `pick_by_load` may change state."""
        if self.sessions is not None:
            key = request.session or self.sessions.key(request)
            if key:
                return self._pick_by_session(key, live)
        if self.policy is not None:
            return self.policy.choose(live, request)
        if len(live) == 1:
            return live[0], ChoiceReason.ONLY
        return pick_by_load(live), ChoiceReason.POLICY

    def explain(self, request: RequestView, live: Sequence[Backend]) -> dict[str, Any]:
        """Return the details of the choice, for `/router/explain`."""
        details: dict[str, Any] = {}
        if self.sessions is not None:
            key = self.sessions.key(request)
            details["session"] = bool(key)
            if key:
                details["session_order"] = [backend.name for backend in self._ring.walk(key)]
        if self.policy is not None and live:
            details |= self.policy.explain(live, request)
        return details

    def tick(self, now: float) -> None:
        """Let time pass. Call at least once a second, and when backends were added or removed."""
        backends = self._backends.all
        if backends is not self._all:
            names = {backend.name for backend in backends}
            self._ring = HashRing(backends)
            self._all = backends
            self.counts = Counter({key: count for key, count in self.counts.items() if key[0] in names})
        if self.policy is not None:
            self.policy.tick(backends, now)

    def _pick_by_session(self, key: bytes, live: Sequence[Backend]) -> tuple[Backend, str]:
        reason = ChoiceReason.STICKY
        for backend in self._ring.walk(key):
            if backend in live:
                return backend, reason
            reason = ChoiceReason.MOVED
        return live[0], reason


class SessionAffinity:
    """Finds the session key of a request: in a cookie, in a header, or in the JSON body."""

    def __init__(self, settings: SessionAffinitySettings) -> None:
        self._cookie = settings.cookie.encode()
        self._header = settings.header.lower().encode()
        self._path = tuple(settings.body.split(".")) if settings.body else ()

    def key(self, request: RequestView) -> bytes:
        """Return the session key; b"" if there is none."""
        if self._header:
            key = request.head.by_name.get(self._header, b"")
        elif self._cookie:
            key = self._from_cookie(request.head)
        else:
            key = self._from_body(request)
        return key[:_MAX_KEY_BYTES]

    def cookie_for(self, request: RequestView) -> tuple[bytes, bytes]:
        """Return the key of a new session and its Set-Cookie line; b"" twice if the request needs none."""
        if not self._cookie or self._from_cookie(request.head):
            return b"", b""
        key = secrets.token_hex(12).encode()
        secure = b"; Secure" if request.head.scheme == b"https" else b""
        return key, b"set-cookie: %b=%b; Path=/; HttpOnly; SameSite=Lax%b\r\n" % (self._cookie, key, secure)

    def _from_cookie(self, head: RequestHead) -> bytes:
        if b"cookie" not in head.by_name:
            return b""
        for name, field in head.fields:
            # HTTP/2 may send one field per cookie.
            if name == b"cookie":
                for pair in field.split(b";"):
                    cookie, _, value = pair.strip().partition(b"=")
                    if cookie == self._cookie:
                        return value
        return b""

    def _from_body(self, request: RequestView) -> bytes:
        value = request.document
        for key in self._path:
            value = value.get(key) if isinstance(value, dict) else None
        return str(value).encode(errors="surrogatepass") if isinstance(value, str | int) else b""


def make_chooser(settings: RouterSettings, backends: Backends, policy: PromptPolicy | None = None) -> Chooser | None:
    """Return a chooser, or None if no setting depends on the request."""
    needed = settings.policy in PROMPT_POLICIES or settings.sticky.is_enabled or settings.max_outstanding
    return Chooser(settings, backends, policy) if needed or settings.hedging.is_enabled else None


def reads_bodies(settings: RouterSettings) -> bool:
    """Return whether a choice depends on the body, so that the body must be complete first."""
    return settings.policy in PROMPT_POLICIES or bool(settings.sticky.body) or settings.paired


def _prompt_policy(settings: RouterSettings, backends: Backends) -> PromptPolicy | None:
    if settings.policy == "cache_aware":
        return CacheAware(settings.cache_aware)
    if settings.policy == "prefix_hash":
        return PrefixHash(settings.prefix_hash, backends.all)
    return None
