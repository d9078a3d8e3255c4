# SPDX-License-Identifier: Apache-2.0
"""Every way a request can fail, with fakes that fail on command: the class, the text, the id, and what is sent again."""

from __future__ import annotations

import socket
import threading
from typing import Any

import grpc
import numpy as np
import pytest
from client_servers import (
    ANSWER,
    answers,
    chunks,
    fake_grpc,
    fake_http,
    hangs_up,
    internals_of,
    respond_with,
    seen_as_stale,
)

from headrace.client import NO_RETRY, Client, Retry
from headrace.client.errors import GRPC_ERRORS, HTTP_ERRORS
from headrace.client.grpc_codec import message
from headrace.core import errors
from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    Internal,
    InvalidArgument,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from support.ports import free_port
from support.waiting import eventually

QUICK = Retry(attempts=4, first_seconds=0.001, most_seconds=0.002)
INPUT = {"x": np.zeros(3, np.float32)}
SOON = "retry-after: 0"


@pytest.mark.parametrize("status", [*HTTP_ERRORS, 302, 418, 507])
def test_each_status_is_an_error_of_its_class(make: Any, status: int) -> None:
    expected = HTTP_ERRORS.get(status) or {302: Unavailable, 418: InvalidArgument, 507: Internal}[status]
    with fake_http(answers(status, b'{"error":"the reason"}')) as server, make(server.url) as client:
        with pytest.raises(HeadraceError, match="^the reason") as caught:
            client.infer("m", INPUT, request_id="abc")
        assert type(caught.value) is expected
        assert caught.value.message == "the reason"
        assert (caught.value.status, caught.value.request_id) == (status, "abc")  # type: ignore[attr-defined]
        assert len(server.requests) == 1


@pytest.mark.parametrize("code", GRPC_ERRORS)
def test_each_grpc_code_is_an_error_of_its_class(make: Any, code: str) -> None:
    def fail(context: Any) -> bytes:
        context.abort(grpc.StatusCode[code], "the reason")
        raise AssertionError

    with fake_grpc(fail) as server, make(server.url) as client:
        with pytest.raises(HeadraceError, match="^the reason") as caught:
            client.infer("m", INPUT, request_id="abc")
        assert type(caught.value) is GRPC_ERRORS[code]
        assert caught.value.message == "the reason"
        assert (caught.value.status, caught.value.request_id) == (code, "abc")  # type: ignore[attr-defined]
        assert len(server.calls) == 1


def test_the_tables_have_every_error() -> None:
    every = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadraceError)}
    assert every - set(HTTP_ERRORS.values()) - set(GRPC_ERRORS.values()) == {HeadraceError}


def test_the_id_in_the_servers_log_is_reported(make: Any) -> None:
    turn = answers(500, b'{"error":"internal error"}', "x-request-id: from-the-server")
    with fake_http(turn) as server, make(server.url) as client:
        with pytest.raises(Internal) as caught:
            client.infer("m", INPUT)
        assert caught.value.request_id == "from-the-server"  # type: ignore[attr-defined]
        assert "from-the-server" in caught.value.__notes__[0]


# What is sent again, and what is not.


def test_what_the_server_puts_off_is_sent_again(make: Any) -> None:
    turns = [answers(503, b"{}", SOON), answers(429, b"{}", SOON), answers(200, ANSWER)]
    with fake_http(*turns) as server, make(server.url, retry=QUICK) as client:
        assert client.infer("m", INPUT)["y"].tolist() == [7, 8]
        assert len(server.requests) == 3
        assert len(set(server.requests)) == 1
        assert server.connections == 1


