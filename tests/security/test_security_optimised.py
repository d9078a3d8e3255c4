# SPDX-License-Identifier: Apache-2.0
"""The worst of the corpus against a server under `python -O`, where every `assert` is gone (test 7): no guard may be one.

`scripts/check_forbidden.py` refuses `assert` in the product; this shows what is left of a server when a library relied on
one. The whole corpus is `tests/api/test_bad_input_corpus.py`.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bad_inputs import nested, one
from raw_requests import ask, exchange
from surfaces import RunningVerb, program, write_echo

from support.ports import free_port

pytestmark = pytest.mark.slow

INFER = "/v2/models/echo/infer"


class OptimisedServer(NamedTuple):
    running: RunningVerb
    folder: Path

    @property
    def port(self) -> int:
        return self.running.port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OptimisedServer]:
    folder = tmp_path_factory.mktemp("optimised")
    (folder / "canary").write_text("untouched")
    models = write_echo(folder / "models")
    port = free_port()
    arguments = ("serve", models, "--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
    arguments += ("--model-control-mode", "explicit", "--load-model", "*", "--allow-client-shm", "true")
    ready = rf"listening on 127\.0\.0\.1:({port})\b(?s:.)*model\(s\)"
    with program(folder / "log", *arguments, ready=ready, python=("-O",)) as running:
        yield OptimisedServer(running, folder)


@pytest.fixture(autouse=True)
def _unharmed(server: OptimisedServer) -> Iterator[None]:
    yield
    answer = ask(server.port, "POST", INFER, json.dumps(one(data=[1, 2, 3, 4])).encode())
    assert (answer.status, json.loads(answer.body)["outputs"][0]["data"]) == (200, [1, 2, 3, 4])
    assert (server.folder / "canary").read_text() == "untouched"
    assert "Traceback" not in server.running.log


def post(server: OptimisedServer, path: str, body: Any, *fields: bytes) -> int:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(server.port, "POST", path, raw, fields).status


def test_asserts_are_removed(server: OptimisedServer) -> None:
    assert "-O" in server.running.command_lines().split()


def test_a_million_levels(server: OptimisedServer) -> None:
    assert post(server, INFER, nested(1_000_000)) == 400


def test_sizes_that_overflow(server: OptimisedServer) -> None:
    for shape in ([2**32, 2**32], [1, -4], [1, 2**80], [1, 2**62]):
        assert post(server, INFER, one(shape=shape)) == 400


def test_a_header_length_beyond_the_body(server: OptimisedServer) -> None:
    for length in (b"99999999999999999999", b"-1", b"5"):
        assert post(server, INFER, one(), b"inference-header-content-length: " + length) == 400


def test_a_text_longer_than_its_bytes(server: OptimisedServer) -> None:
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 8}}
    text = json.dumps({"inputs": [tensor]}).encode()
    field = b"inference-header-content-length: %d" % len(text)
    assert post(server, INFER, text + struct.pack("<I", 2**31) + b"abcd", field) == 400


def test_a_bomb(server: OptimisedServer) -> None:
    bomb = gzip.compress(bytes(80 << 20), 1)
    assert post(server, INFER, bomb, b"content-encoding: gzip") == 413


def test_very_many_chunks(server: OptimisedServer) -> None:
    chunks = b"1\r\n{\r\n" * 65_537 + b"0\r\n\r\n"
    assert post(server, INFER, chunks, b"transfer-encoding: chunked") == 413


def test_a_length_and_chunks(server: OptimisedServer) -> None:
    """Two readings of where a request ends: the way to smuggle one past a proxy."""
    smuggled = b"0\r\n\r\nPOST /v2/repository/models/echo/unload HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
    head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" % INFER.encode()
    assert exchange(server.port, head + smuggled).status == 400


def test_files_of_a_load_that_lead_out(server: OptimisedServer) -> None:
    poison = base64.b64encode(b"poison").decode()
    for name in ("file:../canary", "file:1/../../../canary", f"file:{server.folder}/canary", "file:1/a\x00b"):
        body = {"parameters": {"config": json.dumps({"backend": "identity"}), name: poison}}
        assert post(server, "/v2/repository/models/echo/load", body) == 400


def test_regions_that_lead_out(server: OptimisedServer) -> None:
    for key in ("../../canary", "/../etc/passwd", "a\x00b", "/triton_python_backend_shm_region_1"):
        body = {"key": key, "offset": 0, "byte_size": 64}
        assert post(server, "/v2/systemsharedmemory/region/r/register", body) in (400, 404)
    assert ask(server.port, "GET", "/v2/systemsharedmemory/status").body == b"[]"


def test_frames_that_are_none(server: OptimisedServer) -> None:
    """HTTP/2: a frame that says it is 16 MB long, and a header block that no HPACK decoder knows."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for frame in (b"\xff\xff\xff\x00\x00\x00\x00\x00\x00", b"\x00\x00\x08\x01\x05\x00\x00\x00\x01" + b"\x80" * 8):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(preface + frame)
            received = b""
            while piece := sock.recv(65536):  # until the server has hung up
                received += piece
        kinds = []
        while received:
            kinds.append(received[3])
            received = received[9 + int.from_bytes(received[:3], "big") :]
        assert kinds[-1] == 7, kinds  # GOAWAY
