# SPDX-License-Identifier: Apache-2.0
"""The parts of a cold start: in the status, in metrics, and in the trace of each held request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from activation_router import TARGET, ScriptedScaler, activation_router
from routing import ask

from headrace.core.telemetry.tracing import Tracer
from headrace.fleet.router.activation import PARTS, ColdStart
from headrace.fleet.router.scale_targets import ReplicaCounts
from headrace.fleet.router.settings import ScaleTarget
from support.serving import EchoCalls, echo_site, serving
from support.waiting import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class TimedScaler(ScriptedScaler):
    """Tells when processes began and were found to be ready, as the daemon of this machine does."""

    moments = (0.0, 0.0)

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        result = await super().replicas(target)
        return ReplicaCounts(result.desired, result.ready, *self.moments)


@pytest.fixture
def spans() -> Any:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def tracer_to(spans: Any) -> Tracer:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from headrace.core.telemetry.opentelemetry_spans import ProviderTracer

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return ProviderTracer(provider)


def test_parts_follow_each_other_and_make_up_the_whole() -> None:
    wake = ColdStart(10.0, decided=10.1, started=10.3, loading=12.0, seen=12.1, connected=12.2, first_byte=12.5)
    assert tuple(wake.seconds()) == PARTS
    assert sum(wake.seconds().values()) == pytest.approx(2.5)
    assert wake.seconds()["loading"] == pytest.approx(1.7)


def test_an_unreported_phase_is_part_of_the_next_one() -> None:
    wake = ColdStart(10.0, decided=10.1, seen=12.1, connected=12.2)
    assert wake.seconds() == pytest.approx({"decided": 0.1, "seen": 2.0, "connected": 0.1})


def test_a_later_request_and_an_already_running_process() -> None:
    wake = ColdStart(10.0, decided=10.1, started=9.0, loading=12.0, seen=12.1)
    assert wake.seconds()["started"] == 0.0
    late = {name: (began, ended) for name, began, ended in wake.spans(since=11.0)}
    assert late["decided"] == late["started"] == (11.0, 11.0) and late["loading"] == (11.0, 12.0)


def test_the_status_the_metrics_and_the_trace_of_a_request(spans: Any) -> None:
    scaler = TimedScaler()
    woken: list[ColdStart] = []
    with serving(echo_site()) as server, activation_router(server.port, scaler=scaler, tracer=tracer_to(spans)) as nap:
        nap.activator.cold_starts.on_cold_start = woken.append
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, nap.port, "GET", "/hello", None, {"traceparent": PARENT})
            second = pool.submit(ask, nap.port, "POST", "/echo", b"x")
            nap.held(2)
            eventually(lambda: nap.activator.cold_starts.last.decided)
            held = nap.activator.cold_starts.last.held
            # Both are told by somebody else, whose clock is the machine's.
            scaler.moments = (nap.activator.cold_starts.last.decided, nap.activator.cold_starts.last.decided)
            scaler.ready = 1
            assert first.result(30).body == b"hello" and second.result(30).body == b"x"
        last_wake = json.loads(ask(nap.port, "GET", "/router/status").body)["waking"]["last_wake"]
        assert tuple(last_wake) == PARTS and woken[0].seconds() == last_wake and woken[0].held == held
        metrics = ask(nap.port, "GET", "/router/metrics").body.decode()
        for part in PARTS:
            assert f'headrace_router_wake_part_seconds_count{{part="{part}"}} 1' in metrics
    result = spans.get_finished_spans()
    roots = [item for item in result if item.name == "cold start"]
    assert len(roots) == 2 and len(result) == 2 * (1 + len(PARTS))
    (asked,) = [root for root in roots if root.parent is not None]
    assert f"{asked.context.trace_id:032x}" == TRACE
    below = sorted((item for item in result if item.parent and item.parent.span_id == asked.context.span_id),
                   key=lambda item: item.start_time)  # fmt: skip
    assert {item.name for item in below} == {part.replace("_", " ") for part in PARTS}
    assert all(one.end_time <= other.start_time + 1 for one, other in zip(below, below[1:], strict=False))
    assert below[-1].end_time <= asked.end_time and asked.start_time <= below[0].start_time


def test_a_grpc_call_is_traced_as_well(spans: Any) -> None:
    with (
        serving(echo_site(calls=EchoCalls())) as server,
        activation_router(server.port, tracer=tracer_to(spans)) as nap,
    ):
        with grpc.insecure_channel(f"127.0.0.1:{nap.port}") as channel:
            call = channel.unary_unary("/test.Echo/Unary").future(
                b"hello", metadata=[("traceparent", PARENT)], timeout=60
            )
            nap.held(1)
            nap.scaler.ready = 1
            assert call.result() == b"hello"
        eventually(lambda: spans.get_finished_spans())
        (root,) = [span for span in spans.get_finished_spans() if span.name == "cold start"]
        assert f"{root.context.trace_id:032x}" == TRACE


def test_an_unanswered_cold_start_is_a_failed_trace(spans: Any) -> None:
    with (
        serving(echo_site()) as server,
        activation_router(server.port, wait_seconds=0.2, tracer=tracer_to(spans)) as nap,
    ):
        assert ask(nap.port, "GET", "/hello").status == 503
        assert nap.scaler.asked == [(TARGET.name, 1)]
    (root,) = [span for span in spans.get_finished_spans() if span.name == "cold start"]
    assert not root.status.is_ok and "did not start" in root.status.description


def test_an_error_in_reporting_loses_no_request() -> None:
    def fails(_: ColdStart) -> None:
        raise RuntimeError("the test's own")

    with serving(echo_site()) as server, activation_router(server.port) as nap, ThreadPoolExecutor() as pool:
        nap.activator.cold_starts.on_cold_start = fails
        waiting = pool.submit(ask, nap.port, "GET", "/hello")
        nap.held(1)
        nap.scaler.ready = 1
        assert waiting.result(30).body == b"hello"
