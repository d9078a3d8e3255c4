# SPDX-License-Identifier: Apache-2.0
"""The policy `kv_events`: real routers and ZeroMQ sockets; the backends answer `/tokenize` and say who answered.

The events come from a publisher of the tests, as vLLM's engine sends them, and from our own engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from routing import Routing, routing

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.kv_events import END, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, encode_events
from headrace.fleet.router.backend import Backend
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.kv_events import KVEvents
from headrace.fleet.router.kv_index import KVIndex, pack_tokens
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.settings import (
    BackendAddress,
    HedgingSettings,
    KVEventSettings,
    RouterSettings,
    check_settings,
)
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, RequestHead, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import serving
from support.waiting import eventually

zmq = pytest.importorskip("zmq", reason="needs the extra kv-events")

SETTINGS = KVEventSettings(least_bytes=0)
TEXT = "the quick brown fox jumps over the lazy dog"


def tokens_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Engine:
    """A backend whose tokens are letters, and the KV events that it sends."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tokenize_status = 200
        context = zmq.Context.instance()
        self._publisher = context.socket(zmq.PUB)
        self.port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        self._replay = context.socket(zmq.ROUTER)
        self.replay_port = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self.batches: list[bytes] = []
        self.first = 0
        """The number of the first batch that it still has."""
        self.http_port = 0

    def publish(self, *events: KVEvent, lost: bool = False) -> None:
        """Publish a batch; `lost`: nobody receives it."""
        self.batches.append(encode_events(events, 0.0))
        if not lost:
            number = self.first + len(self.batches) - 1
            self._publisher.send_multipart((b"", number.to_bytes(8, "big"), self.batches[-1]))

    def restart(self) -> None:
        self.batches = []

    def answer_replays(self) -> int:
        """Answer who has missed something; return how many did."""
        answered = 0
        while self._replay.poll(10):
            client, _, first = self._replay.recv_multipart()
            for number, batch in enumerate(self.batches, self.first):
                if number >= int.from_bytes(first, "big"):
                    self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
            self._replay.send_multipart((client, b"", END, b""))
            answered += 1
        return answered

    def handle(self, exchange: Exchange) -> None:
        path = exchange.head.path.decode()
        self.asked.append(path)
        if path != "/tokenize":
            exchange.respond(OK_JSON, json.dumps({"by": self.http_port}).encode())
        elif self.tokenize_status != 200:
            exchange.respond(ResponseHead(self.tokenize_status, []), b"")
        else:
            document = json.loads(exchange.body)
            text = document.get("prompt") or "".join(message["content"] for message in document["messages"])
            exchange.respond(OK_JSON, json.dumps({"tokens": tokens_of(text), "count": len(text)}).encode())

    def close(self) -> None:
        self._publisher.close(linger=0)
        self._replay.close(linger=0)


@contextmanager
def routed(count: int = 2, **changes: Any) -> Iterator[tuple[Routing, list[Engine]]]:
    with ExitStack() as opened:
        engines = []
        texts = []
        for _ in range(count):
            engine = Engine()
            opened.callback(engine.close)

            def site(engine: Engine = engine) -> Site:
                routes = Routes()
                routes.fallback(engine.handle, engine.handle, whole_bytes=1 << 20)
                return Site(routes)

            engine.http_port = opened.enter_context(serving(site)).port
            texts.append(f"http://127.0.0.1:{engine.http_port},events={engine.port},replay={engine.replay_port}")
            engines.append(engine)
        changes.setdefault("kv_events", SETTINGS)
        router = opened.enter_context(routing(*texts, policy="kv_events", **changes))
        for engine in engines:
            # It asks at once for what was published before; from then on it is subscribed.
            eventually(engine.answer_replays)
        yield router, engines


def blocks(router: Routing) -> int:
    subscriber = router.proxy.kv_events
    assert subscriber is not None
    return subscriber.blocks


