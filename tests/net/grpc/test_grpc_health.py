# SPDX-License-Identifier: Apache-2.0
"""`grpc.health.v1.Health`, asked by grpcio's own client."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_echo_client import SECONDS, channel_to, open_streams, raised
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.net.grpc.services import Services
from headrace.net.grpc.standard_services import HealthService
from headrace.net.site import Site
from support.serving import Serving, serving
from support.waiting import eventually

STATUS = health_pb2.HealthCheckResponse


class Healthy:
    def __init__(self) -> None:
        self.health: HealthService | None = None

    def site(self) -> Site:
        services = Services()
        self.health = HealthService()
        self.health.add_to(services)
        self.health.set("test.A", True)
        self.health.set("test.B", False)
        return Site(services=services)


@pytest.fixture
def healthy() -> Healthy:
    return Healthy()


@pytest.fixture
def health_server(healthy: Healthy) -> Iterator[Serving]:
    with serving(healthy.site) as running:
        yield running


@pytest.fixture
def stub(health_server: Serving) -> Iterator[health_pb2_grpc.HealthStub]:
    with channel_to(health_server) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(name: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


def test_check(stub: health_pb2_grpc.HealthStub) -> None:
    for name, status in (("", STATUS.SERVING), ("test.A", STATUS.SERVING), ("test.B", STATUS.NOT_SERVING)):
        assert stub.Check(asked(name), timeout=SECONDS).status == status


def test_check_of_an_unknown_service(stub: health_pb2_grpc.HealthStub) -> None:
    for name in ("test.C", "\N{SNOWMAN}", "x" * 100_000):
        error = raised(lambda name=name: stub.Check(asked(name), timeout=SECONDS))
        assert error.code() is grpc.StatusCode.NOT_FOUND


def test_a_watcher_gets_every_change(
    stub: health_pb2_grpc.HealthStub, healthy: Healthy, health_server: Serving
) -> None:
    assert healthy.health is not None
    watch = stub.Watch(asked("test.A"), timeout=3 * SECONDS)
    assert next(watch).status == STATUS.SERVING
    for state in (False, True, False):
        health_server.call(healthy.health.set, "test.A", state)
        assert next(watch).status == (STATUS.SERVING if state else STATUS.NOT_SERVING)
    # Changes of others, and sets that change nothing, are not news.
    health_server.call(healthy.health.set, "test.B", True)
    health_server.call(healthy.health.set, "test.A", False)
    health_server.call(healthy.health.set, "test.A", True)
    assert next(watch).status == STATUS.SERVING
    watch.cancel()
    eventually(lambda: not open_streams(health_server))


def test_a_watcher_of_an_unknown_service_waits_for_it(
    stub: health_pb2_grpc.HealthStub, healthy: Healthy, health_server: Serving
) -> None:
    assert healthy.health is not None
    watch = stub.Watch(asked("test.C"), timeout=3 * SECONDS)
    assert next(watch).status == STATUS.SERVICE_UNKNOWN
    health_server.call(healthy.health.set, "test.C", True)
    assert next(watch).status == STATUS.SERVING
    watch.cancel()


def test_a_shutdown_is_reported_and_ends_the_watches(
    stub: health_pb2_grpc.HealthStub, healthy: Healthy, health_server: Serving
) -> None:
    assert healthy.health is not None
    watches = [stub.Watch(asked(name), timeout=3 * SECONDS) for name in ("", "test.A", "test.A")]
    assert [next(watch).status for watch in watches] == [STATUS.SERVING] * 3
    health_server.call(healthy.health.shut_down)
    assert [next(watch).status for watch in watches] == [STATUS.NOT_SERVING] * 3
    for name in ("", "test.A", "test.B"):
        assert stub.Check(asked(name), timeout=SECONDS).status == STATUS.NOT_SERVING
    for watch in watches:
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_what_is_not_a_request_is_refused(health_server: Serving, method: str) -> None:
    with channel_to(health_server) as channel:
        error = raised(lambda: channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff\xff", timeout=SECONDS))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_watch_without_a_request(health_server: Serving) -> None:
    """A violation of the method's kind; it must end or answer, and leave nothing behind."""
    with channel_to(health_server) as channel:
        watch = channel.stream_stream("/grpc.health.v1.Health/Watch")(iter(()), timeout=SECONDS)
        assert raised(lambda: watch).code() is grpc.StatusCode.UNIMPLEMENTED
    eventually(lambda: not open_streams(health_server))
