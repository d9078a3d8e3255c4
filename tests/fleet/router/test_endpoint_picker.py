# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker, asked by a client that does what an Envoy gateway does, message by message."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from routing import NO_CHECKS, ask

from headrace.fleet.router.endpoint_picker import DESTINATION, SERVICE, EndpointPicker, ext_proc_schema
from headrace.fleet.router.grpc.proxy import GrpcProxy
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.settings import (
    BackendAddress,
    FairnessSettings,
    QueueSettings,
    RouterSettings,
    SessionAffinitySettings,
)
from headrace.net.grpc.standard_services import grpc_schema
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.router import RouterAppSettings, build_router_site
from support.serving import Serving, echo_site, serving
from support.waiting import eventually

REQUEST = ext_proc_schema().message("envoy.service.ext_proc.v3.ProcessingRequest")
RESPONSE = ext_proc_schema().message("envoy.service.ext_proc.v3.ProcessingResponse")
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, DUPLEX, GRPC = range(6)
CHAT = "/v1/chat/completions"
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
ONE, TWO = "10.0.0.1:8000", "10.0.0.2:8000"


class Router:
    """A router with an endpoint picker."""

    def __init__(self, server: Serving, proxy: RouterProxy, picker: EndpointPicker, channel: grpc.Channel) -> None:
        self.server, self.proxy, self.picker, self.channel = server, proxy, picker, channel
        self.port = server.port

    def outstanding(self) -> dict[str, int]:
        return {
            f"{backend.address.host}:{backend.address.port}": backend.outstanding for backend in self.proxy.backends.all
        }


@contextmanager
def routing(*endpoints: str, **changes: Any) -> Iterator[Router]:
    backends = tuple(BackendAddress.parse(f"http://{endpoint}") for endpoint in endpoints)
    router = RouterSettings(backends, health=NO_CHECKS, endpoint_picker=True, **changes)
    settings = RouterAppSettings(router, Address.parse("127.0.0.1:0"))
    created: list[Any] = []

    async def build() -> Site:
        proxy = RouterProxy(settings.router)
        calls = GrpcProxy(proxy.backends, settings.router, budget=proxy.budget)
        picker = EndpointPicker(proxy)
        picker.add_to(calls.services)
        await proxy.start()
        calls.start()
        created.extend((proxy, calls, picker))
        return build_router_site(proxy, calls, settings)

    with serving(build) as server:  # type: ignore[arg-type]
        try:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield Router(server, created[0], created[2], channel)
        finally:
            server.call(created[1].close)
            server.call(created[0].close)


class Exchange:
    """One HTTP request of a gateway: a stream to the endpoint picker."""

    def __init__(self, router: Router, mode: int | None = DUPLEX, subset: Sequence[str] | None = None) -> None:
        self._messages: queue.Queue[Any] = queue.Queue()
        self._mode, self._subset = mode, subset
        process = router.channel.stream_stream(
            f"/{SERVICE}/Process", lambda message: message.SerializeToString(), RESPONSE.FromString
        )
        self.call = process(iter(self._messages.get, None), timeout=60)

    def send(self, **fields: Any) -> None:
        message = REQUEST(**fields)
        if self._subset is not None:
            metadata = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            values = metadata.fields["x-gateway-destination-endpoint-subset"].list_value.values
            for endpoint in self._subset:
                values.add().string_value = endpoint
        self._messages.put(message)

    def receive(self) -> Any:
        return next(self.call)

    def headers(self, path: str = CHAT, method: str = "POST", end: bool = False, **fields: str) -> None:
        named = {":method": method, ":path": path, ":authority": "models.example", **fields}
        headers = [{"key": name.replace("_", "-"), "raw_value": value.encode()} for name, value in named.items()]
        config = {}
        if self._mode is not None:
            config = {"protocol_config": {"request_body_mode": self._mode, "response_body_mode": self._mode}}
        self.send(request_headers={"headers": {"headers": headers}, "end_of_stream": end}, **config)

    def body(self, data: bytes, end: bool = True) -> None:
        self.send(request_body={"body": data, "end_of_stream": end})

    def chat(self, prompt: str = "hello", **fields: str) -> Any:
        """Send a chat request in duplex mode; returns the response to its headers."""
        self.headers(**fields)
        self.body(json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode())
        response = self.receive()
        if response.WhichOneof("response") != "immediate_response":
            assert self.receive().request_body.response.body_mutation.streamed_response.end_of_stream
        return response

    def respond(self, *pieces: bytes, status: int = 200) -> Any:
        """Send the response of a backend along; returns the response to its headers."""
        headers = [{"key": ":status", "raw_value": b"%d" % status}]
        self.send(response_headers={"headers": {"headers": headers}, "end_of_stream": not pieces})
        answer = self.receive()
        for number, piece in enumerate(pieces, 1):
            self.send(response_body={"body": piece, "end_of_stream": number == len(pieces)})
            streamed = self.receive().response_body.response.body_mutation.streamed_response
            assert (streamed.body, streamed.end_of_stream) == (piece, number == len(pieces))
        return answer

    def close(self) -> None:
        self._messages.put(None)
        assert list(self.call) == []