def test_what_the_server_puts_off_over_grpc_is_sent_again(make: Any) -> None:
    def put_off(context: Any) -> bytes:
        context.set_trailing_metadata((("retry-after", "0"),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        raise AssertionError

    def answer(context: Any) -> bytes:
        response = message("ModelInferResponse")(model_name="m", model_version="3")
        response.outputs.add(name="y", datatype="INT32", shape=[2]).contents.int_contents.extend([7, 8])
        return bytes(response.SerializeToString())

    with fake_grpc(put_off, put_off, answer) as server, make(server.url, retry=QUICK) as client:
        assert client.infer("m", INPUT)["y"].tolist() == [7, 8]
        assert len(server.calls) == 3


def test_unavailable_without_a_retry_time_is_final(make: Any) -> None:
    with fake_http(answers(503, b'{"error":"no"}')) as server, make(server.url, retry=QUICK) as client:
        with pytest.raises(Unavailable, match="no"):
            client.infer("m", INPUT)
        assert len(server.requests) == 1


def test_retries_end(make: Any) -> None:
    turns = [answers(503, b'{"error":"try %d"}' % number, SOON) for number in range(1, 9)]
    with fake_http(*turns) as server, make(server.url, retry=QUICK) as client:
        with pytest.raises(Unavailable, match="try 4"):
            client.infer("m", INPUT)
    with fake_http(*turns) as server, make(server.url, retry=NO_RETRY) as client:
        with pytest.raises(Unavailable, match="try 1") as caught:
            client.infer("m", INPUT)
        assert caught.value.retry_after_seconds == 0


def test_a_wait_beyond_the_timeout_is_not_begun(make: Any) -> None:
    with fake_http(answers(503, b'{"error":"in an hour"}', "retry-after: 3600")) as server, make(server.url) as client:
        with pytest.raises(Unavailable, match="in an hour"):
            client.infer("m", INPUT, timeout=1000)  # beyond the test's own


def test_a_request_that_may_have_been_computed_is_not_sent_again(make: Any) -> None:
    with fake_http(hangs_up, answers(200, ANSWER)) as server, make(server.url, retry=QUICK) as client:
        with pytest.raises(Unavailable, match="broke before the answer came.*may have been computed") as caught:
            client.infer("m", INPUT)
        assert caught.value.status is None  # type: ignore[attr-defined]
        assert len(server.requests) == 1


def test_a_request_that_was_cut_while_it_was_sent_is_sent_again(make: Any) -> None:
    """A fake that closes its first connection unread: 50 MB cannot have been sent by then."""
    array = np.zeros(12_500_000, np.float32)
    with fake_http(answers(200, ANSWER), unread=1) as server, make(server.url, retry=QUICK) as client:
        assert client.infer("m", {"x": array})["y"].tolist() == [7, 8]
        assert (server.connections, len(server.requests)) == (2, 1)
    with fake_http(answers(200, ANSWER), unread=1) as server, make(server.url, retry=NO_RETRY) as client:
        with pytest.raises(Unavailable, match="before the whole request was sent"):
            client.infer("m", {"x": array})


def test_unless_the_caller_marks_it_as_idempotent(make: Any) -> None:
    retry = Retry(attempts=3, first_seconds=0.001, lost_answers=True)
    turns = [hangs_up, respond_with(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"), answers(200, ANSWER)]
    with fake_http(*turns) as server, make(server.url, retry=retry) as client:
        assert client.infer("m", INPUT)["y"].tolist() == [7, 8]
        assert len(server.requests) == 3


def test_queries_are_always_retried(make: Any) -> None:
    with fake_http(hangs_up, answers(200, b'{"name":"m"}')) as server, make(server.url, retry=QUICK) as client:
        assert client.metadata("m") == {"name": "m"}


def test_a_kept_connection_that_was_closed_meanwhile_is_noticed(make: Any) -> None:
    with fake_http(answers(200, ANSWER, keeps=False), answers(200, ANSWER)) as server, make(server.url) as client:
        client.infer("m", INPUT)
        ((idle, _),) = internals_of(client)._transport._connections._idle
        eventually(lambda: seen_as_stale(client, idle))
        assert client.infer("m", INPUT)["y"].tolist() == [7, 8]
        assert server.connections == 2


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_starts_late_is_found(make: Any, scheme: str) -> None:
    port = free_port()
    started = []

    def live(context: Any) -> bytes:
        return bytes(message("ServerMetadataResponse")(name="late").SerializeToString())

    def start() -> None:
        if scheme == "grpc":
            started.append(fake_grpc(live, port=port))
            started[0].__enter__()
            return
        listener = socket.create_server(("127.0.0.1", port))
        with listener, listener.accept()[0] as sock:
            sock.recv(65536)
            sock.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"name":"late"}')

    timer = threading.Timer(0.15, start)
    timer.start()
    retry = Retry(attempts=1000, first_seconds=0.02, most_seconds=0.02)
    try:
        with make(f"{scheme}://127.0.0.1:{port}", retry=retry) as client:
            assert client.metadata(timeout=120)["name"] == "late"
    finally:
        timer.join()
        for service in started:
            service.__exit__(None, None, None)


# Connections.


@pytest.mark.parametrize("scheme", ["http", "https", "grpc"])
def test_server_unreachable(make: Any, scheme: str) -> None:
    url = f"{scheme}://127.0.0.1:{free_port()}"
    with make(url, retry=QUICK) as client:
        with pytest.raises(
            Unavailable, match=rf"no server answers at {url} \(.*refused\): check that one runs"
        ) as caught:
            client.infer("m", INPUT)
        assert caught.value.status is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_an_unknown_host(make: Any, scheme: str) -> None:
    with make(f"{scheme}://no-such-host.invalid:8000", retry=NO_RETRY) as client:
        with pytest.raises(Unavailable, match=r"no-such-host\.invalid"):
            client.infer("m", INPUT, timeout=120)


def test_a_timeout_during_retries(make: Any) -> None:
    with make(
        f"http://127.0.0.1:{free_port()}", retry=Retry(attempts=10**9, first_seconds=0.01, most_seconds=0.01)
    ) as client:
        with pytest.raises((Unavailable, DeadlineExceeded)):
            client.infer("m", INPUT, timeout=0.2)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", Unavailable, "does not answer in HTTP/1.1: is it a gRPC port"),
        (b"HTTP/2 200\r\n\r\n", Unavailable, "does not answer in HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", Unavailable, "an invalid response head"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", Unavailable, "an invalid content-length"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n", TooLarge, "99999999999999 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", Unavailable, "chunks without a size"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70000, Unavailable, "a head without an end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nnot json!", Internal, "cannot be read"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", Internal, "cannot be read"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ninference-header-content-length: 9\r\n\r\n{}",
            Internal,
            "cannot be",
        ),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"outputs":["x"]}', Internal, "an output"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-encoding: br\r\n\r\n{}", Unavailable, "coding"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-encoding: gzip\r\n\r\n{}", Unavailable, "damaged"),
    ],
)
def test_answers_that_are_none(make: Any, data: bytes, error: type[Exception], text: str) -> None:
    with (
        fake_http(respond_with(data)) as server,
        make(server.url, retry=NO_RETRY) as client,
        pytest.raises(error, match=text),
    ):
        client.infer("m", INPUT)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks([ANSWER[:7], ANSWER[7:]]),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + ANSWER,
        b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER,
    ],
    ids=["chunked", "until the end, after 100", "HTTP/1.0"],
)
def test_answers_in_every_shape_http_has(make: Any, data: bytes) -> None:
    with (
        fake_http(respond_with(data, keeps=b"chunked" in data), answers(200, ANSWER)) as server,
        make(server.url) as client,
    ):
        assert client.infer("m", INPUT)["y"].tolist() == [7, 8]
        assert client.infer("m", INPUT, timeout=120).model_version == "3"


