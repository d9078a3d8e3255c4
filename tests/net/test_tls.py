# SPDX-License-Identifier: Apache-2.0
"""TLS for real: handshakes over loopback, and certificates and client authorities that change under live clients."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trustme
import uvloop
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from headrace.core.errors import InvalidArgument
from headrace.core.limits import Limits
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address, Listener
from headrace.net.tls import ReloadingTlsContext, TlsFiles, make_context
from support.waiting import eventually_async

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
CA = trustme.CA()
"""Signs every server certificate here; clients trust it."""
CLIENT_CA, OTHER_CLIENT_CA = trustme.CA(), trustme.CA()
OPEN: list[HttpServer | socket.socket] = []


class Echo(asyncio.Protocol):
    """Sends back what it gets. Draining closes it."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.site.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.site.connections.discard(self)

    def drain(self) -> None:
        self.transport.close()

    def sweep(self, now: float) -> None:
        pass

    def expire(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()


class Files:
    """PEM files of one server, replaced as an administrator would."""

    def __init__(self, folder: Path, *, client_ca: trustme.CA | None = None) -> None:
        self.folder = folder
        self.tls = TlsFiles(
            str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "clients.pem") if client_ca else None
        )
        self.leaf = self.renew()
        if client_ca is not None:
            self.trust(client_ca)

    def renew(self) -> trustme.LeafCert:
        """Put a new certificate and key in place; each file is replaced whole, one after the other."""
        self.leaf = CA.issue_cert("localhost", "127.0.0.1")
        self.put("cert.pem", b"".join(blob.bytes() for blob in self.leaf.cert_chain_pems))
        self.put("key.pem", self.leaf.private_key_pem.bytes())
        return self.leaf

    def trust(self, authority: trustme.CA) -> None:
        self.put("clients.pem", authority.cert_pem.bytes())

    def put(self, name: str, data: bytes) -> None:
        (self.folder / "new").write_bytes(data)
        os.replace(self.folder / "new", self.folder / name)

    @property
    def der(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.leaf.cert_chain_pems[0].bytes().decode())