def destination_of(response: Any, kind: str = "request_headers") -> str:
    """The endpoint that a response names, in the header and in the metadata."""
    common = getattr(response, kind).response
    (option,) = common.header_mutation.set_headers
    assert option.header.key == DESTINATION and option.append_action == 2 and common.clear_route_cache
    metadata = response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
    assert metadata == option.header.raw_value.decode()
    return str(metadata)


def error_of(response: Any) -> tuple[int, str, dict[str, str]]:
    refusal = response.immediate_response
    fields = {option.header.key: option.header.raw_value.decode() for option in refusal.headers.set_headers}
    return refusal.status.code, json.loads(refusal.body)["error"], fields


def test_a_request_and_its_response() -> None:
    with routing(ONE, TWO, policy="round-robin") as router:
        exchange = Exchange(router)
        exchange.headers()
        exchange.body(b'{"model":"m",', end=False)
        exchange.body(b'"messages":[]}')
        endpoint = destination_of(exchange.receive())
        chunks = [exchange.receive().request_body.response.body_mutation.streamed_response for _ in range(2)]
        assert [(chunk.body, chunk.end_of_stream) for chunk in chunks] == [
            (b'{"model":"m",', False),
            (b'"messages":[]}', True),
        ]
        assert router.outstanding() == {ONE: 0, TWO: 0} | {endpoint: 1}
        exchange.respond(b"one ", b"two")
        eventually(lambda: router.outstanding() == {ONE: 0, TWO: 0})
        exchange.close()
        second = Exchange(router)
        assert destination_of(second.chat()) != endpoint
        second.respond(b"x", status=500)
        second.close()
        assert sorted((backend.stats.ok, backend.stats.erred) for backend in router.proxy.backends.all) == [
            (0, 1),
            (1, 0),
        ]
        metrics = ask(router.port, "GET", "/router/metrics").body
        assert b'headrace_router_picks_total{outcome="picked"} 2' in metrics


def test_a_conversation_stays_with_its_backend() -> None:
    with routing(ONE, TWO, policy="cache_aware") as router:
        endpoints: dict[str, set[str]] = {"a": set(), "b": set(), "c": set(), "d": set()}
        for turn in range(1, 6):
            for name, seen in endpoints.items():
                exchange = Exchange(router)
                seen.add(destination_of(exchange.chat(f"conversation {name} " * 50 * turn)))
                exchange.respond(b"{}")
                exchange.close()
        assert all(len(seen) == 1 for seen in endpoints.values())
        assert len(set.union(*endpoints.values())) == 2


@pytest.mark.parametrize("mode", [NONE, STREAMED, DUPLEX, None])
def test_a_request_without_a_body_is_answered_at_once(mode: int | None) -> None:
    with routing(ONE) as router:
        exchange = Exchange(router, mode)
        exchange.headers("/v1/models", "GET", end=True)
        assert destination_of(exchange.receive()) == ONE
        exchange.close()


