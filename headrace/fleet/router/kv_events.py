# SPDX-License-Identifier: Apache-2.0
"""The policy `kv_events`: choose the backend whose prefix cache has most of the prompt, by the backends' own KV events.

`KVEventSubscriber` follows the KV events of each backend (`core.kv_events`) and keeps the index up to date: it requests
missed batches again, and drops the backend's blocks if they are no longer available. `TokensFirst` asks a backend for the
tokens of a prompt before the choice. Without events, tokens or a match, `prefix_hash` chooses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.extras import MissingExtra
from headrace.core.kv_events import END, InvalidKVEvents, decode_events
from headrace.fleet.router.backend import Backend
from headrace.fleet.router.kv_index import TOKEN_BYTES, KVIndex, pack_tokens
from headrace.fleet.router.policies import ChoiceReason, PrefixHash, RequestView
from headrace.fleet.router.proxied_request import ProxiedRequest, RequestStrategy
from headrace.fleet.router.side_request import SideRequest

if TYPE_CHECKING:
    from headrace.fleet.router.proxied_request import Forwarder
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.settings import KVEventSettings, RouterSettings

log = logging.getLogger("headrace.router")

_REPLAY_SECONDS = 2.0
_TOKENIZE_MEMBERS = (
    "model",
    "messages",
    "prompt",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "documents",
)
_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions"))
_FIELDS = ("authorization", "api-key", "x-api-key")


class KVEvents:
    """The policy. Implements `policies.PromptPolicy`."""

    def __init__(self, settings: RouterSettings, backends: Sequence[Backend], index: KVIndex[Backend]) -> None:
        self.index = index
        self._settings = settings
        self._otherwise = PrefixHash(settings.prefix_hash, backends)

    def choose(self, live: Sequence[Backend], request: RequestView) -> tuple[Backend, str]:
        """Return a backend and the reason."""
        tokens = request.tokens
        if tokens:
            cached, holders = self.index.longest(tokens, self._adapter(request))
            # Common beginnings have many holders.
            among = live if len(holders) < 4 else frozenset(live)
            chosen = min((backend for backend in holders if backend in among), key=_load, default=None)
            if chosen is not None:
                if cached * TOKEN_BYTES < self._settings.cache_aware.cache_threshold * len(tokens):
                    # Only a common beginning, such as a system prompt: no reason to send all such requests to one backend.
                    least_busy = min(live, key=_load)
                    return (chosen if _load(chosen) <= _load(least_busy) else least_busy), ChoiceReason.MISS
                if chosen.outstanding <= self._settings.cache_aware.balance_abs_threshold:
                    return chosen, ChoiceReason.HIT
                least_busy = min(live, key=_load)
                balance = self._settings.cache_aware
                if chosen.outstanding - least_busy.outstanding <= balance.balance_abs_threshold:
                    return chosen, ChoiceReason.HIT
                if chosen.outstanding <= least_busy.outstanding * balance.balance_rel_threshold:
                    return chosen, ChoiceReason.HIT
                return least_busy, ChoiceReason.IMBALANCE
        return self._otherwise.choose(live, request)

    def record(self, backend: Backend, request: RequestView) -> None:
        """Do nothing: the backend reports its cache itself."""

    def explain(self, live: Sequence[Backend], request: RequestView) -> dict[str, Any]:
        """Return the state of the index."""
        details = {
            **self._otherwise.explain(live, request),
            "blocks": {backend.name: self.index.size(backend) for backend in live},
        }
        if request.tokens:
            cached, holders = self.index.longest(request.tokens, self._adapter(request))
            details |= {"prompt_tokens": len(request.tokens) // TOKEN_BYTES, "cached_tokens": cached}
            details["holders"] = sorted(backend.name for backend in holders)
        return details

    def tick(self, backends: Sequence[Backend], now: float) -> None:
        """Rebuild the ring if the backends have changed."""
        self._otherwise.tick(backends, now)

    def _adapter(self, request: RequestView) -> str:
        """Return the adapter of a request: blocks are stored under its name, which is the model's name in requests."""
        if not self.index.adapters or not isinstance(request.document, dict):
            return ""
        model = request.document.get("model")
        return model if model in self.index.adapters else ""


