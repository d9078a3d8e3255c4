# SPDX-License-Identifier: Apache-2.0
"""A router before real servers: bodies of every kind both ways, fields, the client's leaving, the router's own pages."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import trustme
from routing import Routing, ScriptedBackend, ask, raw, routing, scripted_backend

from headrace.fleet.router.settings import HealthSettings, RouterSettings
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, OK_PLAIN, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.http.sse import EventStream
from headrace.net.site import Site
from headrace.net.tls import TlsFiles
from support.serving import EchoHandlers, echo_site, serving
from support.waiting import eventually


def _mirror_site() -> Site:
    """Tells what it was sent."""

    def mirror(exchange: Exchange) -> None:
        head = exchange.head
        document = {
            "method": head.method.decode(),
            "target": (head.path + (b"?" + head.query if head.query else b"")).decode(),
            "fields": [[name.decode(), value.decode()] for name, value in head.fields],
            "body": bytes(exchange.body).decode("latin-1"),
        }
        exchange.respond(OK_JSON, json.dumps(document).encode())

    routes = Routes()
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
        routes.add(method, "/mirror", mirror)
    routes.add("GET", "/none", lambda exchange: exchange.respond(ResponseHead(204)))
    routes.add("GET", "/same", lambda exchange: exchange.respond(ResponseHead(304, [(b"etag", b'"x"')])))
    routes.add("GET", "/busy", lambda exchange: exchange.respond(ResponseHead(503), b"busy"))

    def events(exchange: Exchange) -> None:
        stream = EventStream(exchange)
        held.append(stream)

    held: list[EventStream] = []
    routes.add("GET", "/events", events)
    routes.add("GET", "/go/{word}", lambda exchange: _send_word(exchange, held))
    return Site(routes)


def _send_word(exchange: Exchange, held: list[EventStream]) -> None:
    word = exchange.params[0]
    for stream in held:
        if word == "end":
            stream.finish()
        else:
            stream.send(word)
    exchange.respond(OK_PLAIN, b"said")


def _mirrored(router: Routing, *arguments: object, **fields: str) -> dict[str, object]:
    answer = router.get("/mirror?a=1", *arguments, **fields)  # type: ignore[arg-type]
    assert answer.status == 200, answer
    document: dict[str, object] = json.loads(answer.body)
    return document


def test_small_and_large_bodies_are_returned_unchanged() -> None:
    with serving(echo_site()) as server, routing(server.port) as router:
        for size in (0, 1, 1000, 16_384, 65_536, 65_537, 3_000_000):
            body = bytes(range(256)) * (size // 256) + bytes(size % 256)
            answer = router.get("/echo", "POST", body)
            assert (answer.status, answer.body == body) == (200, True), size
        assert router.get("/big/5000000").body == bytes(5_000_000)
        assert router.stats().ok == 8 and router.stats().failed == 0


def test_one_connection_below_and_one_above_serve_many_requests() -> None:
    with serving(echo_site()) as server, routing(server.port) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=30)
        for number in range(50):
            connection.request("POST", "/echo", b"%d" % number)
            assert connection.getresponse().read() == b"%d" % number
        connection.close()
        assert server.connections() == 1


def test_pipelined_requests_are_answered_in_order() -> None:
    with serving(echo_site()) as server, routing(server.port) as router:
        one = b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n"
        last = b"GET /hello HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        text = raw(router.port, one + b"a" + one + b"b" + one + b"c" + last)
        bodies = [part.partition(b"\r\n\r\n")[2] for part in text.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        assert bodies == [b"a", b"b", b"c", b"hello"]


def test_chunked_both_ways() -> None:
    with serving(echo_site()) as server, routing(server.port) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=30)
        connection.request("POST", "/upload", iter([b"a" * 70_000, b"b", b"c" * 200_000]), encode_chunked=True)
        assert connection.getresponse().read() == b"270001"
        connection.request("GET", "/stream/100")
        response = connection.getresponse()
        assert response.read() == b"".join(b"piece %d\n" % number for number in range(100))
        connection.close()


def test_small_chunked_bodies_one_after_the_other() -> None:
    """From the second on there are connections to spare, and an address that is known."""
    with serving(echo_site()) as server, routing(server.port) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=30)
        for number in range(4):
            connection.request("POST", "/echo", iter([b"abc", b"%d" % number]), encode_chunked=True)
            assert connection.getresponse().read() == b"abc%d" % number
        connection.close()


def test_fields_for_the_backend() -> None:
    with serving(_mirror_site) as server, routing(server.port) as router:
        reported = _mirrored(
            router,
            "POST",
            b"xyz",
            X_Own="kept",
            Connection="close, X-Hop",
            X_Hop="gone",
            TE="trailers",
            Keep_Alive="timeout=5",
            X_Forwarded_For="10.1.1.1",
            X_Forwarded_Proto="gopher",
            X_Real_IP="6.6.6.6",
            Forwarded="for=6.6.6.6",
            Host="models.example:81",
        )
        fields = reported["fields"]
        assert isinstance(fields, list)
        by_name = dict(fields)
        assert len(by_name) == len(fields)
        assert reported["target"] == "/mirror?a=1" and reported["body"] == "xyz"
        assert by_name["x-own"] == "kept" and by_name["content-length"] == "3"
        assert by_name["host"] == by_name["x-forwarded-host"] == "models.example:81"
        assert by_name["x-forwarded-for"] == "127.0.0.1"
        assert by_name["x-forwarded-proto"] == "http" and by_name["via"] == "1.1 headrace-router"
        for gone in ("connection", "x-hop", "te", "keep-alive", "x-real-ip", "forwarded", "transfer-encoding"):
            assert gone not in by_name


def test_fields_of_a_trusted_proxy_and_the_backends_own_host() -> None:
    with (
        serving(_mirror_site) as server,
        routing(server.port, trust_forwarded=True, keep_host=False) as router,
    ):
        reported = _mirrored(
            router,
            X_Forwarded_Proto="https",
            X_Forwarded_Host="a.example",
            X_Forwarded_For="10.1.1.1",
            Forwarded="for=1.2.3.4",
        )
        fields = dict(reported["fields"])  # type: ignore[call-overload]
        assert fields["host"] == f"127.0.0.1:{server.port}"
        assert (fields["x-forwarded-proto"], fields["x-forwarded-host"]) == ("https", "a.example")
        assert fields["forwarded"] == "for=1.2.3.4" and fields["x-forwarded-for"] == "10.1.1.1, 127.0.0.1"


def test_an_http_1_0_client_without_a_host() -> None:
    with serving(_mirror_site) as server, routing(server.port) as router:
        text = raw(router.port, b"GET /mirror HTTP/1.0\r\n\r\n")
        assert text.startswith(b"HTTP/1.1 200") and b"connection: close" in text
        fields = dict(json.loads(text.partition(b"\r\n\r\n")[2])["fields"])
        assert fields["host"] == f"127.0.0.1:{server.port}" and fields["via"] == "1.0 headrace-router"


def test_answers_without_bodies() -> None:
    with serving(_mirror_site) as server, routing(server.port) as router:
        head = router.get("/mirror", "HEAD")
        assert head.status == 200 and int(head.fields["content-length"]) > 50 and head.body == b""
        none = router.get("/none")
        assert none.status == 204 and "content-length" not in none.fields
        same = router.get("/same")
        assert same.status == 304 and same.fields["etag"] == '"x"' and same.fields["via"] == "1.1 headrace-router"
        assert router.get("/mirror").status == 200
        assert server.connections() == 1


def test_coded_bodies_pass_untouched() -> None:
    """The router neither inflates what a client sent nor compresses what a backend answers."""
    with serving(_mirror_site) as server, routing(server.port) as router:
        plain = router.get("/mirror", Accept_Encoding="identity", X_Fill="f" * 3000)
        assert "content-encoding" not in plain.fields and len(plain.body) > 3000
    with serving(echo_site()) as server, routing(server.port) as router:
        answer = router.get("/upload", "POST", b"\x1f\x8bnot really gzip", Content_Encoding="gzip")
        assert answer.body == b"17"


def test_expect_100_continue() -> None:
    with serving(echo_site()) as server, routing(server.port) as router:
        for path, size in (("/echo", 10), ("/upload", 100_000)):
            with socket.create_connection(("127.0.0.1", router.port), timeout=30) as sock:
                head = f"POST {path} HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: {size}\r\n"
                sock.sendall(head.encode() + b"Connection: close\r\n\r\n")
                assert sock.recv(100).startswith(b"HTTP/1.1 100 Continue")
                sock.sendall(bytes(size))
                received = b""
                while piece := sock.recv(65536):
                    received += piece
                assert received.startswith(b"HTTP/1.1 200"), received


def test_events_are_forwarded_one_by_one() -> None:
    with serving(_mirror_site) as server, routing(server.port) as router:
        with socket.create_connection(("127.0.0.1", router.port), timeout=30) as sock:
            sock.sendall(b"GET /events HTTP/1.1\r\nHost: h\r\n\r\n")
            text = b""
            while b"\r\n\r\n" not in text:
                text += sock.recv(4096)
            assert b"text/event-stream" in text
            for word in ("one", "two"):
                ask(server.port, "GET", f"/go/{word}")
                text = b""
                while b"\n\n" not in text:
                    text += sock.recv(4096)
                assert f"data: {word}\n\n".encode() in text
            ask(server.port, "GET", "/go/end")
            assert sock.recv(4096) == b"0\r\n\r\n"


def test_a_client_that_leaves_cancels_the_backends_work() -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as server, routing(server.port) as router:
        sock = socket.create_connection(("127.0.0.1", router.port), timeout=30)
        sock.sendall(b"POST /hold HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi")
        eventually(lambda: bool(handlers.held))
        sock.close()
        eventually(lambda: handlers.events == ["disconnect"])
        eventually(lambda: router.stats().cancelled == 1)
        assert router.proxy.backends.all[0].outstanding == 0
        assert router.get("/hello").body == b"hello"


def test_a_client_that_does_not_read_pauses_the_backend() -> None:
    with serving(echo_site()) as server, routing(server.port) as router:
        size = 64_000_000
        with socket.create_connection(("127.0.0.1", router.port), timeout=30) as sock:
            sock.sendall(b"GET /big/%d HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" % size)
            sock.recv(1000, socket.MSG_PEEK)
            upstream = next(iter(router.proxy.pools[router.proxy.backends.all[0]].all))
            eventually(lambda: upstream._read_paused)
            received = 0
            while piece := sock.recv(1 << 20):
                received += len(piece)
            assert received > size


def test_a_backend_that_does_not_read_pauses_the_client() -> None:
    """Nor may an early answer be lost."""
    stalled = threading.Event()

    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        sock.recv(1000)
        stalled.wait(60)
        sock.sendall(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 3\r\n\r\nbig")
        backend.stopping.wait(60)

    with scripted_backend(script) as backend, routing(backend.port) as router:
        with socket.create_connection(("127.0.0.1", router.port), timeout=30) as sock:
            sock.sendall(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 900000000\r\n\r\n")
            sock.settimeout(0.5)
            sent = 0
            try:
                while sent < 200_000_000:
                    sent += sock.send(bytes(100_000))
            except TimeoutError:
                pass
            assert sent < 100_000_000
            stalled.set()
            sock.settimeout(30)
            assert sock.recv(4096).startswith(b"HTTP/1.1 413")


def test_503_of_a_backend_is_forwarded_and_counted() -> None:
    with serving(_mirror_site) as server, routing(server.port) as router:
        answer = router.get("/busy")
        assert (answer.status, answer.body) == (503, b"busy")
        assert router.stats().refused == 1 and router.stats().ok == 0


def test_the_routers_own_pages() -> None:
    with serving(echo_site()) as server, routing(server.port, policy="least") as router:
        router.get("/hello")
        status = json.loads(router.get("/router/status").body)
        assert status["policy"] == "least" and status["live"] == 1
        (backend,) = status["backends"]
        assert backend["url"] == f"http://127.0.0.1:{server.port}" and backend["state"] == "up"
        assert (backend["requests"], backend["ok"], backend["idle_connections"]) == (1, 1, 1)
        metrics = router.get("/router/metrics").body.decode()
        name = f'backend="http://127.0.0.1:{server.port}"'
        assert f'headrace_router_requests_total{{{name},outcome="ok"}} 1' in metrics
        assert f"headrace_router_backend_up{{{name}}} 1" in metrics
        assert f"headrace_router_backend_seconds_count{{{name}}} 1" in metrics
        assert router.get("/router/healthz").body == b"ok\n"
        assert router.get("/router/secret").status == 404
        assert router.get("/router/status", "POST", b"").status == 404
        assert router.stats().requests == 1


def test_no_healthy_backend_is_503_with_names() -> None:
    def settings(port: int) -> HealthSettings:
        return HealthSettings(path="/v2/health/ready", interval_seconds=60)

    with serving(echo_site()) as server:  # has no such path: its checks answer 404
        with routing(server.port, health=settings(server.port)) as router:
            answer = router.get("/hello")
            assert answer.status == 503 and int(answer.fields["retry-after"]) >= 1
            text = json.loads(answer.body)["error"]
            assert f"http://127.0.0.1:{server.port} is down (/v2/health/ready answered 404)" in text
            assert router.get("/router/healthz").status == 503
            assert router.get("/router/status").status == 200
            large = router.get("/upload", "POST", bytes(100_000))
            assert large.status == 503


def test_checks_find_a_backend_that_starts() -> None:
    healthy: list[bool] = []
    routes = Routes()

    def check(exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN if healthy else ResponseHead(503), b"")

    routes.add("GET", "/fit", check)
    routes.add("GET", "/hello", lambda exchange: exchange.respond(OK_PLAIN, b"hello"))
    checks = HealthSettings(path="/fit", interval_seconds=0.02, rise=2, fall=1)
    with serving(Site(routes)) as server, routing(server.port, health=checks) as router:
        assert router.get("/hello").status == 503
        healthy.append(True)
        eventually(lambda: router.proxy.backends.all[0].live)
        assert router.get("/hello").status == 200
        healthy.clear()
        eventually(lambda: not router.proxy.backends.all[0].live)


def test_http2_clients_are_served_over_http_1_1() -> None:
    with serving(_mirror_site) as server, routing(server.port) as router:
        document = json.loads(_over_http2(router.port, "POST", "/mirror?x=2", [b"abc"], length=True))
        assert document["body"] == "abc" and document["target"] == "/mirror?x=2"
        fields = dict(document["fields"])
        assert fields["via"] == "2 headrace-router" and fields["host"] == fields["x-forwarded-host"] == "h2.example"
        assert json.loads(_over_http2(router.port, "POST", "/mirror", [b"ab", b"cd"]))["body"] == "abcd"
        assert json.loads(_over_http2(router.port, "GET", "/mirror", []))["body"] == ""
        large = [bytes(16_000)] * 4 + [b"x" * 7]
        assert len(json.loads(_over_http2(router.port, "PUT", "/mirror", large, length=True))["body"]) == 64_007


def _over_http2(port: int, method: str, path: str, pieces: list[bytes], *, length: bool = False) -> bytes:
    fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "h2.example")]
    if length:
        fields.append(("content-length", str(sum(map(len, pieces)))))
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.increment_flow_control_window(1 << 24)
    client.send_headers(1, fields, end_stream=not pieces)
    for number, piece in enumerate(pieces):
        client.send_data(1, piece, end_stream=number == len(pieces) - 1)
    body = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(client.data_to_send())
        while True:
            for event in client.receive_data(sock.recv(65536)):
                if isinstance(event, h2.events.DataReceived):
                    body += event.data
                    client.acknowledge_received_data(len(event.data), 1)
                elif isinstance(event, h2.events.ResponseReceived):
                    assert (b":status", b"200") in _raw(event.headers)
                elif isinstance(event, h2.events.StreamEnded):
                    return body
            sock.sendall(client.data_to_send())


def _raw(fields: Any) -> list[tuple[bytes, bytes]]:
    return [(_bytes(name), _bytes(value)) for name, value in fields]


def _bytes(text: Any) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def test_https_backends_must_prove_who_they_are(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    for name, ca in (("ca", authority), ("stranger", stranger)):
        ca.cert_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    tls = TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    with serving(echo_site(), tls=tls) as server:
        url = f"https://localhost:{server.port}"
        with routing(url, ca_file=str(tmp_path / "ca.pem"), health=HealthSettings(path="/hello")) as router:
            assert router.proxy.backends.all[0].state == "up"
            assert router.get("/hello").body == b"hello"
            assert router.get("/echo", "POST", bytes(200_000)).body == bytes(200_000)
        with routing(url, ca_file=str(tmp_path / "stranger.pem")) as router:
            answer = router.get("/hello")
            assert answer.status == 502 and b"could not be reached" in answer.body


def test_defaults_are_those_documented() -> None:
    settings = RouterSettings(())
    assert (settings.policy, settings.health.path, settings.retries.budget) == ("p2c", "/v2/health/ready", 0.2)
    assert settings.retries.inference is False