def client_context(
    *, version: ssl.TLSVersion | None = None, alpn: list[str] | None = None, identity: trustme.CA | None = None
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    CA.configure_trust(context)
    context.check_hostname = False  # some of these clients send no name
    if version is not None:
        context.minimum_version = context.maximum_version = version
    if alpn is not None:
        context.set_alpn_protocols(alpn)
    if identity is not None:
        identity.issue_cert("client@example.org").configure_cert(context)
    return context


class Client:
    """A blocking TLS client; use its methods through `there`, in a thread."""

    def __init__(
        self, server: HttpServer, context: ssl.SSLContext, name: str | None = "localhost", session: Any = None
    ) -> None:
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        OPEN.append(plain)
        self.tls = context.wrap_socket(plain, server_hostname=name, session=session)
        OPEN.append(self.tls)
        self.peer = self.tls.getpeercert(binary_form=True)

    def echo(self, data: bytes) -> bytes:
        self.tls.sendall(data)
        return self.tls.recv(100)


async def there(action: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(action, *args)


def visit(server: HttpServer, context: ssl.SSLContext, name: str | None = "localhost") -> bytes | None:
    """One whole visit; returns the certificate that the server showed."""
    client = Client(server, context, name)
    assert client.echo(b"x") == b"x"
    client.tls.close()
    return client.peer


def refused(server: HttpServer, context: ssl.SSLContext, name: str | None = "localhost", session: Any = None) -> bool:
    """Whether a client gets no byte back: in TLS 1.3 it believes in its handshake before the server has judged it."""
    try:
        return Client(server, context, name, session).echo(b"x") == b""
    except TimeoutError:
        raise
    except OSError:
        return True


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look at their files every 20 milliseconds, not every second."""
    monkeypatch.setattr("headrace.net.server.SWEEP_SECONDS", 0.02)


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while OPEN:
        left = OPEN.pop()
        if isinstance(left, socket.socket):
            left.close()


def run(main: Coroutine[Any, Any, None], runner: Callable[[Coroutine[Any, Any, None]], None] = uvloop.run) -> None:
    async def bounded() -> None:
        try:
            await asyncio.wait_for(main, 200)
        finally:
            for left in OPEN:
                if isinstance(left, HttpServer):
                    left.abort()
            await asyncio.sleep(0.01)

    runner(bounded())


async def started(files: TlsFiles, *, limits: Limits | None = None) -> HttpServer:
    site = Site(limits=limits)
    server = HttpServer(site, Address("127.0.0.1", 0), lambda: Echo(site), tls=files)
    OPEN.append(server)
    await server.start()
    return server


async def until_reloaded(server: HttpServer, change: Callable[[], object]) -> None:
    """Make a change and wait until the server accepts with a new context."""
    before = server._asyncio_server
    change()
    await eventually_async(lambda: server._asyncio_server is not before)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("offer", "chosen"),
    [
        (["h2", "http/1.1"], "h2"),
        (["http/1.1"], "http/1.1"),
        (["http/1.1", "h2"], "h2"),
        (["other"], None),
        (None, None),
    ],
)
def test_alpn(tmp_path: Path, version: ssl.TLSVersion, offer: list[str] | None, chosen: str | None) -> None:
    async def main() -> None:
        server = await started(Files(tmp_path).tls)
        client = await there(Client, server, client_context(version=version, alpn=offer))
        assert client.tls.selected_alpn_protocol() == chosen
        assert await there(client.echo, b"a") == b"a"

    run(main())


def test_tls_1_1_and_weak_suites_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        server = await started(Files(tmp_path).tls)
        old = client_context()
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        assert await there(refused, server, old)
        weak = client_context(version=ssl.TLSVersion.TLSv1_2)
        weak.set_ciphers("ECDHE+AES+SHA256:ECDHE+AES+SHA1:!AESGCM")  # CBC: HTTP/2 forbids it
        assert await there(refused, server, weak)

    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        run(main())


@pytest.mark.parametrize("name", ["localhost", None])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_new_certificate_is_used_and_no_connection_is_dropped(
    tmp_path: Path, version: ssl.TLSVersion, name: str | None
) -> None:
    async def main() -> None:
        files = Files(tmp_path)
        server = await started(files.tls)
        context = client_context(version=version)
        old = await there(Client, server, context, name)
        first = files.der
        assert old.peer == first
        await until_reloaded(server, files.renew)
        assert await there(visit, server, context, name) == files.der != first
        assert await there(old.echo, b"still here") == b"still here"
        await until_reloaded(server, files.renew)  # and again
        assert await there(visit, server, context, name) == files.der
        assert await there(old.echo, b"still here") == b"still here"

    run(main())


def test_connections_waiting_or_in_handshake_during_a_reload_succeed(tmp_path: Path) -> None:
    async def main() -> None:
        files = Files(tmp_path)
        server = await started(
            files.tls, limits=Limits(header_seconds=1000.0)
        )  # for the one that is silent until later
        half = socket.create_connection(("127.0.0.1", server.port), timeout=30)  # accepted, silent until later
        OPEN.append(half)
        await asyncio.sleep(0.05)
        visits: list[bytes | None] = []

        async def visitor() -> None:
            for _ in range(30):
                visits.append(await there(visit, server, client_context()))

        visiting = [asyncio.ensure_future(visitor()) for _ in range(2)]
        await until_reloaded(server, files.renew)
        await until_reloaded(server, files.renew)
        await asyncio.gather(*visiting)
        assert len(visits) == 60
        tls = await there(lambda: client_context().wrap_socket(half, server_hostname="localhost"))
        OPEN.append(tls)

    run(main())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_reload_serves_connections_of_every_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Callable[..., None]
) -> None:
    """asyncio's loop sets up a connection one iteration after it was accepted; the reload must not come in between."""
    monkeypatch.setattr("headrace.net.server.SWEEP_SECONDS", 0.002)

    async def main() -> None:
        files = Files(tmp_path)
        server = await started(files.tls)
        for _ in range(8):
            old = server._asyncio_server
            files.renew()
            clients: list[socket.socket] = []
            while server._asyncio_server is old and len(clients) < 500:
                clients.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
                await asyncio.sleep(0)
            assert server._asyncio_server is not old
            OPEN.extend(clients)
            for client in clients[-10:]:
                OPEN.append(await there(client_context().wrap_socket, client, False, True, True, "localhost"))

    run(main(), runner)


def test_a_secret_volume_of_kubernetes(tmp_path: Path) -> None:
    """Files are links into a folder that is itself a link, and that link is what changes."""

    async def main() -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        one, two = Files(tmp_path / "one"), Files(tmp_path / "two")
        (tmp_path / "..data").symlink_to("one")
        for name in ("cert.pem", "key.pem"):
            (tmp_path / name).symlink_to(f"..data/{name}")
        server = await started(TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")))
        assert await there(visit, server, client_context()) == one.der

        def swap() -> None:
            (tmp_path / "..new").symlink_to("two")
            os.replace(tmp_path / "..new", tmp_path / "..data")

        await until_reloaded(server, swap)
        assert await there(visit, server, client_context()) == two.der

    run(main())


@pytest.mark.parametrize("version", VERSIONS)
def test_mutual_tls(tmp_path: Path, version: ssl.TLSVersion) -> None:
    async def main() -> None:
        server = await started(Files(tmp_path, client_ca=CLIENT_CA).tls)
        await there(visit, server, client_context(version=version, identity=CLIENT_CA))
        for stranger in (None, OTHER_CLIENT_CA):
            assert await there(refused, server, client_context(version=version, identity=stranger))

    run(main())


@pytest.mark.parametrize("name", ["localhost", None])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_revoked_client_authority_admits_no_client(tmp_path: Path, version: ssl.TLSVersion, name: str | None) -> None:
    async def main() -> None:
        files = Files(tmp_path, client_ca=CLIENT_CA)
        server = await started(files.tls)
        context = client_context(version=version, identity=CLIENT_CA)
        old = await there(Client, server, context, name)
        assert await there(old.echo, b"a") == b"a"
        session = old.tls.session
        assert session is not None
        second = await there(Client, server, context, name, session)
        assert second.tls.session_reused  # so the session below is one that could have been resumed

        await until_reloaded(server, lambda: files.trust(OTHER_CLIENT_CA))
        assert await there(refused, server, context, name)
        assert await there(refused, server, context, name, session)  # resumed, it would show no certificate
        await there(visit, server, client_context(version=version, identity=OTHER_CLIENT_CA), name)
        assert await there(old.echo, b"still here") == b"still here"

    run(main())


def test_broken_files_are_reported_once_and_the_old_ones_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        files = Files(tmp_path)
        server = await started(files.tls)
        good = files.der
        files.put("cert.pem", b"-----BEGIN CERTIFICATE-----\nnot one\n-----END CERTIFICATE-----\n")
        await eventually_async(lambda: "old ones stay in use" in caplog.text)
        assert server._tls is not None
        for _ in range(3):
            server._tls.refresh()
        assert caplog.text.count("old ones stay in use") == 1
        assert await there(visit, server, client_context()) == good
        (tmp_path / "cert.pem").unlink()
        await eventually_async(lambda: caplog.text.count("old ones stay in use") == 2)
        assert "No such file" in caplog.text
        assert await there(visit, server, client_context()) == good
        await until_reloaded(server, files.renew)
        assert await there(visit, server, client_context()) == files.der != good

    run(main())


def test_a_certificate_waits_for_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Files(tmp_path)
    contexts = ReloadingTlsContext(files.tls)
    first = contexts.context
    key = (tmp_path / "key.pem").read_bytes()
    files.renew()
    new_key = (tmp_path / "key.pem").read_bytes()
    files.put("key.pem", key)  # the new certificate is there, its key is not
    contexts.refresh()
    assert contexts.context is first
    assert "key values mismatch" in caplog.text
    files.put("key.pem", new_key)
    contexts.refresh()
    assert contexts.context is not first
    second = contexts.context
    contexts.refresh()
    assert contexts.context is second


def test_bad_files_at_the_start_are_named(tmp_path: Path) -> None:
    files = Files(tmp_path, client_ca=CLIENT_CA)
    tls = files.tls
    with pytest.raises(InvalidArgument, match=r"nothing\.pem: No such file"):
        make_context(TlsFiles(tls.certificate, str(tmp_path / "nothing.pem")))
    with pytest.raises(InvalidArgument, match="must be PEM"):
        make_context(TlsFiles(tls.key, tls.certificate))
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="client authorities"):
        make_context(TlsFiles(tls.certificate, tls.key, str(tmp_path / "empty")))
    locked = tmp_path / "locked.pem"
    key = load_pem_private_key(files.leaf.private_key_pem.bytes(), None)
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(InvalidArgument, match="is encrypted"):
        make_context(TlsFiles(tls.certificate, str(locked)))


def test_tls_connections_in_the_backlog_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Listener, "refuse_new", lambda self: False)  # see test_server.py
    caplog.set_level("INFO")

    async def main() -> None:
        server = await started(Files(tmp_path, client_ca=CLIENT_CA).tls)
        waiting = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(10)]
        OPEN.extend(waiting)
        draining = asyncio.ensure_future(server.drain(30))
        await eventually_async(lambda: "waiting connections" in caplog.text)
        assert server.site.draining

        def finish(plain: socket.socket) -> bytes:
            context = client_context(identity=CLIENT_CA)
            with context.wrap_socket(plain, server_hostname="localhost") as tls:
                tls.sendall(b"x")
                answer = tls.recv(10)
                tls.unwrap()
                return answer

        assert await asyncio.gather(*(there(finish, plain) for plain in waiting)) == [b"x"] * 10
        assert await draining == 0

    run(main())


def test_a_handshake_that_began_before_the_drain_may_end_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        server = await started(Files(tmp_path).tls)
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        OPEN.append(plain)
        await asyncio.sleep(0.05)  # the loop has accepted it and waits for its first bytes
        draining = asyncio.ensure_future(server.drain(30))
        await eventually_async(lambda: server._listener is None)  # it accepts no more, and waits for those it has
        await asyncio.sleep(0.1)
        assert not draining.done()

        def finish() -> bytes:
            with client_context().wrap_socket(plain, server_hostname="localhost") as tls:
                tls.sendall(b"x")
                answer = tls.recv(10)
                tls.unwrap()
                return answer

        assert await there(finish) == b"x"
        assert await draining == 0

    run(main())


def test_an_unfinished_handshake_does_not_block_the_drain(tmp_path: Path) -> None:
    async def main() -> None:
        server = await started(Files(tmp_path).tls, limits=Limits(header_seconds=0.3))
        OPEN.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
        await asyncio.sleep(0.05)
        assert await server.drain(40) == 0

    run(main())
