# SPDX-License-Identifier: Apache-2.0
"""Policies that look at the request's prompt: `cache_aware` and `prefix_hash`. Asked by `chooser` for every request.

Neither changes anything in `choose`, so that `explaining` can ask as well; `given` is told what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

from headrace.fleet.router.choosing.ring import Ring
from headrace.fleet.router.choosing.tree import PrefixTree

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.choosing.request import Request
    from headrace.fleet.router.choosing.settings import CacheAwareSettings, PrefixHashSettings


_HARDLY_BUSIER = 4
"""Requests under way."""


class Why:
    """Why a backend was chosen: the label `why` of `headrace_router_decisions_total`."""

    POLICY = "policy"
    """By number alone."""
    ONLY = "only"
    """There was no other."""
    HIT = "hit"
    """It has seen most of the prompt."""
    MISS = "miss"
    """Nobody has: it had little to do, and has seen least."""
    IMBALANCE = "imbalance"
    """One had far too much to do: it had the least."""
    NO_PROMPT = "no_prompt"
    """There is none, or it came too late to be looked at."""
    HASH = "hash"
    OVERFLOW = "overflow"
    """The one the hash stands for has too much to do, or is down."""
    STICKY = "sticky"
    MOVED = "sticky_moved"
    """The session's backend is gone, down or full."""
    RETRY = "retry"
    HEDGE = "hedge"
    AGGREGATED = "aggregated"
    """It is a prefill, and no decoder was left."""


class PromptPolicy(Protocol):
    """A way to choose by prompt."""

    def choose(self, live: Sequence[Backend], request: Request) -> tuple[Backend, str]:
        """One of `live`, which is not empty, and a word of `Why`."""

    def given(self, backend: Backend, request: Request) -> None:
        """The request goes there."""

    def explain(self, live: Sequence[Backend], request: Request) -> dict[str, Any]:
        """What the choice was made from, for people."""

    def keep(self, backends: Sequence[Backend], now: float) -> None:
        """Time has passed; these are all backends there are."""


class CacheAware:
    """The backend that has seen most of the prompt's beginning. See the module."""

    def __init__(self, settings: CacheAwareSettings) -> None:
        self._settings = settings
        self.tree: PrefixTree[Backend] = PrefixTree(settings.max_tree_size)
        self._known: Sequence[Backend] = ()
        self._trimmed = 0.0

    def choose(self, live: Sequence[Backend], request: Request) -> tuple[Backend, str]:
        """See `PromptPolicy.choose`."""
        prompt = request.prompt
        if not prompt:
            return self._least(live), Why.NO_PROMPT
        if self._unbalanced(live):
            return self._least(live), Why.IMBALANCE
        matched, users = self.tree.longest(prompt, live)
        if users and matched >= self._settings.cache_threshold * len(prompt):
            return self._least(users), Why.HIT
        return self._emptiest(live), Why.MISS

    def given(self, backend: Backend, request: Request) -> None:
        """See `PromptPolicy.given`."""
        if request.prompt:
            self.tree.add(request.prompt, backend)

    def explain(self, live: Sequence[Backend], request: Request) -> dict[str, Any]:
        """See `PromptPolicy.explain`."""
        prompt = request.prompt
        matched = {each.name: self.tree.longest(prompt, (each,))[0] for each in live}
        return {
            "prompt_characters": len(prompt),
            "matched_characters": matched,
            "tree_size": {each.name: self.tree.size(each) for each in live},
            "unbalanced": self._unbalanced(live),
        }

    def keep(self, backends: Sequence[Backend], now: float) -> None:
        """See `PromptPolicy.keep`."""
        if backends is not self._known:
            for gone in set(self._known) - set(backends):
                self.tree.forget(gone)
            self._known = backends
        every = self._settings.eviction_interval_seconds
        if every > 0 and now - self._trimmed >= every:
            self._trimmed = now
            self.tree.trim(7 / 8)

    def _unbalanced(self, live: Sequence[Backend]) -> bool:
        most = least = live[0].outstanding
        for backend in live:
            load = backend.outstanding
            if load > most:
                most = load
            elif load < least:
                least = load
        settings = self._settings
        return most - least > settings.balance_abs_threshold and most > least * settings.balance_rel_threshold

    def _emptiest(self, live: Sequence[Backend]) -> Backend:
        """Of those that are hardly busier than the least busy, the one that has seen least.

        What begins here comes here again: who has room for it counts for more than who is free this moment.
        """
        most = min(map(_load, live)) + _HARDLY_BUSIER
        near = [each for each in live if _load(each) <= most]
        return min(near, key=lambda each: (self.tree.size(each) / each.share, _load(each)))

    def _least(self, live: Sequence[Backend]) -> Backend:
        """The least busy; of these the one that has seen least."""
        best, least = live[0], float("inf")
        size = 0
        for backend in live:
            load = (backend.outstanding + 1) / backend.share
            seen = self.tree.size(backend)
            if load < least or (load == least and seen < size):
                best, least, size = backend, load, seen
        return best


class PrefixHash:
    """The backend that a hash of the prompt's first characters stands for, unless it has too much to do."""

    def __init__(self, settings: PrefixHashSettings, backends: Backends) -> None:
        self._settings = settings
        self._all = backends.all
        self._ring = Ring(backends.all)

    def choose(self, live: Sequence[Backend], request: Request) -> tuple[Backend, str]:
        """See `PromptPolicy.choose`."""
        prompt = request.prompt[: self._settings.characters]
        if not prompt:
            return min(live, key=_load), Why.NO_PROMPT
        total = sum(each.outstanding for each in live) + 1
        shares = sum(each.share for each in live)
        first = True
        for backend in self._ring.walk(prompt.encode(errors="surrogatepass")):
            if backend in live:
                most = ceil(self._settings.load_factor * total * backend.share / shares)
                if backend.outstanding < most:
                    return backend, Why.HASH if first else Why.OVERFLOW
            first = False
        return min(live, key=_load), Why.OVERFLOW

    def given(self, backend: Backend, request: Request) -> None:
        """See `PromptPolicy.given`."""

    def explain(self, live: Sequence[Backend], request: Request) -> dict[str, Any]:
        """See `PromptPolicy.explain`."""
        prompt = request.prompt[: self._settings.characters]
        order = self._ring.walk(prompt.encode(errors="surrogatepass")) if prompt else ()
        return {"prompt_characters": len(prompt), "order": [each.name for each in order]}

    def keep(self, backends: Sequence[Backend], now: float) -> None:
        """See `PromptPolicy.keep`."""
        if backends is not self._all:
            self._all = tuple(backends)
            self._ring = Ring(backends)


def _load(backend: Backend) -> float:
    return (backend.outstanding + 1) / backend.share