def test_a_gateway_that_buffers_or_streams() -> None:
    with routing(ONE) as router:
        for mode in (BUFFERED, BUFFERED_PARTIAL):
            exchange = Exchange(router, mode)
            exchange.headers()
            assert not exchange.receive().request_headers.response.header_mutation.set_headers
            exchange.body(b'{"model":"m"}')
            assert destination_of(exchange.receive(), "request_body") == ONE
            exchange.close()
        exchange = Exchange(router, STREAMED)
        exchange.headers()
        assert destination_of(exchange.receive()) == ONE
        exchange.body(b'{"model":"m"}')
        assert exchange.receive().request_body.response.body_mutation.WhichOneof("mutation") is None
        exchange.close()


def test_the_messages_of_a_grpc_call_are_passed_on() -> None:
    with routing(ONE) as router:
        exchange = Exchange(router, GRPC)
        exchange.headers()
        assert destination_of(exchange.receive()) == ONE
        exchange.body(b"message", end=False)
        streamed = exchange.receive().request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (b"message", False)
        exchange.call.cancel()


def test_a_long_body_is_passed_on_while_it_comes() -> None:
    with routing(ONE) as router:
        exchange = Exchange(router)
        exchange.headers()
        piece = b"x" * 60_000
        for _ in range(20):
            exchange.body(piece, end=False)
        assert destination_of(exchange.receive()) == ONE
        exchange.body(b"end")
        received = b""
        while not received.endswith(b"end"):
            received += exchange.receive().request_body.response.body_mutation.streamed_response.body
        assert received == piece * 20 + b"end"
        exchange.close()


def test_trailers_end_a_body() -> None:
    with routing(ONE) as router:
        exchange = Exchange(router)
        exchange.headers()
        exchange.body(b"{}", end=False)
        exchange.send(request_trailers={"trailers": {}})
        assert destination_of(exchange.receive()) == ONE
        assert exchange.receive().request_body.response.body_mutation.streamed_response.body == b"{}"
        assert exchange.receive().WhichOneof("response") == "request_trailers"
        exchange.respond()
        assert router.outstanding() == {ONE: 0}
        exchange.send(response_trailers={"trailers": {}})
        assert exchange.receive().WhichOneof("response") == "response_trailers"
        exchange.close()


@pytest.mark.parametrize("policy", ["p2c", "cache_aware", "predicted_latency"])
def test_only_the_endpoints_that_the_gateway_allows(policy: str) -> None:
    with routing(ONE, TWO, policy=policy) as router:
        for _ in range(10):
            exchange = Exchange(router, subset=[TWO, "10.9.9.9:1"])
            assert destination_of(exchange.chat()) == TWO
            exchange.close()
        for subset in ([], ["10.9.9.9:1"]):
            code, message, fields = error_of(Exchange(router, subset=subset).chat())
            assert code == 503 and "no backend can take the request" in message and "retry-after" in fields


def test_no_backend_to_choose() -> None:
    with routing(ONE) as router:
        router.server.call(router.proxy.backends.suspend)
        code, message, _ = error_of(Exchange(router).chat())
        assert code == 503 and "10.0.0.1:8000 is asleep" in message
        assert router.picker.counts["unavailable"] == 1


def test_requests_wait_in_the_queue_of_the_router() -> None:
    with routing(ONE, max_outstanding=1, queue=QueueSettings(requests=1)) as router:
        first = Exchange(router)
        first.chat()
        second = Exchange(router)
        second.headers()
        second.body(b"{}")
        eventually(lambda: router.proxy.backends.queued == 1)
        code, message, fields = error_of(Exchange(router).chat())
        assert code == 429 and "queue.requests" in message and fields["retry-after"] == "1"
        first.respond(b"{}")
        assert destination_of(second.receive()) == ONE
        assert router.outstanding() == {ONE: 1}
        # A gateway that gives a request up, whether it runs or waits.
        third = Exchange(router)
        third.headers()
        third.body(b"{}")
        eventually(lambda: router.proxy.backends.queued == 1)
        third.call.cancel()
        second.call.cancel()
        eventually(lambda: router.proxy.backends.queued == 0 and router.outstanding() == {ONE: 0})