def learned(router: Routing, engine: Engine, text: str, first: int = 0) -> None:
    """Publish what an engine has of a text until the router knows it: a subscription takes a moment."""
    stored = BlockStored(list(range(first, first + len(text) // 4)), None, tokens_of(text)[: len(text) // 4 * 4], 4)
    before = blocks(router)

    def knows() -> bool:
        engine.publish(stored)
        engine.answer_replays()
        return blocks(router) > before

    eventually(knows)


def answered_by(router: Routing, text: str = TEXT) -> int:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    answer = router.get("/v1/chat/completions", "POST", body)
    assert answer.status == 200, answer
    return int(json.loads(answer.body)["by"])


def test_a_conversation_follows_its_blocks() -> None:
    with routed() as (router, (one, other)):
        learned(router, one, TEXT)
        assert {answered_by(router, TEXT + more) for more in (" again", " and again", "")} == {one.http_port}
        # Its blocks are evicted there, and computed at the other one.
        one.publish(BlockRemoved(list(range(20))))
        learned(router, other, TEXT + " again and", 700)
        assert {answered_by(router, TEXT + more) for more in (" again", " again and again")} == {other.http_port}
        assert "/tokenize" in one.asked + other.asked
        metrics = router.get("/router/metrics").body
        assert (
            b'headrace_router_kv_events_total{what="batches"}' in metrics and b"headrace_router_kv_blocks " in metrics
        )


def test_without_events_or_tokens_the_hash_chooses() -> None:
    with routed() as (router, (one, other)):
        first = answered_by(router)
        assert "/tokenize" not in one.asked + other.asked
        learned(router, one, "something else entirely")
        one.tokenize_status = other.tokenize_status = 404
        assert {answered_by(router) for _ in range(3)} == {first}
        assert "/tokenize" in one.asked + other.asked
        body = json.dumps({"model": "m", "prompt": tokens_of("something else entirely, at last")}).encode()
        answer = router.get("/v1/completions", "POST", body)
        assert json.loads(answer.body)["by"] == one.http_port  # its tokens need not be asked for
        assert router.get("/v1/embeddings", "POST", b'{"input": "x"}').status == 200


def test_what_many_prompts_begin_with_does_not_send_all_to_one_backend() -> None:
    addresses = tuple(BackendAddress.parse(f"http://10.0.0.{number}:1") for number in (1, 2, 3))
    settings = RouterSettings(addresses, policy="kv_events")
    one, other, third = backends = Backends(settings).all
    index: KVIndex[Backend] = KVIndex(1000)
    index.apply(one, [BlockStored([1, 2], None, list(range(8)), 4)])
    policy = KVEvents(settings, backends, index)
    view = RequestView(RequestHead(b"POST", b"/v1/completions", [], version="1.1"))

    def choose(tokens: int) -> tuple[Backend, str]:
        view.tokens = pack_tokens(list(range(tokens)))
        return policy.choose(backends, view)

    one.outstanding, other.outstanding, third.outstanding = 2, 1, 3
    assert choose(20) == (one, ChoiceReason.HIT)  # two fifths of it
    assert choose(80) == (other, ChoiceReason.MISS)  # a tenth: the least busy one
    other.outstanding = 2
    assert choose(80) == (one, ChoiceReason.MISS)  # as busy as the least, and it has a little


def test_missed_batches_are_asked_for() -> None:
    with routed() as (router, (one, _)):
        learned(router, one, TEXT[:8])
        one.publish(BlockStored([2, 3], 1, tokens_of(TEXT[8:16]), 4), lost=True)
        one.publish(BlockStored([4, 5], 3, tokens_of(TEXT[16:24]), 4))
        eventually(lambda: one.answer_replays() or blocks(router) == 6)
        eventually(lambda: blocks(router) == 6)


def test_events_that_cannot_be_replayed_empty_the_index_of_a_backend() -> None:
    with routed() as (router, (one, _)):
        learned(router, one, TEXT[:8])
        one.first += len(one.batches) + 5
        one.batches = []
        one.publish(BlockStored([9], None, tokens_of(TEXT[:4]), 4))
        eventually(one.answer_replays)
        eventually(lambda: blocks(router) == 1)
        assert router.proxy.kv_events is not None
        assert router.proxy.kv_events.lost == 1


def test_a_restarted_engine_has_nothing() -> None:
    with routed() as (router, (one, _)):
        learned(router, one, TEXT)
        one.restart()
        one.publish(AllBlocksCleared())
        eventually(lambda: blocks(router) == 0)


def test_a_backend_that_is_down_is_forgotten() -> None:
    with routed() as (router, (one, _)):
        learned(router, one, TEXT)
        backend = router.proxy.backends.all[0]

        def go_down() -> None:
            backend.health.eject(router.server.loop.time(), "a test")
            router.proxy.backends._update_live(backend, router.server.loop.time())

        router.server.call(go_down)
        assert blocks(router) == 0


def test_events_that_cannot_be_read_are_skipped() -> None:
    with routed() as (router, (one, _)):
        learned(router, one, TEXT[:8])
        one._publisher.send_multipart((b"", b"x", b"y"))
        one._publisher.send_multipart((b"", len(one.batches).to_bytes(8, "big"), b"\xc1"))
        one.batches.append(b"\xc1")
        one.publish(BlockStored([2, 3], 1, tokens_of(TEXT[8:16]), 4))
        eventually(lambda: blocks(router) == 4)


def test_our_engine_publishes_what_its_cache_gets_and_loses() -> None:
    from headrace.backends.llm.kv_events import KVEventPublisher
    from headrace.backends.llm.page_pool import PagePool
    from headrace.backends.llm.scheduler import Scheduler, Sequence

    publisher = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    pool = PagePool(8, 4, prefix_cache=True)
    scheduler = Scheduler(pool, max_running=2, max_step_tokens=64)
    scheduler.events = pool.events = publisher

    def run(text: str, adapter: str = "") -> None:
        sequence = Sequence(tokens_of(text), len(text) + 1, adapter=adapter, cache_salt=adapter.encode())
        scheduler.add(sequence)
        while not scheduler.idle:
            chunks = scheduler.schedule()
            scheduler.commit(chunks, [7] * sum(chunk.samples for chunk in chunks))
            if len(sequence.tokens) >= sequence.limit:
                scheduler.finish((sequence,))
        publisher.flush()

    try:
        run(TEXT[:20])
        with routed(1) as (_, (engine,)):
            events, replay = (address.rpartition(":")[2] for address in (publisher.endpoint, publisher.replay_endpoint))
            text = f"http://127.0.0.1:{engine.http_port},events={events},replay={replay}"
            with routing(text, policy="kv_events", kv_events=SETTINGS) as router:
                eventually(lambda: blocks(router) == 5)  # what was published before, sent again
                run(TEXT[:24])
                eventually(lambda: blocks(router) == 6)
                run("0123456789abcdef")  # evicts the last pages
                eventually(lambda: router.proxy.kv_events is not None and router.proxy.kv_events.batches >= 3)
                used = pool.evictable
                eventually(lambda: blocks(router) == used)
                pool.reset_prefix_cache()
                publisher.flush()
                eventually(lambda: blocks(router) == 0)
                run(TEXT[:8], "french")
                eventually(lambda: blocks(router) == 2)
    finally:
        publisher.close()


def test_an_address_that_is_taken_is_refused() -> None:
    from headrace.backends.llm.kv_events import KVEventPublisher

    first = KVEventPublisher("tcp://127.0.0.1:*")
    try:
        with pytest.raises(FailedPrecondition, match="kv_events"):
            KVEventPublisher(first.endpoint)
    finally:
        first.close()


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.backends.llm.kv_events import KVEventPublisher

    for name in ("zmq", "zmq.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FailedPrecondition, match="kv-events"):
        KVEventPublisher("tcp://127.0.0.1:*")
    with pytest.raises(FailedPrecondition, match="kv-events"):
        RouterProxy(RouterSettings((BackendAddress.parse("http://a:1"),), policy="kv_events"))


def test_settings_that_do_not_fit_are_refused() -> None:
    backend = BackendAddress.parse("http://a:1,events=5557,replay=5558")
    assert (backend.events_port, backend.replay_port) == (5557, 5558)
    for text in ("http://a:1,events=x", "http://a:1,replay=70000", "http://a:1,events=0"):
        with pytest.raises(InvalidArgument):
            BackendAddress.parse(text)
    for changes in (
        {"hedging": HedgingSettings(after_seconds=1)},
        {"kv_events": KVEventSettings(port=70_000)},
        {"kv_events": KVEventSettings(max_blocks=0)},
    ):
        with pytest.raises(InvalidArgument):
            check_settings(RouterSettings((backend,), policy="kv_events", **changes))  # type: ignore[arg-type]
