# SPDX-License-Identifier: Apache-2.0
"""Load-balancing policies: by load alone (`Policy`), or by the prompt of the request (`PromptPolicy`).

`backends.Backends` uses the first kind and `chooser.Chooser` the second. A policy gets the backends that can take the
request. Choosing by prompt changes nothing, so that `/router/explain` can do it too; `record` is called after the choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from math import ceil
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.prefix_tree import PrefixTree
from headrace.fleet.router.settings import ALIASES, POLICIES

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.settings import CacheAwareSettings, PrefixHashSettings
    from headrace.net.http.heads import Buffer, RequestHead

MAX_PROMPT_CHARACTERS = 1 << 17
"""Characters of a prompt that policies use."""
_PROMPT_KEYS = ("prompt", "text", "text_input", "input", "inputs")
"""Keys of a prompt if there are no messages: completions, `/generate` of several servers, embeddings."""
_UNPARSED: Any = object()
_RING_POINTS = 100
"""Points on the hash ring for a backend of mean weight."""
_MAX_RING_POINTS = 1000
_SIMILAR_LOAD = 4
"""Backends with at most so many open requests more than the least busy one count as equally busy."""


class Policy(Protocol):
    """Chooses by load alone."""

    def pick(self, live: Sequence[Backend]) -> Backend:
        """Return one of `live`, which has at least two backends."""


class RoundRobin:
    """Each backend in turn, whatever its weight. A backend in slow start is skipped most of the time."""

    def __init__(self, random: Random) -> None:
        self._next = 0
        self._random = random.random

    def pick(self, live: Sequence[Backend]) -> Backend:
        """Return the next backend."""
        size = len(live)
        for _ in range(size):
            self._next = index = (self._next + 1) % size
            backend = live[index]
            if backend.ramp >= 1.0 or self._random() < backend.ramp:
                return backend
        return live[self._next]


class LeastOutstanding:
    """The backend with the fewest open requests for its weight; equal ones in turn."""

    def __init__(self, random: Random) -> None:
        self._start = 0

    def pick(self, live: Sequence[Backend]) -> Backend:
        """Return the least busy backend."""
        size = len(live)
        # The start moves each time: otherwise the first of equals would get all requests of an idle router.
        self._start = start = (self._start + 1) % size
        best = live[start]
        lowest = (best.outstanding + 1) / best.share
        for index in range(start + 1, start + size):
            backend = live[index - size if index >= size else index]
            load = (backend.outstanding + 1) / backend.share
            if load < lowest:
                best, lowest = backend, load
        return best


class PowerOfTwo:
    """Two random backends, and of these the one with fewer open requests for its weight.

    Nearly as even as comparing all, and several routers that do so do not all choose the same backend.
    """

    def __init__(self, random: Random) -> None:
        self._random = random.random

    def pick(self, live: Sequence[Backend]) -> Backend:
        """Return the less busy one of two random backends."""
        size = len(live)
        random = self._random
        first = int(random() * size)
        second = int(random() * (size - 1))
        if second >= first:
            second += 1
        first_choice, second_choice = live[first], live[second % size]
        if (first_choice.outstanding + 1) * second_choice.share <= (second_choice.outstanding + 1) * first_choice.share:
            return first_choice
        return second_choice


class SmoothWeighted:
    """Weighted round robin, well mixed: with weights 2 and 1 the order is a b a, not a a b (nginx's algorithm)."""

    def __init__(self, random: Random) -> None:
        self._credit: dict[Backend, float] = {}

    def pick(self, live: Sequence[Backend]) -> Backend:
        """Return the backend with the most credit."""
        credit = self._credit
        total = 0.0
        best = live[0]
        highest = float("-inf")
        for backend in live:
            share = backend.share
            total += share
            credit[backend] = current = credit.get(backend, 0.0) + share
            if current > highest:
                best, highest = backend, current
        credit[best] = highest - total
        return best

    def remove(self, backend: Backend) -> None:
        """Drop the state of a removed backend."""
        self._credit.pop(backend, None)

    def __copy__(self) -> SmoothWeighted:
        # For `/router/explain`, which finds the next choice without making it.
        copied = SmoothWeighted(Random())  # noqa: S311 - unused
        copied._credit = dict(self._credit)
        return copied


class WeightedRandom:
    """A random backend, by weight."""

    def __init__(self, random: Random) -> None:
        self._random = random.random

    def pick(self, live: Sequence[Backend]) -> Backend:
        """Return a random backend."""
        left = self._random() * sum(backend.share for backend in live)
        for backend in live:
            left -= backend.share
            if left < 0:
                return backend
        return live[-1]


_POLICY_CLASSES: dict[str, Callable[[Random], Policy]] = dict(
    zip(
        POLICIES,
        # The last four choose by the request, and by load where the request says nothing.
        (PowerOfTwo, RoundRobin, LeastOutstanding, SmoothWeighted, WeightedRandom, *[LeastOutstanding] * 4),
        strict=True,
    )
)


def make_policy(name: str, random: Random | None = None) -> Policy:
    """Return the policy of this name, one of `settings.POLICIES` or of its `ALIASES`."""
    try:
        policy_class = _POLICY_CLASSES[ALIASES.get(name, name)]
    except KeyError:
        raise InvalidArgument(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}") from None
    return policy_class(random or Random())  # noqa: S311 - spreads requests, hides nothing


class ChoiceReason:
    """Why a backend was chosen: the label `why` of `headrace_router_decisions_total`."""

    POLICY = "policy"
    """By load alone."""
    ONLY = "only"
    """It was the only backend."""
    HIT = "hit"
    """It has seen most of the prompt."""
    MISS = "miss"
    """No backend has seen the prompt: it had little load and the smallest part of the tree."""
    IMBALANCE = "imbalance"
    """One backend had far too much load: it had the least."""
    NO_PROMPT = "no_prompt"
    """The request has no prompt, or the body was not complete when the choice was made."""
    HASH = "hash"
    OVERFLOW = "overflow"
    """The backend of the hash is down or has too much load."""
    STICKY = "sticky"
    MOVED = "sticky_moved"
    """The backend of the session is removed, down or full."""
    RETRY = "retry"
    HEDGE = "hedge"
    PREDICTED = "predicted"
    """It is expected to be done first, and to keep the latency target if there is one."""
    TARGET_MISSED = "target_missed"
    """No backend is expected to keep the latency target: it misses it least."""
    AGGREGATED = "aggregated"
    """It is a prefill backend, and no decode backend was left."""


class RequestView:
    """A request as policies see it: head, body, session, and the parsed body, which is parsed when first used."""

    __slots__ = ("_document", "_prompt", "body", "head", "session", "tokens")

    def __init__(self, head: RequestHead, body: Buffer = b"") -> None:
        self.head = head
        self.body = body
        self.session = b""
        """The session key, if the router has just created one."""
        self.tokens: bytes | None = None
        """The tokens of the prompt, packed for `kv_index`, where a policy needs them and they were found."""
        self._document: Any = _UNPARSED
        self._prompt: str | None = None

    @property
    def document(self) -> Any:
        """The body as JSON; None if it is not JSON."""
        if self._document is _UNPARSED:
            self._document = None
            if self.body[:1] in (b"{", b" ", b"\n", b"\r", b"\t"):
                try:
                    self._document = orjson.loads(self.body)
                except orjson.JSONDecodeError:
                    pass
        return self._document

    @property
    def prompt(self) -> str:
        """The text that a model reads; the body's bytes if there is no prompt in it; "" without a body."""
        if self._prompt is None:
            self._prompt = self._read_prompt()[:MAX_PROMPT_CHARACTERS]
        return self._prompt

    def _read_prompt(self) -> str:
        document = self.document
        if isinstance(document, dict):
            text = _text_of_messages(document.get("messages"))
            # Anthropic's Messages API has the system prompt beside the messages; a model reads it first.
            system = _text_of(document.get("system")) if text else ""
            text = f"system: {system}\n{text}" if system else text
            for key in _PROMPT_KEYS:
                text = text or _text_of(document.get(key))
            if text:
                # Each model has its own cache.
                model = document.get("model")
                return f"{model}\n{text}" if isinstance(model, str) else text
        return bytes(self.body[:MAX_PROMPT_CHARACTERS]).decode("latin-1")


def _text_of_messages(messages: Any) -> str:
    if not isinstance(messages, list):
        return ""
    valid = (message for message in messages if isinstance(message, dict))
    return "\n".join(f"{message.get('role')}: {_text_of(message.get('content'))}" for message in valid)


def _text_of(value: Any) -> str:
    """Return the text of a string, of a list of strings or message parts, or of a list of token ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    if value and isinstance(value[0], dict):
        texts = [part.get("text") or part.get("content") for part in value if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str)) or orjson.dumps(value).decode()
    return "\n".join(value) if all(isinstance(item, str) for item in value) else orjson.dumps(value).decode()


class PromptPolicy(Protocol):
    """Chooses by the prompt of the request."""

    def choose(self, live: Sequence[Backend], request: RequestView) -> tuple[Backend, str]:
        """Return one of `live`, which is not empty, and a `ChoiceReason`."""

    def record(self, backend: Backend, request: RequestView) -> None:
        """Note that the request is sent to the backend."""

    def explain(self, live: Sequence[Backend], request: RequestView) -> dict[str, Any]:
        """Return the details of the choice, for `/router/explain`."""

    def tick(self, backends: Sequence[Backend], now: float) -> None:
        """Let time pass; `backends` are all backends of the router."""


class CacheAware:
    """The backend that has seen the longest prefix of the prompt, so that its KV cache can be reused."""

    def __init__(self, settings: CacheAwareSettings) -> None:
        self._settings = settings
        self.tree: PrefixTree[Backend] = PrefixTree(settings.max_tree_size)
        self._backends: Sequence[Backend] = ()
        self._last_trim = 0.0

    def choose(self, live: Sequence[Backend], request: RequestView) -> tuple[Backend, str]:
        """Return a backend and the reason."""
        prompt = request.prompt
        if not prompt:
            return self._least_busy(live), ChoiceReason.NO_PROMPT
        if self._is_unbalanced(live):
            return self._least_busy(live), ChoiceReason.IMBALANCE
        matched, backends = self.tree.longest(prompt, live)
        if backends and matched >= self._settings.cache_threshold * len(prompt):
            return self._least_busy(backends), ChoiceReason.HIT
        return self._smallest_tree(live), ChoiceReason.MISS

    def record(self, backend: Backend, request: RequestView) -> None:
        """Add the prompt to the backend's part of the tree."""
        if request.prompt:
            self.tree.add(request.prompt, backend)

    def explain(self, live: Sequence[Backend], request: RequestView) -> dict[str, Any]:
        """Return the lengths of the matches and the sizes of the tree."""
        prompt = request.prompt
        matched = {backend.name: self.tree.longest(prompt, (backend,))[0] for backend in live}
        return {
            "prompt_characters": len(prompt),
            "matched_characters": matched,
            "tree_size": {backend.name: self.tree.size(backend) for backend in live},
            "unbalanced": self._is_unbalanced(live),
        }

    def tick(self, backends: Sequence[Backend], now: float) -> None:
        """Remove the prompts of removed backends, and trim the tree at its interval."""
        if backends is not self._backends:
            for backend in set(self._backends) - set(backends):
                self.tree.remove(backend)
            self._backends = backends
        interval = self._settings.eviction_interval_seconds
        if interval > 0 and now - self._last_trim >= interval:
            self._last_trim = now
            self.tree.trim(7 / 8)

    def _is_unbalanced(self, live: Sequence[Backend]) -> bool:
        highest = lowest = live[0].outstanding
        for backend in live:
            load = backend.outstanding
            if load > highest:
                highest = load
            elif load < lowest:
                lowest = load
        settings = self._settings
        return highest - lowest > settings.balance_abs_threshold and highest > lowest * settings.balance_rel_threshold

    def _smallest_tree(self, live: Sequence[Backend]) -> Backend:
        """Return the backend with the smallest part of the tree among the least busy ones.

        Prompts with this prefix will come here again: free cache counts for more than the load of this moment.
        """
        loads = [(backend.outstanding + 1) / backend.share for backend in live]
        limit, size = min(loads) + _SIMILAR_LOAD, self.tree.size
        best, least = live[0], (float("inf"), float("inf"))
        for backend, load in zip(live, loads, strict=True):
            if load <= limit and (rank := (size(backend) / backend.share, load)) < least:
                best, least = backend, rank
        return best

    def _least_busy(self, live: Sequence[Backend]) -> Backend:
        """Return the least busy backend; among equals the one with the smallest part of the tree."""
        best, lowest = live[0], float("inf")
        best_size = 0
        for backend in live:
            load = (backend.outstanding + 1) / backend.share
            size = self.tree.size(backend)
            if load < lowest or (load == lowest and size < best_size):
                best, lowest, best_size = backend, load, size
        return best


class PrefixHash:
    """The backend on the hash ring for the prompt's first characters, unless it has too much load."""

    def __init__(self, settings: PrefixHashSettings, backends: Sequence[Backend]) -> None:
        self._settings = settings
        self._backends = backends
        self._ring = HashRing(backends)

    def choose(self, live: Sequence[Backend], request: RequestView) -> tuple[Backend, str]:
        """Return a backend and the reason."""
        prompt = request.prompt[: self._settings.characters]
        if not prompt:
            return min(live, key=_load), ChoiceReason.NO_PROMPT
        total = sum(backend.outstanding for backend in live) + 1
        shares = sum(backend.share for backend in live)
        first = True
        for backend in self._ring.walk(prompt.encode(errors="surrogatepass")):
            if backend in live:
                limit = ceil(self._settings.load_factor * total * backend.share / shares)
                if backend.outstanding < limit:
                    return backend, ChoiceReason.HASH if first else ChoiceReason.OVERFLOW
            first = False
        return min(live, key=_load), ChoiceReason.OVERFLOW

    def record(self, backend: Backend, request: RequestView) -> None:
        """Do nothing: the ring is enough."""

    def explain(self, live: Sequence[Backend], request: RequestView) -> dict[str, Any]:
        """Return the order of backends on the ring."""
        prompt = request.prompt[: self._settings.characters]
        order = self._ring.walk(prompt.encode(errors="surrogatepass")) if prompt else ()
        return {"prompt_characters": len(prompt), "order": [backend.name for backend in order]}

    def tick(self, backends: Sequence[Backend], now: float) -> None:
        """Rebuild the ring if the backends have changed."""
        if backends is not self._backends:
            self._backends = tuple(backends)
            self._ring = HashRing(backends)


class HashRing:
    """Consistent hashing: a key maps to the same backend in every router, and few keys move when backends change.

    A backend that is down keeps its points: its keys come back when it does.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        mean = sum(backend.weight for backend in backends) / len(backends) if backends else 1.0
        points = sorted(
            (_hash(f"{backend.name}#{number}".encode()), index)
            for index, backend in enumerate(backends)
            for number in range(max(1, min(_MAX_RING_POINTS, round(_RING_POINTS * backend.weight / mean))))
        )
        self._backends = tuple(backends)
        self._hashes = [point for point, _ in points]
        self._indexes = [index for _, index in points]

    def walk(self, key: bytes) -> Iterator[Backend]:
        """Yield all backends: the one of the key first, then its replacements in order."""
        seen: set[int] = set()
        size = len(self._indexes)
        start = bisect_right(self._hashes, _hash(key))
        for step in range(size):
            index = self._indexes[(start + step) % size]
            if index not in seen:
                seen.add(index)
                yield self._backends[index]
                if len(seen) == len(self._backends):
                    return


def _load(backend: Backend) -> float:
    return (backend.outstanding + 1) / backend.share


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest())
