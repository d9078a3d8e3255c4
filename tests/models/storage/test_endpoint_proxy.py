# SPDX-License-Identifier: Apache-2.0
"""A store that a user named leads nowhere else: its redirects are refused, and nobody else may use the proxy."""

from __future__ import annotations

import asyncio
import gc
import http.client
import ipaddress
import logging
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from store_stub import StoreStub
from web_stub import WebStub, reply

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.endpoint_proxy import proxy_url
from headrace.models.storage.locations import ObjectLocation
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

QUICK = ObjectLimits(idle_seconds=30, retry_seconds=0.1)


@pytest.fixture
def inside() -> Iterator[WebStub]:
    """A server that only this machine should reach."""
    with WebStub(default=lambda handler: reply(handler, b"<credentials/>")) as stub:
        yield stub


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_elsewhere_is_not_followed(
    status: int, inside: WebStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StoreStub({"bkt": {"top": b"1"}}) as store:
        metadata = store.metadata("bkt")
        store.default = lambda handler: reply(handler, b"", status=status, location=inside.url("/latest/meta-data"))
        source = ObjectSource(ObjectLocation("aws", "bkt", "top"), CloudCredentials.from_metadata(metadata), QUICK)
        with caplog.at_level(logging.WARNING), pytest.raises(HeadraceError):
            source.download(source.read_listing(), tmp_path)
        assert store.seen
    assert inside.seen == [], "the redirect was followed"
    assert "a redirect of an object store" in caplog.text and str(inside.port) in caplog.text
    assert list(tmp_path.iterdir()) == []


def ask(url: str, target: str, method: str = "GET", host: str = "") -> int:
    """The status that the proxy answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=30)
    headers = {"Host": host or "x"}
    if parts.username:
        headers["Proxy-Authorization"] = _basic(parts.username)
    try:
        connection.request(method, target, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_proxy_reaches_its_endpoint_and_nothing_else(inside: WebStub) -> None:
    with WebStub(default=lambda handler: reply(handler, b"ok")) as endpoint:
        url = proxy_url(endpoint.url(""))
        assert ask(url, endpoint.url("/a?b=c")) == 200
        assert [path for path, _ in endpoint.seen] == ["/a?b=c"]
        assert "Proxy-Authorization" not in endpoint.seen[0][1]
        assert ask(url, inside.url("/")) == 403
        assert ask(url, f"127.0.0.1:{inside.port}", "CONNECT") == 403
        assert ask(url, "http://[::1/") == 403
        anonymous = f"http://127.0.0.1:{urlsplit(url).port}"
        assert ask(anonymous, endpoint.url("/")) == 403
        assert len(endpoint.seen) == 1
    assert inside.seen == []
    assert ask(url, endpoint.url("/")) == 502  # it is gone


def test_tls_uses_a_tunnel_that_the_client_verifies() -> None:
    authority = trustme.CA()
    context, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(trusting)
    with WebStub(default=lambda handler: reply(handler, b"secure" * 100_000)).with_tls(context) as endpoint:
        url = urlsplit(proxy_url(endpoint.url("", scheme="https")))
        connection = http.client.HTTPSConnection("127.0.0.1", url.port, context=trusting, timeout=30)
        connection.set_tunnel("127.0.0.1", endpoint.port, {"Proxy-Authorization": _basic(url.username or "")})
        connection.request("GET", "/object")
        assert connection.getresponse().read() == b"secure" * 100_000
        connection.close()


def _basic(name: str) -> str:
    return "Basic " + b64encode(f"{name}:".encode()).decode()


def test_an_endpoint_has_one_proxy_and_must_be_a_url() -> None:
    assert proxy_url("http://store.example:9000") == proxy_url("http://STORE.example:9000/")
    assert proxy_url("http://store.example:9000") != proxy_url("http://store.example:9001")
    with pytest.raises(InvalidArgument):
        proxy_url("store.example")


def test_it_starts_in_a_running_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def first_use() -> str:
        return proxy_url(endpoint.url(""))

    monkeypatch.setattr("headrace.models.storage.endpoint_proxy._of_process", {})
    with WebStub(default=lambda handler: reply(handler, b"ok")) as endpoint:
        assert ask(asyncio.run(first_use()), endpoint.url("/")) == 200


def test_a_client_that_disconnects_ends_the_request_at_the_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    began, gone, collected = threading.Event(), threading.Event(), threading.Event()

    def wait_for_the_end(handler: BaseHTTPRequestHandler) -> None:
        began.set()
        if handler.connection.recv(1) == b"":
            gone.set()
        collected.wait(30)  # it does not answer

    with WebStub(default=wait_for_the_end) as endpoint:
        url = urlsplit(proxy_url(endpoint.url("")))
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=30)
        connection.request("GET", endpoint.url("/"), headers={"Proxy-Authorization": _basic(url.username or "")})
        assert began.wait(30)
        connection.close()
        assert gone.wait(30)
        gc.collect()
        collected.set()
    assert "Task was destroyed" not in caplog.text


def test_a_name_at_the_metadata_service_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [ipaddress.ip_address("169.254.169.254")]
    monkeypatch.setattr("headrace.models.storage.endpoint_proxy.addresses_of", lambda host, port: addresses)
    assert ask(proxy_url("http://rebound.example"), "http://rebound.example/") == 502
