# SPDX-License-Identifier: Apache-2.0
"""The corpus of bad input, items 1 to 6 of the list in `facts/users.md` 4.4, on every route and method of the server.

Which routes there are is read from the server's own document, so a new one is tried without a word here. Everything wrong
gets a status of the 400s and a text; the server lives, has written nothing where it should not, and gives memory back.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from bad_inputs import NAMES, V1_HEADERS, WRONG_GENERATES, WRONG_TENSORS, nested, one
from described_server import BODY_BYTES, DescribedServer, described_server, make_models
from grpc_requests import framed, grpc_methods, status, varint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_requests import METHODS, Answer, ask, exchange, filled, routes_of

from support.conformance import disagreement, operations
from support.properties import examples
from support.waiting import eventually

REHEARSALS = 3
"""Rounds of the worst before the baseline: what is made once and kept (remembered heads and layouts) is there then."""
HEALTHY = ("/ready", "/live", "/api/health")
"""Routes whose 400 means no, and needs no words."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, a folder for temporary files, and something nobody may touch."""
    world = tmp_path_factory.mktemp("world")
    (world / "tmp").mkdir()
    (world / "canary").write_text("untouched")
    (world / "outside").mkdir()
    (world / "outside/canary").write_text("untouched")
    make_models(world / "models")
    return world


@pytest.fixture(scope="module")
def server(world: Path) -> Iterator[DescribedServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(world / "tmp"))
        with described_server(world / "models", world / "log", "explicit", "on") as running:
            yield running


@pytest.fixture(scope="module")
def document(server: DescribedServer) -> dict[str, Any]:
    return server.document()


@pytest.fixture(scope="module", autouse=True)
def _memory_back(server: DescribedServer, document: dict[str, Any]) -> Iterator[None]:
    """RSS is back within 5% after 10 seconds, counted from when the allocator has the reserve that large bodies leave it."""
    for path in ("/openapi.json", "/docs", "/metrics", "/v2/models/stats", "/api/status"):
        assert ask(server.port, "GET", path).status == 200
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        assert ask(server.port, "POST", path, b"{}").status == 400
    before = 0
    for _ in range(REHEARSALS):
        test_tensors(server, document, nested(1_000_000))
        test_bodies_are_counted(server, document)
        test_bodies_are_counted_after_inflation(server, document)
        # What it settles at: the server may have given its reserve back a moment ago.
        before = max(before, server.resident_bytes())
    yield
    eventually(lambda: server.resident_bytes() <= before * 1.05, within=30, message=f"back to {before} resident bytes")


@pytest.fixture(autouse=True)
def _unharmed(server: DescribedServer, world: Path) -> Iterator[None]:
    """The server answers, has had no accident, and what lies outside its folders is as it was."""
    before = _hashes(world)
    log = world / "log"
    seen = len(log.read_text())
    yield
    assert server.alive()
    assert _hashes(world) == before
    assert "Traceback" not in log.read_text()[seen:]


def _hashes(world: Path) -> dict[str, str]:
    """What every file outside the log is; temporary files of the running models come and go in folders of theirs."""
    files = (path for path in sorted(world.rglob("*")) if path.is_file() and path.name != "log")
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if "__pycache__" not in path.parts
    }


def assert_refused(answer: Answer, *statuses: int, path: str = "") -> None:
    assert answer.status in statuses, (path, answer)
    if not path.split("?")[0].endswith(HEALTHY):
        assert 0 < len(answer.error) < 4096, (path, answer)
    assert "Traceback" not in answer.error and "set-cookie" not in answer.fields


# 1. Names


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_names_in_paths(server: DescribedServer, document: dict[str, Any], name: str) -> None:
    for method, path in routes_of(document):
        for placeholder in ("model", "version", "name", "key", "offset", "size", "device"):
            if f"{{{placeholder}}}" not in path:
                continue
            target = filled(path, **{placeholder: name})
            answer = ask(server.port, method, target, b"{}" if method == "POST" else b"")
            if path.startswith("/api/") and not answer.error:
                # This protocol answers 400 without a word where the path is not one of its own.
                assert answer.status == 400, (target, answer)
            elif "/unregister" in path and answer.status == 200:
                # A region is a word of the client's; that there is none of that name is what was asked for.
                assert placeholder == "name", (target, answer)
            elif path.startswith("/predict/") and method == "GET":
                assert_refused(
                    answer, 400, 404, 405, path=target
                )  # 405: a browser is told to use POST, whatever the name
            else:
                assert_refused(answer, 400, 404, 501, path=target)