def test_an_answer_while_the_body_is_still_sent(real: Any, make: Any) -> None:
    """A real server: 413 comes before the end of a body that is over its limit."""
    with make(real.http) as client:
        with pytest.raises(TooLarge):
            client.infer("same_FP32", {"x": np.zeros((30_000, 1000), np.float32)})
        assert client.live()


# What is sent along.


def test_tokens_headers_and_ids_are_sent(make: Any) -> None:
    with fake_http(answers(200, ANSWER)) as server:
        with make(server.url + "/behind/proxy", token="secret", headers={"X-Tenant": "blue"}) as client:
            client.infer("m", INPUT, version=2, request_id="id-1")
        head = server.requests[0].partition(b"\r\n\r\n")[0].decode()
    assert head.startswith("POST /behind/proxy/v2/models/m/versions/2/infer HTTP/1.1\r\n")
    for line in ("authorization: Bearer secret", "x-tenant: blue", "x-request-id: id-1"):
        assert f"\r\n{line}" in head


def test_tokens_headers_and_ids_are_sent_over_grpc(make: Any) -> None:
    def fail(context: Any) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who?")
        raise AssertionError

    with fake_grpc(fail) as server, make(server.url, token="secret", headers={"X-Tenant": "blue"}) as client:
        with pytest.raises(Unauthenticated):
            client.infer("m", INPUT, request_id="id-1")
        method, metadata = server.calls[0]
    assert method == "/inference.GRPCInferenceService/ModelInfer"
    assert (metadata["authorization"], metadata["x-tenant"], metadata["x-request-id"]) == (
        "Bearer secret",
        "blue",
        "id-1",
    )


def test_a_token_is_not_shown() -> None:
    with Client("http://127.0.0.1:1", token="secret-token") as client:
        assert "secret-token" not in repr(client)
        assert "secret-token" not in repr(client._requests._options)


def test_without_grpcio_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(errors.FailedPrecondition, match=r"pip install 'headrace\[grpc\]'"):
        Client("grpc://127.0.0.1:8001")
    Client("http://127.0.0.1:8000").close()
