# SPDX-License-Identifier: Apache-2.0
"""Guards before gRPC methods, asked by grpcio."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings, Concurrency, RateLimit, RateLimits
from headrace.core.clock import SystemClock
from headrace.core.telemetry.metrics import Registry
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import CoroutineCalls, MessageStream, Services
from headrace.net.grpc.standard_services import HealthService
from headrace.net.http.heads import Buffer
from headrace.net.site import Site
from headrace.programs.serve.access_guard import Guard, Middleware, open_guard
from support.serving import Serving, serving

SERVICE = "inference.GRPCInferenceService"
SECONDS = 60


class Methods:
    """Methods whose messages are plain bytes."""

    def __init__(self) -> None:
        self.held: list[GrpcCall] = []
        self._calls = CoroutineCalls()

    def add_to(self, services: Services) -> None:
        services.unary(SERVICE, "ModelInfer", self.infer, scope="infer")
        services.unary(SERVICE, "ModelMetadata", lambda call, message: call.reply(message), scope="read")
        services.streaming(SERVICE, "ModelStreamInfer", self._calls.serve(self.chat), scope="infer")
        HealthService().add_to(services)

    def infer(self, call: GrpcCall, message: Buffer) -> None:
        if message == b"hold":
            self.held.append(call)
        elif message == b"raise":
            raise RuntimeError("a secret of the handler")
        else:
            call.reply(message)

    async def chat(self, stream: MessageStream) -> None:
        async for message in stream:
            await stream.send(message)


class Guarded:
    """A guarded site, and a channel to it."""

    def __init__(self, server: Serving, guard: Guard, methods: Methods, channel: grpc.Channel) -> None:
        self.server, self.guard, self.methods = server, guard, methods
        self._channel = channel

    def call(self, message: bytes = b"x", method: str = "ModelInfer", **options: Any) -> Any:
        return self._channel.unary_unary(f"/{SERVICE}/{method}").future(message, timeout=SECONDS, **options)

    def chat(self, messages: Iterator[bytes], **options: Any) -> Any:
        return self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(messages, timeout=SECONDS, **options)

    def health(self) -> bytes:
        answer: bytes = self._channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SECONDS)
        return answer

    def wait_for(self, condition: Callable[[], bool]) -> None:
        while not self.server.call(condition):  # the test's own time-out is the limit
            pass


@contextmanager
def guarded(settings: AccessSettings) -> Iterator[Guarded]:
    methods = Methods()
    guard = open_guard(settings, Registry(SystemClock()))
    assert guard is not None

    def build() -> Site:
        services = Services(Middleware(guard))
        methods.add_to(services)
        return Site(services=services)

    with (
        serving(build) as server,
        grpc.insecure_channel(
            f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        ) as channel,
    ):
        yield Guarded(server, guard, methods, channel)


def refused(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    with pytest.raises(grpc.RpcError) as error:
        call.result() if hasattr(call, "result") else list(call)
    reported: Any = error.value
    return reported.code(), reported.details(), {pair.key: pair.value for pair in reported.trailing_metadata() or ()}


def test_keys_in_metadata(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    alice = create_key(path, "alice", ["infer"], created=0)
    with guarded(AccessSettings(keys_file=path)) as site:
        code, details, _ = refused(site.call())
        assert code == grpc.StatusCode.UNAUTHENTICATED
        assert "needs an API key" in details
        bearer = [("authorization", f"Bearer {alice}")]
        assert site.call(metadata=bearer).result() == b"x"
        assert site.call(metadata=[("x-api-key", alice)]).result() == b"x"
        assert refused(site.call(metadata=[("x-api-key", "wrong")]))[0] == grpc.StatusCode.UNAUTHENTICATED
        code, details, _ = refused(site.call(method="ModelMetadata", metadata=bearer))
        assert (code, "no scope 'read'" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)
        assert refused(site.chat(iter([b"1"])))[0] == grpc.StatusCode.UNAUTHENTICATED
        assert list(site.chat(iter([b"1", b"2"]), metadata=bearer)) == [b"1", b"2"]
        assert site.health()


def test_rates() -> None:
    with guarded(AccessSettings(rates=RateLimits((RateLimit(2, 3600.0),)))) as site:
        assert [site.call().result() for _ in range(2)] == [b"x", b"x"]
        code, details, trailing = refused(site.call())
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.startswith("this address may send 2 requests in 3600 seconds: wait ")
        assert 1700 < int(trailing["retry-after"]) <= 1800
        assert site.call(method="ModelMetadata").result() == b"x"
        assert site.health()


def test_each_message_of_a_stream_counts() -> None:
    with guarded(AccessSettings(rates=RateLimits((RateLimit(3, 3600.0),)))) as site:
        assert list(site.chat(iter([]))) == []  # none, so far
        sent: queue.Queue[bytes] = queue.Queue()
        stream = site.chat(iter(sent.get, b""))
        for number in range(3):
            sent.put(b"%d" % number)
            assert next(stream) == b"%d" % number
        sent.put(b"one too many")
        code, _, trailing = refused(stream)
        assert (code, "retry-after" in trailing) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        sent.put(b"")
        assert refused(site.call())[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_in_flight() -> None:
    with guarded(AccessSettings(concurrency=Concurrency(2))) as site:
        calls = []
        for number in range(2):
            calls.append(site.call(b"hold"))
            site.wait_for(lambda number=number: len(site.methods.held) == number + 1)  # type: ignore[misc]
        assert site.guard.in_flight == 2
        code, details, trailing = refused(site.call())
        assert (code, trailing["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1")
        assert details == "2 requests are in flight, the limit of this server"
        site.server.call(site.methods.held[0].reply, b"done")
        assert site.guard.in_flight == 1
        calls[1].cancel()
        site.wait_for(lambda: site.guard.in_flight == 0)
        for call in site.methods.held:  # what is over is over
            site.server.call(call.reply, b"again")
        assert site.guard.in_flight == 0
        assert refused(site.call(b"raise"))[0] == grpc.StatusCode.INTERNAL
        assert site.guard.in_flight == 0
        assert {call.result() for call in calls[:1]} == {b"done"}


def test_a_deadline_that_passes_ends_the_request_once() -> None:
    with guarded(AccessSettings(concurrency=Concurrency(1))) as site:
        with pytest.raises(grpc.RpcError):
            site._channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"hold", timeout=0.2)
        site.wait_for(lambda: site.guard.in_flight == 0)
        for call in site.methods.held:
            site.server.call(call.reply, b"late")
        assert site.guard.in_flight == 0
        assert site.call().result() == b"x"
