# SPDX-License-Identifier: Apache-2.0
"""Who is asked for a prompt, who answers the request, and how often what came of it.

Made by `proxy`, asked by `pairing.flows` for every request and by `explaining`. `Pairs.chooser` stands in for the chooser of
a router without roles: requests go to decoders, and to prefills where no decoder is left, for they can do all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from headrace.fleet.router.choosing.chooser import Chooser, Pick
from headrace.fleet.router.choosing.policies import Why

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.choosing.request import Request
    from headrace.fleet.router.settings import RouterSettings

PREFILL = "prefill"
_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions"))


class Handed:
    """What came of a request: the label `outcome` of `headrace_router_handings_total`."""

    DONE = "handed"
    """The decoder got a ticket."""
    SHORT = "short"
    """The body was shorter than `least_bytes`."""
    NO_PREFILL = "no_prefill"
    NO_DECODER = "no_decoder"
    NOTHING = "nothing"
    """The prefill had nothing to hand over: a prompt of less than a page, several of them, or no room."""
    REFUSED = "refused"
    """The prefill answered with an error. If it is the request's own, the decoder says the same."""
    FAILED = "failed"
    LATE = "late"


WORDS = {
    Handed.DONE: "a prefill computes the prompt first",
    Handed.SHORT: "the request is too short for it to be worth the while",
    Handed.NO_PREFILL: "no prefill can take a prompt: the decoder computes it",
    Handed.NO_DECODER: "no decoder can take a request: a prefill serves all of it",
}


def pairable(request: Request) -> bool:
    """Whether it is a request with a prompt that could be computed elsewhere."""
    return request.head.method == b"POST" and request.head.path in _PATHS


class Pairs:
    """See the module. Used from the loop's thread only."""

    def __init__(self, settings: RouterSettings, backends: Backends) -> None:
        self.settings = settings.pairing
        self.key = settings.handing_key
        self._prefills = _PrefillChooser(settings, backends)
        self.chooser: Chooser = _ServingChooser(settings, backends, self)
        self.counts: Counter[str] = Counter()
        """Requests, by what is in `Handed`."""
        self.seconds = 0.0
        """That prefills took for those that were handed over."""

    def candidate(self, request: Request) -> str:
        """Whether a prefill is to be asked: `Handed.DONE`, or why not."""
        if len(request.body) < self.settings.least_bytes:
            return Handed.SHORT
        if not self._prefills.candidates():
            return Handed.NO_PREFILL
        if all(backend.address.role == PREFILL for backend in self.chooser.candidates()):
            return Handed.NO_DECODER
        return Handed.DONE

    def prefill_for(self, request: Request) -> Backend | None:
        """Who is asked for the prompt; None for nobody, which is counted."""
        outcome = self.candidate(request)
        if outcome != Handed.DONE:
            self.counts[outcome] += 1
            return None
        return self._prefills.pick(request)

    def explain(self, request: Request) -> dict[str, Any]:
        """What would become of a request, for people."""
        if not pairable(request):
            return {}
        outcome = self.candidate(request)
        told: dict[str, Any] = {"handing": outcome, "handing_because": WORDS[outcome]}
        if outcome == Handed.DONE:
            live = self._prefills.candidates()
            told["prefill"] = self._prefills.decide(request, live, lambda each: each[0])[0].name
        return told

    def keep(self, now: float) -> None:
        """Time has passed."""
        self._prefills.keep(now)


class _PrefillChooser(Chooser):
    """Among prefills."""

    def candidates(self, exclude: Collection[Backend] = ()) -> Sequence[Backend]:
        """See `Chooser.candidates`."""
        return [each for each in super().candidates(exclude) if each.address.role == PREFILL]


class _ServingChooser(Chooser):
    """Among those who answer requests."""

    def __init__(self, settings: RouterSettings, backends: Backends, pairs: Pairs) -> None:
        super().__init__(settings, backends)
        self._pairs = pairs

    def candidates(self, exclude: Collection[Backend] = ()) -> Sequence[Backend]:
        """See `Chooser.candidates`."""
        live = super().candidates(exclude)
        return [each for each in live if each.address.role != PREFILL] or live

    def decide(self, request: Request, live: Sequence[Backend], plain: Pick) -> tuple[Backend, str]:
        """See `Chooser.decide`."""
        backend, why = super().decide(request, live, plain)
        return backend, Why.AGGREGATED if backend.address.role == PREFILL else why

    def explain(self, request: Request, live: Sequence[Backend]) -> dict[str, Any]:
        """See `Chooser.explain`."""
        return {**super().explain(request, live), **self._pairs.explain(request)}

    def keep(self, now: float) -> None:
        """See `Chooser.keep`."""
        super().keep(now)
        self._pairs.keep(now)
