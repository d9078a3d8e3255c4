# SPDX-License-Identifier: Apache-2.0
"""Tracing: silence by default, OpenTelemetry when asked for."""

import importlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.core.telemetry.tracing import NO_TRACING, open_tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01".encode()


def test_silence_takes_everything_and_gives_nothing():
    assert NO_TRACING.enabled is False
    span = NO_TRACING.start("infer", TRACEPARENT)
    assert NO_TRACING.start("child", span) is span
    assert span.traceparent == b""
    span.set("model", "m")
    span.end("failed")
    with NO_TRACING.start("block") as inside:
        assert inside is span
    with pytest.raises(ZeroDivisionError), NO_TRACING.start("block"):
        raise ZeroDivisionError
    NO_TRACING.close()


def test_silence_does_not_import_opentelemetry():
    code = (
        "import sys, headrace.core.telemetry.tracing; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "ftp://h", "http://", "file:///etc", "/v1/traces"])
def test_an_endpoint_must_be_a_url(endpoint):
    with pytest.raises(ValueError, match="use a URL such as http://localhost:4318"):
        open_tracing(endpoint, "headrace")


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_sample_ratio_must_be_a_ratio(ratio):
    with pytest.raises(ValueError, match="from 0 to 1"):
        open_tracing("http://localhost:4318", "headrace", sample_ratio=ratio)


def without(monkeypatch, missing):
    def find(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", find)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter"])
def test_a_missing_package_is_named_with_its_cure(monkeypatch, missing):
    without(monkeypatch, missing)
    with pytest.raises(FailedPrecondition, match=r"pip install 'headrace\[trace\]'"):
        open_tracing("http://localhost:4318", "headrace")


def test_another_missing_module_is_not_blamed_on_the_extra(monkeypatch):
    without(monkeypatch, "something_else")
    with pytest.raises(ModuleNotFoundError, match="something_else"):
        open_tracing("http://localhost:4318", "headrace")


@pytest.fixture
def memory():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def tracer(memory):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from headrace.core.telemetry.opentelemetry_spans import ProviderTracer

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = ProviderTracer(provider)
    yield tracer
    tracer.close()


def test_a_span_is_recorded_with_its_facts(tracer, memory):
    assert tracer.enabled is True
    span = tracer.start("infer")
    span.set("model", "m")
    span.set("batch", 4)
    assert memory.get_finished_spans() == ()
    span.end()
    (done,) = memory.get_finished_spans()
    assert (done.name, dict(done.attributes), done.status.is_unset) == ("infer", {"model": "m", "batch": 4}, True)
    assert done.parent is None


def test_a_clients_traceparent_is_the_parent(tracer, memory):
    span = tracer.start("infer", TRACEPARENT)
    assert span.traceparent.startswith(f"00-{TRACE}-".encode())
    assert sampled(span)
    span.end()
    (done,) = memory.get_finished_spans()
    assert f"{done.context.trace_id:032x}" == TRACE
    assert f"{done.parent.span_id:016x}" == PARENT
    assert done.parent.is_remote


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"nonsense",
        b"\xff\xfe",
        TRACEPARENT[:-3],
        TRACEPARENT.upper().replace(b"4BF", b"xyz"),
        f"ff-{TRACE}-{PARENT}-01".encode(),
        f"00-{'0' * 32}-{PARENT}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        b"00-" + b"a" * 10_000,
    ],
    ids=ascii,
)
def test_a_bad_traceparent_is_as_good_as_none(tracer, memory, header):
    tracer.start("infer", header).end()
    (done,) = memory.get_finished_spans()
    assert done.parent is None


def test_a_span_is_the_parent_of_another(tracer, memory):
    outer = tracer.start("request", TRACEPARENT)
    inner = tracer.start("compute", outer)
    inner.end()
    outer.end()
    compute, request = memory.get_finished_spans()
    assert compute.parent.span_id == request.context.span_id
    assert compute.context.trace_id == request.context.trace_id == int(TRACE, 16)


def test_a_span_that_happens_to_be_around_is_not_a_parent(tracer, memory):
    from opentelemetry import trace

    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(int(TRACE, 16), int(PARENT, 16), is_remote=True))):
        tracer.start("two").end()
    assert [span.parent for span in memory.get_finished_spans()] == [None]


def test_an_unsampled_span_is_not_a_parent(tracer, memory):
    tracer.start("infer", NO_TRACING.start("x")).end()
    assert memory.get_finished_spans()[0].parent is None


def test_failure_is_marked(tracer, memory):
    tracer.start("infer").end("queue full")
    (done,) = memory.get_finished_spans()
    assert (done.status.status_code.name, done.status.description) == ("ERROR", "queue full")


@pytest.mark.parametrize(
    ("error", "words"), [(Unavailable("model is loading"), "model is loading"), (KeyError("/secret/path"), "KeyError")]
)
def test_an_exception_marks_the_span_without_its_text(tracer, memory, error, words):
    with pytest.raises(type(error)), tracer.start("infer"):
        raise error
    (done,) = memory.get_finished_spans()
    assert (done.status.status_code.name, done.status.description) == ("ERROR", words)
    assert "secret" not in done.to_json()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("path", "expected"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/own/path", "/own/path")])
def test_spans_arrive_at_the_collector(path, expected):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            tracer = open_tracing(f"http://127.0.0.1:{server.server_port}{path}", "my-service")
            tracer.start("kept").end()
            tracer.start("dropped by its caller", f"00-{TRACE}-{PARENT}-00".encode()).end()
            tracer.close()
        finally:
            server.shutdown()
            thread.join()
    assert [where for where, _ in received] == [expected]
    assert b"my-service" in gunzipped(received[0][1])
    assert b"kept" in gunzipped(received[0][1])
    assert b"dropped" not in gunzipped(received[0][1])


def sampled(span):
    return bool(int(span.traceparent[-2:], 16) & 1)


def gunzipped(body):
    import gzip

    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


@pytest.mark.usefixtures("memory")
def test_a_ratio_of_zero_traces_only_sampled_callers():
    from opentelemetry.sdk.trace import TracerProvider

    tracer = open_tracing("http://127.0.0.1:9", "headrace", sample_ratio=0.0)
    assert isinstance(tracer._provider, TracerProvider)
    assert not sampled(tracer.start("nobody asked"))
    assert sampled(tracer.start("asked", TRACEPARENT))
    tracer.close()