@pytest.mark.parametrize("name", ["..", "a\x00b", "модель", "a" * 4096, "-x", "a\nb", "/etc/passwd", "a\\b", ""])
def test_names_over_grpc(server: DescribedServer, name: str) -> None:
    wire = name.encode()
    field = b"\x0a" + varint(len(wire)) + wire
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for method in ("ModelMetadata", "ModelConfig", "ModelInfer"):
            assert status(channel, f"/inference.GRPCInferenceService/{method}", field) in (
                "INVALID_ARGUMENT",
                "NOT_FOUND",
            )
        # In these messages the model's name is the second field.
        for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
            path = f"/inference.GRPCInferenceService/{method}"
            assert status(channel, path, b"\x12" + field[1:]) in ("INVALID_ARGUMENT", "NOT_FOUND")


def test_methods(server: DescribedServer, document: dict[str, Any]) -> None:
    """Every path with every method that it does not have."""
    routes = routes_of(document)
    for path in {path for _, path in routes}:
        known = {method for method, item in routes if item == path}
        for method in METHODS:
            if method in known or (method == "HEAD" and "GET" in known):
                continue
            if path == "/predict/stream" and method == "POST":
                continue  # a model may be called so
            if path == "/v1/responses/input_tokens" and method in ("GET", "HEAD", "DELETE"):
                continue  # to the server, this is the id of a response
            answer = ask(server.port, method, filled(path))
            if path.startswith("/api/sharedmemorycontrol/"):
                assert answer.status in (400, 405), (method, path, answer)
            else:
                assert answer.status == 405, (method, path, answer)
            if not path.startswith("/api/"):
                assert known <= set(answer.fields["allow"].split(", "))


def test_paths_that_are_not_there(server: DescribedServer) -> None:
    for path in (
        "/",
        "/v2/",
        "/v2/nothing",
        "//v2",
        "/v2/models/echo/infer/",
        "/v2/models/echo/../echo",
        "/V2",
        "/v2%2fmodels",
    ):
        assert_refused(ask(server.port, "GET", path), 400, 404, path=path)
    for path in ("/api", "/api/", "/api/nothing", "/api/health/nothing", "/api/infer", "/api//status"):
        assert ask(server.port, "GET", path).status in (400, 405)


