# SPDX-License-Identifier: Apache-2.0
"""Names that lead elsewhere (test 1), on every route of the gateway, on WebSockets, and on the files of the console.

The inference server's routes are tried by `tests/api/test_bad_input_corpus.py`, archives and object stores by
`tests/models/storage`, those of a machine's fleet by `test_security_fleet`, of tickets by `test_security_kv_transfer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import routes_and_rights as rights
from bad_inputs import NAMES
from job_api import EXPERIMENT, JOB, ORG, Api, job_api
from raw_requests import Answer, ask, exchange
from surfaces import Served, gateway_path, inference_server


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """With real jobs behind it."""
    world = tmp_path_factory.mktemp("names")
    (world / "canary").write_text("untouched")
    (world / "data").mkdir()
    with job_api(None, world / "data") as api:
        yield api


@pytest.fixture(scope="module")
def token(gateway: Api) -> str:
    return gateway.login("root")


def _files(api: Api) -> dict[str, str]:
    """What lies there, but for what the gateway writes of itself."""
    files = (path for path in sorted(api.folder.parent.rglob("*")) if path.is_file() and "sqlite3" not in path.name)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if "audit" not in path.name}


def tried(api: Api, method: str, path: str, token: str, body: bytes = b"{}") -> Answer:
    sent = body if method in ("POST", "PUT", "PATCH") else b""
    return ask(api.port, method, path, sent, (f"authorization: Bearer {token}".encode(),))


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_names_in_every_path_of_the_gateway(gateway: Api, token: str, name: str) -> None:
    before = _files(gateway)
    tries = 0
    for route in rights.by_route(rights.GATEWAY):
        method, path = route.split(" ")
        for place in range(path.count("{}")):
            right = [ORG, EXPERIMENT, JOB][: path.count("{}")]
            right[place] = name
            target = path
            for item in right:
                target = target.replace("{}", item, 1)
            answer = tried(gateway, method, target, token)
            if answer.status == 200:
                # The administrator has every organisation that a name can have; nothing is in it.
                assert place == 0 and "passwd" not in answer.body.decode(), (target, answer)
            else:
                # 401: a service's own report, and the administrator is no service.
                service = target.endswith(":status_update")
                assert answer.status in (400, 404, 405) or (answer.status == 401 and service), (method, target, answer)
                assert len(answer.body) < 4096 and b"Traceback" not in answer.body
            assert "set-cookie" not in answer.fields
            tries += 1
    assert tries > 80
    assert _files(gateway) == before


TEXTS = ["../../canary", "/etc/passwd", "..", "a\x00b", "a\nb: c", "-rf", "$(touch canary)", "`id`",
         "'; drop table jobs; --", "\u202egpj", "a" * 100_000, "", "{{7*7}}", "${jndi:ldap://x}"]  # fmt: skip
FIELDS = ("name", "description", "parent_job_id", "parent_id", "workspace", "experiment_id", "network_arch", "action",
          "checkpoint", "docker_image", "gpu_type", "cloud_type", "backup_file_name", "workspace_id",
          "id", "kind")  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:16])
def test_texts_in_every_body_of_the_gateway(gateway: Api, token: str, text: str) -> None:
    before = _files(gateway)
    document: dict[str, Any] = dict.fromkeys(FIELDS, text)
    document |= {"specs": {"model_path": text, "input": text}, "cloud_specific_details": {"cloud_bucket_name": text}}
    for route in rights.by_route(rights.GATEWAY):
        method, path = route.split(" ")
        if method in ("POST", "PUT", "PATCH"):
            target = gateway_path(path)
            if target.endswith(("/login", "/logout")):
                continue  # each wrong key counts, and soon none is looked at
            answer = tried(gateway, method, target, token, json.dumps(document).encode())
            assert answer.status < 500 or answer.status == 503, (target, answer)
    assert _files(gateway) == before
    assert not Path("canary").exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with inference_server(tmp_path_factory.mktemp("console_names"), keys=False) as served:
        yield served


@pytest.mark.parametrize("name", [*NAMES.values(), "pages.py", "../pages.py", "frame.html", "server.js%00.css"])
def test_the_console_gives_its_own_files_and_no_other(server: Served, name: str) -> None:
    page = ask(server.port, "GET", "/console").body.decode()
    digest = page.split("console/assets/")[1].split("/")[0]
    assert ask(server.port, "GET", f"/console/assets/{digest}/server.js").status == 200
    for path in (f"/console/assets/{digest}/{name}", f"/console/assets/{name}/server.js", f"/console/{name}"):
        assert ask(server.port, "GET", path).status in (400, 404), path


_QUESTION = b'{"features": [1, 2, 3, 4]}'
_FRAMES = bytes([0x81, 0x80 | len(_QUESTION)]) + bytes(4) + _QUESTION + b"\x88\x80" + bytes(4)
"""A message and a close, masked with zeros."""


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_names_in_the_path_of_a_websocket(server: Served, name: str) -> None:
    head = (
        f"GET /predict/{name}/stream HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    reported = exchange(server.port, head.encode() + _FRAMES)
    assert reported.status in (101, 400, 404), reported
    assert "set-cookie" not in reported.fields and b"root:" not in reported.body
    if reported.status == 101:  # the model is looked for when a message asks for it
        assert b'"error"' in reported.body and b'"outputs"' not in reported.body, reported
