# SPDX-License-Identifier: Apache-2.0
"""Fairness between tenants: shares of the tokens, priorities, limits per minute, and what the router says of them."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from routing import Answer, Routing, ask, raw, routing, scripted_backend

from headrace.api.access.api_keys import KeyRing, create_key, set_tenant
from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted
from headrace.fleet.router.fairness import ANONYMOUS, EqualTenant, Fairness, FairQueue, Tenant, TokenUsage
from headrace.fleet.router.request_queue import OnResponse
from headrace.fleet.router.settings import (
    BackendAddress,
    FairnessSettings,
    QueueSettings,
    RouterSettings,
    check_settings,
)
from headrace.net.http.heads import RequestHead
from support.serving import EchoHandlers, echo_site, serving
from support.waiting import eventually

HEADER = "x-tenant"
BY_HEADER = FairnessSettings(tenant_header=HEADER)
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n'


class _Request:
    """A request in a queue, without a connection."""

    queued_since = 0.0

    def __init__(self, usage: TokenUsage, on_start: Callable[[_Request], None]) -> None:
        self.usage: TokenUsage | None = usage
        self.name = usage.tenant.name
        self.error: HeadraceError | None = None
        self.gone = False
        self._on_start = on_start

    def is_gone(self) -> bool:
        return self.gone

    def queued_bytes(self) -> int:
        return 0

    def enter_queue(self) -> None:
        pass

    def traceparent(self) -> bytes:
        return b""

    def leave_queue(self, on_response: OnResponse | None = None) -> None:
        if self.usage is not None:
            self.usage.begin()
        self._on_start(self)

    def refuse(self, error: HeadraceError) -> None:
        self.error = error


class _Queued:
    """A fair queue before one backend, in a loop whose time the test sets."""

    def __init__(self, *tenants: EqualTenant, settings: FairnessSettings = BY_HEADER, requests: int = 1000) -> None:
        self.room = 0
        self.started: list[_Request] = []
        self.specs = {tenant.name.encode(): tenant for tenant in tenants}
        find = (lambda by_name, _: self.specs.get(by_name[HEADER.encode()])) if tenants else None
        self.fairness = Fairness(settings, find)
        self.queue = FairQueue(QueueSettings(requests=requests), lambda: self.room > 0, self.fairness)

    def add(self, tenant: str, prompt_tokens: int = 100) -> _Request:
        head = RequestHead(b"POST", b"/v1/chat/completions", [(HEADER.encode(), tenant.encode())], version="1.1")
        request = _Request(self.fairness.admit(head, 4 * prompt_tokens), self._start)
        self.queue.add(request)
        return request

    def start(self, count: int) -> list[str]:
        """Let so many requests start; returns their tenants in order."""
        before = len(self.started)
        self.room = count
        self.queue.dispatch()
        return [request.name for request in self.started[before:]]

    def _start(self, request: _Request) -> None:
        self.room -= 1
        self.started.append(request)


@pytest.fixture
def clock() -> Iterator[asyncio.AbstractEventLoop]:
    """A running loop whose time stands still at 1000."""
    loop = asyncio.new_event_loop()
    loop.time = lambda: 1000.0  # type: ignore[method-assign]
    asyncio._set_running_loop(loop)
    try:
        yield loop
    finally:
        asyncio._set_running_loop(None)
        loop.close()


def at(clock: asyncio.AbstractEventLoop, seconds: float) -> None:
    clock.time = lambda: 1000.0 + seconds  # type: ignore[method-assign]


@pytest.mark.usefixtures("clock")
def test_tenants_take_turns_in_any_order_of_arrival() -> None:
    queued = _Queued()
    for _ in range(20):
        queued.add("hog")
    for _ in range(3):
        queued.add("small")
    assert Counter(queued.start(6)) == {"hog": 3, "small": 3}


@pytest.mark.usefixtures("clock")
def test_shares_are_of_tokens_and_not_of_requests() -> None:
    queued = _Queued(EqualTenant("double", share=2.0), EqualTenant("single"), EqualTenant("long"))
    for _ in range(400):
        queued.add("double")
        queued.add("single")
        queued.add("long", prompt_tokens=400)
    started = Counter(queued.start(400))
    tokens = {"double": 100 * started["double"], "single": 100 * started["single"], "long": 400 * started["long"]}
    assert tokens["double"] == pytest.approx(2 * tokens["single"], rel=0.05)
    assert tokens["long"] == pytest.approx(tokens["single"], rel=0.05)


@pytest.mark.usefixtures("clock")
def test_generated_tokens_count_while_they_come() -> None:
    queued = _Queued()
    for _ in range(3):
        queued.add("talker")
        queued.add("other")
    assert queued.start(2) == ["talker", "other"]
    talker = queued.started[0].usage
    assert talker is not None
    talker.add(EVENT * 500)
    assert queued.start(2) == ["other", "other"]
    assert talker.tenant.output_tokens == 500


@pytest.mark.usefixtures("clock")
def test_usage_corrects_the_estimate() -> None:
    queued = _Queued()
    queued.add("one", prompt_tokens=1000)
    queued.start(1)
    usage, tenant = queued.started[0].usage, queued.fairness.tenants["one"]
    assert usage is not None
    assert (tenant.prompt_tokens, tenant.counter) == (1000, 1000)
    usage.add(EVENT * 3)
    usage.add(USAGE % (40, 8))
    assert (tenant.prompt_tokens, tenant.output_tokens) == (40, 8)
    assert tenant.counter == 40 + 8 * BY_HEADER.output_weight
    # Text that looks like it is escaped in JSON.
    usage.add(b'data: {"text":"\\"usage\\":{\\"completion_tokens\\":5000}"}\n\n')
    assert tenant.output_tokens == 9


@pytest.mark.usefixtures("clock")
def test_an_idle_tenant_saves_nothing_up_but_a_burst() -> None:
    queued = _Queued()
    queued.add("late")
    queued.start(1)
    for _ in range(2000):
        queued.add("busy")
        queued.start(1)
    late, busy = queued.fairness.tenants["late"], queued.fairness.tenants["busy"]
    assert busy.counter - late.counter > 190_000
    for _ in range(400):
        queued.add("busy")
        queued.add("late")
    order = queued.start(400)
    ahead = order.index("busy")
    assert 100 < ahead < 200  # 16,384 tokens, of 100 for each request
    assert Counter(order[ahead:])["busy"] == pytest.approx((400 - ahead) / 2, abs=2)


def test_priorities_are_first_and_grow_with_the_wait(clock: asyncio.AbstractEventLoop) -> None:
    queued = _Queued(EqualTenant("urgent", priority=2), EqualTenant("normal"))
    queued.add("normal")
    queued.add("urgent")
    assert queued.start(1) == ["urgent"]
    at(clock, 19)
    queued.add("urgent")
    assert queued.start(1) == ["urgent"]  # 1 < 2
    queued.add("urgent")
    at(clock, 30.5)
    assert queued.start(1) == ["normal"]  # both 2, and it has used less
    assert queued.fairness.tenants["normal"].waited_seconds == pytest.approx(30.5)


@pytest.mark.usefixtures("clock")
def test_a_full_queue_drops_the_oldest_request_of_who_fills_it() -> None:
    queued = _Queued(requests=10)
    hogs = [queued.add("hog") for _ in range(10)]
    small = queued.add("small")
    assert small.error is None and queued.queue.length == 10
    assert isinstance(hogs[0].error, ResourceExhausted) and "queue.requests" in hogs[0].error.message
    last = queued.add("hog")
    assert isinstance(last.error, ResourceExhausted)
    assert queued.fairness.tenants["hog"].refused_queue == 2
    assert queued.fairness.tenants["small"].refused_queue == 0
    assert queued.queue.refused == 2 and queued.queue.length == 10
    assert Counter(queued.start(20)) == {"hog": 9, "small": 1}
    assert queued.queue.length == 0


def test_those_who_left_or_waited_too_long_are_removed(clock: asyncio.AbstractEventLoop) -> None:
    queued = _Queued(requests=4)
    requests = [queued.add(name) for name in ("one", "one", "two", "two")]
    requests[1].gone = True
    assert queued.add("three").error is None  # in the place of the one that left
    assert queued.queue.length == 4 and requests[0].error is None
    requests[0].gone = True
    at(clock, 29)
    queued.queue.sweep(1029.0)
    assert queued.queue.length == 3
    queued.queue.sweep(1030.0)
    assert queued.queue.length == 0
    assert [request.error is not None for request in requests] == [False, False, True, True]
    queued.add("one")
    queued.queue.close()
    assert queued.queue.length == 0


def test_a_limit_of_tokens_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5000.0]
    monkeypatch.setattr("headrace.fleet.router.fairness.monotonic", lambda: now[0])
    fairness = Fairness(FairnessSettings(tenant_header=HEADER, output_tokens_per_minute=60))
    head = RequestHead(b"POST", b"/v1/completions", [(HEADER.encode(), b"one")], version="1.1")
    usage = fairness.admit(head, 40)
    usage.begin()
    usage.add(EVENT * 75)  # an answer is not cut: it goes into debt
    with pytest.raises(
        ResourceExhausted, match="'one' has used its 60 output tokens per minute: try again in 16 s"
    ) as e:
        fairness.admit(head, 40)
    assert e.value.retry_after_seconds == pytest.approx(16)
    now[0] += 16
    fairness.admit(head, 40)
    assert fairness.tenants["one"].refused_budget == 1
    # An unused minute is all that is saved.
    now[0] += 3600
    fairness.admit(head, 40).add(EVENT * 61)
    with pytest.raises(ResourceExhausted):
        fairness.admit(head, 40)


def test_tenants_without_a_name_are_one_and_their_number_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.fleet.router.fairness._MAX_TENANTS", 3)
    fairness = Fairness(BY_HEADER)

    def tenant(value: bytes) -> Tenant:
        return fairness.admit(RequestHead(b"GET", b"/", [(HEADER.encode(), value)], version="1.1"), 4000).tenant

    assert tenant(b"").name == tenant(b"a b").name == tenant(b"x" * 65).name == ANONYMOUS
    first = tenant(b"first")
    busy = tenant(b"busy")
    assert tenant(b"third").name == ANONYMOUS  # nobody can be forgotten
    for _ in range(100):
        fairness.admit(RequestHead(b"GET", b"/", [(HEADER.encode(), b"busy")], version="1.1"), 4000).begin()
    assert tenant(b"third").name == "third"
    assert "first" not in fairness.tenants and fairness.tenants["busy"] is busy
    assert tenant(b"first") is not first


def _simulate(hog: float, seconds: float) -> list[float]:
    """Return the response times of two tenants at 0.8 of a third of the capacity, beside one at `hog` times of it.

    Eight requests run at once, each generating 100 tokens a second.
    """
    random_ = random.Random(36)
    loop = asyncio.new_event_loop()
    now = [0.0]
    loop.time = lambda: now[0]  # type: ignore[method-assign]
    fairness = Fairness(BY_HEADER)
    ends: list[tuple[float, int, _Request]] = []
    queue = FairQueue(QueueSettings(requests=200), lambda: len(ends) < 8, fairness)
    begun: dict[_Request, float] = {}
    times: list[float] = []

    def start(request: _Request) -> None:
        tokens = random_.randint(20, 180)
        heapq.heappush(ends, (now[0] + tokens / 100, id(request), request))
        if request.usage is not None:
            request.usage.add(EVENT * tokens)

    arrivals: list[tuple[float, str]] = []
    for tenant, load in (("one", 0.8), ("two", 0.8), ("hog", hog)):
        when = 0.0
        while when < seconds:
            when += random_.expovariate(load * 8 / 3)
            arrivals.append((when, tenant))
    asyncio._set_running_loop(loop)
    try:
        for when, tenant in sorted(arrivals):
            while ends and ends[0][0] <= when:
                now[0], _, request = heapq.heappop(ends)
                if request.name != "hog":
                    times.append(now[0] - begun.pop(request))
                queue.dispatch()
            now[0] = when
            head = RequestHead(b"POST", b"/", [(HEADER.encode(), tenant.encode())], version="1.1")
            request = _Request(fairness.admit(head, 400), start)
            begun[request] = when
            if len(ends) < 8:
                request.leave_queue()
            else:
                queue.add(request)
    finally:
        asyncio._set_running_loop(None)
        loop.close()
    return sorted(times)


def test_a_tenant_at_ten_times_its_share_hardly_slows_the_others() -> None:
    calm, loaded = _simulate(0.8, 1500), _simulate(10.0, 1500)
    assert len(loaded) > 0.99 * len(calm) > 5000
    calm_p99, loaded_p99 = (times[int(len(times) * 0.99)] for times in (calm, loaded))
    assert loaded_p99 < 1.2 * calm_p99


def _status(router: Routing) -> dict[str, dict[str, object]]:
    tenants = json.loads(ask(router.port, "GET", "/router/status").body)["tenants"]
    return {tenant["name"]: tenant for tenant in tenants}


def test_through_http_by_a_header() -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as one:
        with routing(one.port, max_outstanding=1, fairness=BY_HEADER) as router:
            answers: list[Answer] = []

            def send(tenant: str, text: bytes) -> threading.Thread:
                def run() -> None:
                    answers.append(ask(router.port, "POST", "/hold", text, {HEADER: tenant}))

                thread = threading.Thread(target=run)
                thread.start()
                return thread

            threads = [send("hog", b"first")]
            eventually(lambda: handlers.held)
            for number, (tenant, text) in enumerate(
                [("hog", b"h1" * 50), ("hog", b"h2" * 50), ("small", b"s1" * 50)], 1
            ):
                threads.append(send(tenant, text))
                eventually(lambda number=number: router.proxy.backends.queued == number)  # type: ignore[misc]
            assert _status(router)["hog"]["queued"] == 2
            order = []
            for _ in range(4):
                eventually(lambda: handlers.held)
                order.append(bytes(handlers.held[0].body)[:2])
                one.call(lambda: handlers.echo(handlers.held.pop(0)))
            for thread in threads:
                thread.join(60)
            assert order == [b"fi", b"s1", b"h1", b"h2"]
            assert [answer.status for answer in answers] == [200] * 4
            status = _status(router)
            assert status["small"]["requests"] == 1 and status["small"]["prompt_tokens"] == 25
            metrics = ask(router.port, "GET", "/router/metrics").body
            assert b'headrace_router_tenant_requests_total{tenant="hog"} 3' in metrics
            assert b'headrace_router_tenant_tokens_total{tenant="small",kind="prompt"} 25' in metrics


def test_through_http_by_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    limits = {"share": 2.5, "priority": 1, "output_tokens_per_minute": 10}
    key = create_key(file, "alice", ["infer"], created=0, tenant=limits)
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    events = [EVENT] * 9 + [USAGE % (7, 12)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"

    def script(sock: object, backend: object) -> None:
        while backend.read_request(sock):  # type: ignore[attr-defined]
            sock.sendall(stream)  # type: ignore[attr-defined]
            time.sleep(0.01)  # so that the response is no whole one
            sock.sendall(chunks)  # type: ignore[attr-defined]

    ring = KeyRing(file)
    settings = FairnessSettings(keys_file=str(file))
    with scripted_backend(script) as backend:
        with routing(backend.port, max_outstanding=4, fairness=settings, find_tenant=ring.find) as router:

            def chat(authorization: str) -> Answer:
                body = b'{"model":"m","stream":true,"messages":[]}'
                return ask(router.port, "POST", "/v1/chat/completions", body, {"authorization": authorization})

            assert chat(f"Bearer {key}").body == b"".join(events)
            alice = _status(router)["alice"]
            assert (alice["share"], alice["priority"], alice["output_tokens_per_minute"]) == (2.5, 1, 10)
            assert (alice["prompt_tokens"], alice["output_tokens"]) == (7, 12)
            refused = chat(f"Bearer {key}")
            assert refused.status == 429 and b"'alice' has used its 10 output tokens per minute" in refused.body
            assert int(refused.fields["retry-after"]) > 0
            # An unknown key is the backend's to refuse.
            assert chat("Bearer unknown").status == 200
            assert _status(router)[ANONYMOUS]["requests"] == 1
            set_tenant(file, "alice", {"output_tokens_per_minute": 0})
            eventually(lambda: chat(f"Bearer {key}").status == 200)
            assert _status(router)["alice"]["output_tokens_per_minute"] is None
            assert b'headrace_router_tenant_refused_total{tenant="alice",reason="budget"}' in (
                ask(router.port, "GET", "/router/metrics").body
            )


def test_a_body_of_unknown_length_is_counted_as_it_comes() -> None:
    with serving(echo_site()) as one:
        with routing(one.port, max_outstanding=1, fairness=BY_HEADER) as router:
            head = b"POST /echo HTTP/1.1\r\nhost: x\r\nx-tenant: one\r\nconnection: close\r\n"
            head += b"transfer-encoding: chunked\r\n\r\n"
            chunk = b"x" * 4000
            answer = raw(router.port, head + b"%x\r\n%b\r\n" % (len(chunk), chunk) * 100 + b"0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            assert _status(router)["one"]["prompt_tokens"] == pytest.approx(100_000, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (FairnessSettings(keys_file="a", tenant_header="b"), "not both"),
        (FairnessSettings(tenant_header="a b"), "the name of a header"),
        (FairnessSettings(tenant_header="a", ageing_seconds=0), "over 0"),
    ],
)
def test_settings_that_cannot_be(settings: FairnessSettings, complaint: str) -> None:
    backends = (BackendAddress.parse("http://a:1"),)
    with pytest.raises(InvalidArgument, match=complaint):
        check_settings(RouterSettings(backends, max_outstanding=1, fairness=settings))
    with pytest.raises(InvalidArgument, match="needs max_outstanding"):
        check_settings(RouterSettings(backends, fairness=BY_HEADER))


def test_a_priority_may_be_of_a_value_of_the_header() -> None:
    settings = FairnessSettings(tenant_header="x-gateway-inference-objective", priorities="fast=10, slow=-10")
    fairness = Fairness(settings)

    def priority(name: bytes) -> int:
        fields = [(b"x-gateway-inference-objective", name)] if name else []
        return fairness.admit(RequestHead(b"POST", b"/v1/completions", fields, version="1.1"), 0).tenant.priority

    assert [priority(name) for name in (b"fast", b"slow", b"other", b"")] == [10, -10, 0, 0]


@pytest.mark.parametrize("text", ["fast", "fast=", "fast=high", "a b=1", "=1"])
def test_priorities_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="interactive=10"):
        Fairness(FairnessSettings(tenant_header="x-tenant", priorities=text))


def test_priorities_need_a_header_that_names_tenants() -> None:
    settings = RouterSettings((), max_outstanding=1, fairness=FairnessSettings(keys_file="keys", priorities="a=1"))
    with pytest.raises(InvalidArgument, match="tenant_header"):
        check_settings(settings)