@pytest.mark.parametrize(
    "key",
    ["..", "/..", "/../etc/passwd", "../../canary", "/", "//", ".", "", "a\x00b", "a/b", "/a/../b", "a" * 4096, "a\nb",
     "/triton_python_backend_shm_region_1", "///triton_python_backend_shm_region_1", None, 1, [], {}],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_keys_of_shared_memory(server: DescribedServer, key: Any) -> None:
    for sizes in (
        {"offset": 0, "byte_size": 64},
        {"byte_size": 2**63},
        {"offset": -1, "byte_size": 1},
        {"byte_size": "1"},
    ):
        body = json.dumps({"key": key, **sizes}).encode()
        assert_refused(ask(server.port, "POST", "/v2/systemsharedmemory/region/r/register", body), 400, 404)
        handle = {"raw_handle": {"b64": key}, "device_id": 0, **sizes}
        answer = ask(server.port, "POST", "/v2/cudasharedmemory/region/r/register", json.dumps(handle).encode())
        assert_refused(answer, 400, 404, 501)
    for path in ("/v2/systemsharedmemory/status", "/v2/cudasharedmemory/status"):
        assert ask(server.port, "GET", path).body == b"[]"


# 2. Archives: none is taken apart here; what comes closest are the files of a request to load


@pytest.mark.parametrize(
    "name",
    ["file:../canary", "file:/etc/canary", "file:1/../../canary", "file:1/a\x00b", "file:", "file:1/", "file:.", "file:1/..",
     "file:1/model.onnx/../../x", "file:1/" + "a/" * 2000 + "b", "file:1\\..\\x", "nofile:1/x"],
)  # fmt: skip
def test_files_of_a_load(server: DescribedServer, world: Path, name: str) -> None:
    content = base64.b64encode(b"poison").decode()
    config = json.dumps({"backend": "identity"})
    body = json.dumps({"parameters": {"config": config, name: content}}).encode()
    assert_refused(ask(server.port, "POST", "/v2/repository/models/sums/load", body), 400, 404)
    assert [path for path in (world / "tmp").rglob("*") if path.is_file() and path.read_bytes() == b"poison"] == []
    assert not Path("/etc/canary").exists()


@pytest.mark.parametrize(
    "parameters",
    [{"file:1/x": "no base64!"}, {"file:1/x": 1}, {"config": 1}, {"config": "{"}, {"config": "[]"}, {"config": "null"},
     {"config": '{"backend": "nothing"}'}, {"config": '{"name": "other"}'}, {"other": "x"}, [], "x", 1,
     {"config": "[" * 10_000}, {"config": '{"max_batch_size": 99999999999999999999}'}],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_configurations_of_a_load(server: DescribedServer, parameters: Any) -> None:
    body = json.dumps({"parameters": parameters}).encode()
    assert_refused(ask(server.port, "POST", "/v2/repository/models/sums/load", body), 400, 404)
    assert ask(server.port, "GET", "/v2/models/sums/ready").status == 200


# 3. Tensors


@pytest.mark.parametrize("wrong", WRONG_TENSORS.values(), ids=list(WRONG_TENSORS))
def test_tensors(server: DescribedServer, document: dict[str, Any], wrong: Any) -> None:
    body = wrong if isinstance(wrong, bytes) else json.dumps(wrong).encode()
    infers = [path for method, path in routes_of(document) if path.startswith("/v2/") and path.endswith("/infer")]
    assert len(infers) >= 2
    for path in infers:
        assert_refused(ask(server.port, "POST", filled(path), body), 400, 404, path=path)


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "99999999999999999999", "5", "", " ", "\xff", "1,1"])
def test_header_lengths(server: DescribedServer, length: str) -> None:
    field = b"inference-header-content-length: " + length.encode("latin-1")
    assert_refused(ask(server.port, "POST", "/v2/models/echo/infer", json.dumps(one()).encode(), (field,)), 400)


@pytest.mark.parametrize("size", [0, 1, 15, 17, 1000])
def test_binary_tensors_of_a_wrong_size(server: DescribedServer, size: int) -> None:
    text = json.dumps(one(data=..., parameters={"binary_data_size": size})).encode()
    field = b"inference-header-content-length: %d" % len(text)
    assert_refused(ask(server.port, "POST", "/v2/models/echo/infer", text + bytes(size), (field,)), 400)
    assert_refused(
        ask(server.port, "POST", "/v2/models/echo/infer", bytes(size), (b"inference-header-content-length: 0",)), 400
    )
    header = b'NV-InferRequest: batch_size: 1 input { name: "INPUT0" byte_size: 16 } output { name: "OUTPUT0" }'
    assert_refused(ask(server.port, "POST", "/api/infer/echo", bytes(size), (header,)), 400)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", struct.pack("<I", 2**31) + b"a", struct.pack("<I", 5) + b"abcd", b"\x01", b"\x01\x00\x00",
     struct.pack("<I", 1) + b"a" + struct.pack("<I", 1), b""],
)  # fmt: skip
def test_texts_with_bad_lengths(server: DescribedServer, data: bytes) -> None:
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor]}).encode()
    field = b"inference-header-content-length: %d" % len(text)
    assert_refused(ask(server.port, "POST", "/v2/models/upper/infer", text + data, (field,)), 400)


@pytest.mark.parametrize("wrong", WRONG_GENERATES, ids=repr)
def test_generates(server: DescribedServer, document: dict[str, Any], wrong: Any) -> None:
    for method, path in routes_of(document):
        if "/generate" in path:
            answer = ask(server.port, method, filled(path, model="repeat"), json.dumps(wrong).encode())
            assert_refused(answer, 400, path=path)