def _load(backend: Backend) -> float:
    return (backend.outstanding + 1) / backend.share


class PromptTokens:
    """Requests the tokens of prompts from backends, if the choice may depend on them."""

    def __init__(self, settings: KVEventSettings, index: KVIndex[Backend]) -> None:
        self.settings = settings
        self._index = index
        self.asked = 0
        """Prompts that a backend was asked to tokenize."""
        self.failed = 0

    def body_for(self, request: RequestView) -> bytes:
        """Return the body for `/tokenize`; b"" if the choice does not depend on tokens, or if they are known."""
        if not self._index.blocks or len(request.body) < self.settings.least_bytes:
            return b""
        document = request.document
        if request.head.path not in _PATHS or not isinstance(document, dict):
            return b""
        prompt = document.get("prompt")
        if isinstance(prompt, list):
            request.tokens = pack_tokens(prompt)
            return b""
        if request.head.path == b"/v1/completions" and not isinstance(prompt, str):
            return b""
        return orjson.dumps({name: document[name] for name in _TOKENIZE_MEMBERS if name in document})


class TokensFirst(RequestStrategy):
    """The strategy of a request: tokenize its prompt before a backend is chosen."""

    def __init__(self, tokens: PromptTokens) -> None:
        self._tokens = tokens
        self._asked = False
        self._question: TokenizeRequest | None = None

    def start(self, request: ProxiedRequest) -> bool:
        """Request the tokens, once."""
        router = request.router
        if self._asked or router.chooser is None:
            return False
        self._asked = True
        view = request.view_for(router.chooser)
        body = self._tokens.body_for(view)
        live = router.chooser.candidates() if body else ()
        if not live:
            return False
        request.exchange.on_disconnect = request
        self._tokens.asked += 1

        def go_on(tokens: bytes | None) -> None:
            self._question = None
            self._tokens.failed += tokens is None
            view.tokens = tokens
            request.start()

        self._question = TokenizeRequest(router, view, body, go_on)
        self._question.send(router.backends.pick_by_load(live), self._tokens.settings.tokenize_seconds)
        return True

    def cancelled(self, request: ProxiedRequest) -> None:
        """Cancel the request for tokens."""
        if self._question is not None:
            self._question.cancel()


class TokenizeRequest(SideRequest):
    """Asks a backend for the tokens of a prompt, with the client's credentials."""

    max_response_bytes = 32 << 20

    def __init__(
        self, router: Forwarder, request: RequestView, body: bytes, done: Callable[[bytes | None], None]
    ) -> None:
        by_name = request.head.by_name
        fields = [(name.encode(), by_name[name.encode()]) for name in _FIELDS if name.encode() in by_name]
        if b"host" in by_name:
            fields.append((b"host", by_name[b"host"]))
        lines = b"".join(b"\r\n%b: %b" % field for field in fields)
        length = b"\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
        super().__init__(router, b"POST /tokenize HTTP/1.1" + length + lines, body)
        self._done = done

    def _received(self, head: UpstreamHead, body: bytes) -> None:
        self._end(head.outcome)
        tokens = None
        if head.status == 200:
            try:
                tokens = pack_tokens(orjson.loads(body)["tokens"])
            except (orjson.JSONDecodeError, TypeError, KeyError):
                log.debug("A backend answered /tokenize without tokens.")
        self._done(tokens)

    def _failed(self, backend: Backend, reason: str, *, late: bool) -> None:
        log.info("%s %s: choosing without the tokens of a prompt", backend.name, reason)
        self._done(None)


def require_events() -> None:
    """Raise MissingExtra without pyzmq and msgspec."""
    try:
        import msgspec  # noqa: F401
        import zmq.asyncio  # noqa: F401
    except ImportError:
        raise MissingExtra("policy kv_events", "kv-events", "choose another policy") from None


