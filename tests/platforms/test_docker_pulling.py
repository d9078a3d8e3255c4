# SPDX-License-Identifier: Apache-2.0
"""Images that are pulled: from a registry with a key, made here, and those that do not arrive."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.server
import io
import json
import logging
import os
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.register_assert_rewrite("driver_contract")

from docker_platform import DockerEngine  # noqa: E402
from driver_contract import Watch  # noqa: E402

from headrace.core.errors import FailedPrecondition, Unavailable  # noqa: E402
from headrace.platforms.contract import Container, Handle, LaunchSpec  # noqa: E402
from headrace.platforms.docker.cli import DockerCli, ensure_image  # noqa: E402
from headrace.platforms.docker.driver import DockerDriver  # noqa: E402
from headrace.platforms.docker.settings import DockerSettings  # noqa: E402

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers")]

KEY = "nvapi-" + uuid.uuid4().hex
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def digest(raw: bytes) -> str:
    return "sha256:" + hashlib.sha256(raw).hexdigest()


@dataclass
class Registry:
    """Speaks the registry's HTTP API for one private image, `team/app:1`, of two layers."""

    port: int
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifest: bytes = b""

    @property
    def image(self) -> str:
        return f"127.0.0.1:{self.port}/team/app:1"

    def fill(self, architecture: str) -> None:
        layers = [layer(name) for name in ("one", "two")]
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Labels": {"headrace.shell": "/bin/sh"}},
            "rootfs": {"type": "layers", "diff_ids": [digest(raw) for raw in layers]},
        }
        packed = [gzip.compress(raw, mtime=0) for raw in layers]
        head = json.dumps(config).encode()
        self.blobs = {digest(raw): raw for raw in (head, *packed)}
        tar = "application/vnd.docker.image.rootfs.diff.tar.gzip"
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(head),
                "digest": digest(head),
            },
            "layers": [{"mediaType": tar, "size": len(raw), "digest": digest(raw)} for raw in packed],
        }
        self.manifest = json.dumps(document).encode()


def layer(name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        file = tarfile.TarInfo(name)
        file.size = 3
        tar.addfile(file, io.BytesIO(b"abc"))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def registry(engine: DockerEngine) -> Iterator[Registry]:
    wanted = "Basic " + base64.b64encode(f"$oauthtoken:{KEY}".encode()).decode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != wanted:
                reported = b'{"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}'
                self.answer(401, reported, "application/json")
            elif self.path in ("/v2/team/app/manifests/1", f"/v2/team/app/manifests/{digest(registry.manifest)}"):
                self.answer(200, registry.manifest, MANIFEST)
            elif (name := self.path.rpartition("/")[2]) in registry.blobs:
                self.answer(200, registry.blobs[name], "application/octet-stream")
            elif self.path == "/v2/":
                self.answer(200, b"{}", "application/json")
            else:
                reported = b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'
                self.answer(404, reported, "application/json")

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="team"')
            self.send_header("Content-Type", kind)
            self.send_header("Docker-Content-Digest", digest(body))
            self.send_header("Docker-Distribution-API-Version", "registry/2.0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry = Registry(server.server_address[1])
    words = {"x86_64": "amd64", "aarch64": "arm64"}
    registry.fill(words[engine.docker("info", "--format", "{{.Architecture}}")])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield registry
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def own_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "logins"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


def settings_of(engine: DockerEngine, registry: Registry, key: str) -> DockerSettings:
    return DockerSettings(host=engine.host, registry=f"127.0.0.1:{registry.port}", registry_key=key, pull_seconds=180)


def test_an_image_is_pulled_with_the_key_which_is_left_nowhere(
    engine: DockerEngine, registry: Registry, own_logins: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(engine, registry, KEY)
    with caplog.at_level(logging.INFO, "headrace.launch"), Watch(KEY) as watch:
        image = asyncio.run(ensure_image(DockerCli(settings), registry.image, settings))
    assert image.shell == "/bin/sh"
    received = [record.getMessage().removeprefix(f"Image {registry.image}: ") for record in caplog.records]
    assert received == ["pulling", "1 of 2 layers", "2 of 2 layers", "pulled"]
    assert KEY not in caplog.text and not watch.seen
    assert os.listdir(own_logins) == [] and list(own_logins.parent.glob("headrace-docker-*")) == []
    caplog.clear()
    asyncio.run(ensure_image(DockerCli(settings), registry.image, settings))
    assert not caplog.records, "it is there now"
    engine.docker("image", "rm", registry.image)


@pytest.mark.parametrize(
    ("key", "image", "kind", "told"),
    [
        ("", "team/app:1", FailedPrecondition, "set NGC_KEY"),
        ("wrong", "team/app:1", FailedPrecondition, "does not accept the key in NGC_KEY"),
        pytest.param(KEY, "team/app:2", FailedPrecondition, "no such image or tag", id="no such image or tag"),
    ],
)
def test_why_an_image_does_not_arrive(
    engine: DockerEngine, registry: Registry, key: str, image: str, kind: type[Exception], told: str
) -> None:
    async def main() -> None:
        driver = DockerDriver(settings_of(engine, registry, key))
        before = engine.resources()
        spec = LaunchSpec(str(uuid.uuid4()), container=Container(f"127.0.0.1:{registry.port}/{image}", "true"))
        with pytest.raises(kind, match=told) as caught:
            await driver.start(spec)
        assert image in str(caught.value) and KEY not in str(caught.value)
        assert engine.resources() == before and (await driver.status(Handle(spec.job_id, driver.name))).phase == "gone"

    asyncio.run(main())


def test_a_registry_that_is_not_there(engine: DockerEngine) -> None:
    async def main() -> None:
        driver = DockerDriver(DockerSettings(host=engine.host, pull_seconds=180))
        spec = LaunchSpec(str(uuid.uuid4()), container=Container("127.0.0.1:1/x:1", "true"))
        with pytest.raises(Unavailable, match="127.0.0.1:1/x:1 cannot be pulled.*docker load"):
            await driver.start(spec)

    asyncio.run(main())