@pytest.mark.parametrize("header", V1_HEADERS, ids=lambda header: header[:60].decode("latin-1"))
def test_headers_of_the_first_protocol(server: DescribedServer, header: bytes) -> None:
    for path in ("/api/infer/echo", "/api/infer/echo/1", "/api/infer/echo?format=binary"):
        assert_refused(ask(server.port, "POST", path, bytes(15), (b"NV-InferRequest: " + header,)), 400, 431)


# 4. Size


def test_a_length_over_the_limit_is_refused_before_the_body(server: DescribedServer, document: dict[str, Any]) -> None:
    for method, path in routes_of(document, models=True):
        # Not one byte of the body is sent: who waits for it would never answer.
        answer = ask(server.port, method, filled(path), b"", length=BODY_BYTES + 1)
        assert_refused(answer, _too_large(path) if method == "POST" else 413, path="")


def test_bodies_are_counted(server: DescribedServer, document: dict[str, Any]) -> None:
    piece = b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20))
    body = piece * (BODY_BYTES // (1 << 20) + 1) + b"0\r\n\r\n"
    for method, path in routes_of(document):
        if method == "POST":
            assert_refused(
                ask(server.port, method, filled(path), body, (b"transfer-encoding: chunked",)), _too_large(path)
            )


def test_bodies_are_counted_after_inflation(server: DescribedServer, document: dict[str, Any]) -> None:
    bomb = gzip.compress(bytes(16 * BODY_BYTES), 1)
    for method, path in routes_of(document):
        if method == "POST":
            assert_refused(ask(server.port, method, filled(path), bomb, (b"content-encoding: gzip",)), _too_large(path))


def _too_large(path: str) -> int:
    """An upload is neither held in memory nor inflated, and has bounds of its own: this is not even a form."""
    return 400 if path == "/v1/files" else 413


def test_codings_that_are_none(server: DescribedServer, document: dict[str, Any]) -> None:
    for method, path in routes_of(document):
        if method == "POST":
            for coding in (b"gzip", b"deflate", b"br", b"gzip, gzip", b"\xff"):
                assert_refused(
                    ask(server.port, method, filled(path), b"no such data", (b"content-encoding: " + coding,)), 400
                )


def test_chunks_and_fields_are_counted(server: DescribedServer, document: dict[str, Any]) -> None:
    chunks = b"1\r\n{\r\n" * 65_537 + b"0\r\n\r\n"
    assert_refused(ask(server.port, "POST", "/v2/models/echo/infer", chunks, (b"transfer-encoding: chunked",)), 413)
    many = tuple(b"x-%d: a" % number for number in range(300))
    large = (b"x: " + b"a" * 100_000,)
    for method, path in routes_of(document):
        assert_refused(ask(server.port, method, filled(path), fields=many), 431)
        assert_refused(ask(server.port, method, filled(path), fields=large), 431)


def test_messages_over_grpc_are_limited(server: DescribedServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for path in grpc_methods(server):
            # The head of a message of 2 GB. The limit of messages is another than that of bodies.
            assert framed(server, path, b"\x00" + struct.pack(">I", 2**31)) == "8", path
        assert status(channel, "/inference.GRPCInferenceService/ServerLive", b"") == "OK"


# 5. Numbers


@pytest.mark.parametrize("value", [-1, 2**63, 2**64, 2**200, 1.5, "1", None, [1], {}, 1e400, True], ids=repr)
@pytest.mark.parametrize("name", ["timeout", "priority", "sequence_id", "sequence_start", "binary_data_output"])
def test_numbers_in_requests(server: DescribedServer, name: str, value: Any) -> None:
    answer = ask(
        server.port, "POST", "/v2/models/echo/infer", json.dumps(one() | {"parameters": {name: value}}).encode()
    )
    # What a model without a queue or sequences does not look at may pass; nothing may break it.
    if answer.status != 200:
        assert_refused(answer, 400)


@pytest.mark.parametrize("value", [-1, 0, 2**63, 2**64, 1.5, "x", None, [1], {}, True], ids=repr)
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v2/trace/setting", "trace_rate"),
        ("/v2/models/echo/trace/setting", "trace_rate"),
        ("/v2/logging", "log_verbose_level"),
    ],
)
def test_numbers_in_settings(server: DescribedServer, path: str, name: str, value: Any) -> None:
    answer = ask(server.port, "POST", path, json.dumps({name: value}).encode())
    # null takes a setting back, or leaves it.
    if value is None or (name, value, type(value)) == ("log_verbose_level", 0, int):
        assert answer.status == 200, answer
    else:
        assert_refused(answer, 400)