def test_tenants_have_their_limits() -> None:
    fairness = FairnessSettings(tenant_header="x-tenant", output_tokens_per_minute=10)
    with routing(ONE, max_outstanding=8, fairness=fairness) as router:
        exchange = Exchange(router)
        exchange.chat(x_tenant="one")
        exchange.respond(EVENT * 12)
        exchange.close()
        code, message, _ = error_of(Exchange(router).chat(x_tenant="one"))
        assert code == 429 and "'one' has used its 10 output tokens per minute" in message
        assert destination_of(Exchange(router).chat(x_tenant="other")) == ONE


def test_latency_is_learned_from_the_responses() -> None:
    with routing(ONE, TWO, policy="predicted_latency") as router:
        for _ in range(10):
            exchange = Exchange(router)
            exchange.chat()
            exchange.respond(EVENT, *[EVENT] * 5)
            exchange.close()
        latency = router.proxy.latency
        assert latency is not None and latency.all.first_token.samples == 10 and latency.all.next_token.samples == 10
        code, message, _ = error_of(Exchange(router).chat(x_slo_ttft_ms="0.0001", x_slo_refuse="true"))
        assert code == 429 and "no backend is expected to keep the latency target" in message
        code, message, _ = error_of(Exchange(router).chat(x_slo_ttft_ms="soon", x_slo_refuse="true"))
        assert code == 400 and "a number of milliseconds" in message


def test_a_session_gets_its_cookie() -> None:
    with routing(ONE, TWO, sticky=SessionAffinitySettings(cookie="session")) as router:
        exchange = Exchange(router)
        endpoint = destination_of(exchange.chat())
        (option,) = exchange.respond(b"{}").response_headers.response.header_mutation.set_headers
        assert option.header.key == "set-cookie" and option.append_action == 0
        cookie = option.header.raw_value.decode().partition(";")[0]
        exchange.close()
        for _ in range(8):
            exchange = Exchange(router)
            assert destination_of(exchange.chat(cookie=cookie)) == endpoint
            assert not exchange.respond(b"{}").response_headers.response.header_mutation.set_headers
            exchange.close()


def test_a_gateway_that_only_observes_gets_no_answers() -> None:
    with routing(ONE) as router:
        exchange = Exchange(router)
        exchange.send(request_headers={"headers": {}, "end_of_stream": True}, observability_mode=True)
        exchange.close()


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"", REQUEST(request_body={"body": b"x"}).SerializeToString()])
def test_what_no_gateway_sends(message: bytes) -> None:
    with routing(ONE) as router:
        process = router.channel.stream_stream(f"/{SERVICE}/Process")
        with pytest.raises(grpc.RpcError) as refused:
            list(process(iter([message]), timeout=30))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        exchange = Exchange(router)
        exchange.headers(end=True)
        exchange.receive()
        exchange.headers(end=True)
        with pytest.raises(grpc.RpcError) as refused:
            exchange.receive()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        eventually(lambda: router.outstanding() == {ONE: 0})


def test_its_health_can_be_checked() -> None:
    request = grpc_schema().message("grpc.health.v1.HealthCheckRequest")
    response = grpc_schema().message("grpc.health.v1.HealthCheckResponse")
    with routing(ONE) as router:
        check = router.channel.unary_unary(
            "/grpc.health.v1.Health/Check", lambda message: message.SerializeToString(), response.FromString
        )
        for name in ("", "liveness", "readiness", SERVICE):
            assert check(request(service=name), timeout=30).status == 1
        router.server.call(router.picker.drain)
        assert check(request(service="readiness"), timeout=30).status == 2


def test_http_is_still_passed_on() -> None:
    with serving(echo_site()) as backend, routing(f"127.0.0.1:{backend.port}") as router:
        exchange = Exchange(router)
        endpoint = destination_of(exchange.chat())
        assert ask(int(endpoint.partition(":")[2]), "GET", "/hello").body == b"hello"
        assert ask(router.port, "GET", "/hello").body == b"hello"
        exchange.close()
