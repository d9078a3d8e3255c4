# SPDX-License-Identifier: Apache-2.0
"""Kubeconfigs: every way to log in, against a server that remembers the credentials it was sent."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from headrace.core.errors import FailedPrecondition
from headrace.platforms.kubernetes_client import kubeconfig
from headrace.platforms.kubernetes_client.api import ApiError, Unreachable, connect
from headrace.platforms.kubernetes_client.objects import PODS, ServedResource


class Server(http.server.ThreadingHTTPServer):
    """Accepts what is in `accepted` (all if it is empty) and answers each list with no objects."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[str] = []
        self.accepted: set[str] = set()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        credentials = self.headers.get("authorization", "")
        if isinstance(self.connection, ssl.SSLSocket) and self.connection.getpeercert():
            credentials = "certificate"
        self.server.seen.append(credentials)
        refused = self.server.accepted and credentials not in self.server.accepted
        body = json.dumps({"items": [], "metadata": {"resourceVersion": "1"}}).encode()
        self.send_response(401 if refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def write(folder: Path, cluster: dict[str, Any], user: dict[str, Any] | None) -> Path:
    path = folder / "config"
    context = {"cluster": "c", **({"user": "u"} if user is not None else {})}
    document = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "x", "context": context}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path


def list_pods(path: Path | str, times: int = 1) -> None:
    async def run() -> None:
        api = connect(str(path))
        try:
            for _ in range(times):
                await api.list(ServedResource(PODS, "v1"))
        finally:
            await api.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("user", "credentials"),
    [
        ({"token": "abc"}, "Bearer abc"),
        ({"username": "a", "password": "b"}, f"Basic {base64.b64encode(b'a:b').decode()}"),
        ({}, ""),
        (None, ""),
    ],
)
def test_fixed_credentials(server: Server, tmp_path: Path, user: dict[str, Any] | None, credentials: str) -> None:
    list_pods(write(tmp_path, {"server": f"http://127.0.0.1:{server.port}"}, user))
    assert server.seen == [credentials]


def test_a_token_file_is_read_again_when_its_token_has_expired(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    path = write(tmp_path, {"server": f"http://127.0.0.1:{server.port}"}, {"tokenFile": "token", "token": "unused"})

    async def run() -> None:
        api = connect(str(path))
        await api.list(ServedResource(PODS, "v1"))
        (tmp_path / "token").write_text("second")
        await api.list(ServedResource(PODS, "v1"))
        server.accepted = {"Bearer second"}
        await api.list(ServedResource(PODS, "v1"))
        await api.close()

    asyncio.run(run())
    assert server.seen == ["Bearer first", "Bearer first", "Bearer first", "Bearer second"]


def plugin(code: str, version: str = "v1") -> dict[str, Any]:
    api_version = f"client.authentication.k8s.io/{version}"
    env = [{"name": "WHO", "value": "someone"}]
    return {"exec": {"apiVersion": api_version, "command": sys.executable, "args": ["-c", code], "env": env}}


_PRINT = """
import json, os
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
token = os.environ["WHO"] + info["apiVersion"].rpartition("/")[2]
print(json.dumps({"kind": "ExecCredential", "status": {"token": token}}))
"""


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_plugin_runs_once_while_its_token_is_valid(server: Server, tmp_path: Path, version: str) -> None:
    list_pods(write(tmp_path, {"server": f"http://127.0.0.1:{server.port}"}, plugin(_PRINT, version)), times=2)
    assert server.seen == [f"Bearer someone{version}"] * 2


def test_a_new_token_that_is_refused_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    server.accepted = {"Bearer other"}
    with pytest.raises(ApiError) as refused:
        list_pods(write(tmp_path, {"server": f"http://127.0.0.1:{server.port}"}, plugin(_PRINT)))
    assert refused.value.code == 401 and server.seen == ["Bearer someonev1"]


@pytest.mark.parametrize(
    "user",
    [
        plugin("raise SystemExit(3)"),
        plugin("print('no JSON')"),
        plugin("print('{}')"),
        {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/none/there"}},
        {"tokenFile": "missing"},
    ],
)
def test_a_failed_login_is_not_a_traceback(server: Server, tmp_path: Path, user: dict[str, Any]) -> None:
    with pytest.raises(FailedPrecondition, match="the login method of the kubeconfig does not work"):
        list_pods(write(tmp_path, {"server": f"http://127.0.0.1:{server.port}"}, user))
    assert not server.seen


def test_what_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="user or certificates cannot be used"):
        list_pods(write(tmp_path, {"server": "http://127.0.0.1:1"}, {"auth-provider": {"name": "gcp"}}))
    with pytest.raises(FailedPrecondition, match="user or certificates cannot be used"):
        list_pods(write(tmp_path, {"server": "https://127.0.0.1:1", "certificate-authority-data": "bm9uZQ=="}, {}))
    with pytest.raises(FailedPrecondition, match="names no server"):
        list_pods(write(tmp_path, {}, {}))


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure(server: Server, authority: trustme.CA) -> Server:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


@pytest.mark.parametrize("inline", [True, False])
def test_certificates(secure: Server, authority: trustme.CA, tmp_path: Path, inline: bool) -> None:
    mine = authority.issue_cert("me@example.org")
    files = {
        "certificate-authority": authority.cert_pem.bytes(),
        "client-certificate": b"".join(blob.bytes() for blob in mine.cert_chain_pems),
        "client-key": mine.private_key_pem.bytes(),
    }
    entries = {}
    for name, pem in files.items():
        (tmp_path / name).write_bytes(pem)
        entries |= {f"{name}-data": base64.b64encode(pem).decode()} if inline else {name: name}
    cluster = {"server": f"https://127.0.0.1:{secure.port}"}
    cluster |= {name: value for name, value in entries.items() if name.startswith("certificate-authority")}
    user = {name: value for name, value in entries.items() if name.startswith("client-")}
    list_pods(write(tmp_path, cluster, user))
    assert secure.seen == ["certificate"]


def test_an_unknown_authority_is_refused_unless_the_kubeconfig_allows_it(secure: Server, tmp_path: Path) -> None:
    cluster = {"server": f"https://127.0.0.1:{secure.port}"}
    with pytest.raises(Unreachable, match="ConnectError"):
        list_pods(write(tmp_path, cluster, {"token": "abc"}))
    list_pods(write(tmp_path, {**cluster, "insecure-skip-tls-verify": True}, {"token": "abc"}))
    assert secure.seen == ["Bearer abc"]


def test_the_service_account_of_a_pod(
    secure: Server, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("pod")
    (tmp_path / "namespace").write_text("models")
    (tmp_path / "ca.crt").write_bytes(authority.cert_pem.bytes())
    monkeypatch.setattr(kubeconfig, "_POD_FOLDER", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(secure.port))
    list_pods("")
    assert secure.seen == ["Bearer pod"]
    config = kubeconfig.read_kubeconfig()
    assert (config.server, config.namespace) == (f"https://127.0.0.1:{secure.port}", "models")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert kubeconfig.read_kubeconfig().server == f"https://[fd00::1]:{secure.port}"