@pytest.mark.parametrize("count", [0, -1, 2**63, 2**64, 1.5, "3", None, [], True], ids=repr)
def test_numbers_of_classes(server: DescribedServer, count: Any) -> None:
    wanted = {"outputs": [{"name": "OUTPUT0", "parameters": {"classification": count}}]}
    answer = ask(server.port, "POST", "/v2/models/echo/infer", json.dumps(one() | wanted).encode())
    # More classes than there are elements are as many as there are.
    if answer.status != 200 or not isinstance(count, int) or count < 1:
        assert_refused(answer, 400)


# 6. Garbage. Schemathesis over the whole document is in `openapi/test_openapi_schemathesis.py`


@settings(
    max_examples=examples(150),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_garbage_on_every_route(server: DescribedServer, document: dict[str, Any], data: st.DataObject) -> None:
    method, path = data.draw(st.sampled_from(routes_of(document, models=True)))
    values = st.text("abcxyz019%./-_\\ \x00é", min_size=1, max_size=20).map(lambda text: quote(text, safe="%"))
    names = {name: data.draw(values) for name in ("name", "key", "offset", "size", "device")}
    if "unload" in path:
        names["model"] = "nothing"  # no body is wrong there, and others need the model
    body = data.draw(
        st.binary(max_size=200) | st.sampled_from([b"{}", b"[]", b"null", b'{"inputs":[{}]}', b'{"parameters":1}'])
    )
    target = f"{filled(path, **names)}?{data.draw(values)}={data.draw(values)}"
    answer = ask(server.port, method, target, body)
    assert answer.status < 500 or answer.status == 501, (method, target, body, answer)


@settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_garbage_on_every_method_of_grpc(server: DescribedServer, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(grpc_methods(server)))
    message = data.draw(st.binary(max_size=200))
    status = framed(server, path, b"\x00" + struct.pack(">I", len(message)) + message)
    # 2 UNKNOWN and 13 INTERNAL are accidents; a stream that is fine so far has no status before its end.
    assert status not in ("2", "13"), (path, message)


def test_every_answer_is_described(server: DescribedServer, document: dict[str, Any]) -> None:
    """What schemathesis looks at, for a few requests to every route: no accident, and only what the document says."""
    found, succeeded = [], 0
    for method, path, operation in operations(document):
        bodies = [b"", b"{}", b"[1]", b"nonsense"]
        if "x-headrace-example" in operation:
            bodies.append(json.dumps(operation["x-headrace-example"]["body"]).encode())
        # A model that is unloaded would not be there for the others.
        models = ("nothing",) if "unload" in path else ("echo", "nothing")
        for model in models if "{model}" in path else ("",):
            for body in bodies if method in ("POST", "PUT", "PATCH") else [b""]:
                answer = ask(server.port, method, filled(path, model=model), body)
                succeeded += answer.status == 200
                content_type = answer.fields.get("content-type", "")
                text = disagreement(document, operation, answer.status, content_type, answer.body)
                if text:
                    found.append(f"{method} {path} of {model!r} with {body[:40]!r}: {text}")
        assert server.alive(), f"{method} {path} took the model away from the requests after it"
    assert found == []
    assert succeeded > 60, "too few right answers were looked at"


@pytest.mark.parametrize("sent", [b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"])
def test_bytes_that_are_not_http(server: DescribedServer, sent: bytes) -> None:
    assert exchange(server.port, sent + b"\r\n\r\n").status in (400, 505)
