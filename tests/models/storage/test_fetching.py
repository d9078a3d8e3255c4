# SPDX-License-Identifier: Apache-2.0
"""The one function that fetches a URL, against a real server: what it takes, and all that it must not do."""

from __future__ import annotations

import ipaddress
import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from web_stub import Handler, WebStub, dripping, endless, mute, redirect, reply, serve

from headrace.core.errors import Cancelled, InvalidArgument, Unavailable
from headrace.models.storage.http_download import Address, FetchPolicy, fetch, is_listed, is_public

LOCAL = FetchPolicy(max_bytes=100_000, total_seconds=60, idle_seconds=30, private_hosts=("127.0.0.1", "files.test"))
OPEN = FetchPolicy(max_bytes=100_000, total_seconds=60, idle_seconds=30)


@pytest.fixture
def web() -> Iterator[WebStub]:
    with WebStub() as stub:
        yield stub


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def to_loopback(host: str, port: int) -> list[Address]:
    return [ipaddress.ip_address("127.0.0.1")]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_complete_and_has_its_metadata(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = serve(b"0123456789" * 500, content_type="Image/PNG; charset=x")
    received: list[tuple[int, int | None]] = []
    got = fetch(web.url("/a?q=1"), tmp_path / "f", LOCAL, progress=lambda *event: received.append(event))
    assert (got.size, got.content_type) == (5000, "image/png")
    assert got.path.read_bytes() == b"0123456789" * 500
    assert received[-1] == (5000, 5000)
    assert left_in(tmp_path) == ["f"]


def test_only_the_request_is_sent(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = redirect("/b")
    web.routes["/b"] = lambda handler: reply(handler, b"x", set_cookie="a=b")
    fetch(web.url("/a?x=ü &y"), tmp_path / "f", LOCAL)
    headers = {"Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"}
    assert [(path, set(found)) for path, found in web.seen] == [("/a?x=%C3%BC%20&y", headers), ("/b", headers)]
    assert web.seen[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "localhost.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b:1::7f00:1]",
        "[2002:7f00:1::]",
        "0.0.0.0",
        "[::]",
        "10.0.0.1",
        "172.31.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "[fd00:ec2::254]",
        "[fe80::1]",
        "224.0.0.1",
        "255.255.255.255",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0x7f.1",
    ],
)
def test_private_addresses_are_refused_in_every_writing(host: str, web: WebStub, tmp_path: Path) -> None:
    web.routes["/"] = serve(b"secret")
    with pytest.raises(InvalidArgument):
        fetch(web.url("/", host), tmp_path / "f", OPEN)
    assert web.seen == []
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_no_such_host_and_a_private_one_read_the_same(tmp_path: Path) -> None:
    def unknown(host: str, port: int) -> list[Address]:
        raise OSError("no such host")

    texts = []
    for resolve in (unknown, to_loopback):
        with pytest.raises(InvalidArgument) as caught:
            fetch("http://wiki.internal/x", tmp_path / "f", OPEN, resolve=resolve)
        texts.append(caught.value.message)
    assert texts[0] == texts[1]
    assert "127." not in texts[0]


def test_one_private_address_among_public_ones_is_enough(tmp_path: Path) -> None:
    def both(host: str, port: int) -> list[Address]:
        return [ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("127.0.0.1")]

    with pytest.raises(InvalidArgument, match="not public"):
        fetch("http://files.example/x", tmp_path / "f", OPEN, resolve=both)


def test_a_name_is_resolved_once_and_that_address_is_used(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = serve(b"ok")
    requests: list[str] = []

    def changing(host: str, port: int) -> list[Address]:
        requests.append(host)
        return to_loopback(host, port) if len(requests) == 1 else [ipaddress.ip_address("169.254.169.254")]

    fetch(web.url("/a", "files.test"), tmp_path / "f", LOCAL, resolve=changing)
    assert requests == ["files.test"]
    assert web.seen[0][1]["Host"] == f"files.test:{web.port}"


@pytest.mark.parametrize(
    ("allowed", "fits"),
    [("127.0.0.0/8", True), ("10.0.0.0/8", False), ("*.test", True), ("files.test", True), ("test", False)],
)
def test_the_operator_may_list_hosts_and_networks(allowed: str, fits: bool, web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = serve(b"ok")
    policy = FetchPolicy(private_hosts=(allowed,))
    if fits:
        assert fetch(web.url("/a", "files.test"), tmp_path / "f", policy, resolve=to_loopback).size == 2
    else:
        with pytest.raises(InvalidArgument):
            fetch(web.url("/a", "files.test"), tmp_path / "f", policy, resolve=to_loopback)


def test_a_domain_list_applies_to_every_hop(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = serve(b"ok")
    web.routes["/away"] = redirect(web.url("/a", "127.0.0.1"))
    policy = FetchPolicy(private_hosts=("127.0.0.0/8",), allow_hosts=("*.files.test",))
    fetch(web.url("/a", "x.files.test"), tmp_path / "f", policy, resolve=to_loopback)
    for host, path in (("files.test", "/a"), ("evilfiles.test", "/a"), ("x.files.test", "/away")):
        with pytest.raises(InvalidArgument, match="may not fetch from"):
            fetch(web.url(path, host), tmp_path / "f", policy, resolve=to_loopback)
    assert is_listed("A.Files.test.", ("*.files.test",))


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/x",
        "gopher://example.com/x",
        "http://user@example.com/",
        "http://user:pass@example.com/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://example.com:x/",
        "http:///x",
        "http://",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://exa mple.com/",
        "http://a..b/",
        "http://-a.example/",
        "http://bücher.example/",
        "http://example.com/\r\nHost: x",
        "http://example.com/\tx",
        "//example.com/",
        "example.com/x.png",
        "",
        "http://example.com/" + "x" * 9000,
    ],
)
def test_urls_that_can_be_read_in_two_ways_are_refused(url: str, tmp_path: Path) -> None:
    def refuse(host: str, port: int) -> list[Address]:
        raise RuntimeError("nothing of this may be looked up")

    with pytest.raises(InvalidArgument):
        fetch(url, tmp_path / "f", OPEN, resolve=refuse)


@pytest.mark.parametrize(
    "target", ["http://localhost:{port}/secret", "http://[::1]:{port}/secret", "//0.0.0.0:{port}/secret"]
)
def test_a_redirect_to_ourselves_is_not_followed(target: str, web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = redirect(target.format(port=web.port))
    web.routes["/secret"] = serve(b"secret")
    with pytest.raises(InvalidArgument, match="redirects to a host") as caught:
        policy = FetchPolicy(private_hosts=("files.test",))
        fetch(web.url("/a", "files.test"), tmp_path / "f", policy, resolve=lambda host, port: _resolved(host))
    assert "secret" not in caught.value.message
    assert [path for path, _ in web.seen] == ["/a"]


def _resolved(host: str) -> list[Address]:
    return [ipaddress.ip_address({"files.test": "127.0.0.1", "localhost": "127.0.0.1"}.get(host, host))]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "data:text/plain,x", "http://u@127.0.0.1/", "http://[", ""])
def test_a_redirect_to_no_web_url_is_not_followed(target: str, web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = redirect(target)
    with pytest.raises(InvalidArgument, match="redirects to") as caught:
        fetch(web.url("/a"), tmp_path / "f", LOCAL)
    assert "passwd" not in caught.value.message


def test_redirects_end(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = redirect("/a", 307)
    with pytest.raises(InvalidArgument, match="more than 5 times"):
        fetch(web.url("/a"), tmp_path / "f", LOCAL)
    assert len(web.seen) == 6


def test_too_much_is_refused_before_it_is_sent(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = serve(b"x" * 100_001)
    web.routes["/b"] = serve(b"x" * 100_000)
    with pytest.raises(InvalidArgument, match="larger than 100000 bytes"):
        fetch(web.url("/a"), tmp_path / "f", LOCAL)
    assert fetch(web.url("/b"), tmp_path / "f", LOCAL).size == 100_000


def test_a_server_that_never_stops_is_cut_off(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = endless()
    with pytest.raises(InvalidArgument, match="larger than"):
        fetch(web.url("/a"), tmp_path / "f", LOCAL)
    assert left_in(tmp_path) == []


def test_a_slow_loris_has_a_total_time(web: WebStub, stop: threading.Event, tmp_path: Path) -> None:
    web.routes["/a"] = dripping(stop)
    with pytest.raises(Unavailable, match=r"longer than 0\.4 seconds"):
        fetch(
            web.url("/a"),
            tmp_path / "f",
            FetchPolicy(total_seconds=0.4, idle_seconds=60, private_hosts=("127.0.0.1",)),
        )
    assert left_in(tmp_path) == []


def test_dripping_headers_have_a_total_time(web: WebStub, stop: threading.Event, tmp_path: Path) -> None:
    def drip(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not stop.wait(0.02):
            handler.wfile.write(b"X")

    web.routes["/a"] = drip
    with pytest.raises(Unavailable, match=r"longer than 0\.4 seconds"):
        fetch(
            web.url("/a"),
            tmp_path / "f",
            FetchPolicy(total_seconds=0.4, idle_seconds=60, private_hosts=("127.0.0.1",)),
        )


def test_silence_ends_a_fetch(web: WebStub, stop: threading.Event, tmp_path: Path) -> None:
    web.routes["/a"] = mute(stop)
    with pytest.raises(Unavailable, match="too slow"):
        fetch(web.url("/a"), tmp_path / "f", FetchPolicy(idle_seconds=0.3, private_hosts=("127.0.0.1",)))


def test_a_fetch_is_cancelled_while_it_waits(web: WebStub, stop: threading.Event, tmp_path: Path) -> None:
    web.routes["/a"] = mute(stop)
    with pytest.raises(Cancelled):
        fetch(web.url("/a"), tmp_path / "f", LOCAL, cancelled=lambda: bool(web.seen))


def test_a_truncated_file_is_refused(web: WebStub, tmp_path: Path) -> None:
    def half(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 500)

    def half_a_chunk(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"100\r\nxx")

    web.routes["/a"], web.routes["/b"] = half, half_a_chunk
    for path in ("/a", "/b"):
        with pytest.raises(Unavailable):
            fetch(web.url(path), tmp_path / "f", LOCAL)
    assert left_in(tmp_path) == []


def test_compressed_answers_are_not_inflated(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = serve(b"x", content_encoding="gzip")
    with pytest.raises(InvalidArgument, match="compressed"):
        fetch(web.url("/a"), tmp_path / "f", LOCAL)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, InvalidArgument), (206, InvalidArgument), (503, Unavailable), (429, Unavailable)]
)
def test_other_answers_are_reported(status: int, kind: type[Exception], web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = lambda handler: reply(handler, b"internal detail", status=status)
    with pytest.raises(kind, match=str(status)) as caught:
        fetch(web.url("/a"), tmp_path / "f", LOCAL)
    assert "detail" not in str(caught.value)


def test_bytes_that_are_not_http_are_reported(web: WebStub, tmp_path: Path) -> None:
    web.routes["/a"] = lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")
    with pytest.raises(Unavailable, match="no HTTP") as caught:
        fetch(web.url("/a"), tmp_path / "f", LOCAL)
    assert "SSH" not in caught.value.message


def test_no_secret_is_reported_or_logged(web: WebStub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    web.routes["/a"] = lambda handler: handler.wfile.write(b"garbage\r\n")
    caplog.set_level(logging.DEBUG)
    for path in ("/a?signature=s3cr3t", "/missing?signature=s3cr3t#s3cr3t"):
        with pytest.raises((Unavailable, InvalidArgument)) as caught:
            fetch(web.url(path), tmp_path / "f", LOCAL)
        assert "s3cr3t" not in caught.value.message
    with pytest.raises(InvalidArgument) as refused:
        fetch("http://user:s3cr3t@files.test/a", tmp_path / "f", LOCAL)
    assert "s3cr3t" not in refused.value.message + caplog.text


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def test_certificates_are_checked_for_the_host(authority: trustme.CA, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("files.test").configure_cert(context)
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    known = FetchPolicy(idle_seconds=30, private_hosts=("127.0.0.0/8",), ca_file=ca_file)
    with WebStub({"/a": serve(b"ok"), "/down": redirect("http://files.test/a")}).with_tls(context) as web:
        right = web.url("/a", "files.test", "https")
        assert fetch(right, tmp_path / "f", known, resolve=to_loopback).size == 2
        with pytest.raises(InvalidArgument, match="certificate"):
            fetch(web.url("/a", "other.test", "https"), tmp_path / "f", known, resolve=to_loopback)
        with pytest.raises(InvalidArgument, match="certificate"):
            fetch(right, tmp_path / "f", FetchPolicy(private_hosts=("127.0.0.0/8",)), resolve=to_loopback)
        with pytest.raises(InvalidArgument, match="from https to http"):
            fetch(web.url("/down", "files.test", "https"), tmp_path / "f", known, resolve=to_loopback)


def test_no_other_package_has_a_client_that_follows_redirects() -> None:
    root = Path(__file__).resolve().parents[3] / "headrace"
    clients = ("urllib.request", "import requests", "import httpx", "import aiohttp", "urlopen(")
    results = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if any(word in path.read_text() for word in clients)
    }
    # Those of Kubernetes ask the one API server that a kubeconfig names; that of Ray asks the replica's own server.
    assert results == {
        "fleet/ray_serve/forwarding.py",
        "models/storage/hugging_face.py",
        "platforms/kubernetes_client/kubeconfig.py",
        "platforms/kubernetes_client/api.py",
    }
    assert "allow_redirects=False" in (root / "fleet/ray_serve/forwarding.py").read_text()