class KVEventSubscriber:
    """Subscribes to the KV events of all backends. Used from the loop's thread only."""

    def __init__(self, settings: KVEventSettings, index: KVIndex[Backend]) -> None:
        """Raises MissingExtra without pyzmq and msgspec."""
        require_events()
        import zmq.asyncio

        self._settings = settings
        self._index = index
        self._context: Any = zmq.asyncio.Context()
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self.batches = 0
        self.gaps = 0
        """Gaps in the sequence numbers of a backend, or restarts of it."""
        self.lost = 0
        """Gaps that could not be filled, so that the blocks of the backend were dropped."""

    def follow(self, backends: Sequence[Backend]) -> None:
        """Subscribe to exactly these backends; drop the blocks of all others."""
        for backend in set(self._tasks) - set(backends):
            self.leave(backend)
        for backend in backends:
            if backend not in self._tasks and backend.live and self._address(backend, replay=False):
                self._tasks[backend] = asyncio.get_running_loop().create_task(self._follow(backend))

    def leave(self, backend: Backend) -> None:
        """Unsubscribe from a backend, and drop its blocks."""
        task = self._tasks.pop(backend, None)
        if task is not None:
            task.cancel()
        self._index.clear(backend)

    def counts(self) -> dict[tuple[str, ...], float]:
        """Return the counts by what happened, for metrics."""
        index = self._index
        return {
            ("batches",): self.batches,
            ("gaps",): self.gaps,
            ("lost",): self.lost,
            ("orphans",): index.orphans,
            ("evicted",): index.evicted,
        }

    @property
    def blocks(self) -> int:
        """Blocks in the caches of all backends."""
        return self._index.blocks

    async def close(self) -> None:
        """Unsubscribe from all backends."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def _address(self, backend: Backend, *, replay: bool) -> str:
        address, settings = backend.address, self._settings
        port = (address.replay_port or settings.replay_port) if replay else (address.events_port or settings.port)
        host = f"[{address.host}]" if ":" in address.host else address.host
        return f"tcp://{host}:{port}" if port else ""

    async def _follow(self, backend: Backend) -> None:
        import zmq

        socket = self._context.socket(zmq.SUB)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.IPV6, 1)
            socket.subscribe(self._settings.topic.encode())
            socket.connect(self._address(backend, replay=False))
            expected = await self._catch_up(backend, 0, None)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    continue
                number = int.from_bytes(frames[1], "big")
                if number != expected:
                    expected = await self._fill_gap(backend, expected, number)
                if number == expected:
                    self._apply(backend, frames[2])
                    expected = number + 1
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("The KV events of %s cannot be followed.", backend.name)
        finally:
            socket.close()

    async def _fill_gap(self, backend: Backend, expected: int, number: int) -> int:
        """Apply the batches between the last one and this one; return the number that is expected now."""
        self.gaps += 1
        first = expected
        if number < expected:
            log.info("The KV events of %s start again from 0: it was restarted.", backend.name)
            self._index.clear(backend)
            first = 0
        reached = await self._catch_up(backend, first, number)
        if reached != number:
            if first:
                log.info(
                    "KV events of %s are missing from number %d on: its index is built again.", backend.name, reached
                )
            self.lost += 1
            self._index.clear(backend)
        return number

    async def _catch_up(self, backend: Backend, first: int, before: int | None) -> int:
        """Ask for batches that were missed, apply them, and return the number behind the last one without a gap."""
        import zmq

        address = self._address(backend, replay=True)
        if not address or first == before:
            return first
        socket = self._context.socket(zmq.DEALER)
        reached = first
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.IPV6, 1)
            socket.connect(address)
            async with asyncio.timeout(_REPLAY_SECONDS):
                await socket.send_multipart((b"", first.to_bytes(8, "big")))
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) != 3 or frames[1] == END:
                        break
                    number = int.from_bytes(frames[1], "big")
                    if number == reached and (before is None or number < before):
                        self._apply(backend, frames[2])
                        reached += 1
        except TimeoutError:
            log.info("%s did not send missed KV events again.", backend.name)
        finally:
            socket.close()
        return reached

    def _apply(self, backend: Backend, batch: bytes) -> None:
        self.batches += 1
        try:
            self._index.apply(backend, decode_events(batch))
        except InvalidKVEvents as error:
            log.warning("%s sent KV events that cannot be read: %s", backend.name, error)
