# SPDX-License-Identifier: Apache-2.0
"""`/v1/files` with OpenAI's own client and by hand: what is kept, for whom and how long, and what is refused."""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_batch_server import Served, batches_served, jsonl, line

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings
from headrace.api.openai import files
from headrace.core.clock import SystemClock
from headrace.core.limits import BatchLimits
from headrace.core.telemetry.metrics import Registry
from headrace.net.http.routes import Routes
from headrace.programs.serve.access_guard import Middleware, open_guard
from support.waiting import eventually

DAY = 86_400
FORM = "multipart/form-data; boundary=b"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with batches_served(tmp_path_factory.mktemp("state")) as server:
        yield server


def form(**fields: bytes) -> bytes:
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        % (name.replace("__", "[", 1).encode() + b"]" * ("__" in name), b'; filename="f"' * (name == "file"), content)
        for name, content in fields.items()
    ]
    return b"".join(parts) + b"--b--\r\n"


def send(served: Served, body: bytes, content_type: str = FORM, **fields: str) -> tuple[int, Any]:
    status, reply, _ = served.ask("/v1/files", body, headers={"content-type": content_type, **fields})
    return status, reply


def test_a_file_comes_back_as_it_was_sent(served: Served) -> None:
    content = os.urandom(3_000_000) + b"\r\n--b"
    client = served.client()
    made = client.files.create(file=("folder/input.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(content), "input.jsonl", "batch")
    assert made.status == "processed"
    assert made.expires_at == made.created_at + 30 * DAY
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.content(made.id)
    assert gone.value.body["message"] == f"No such File object: {made.id}"  # type: ignore[index]
    assert not list((served.folder / "files").rglob(f"*{made.id}*"))


def test_an_age_of_its_own(served: Served) -> None:
    client = served.client()
    made = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    served.clock.advance(3599)
    assert client.files.retrieve(made.id).id == made.id
    served.clock.advance(1)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_expired_files_go_from_the_disk(tmp_path: Path) -> None:
    with batches_served(tmp_path) as served:
        file_id = served.upload([line(0)])
        upload = served.batches.worker._files.begin()
        upload.write(b"the rest of a killed upload")
        upload.close()
        served.clock.advance(30 * DAY)
        served.openai_server.server.call(served.batches.worker.wake)
        eventually(lambda: not (tmp_path / "files" / "contents" / file_id).exists())
        assert upload.path.exists(), "it may still arrive"
        os.utime(upload.path, (time.time() - 2 * DAY,) * 2)
        served.clock.advance(3600)
        served.openai_server.server.call(served.batches.worker.wake)
        eventually(lambda: not upload.path.exists())
        assert [path.name for path in (tmp_path / "files").rglob("*") if path.is_file()] == [".lock"]


def test_pages_of_a_list(tmp_path: Path) -> None:
    with batches_served(tmp_path) as served:
        client = served.client()
        ids = []
        for _ in range(5):
            ids.append(served.upload([line(0)]))
            served.clock.advance(1)
        assert [each.id for each in client.files.list()] == ids[::-1]
        assert [each.id for each in client.files.list(limit=2)] == ids[::-1], "the client asks for the next pages"
        assert [each.id for each in client.files.list(limit=2, order="asc")] == ids
        page = client.files.list(after=ids[3], limit=2)
        assert ([each.id for each in page.data], page.has_more) == ([ids[2], ids[1]], True)
        assert client.files.list(purpose="batch_output").data == []
        assert len(client.files.list(purpose="batch").data) == 5


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        (form(file=b"x"), 400, "purpose", "is missing"),
        (form(purpose=b"batch"), 400, "file", "is missing"),
        (form(purpose=b"batch", file=b""), 400, "file", "is empty"),
        (form(file=b"x", purpose=b"fine-tune"), 400, "purpose", "'fine-tune' is not served here"),
        (form(file=b"x", purpose=b"\xff"), 400, "purpose", "is not served here"),
        (form(file=b"x", purpose=b"b" * 1025), 400, "purpose", "at most 1024 bytes"),
        (form(file=b"x", purpose=b"batch") + form(file=b"y"), 200, None, ""),
        (form(file=b"x")[:-7] + form(file=b"y"), 400, "file", "may be given once"),
        (form(purpose=b"batch", file=b"x", expires_after__seconds=b"3600"), 400, "expires_after.anchor", "created_at"),
        (
            form(purpose=b"batch", file=b"x", expires_after__seconds=b"9", expires_after__anchor=b"created_at"),
            400,
            "expires_after.seconds",
            "from 3600",
        ),
        (
            form(purpose=b"batch", file=b"x", expires_after__seconds=b"\xd9\xa3", expires_after__anchor=b"created_at"),
            400,
            "expires_after.seconds",
            "from 3600",
        ),
        (form(purpose=b"batch", file=b"x", other=b"ignored"), 200, None, ""),
        (form(purpose=b"batch", file=b"x")[:-8], 400, None, "ends before its last boundary"),
        (b"", 400, None, "ends before its last boundary"),
        (b"{}", 400, None, "ends before its last boundary"),
    ],
)
def test_forms_that_are_refused(served: Served, body: bytes, status: int, param: str | None, text: str) -> None:
    got, reply = send(served, body)
    assert got == status, reply
    if status != 200:
        assert text in reply["error"]["message"]
        assert (reply["error"]["param"], reply["error"]["type"]) == (param, "invalid_request_error")
    assert not [path for path in (served.folder / "files" / "contents").iterdir() if path.name.startswith(".")]


def test_other_content_types_and_codings(served: Served) -> None:
    assert "must be multipart/form-data" in send(served, b"{}", "application/json")[1]["error"]["message"]
    status, reply = send(served, form(purpose=b"batch", file=b"x"), **{"content-encoding": "gzip"})
    assert (status, "not inflated" in reply["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/files/file-unknown", 404),
        ("GET", "/v1/files/file-" + "0" * 32, 404),
        ("GET", "/v1/files/..%2f..%2fetc%2fpasswd/content", 404),
        ("DELETE", "/v1/files/%00", 404),
        ("GET", "/v1/files?limit=0", 400),
        ("GET", "/v1/files?limit=10001", 400),
        ("GET", "/v1/files?limit=%d9%a3", 400),
        ("GET", "/v1/files?order=up", 400),
        ("GET", "/v1/files?after=file-none", 400),
        ("PUT", "/v1/files", 405),
        ("POST", "/v1/files/file-1", 405),
        ("DELETE", "/v1/files/file-1/content", 405),
        ("GET", "/v1/files/file-1/other", 404),
    ],
)
def test_paths_and_queries_that_are_refused(served: Served, method: str, path: str, status: int) -> None:
    got, reply, headers = served.ask(path, b"" if method in ("POST", "PUT") else None, method)
    assert got == status
    assert reply["error"]["message"]
    if status == 405:
        assert headers["allow"] in ("GET", "GET, POST", "DELETE, GET")


def test_both_sides_of_the_bounds(tmp_path: Path) -> None:
    limits = BatchLimits(file_bytes=1000, key_files=3, key_bytes=2000)
    with batches_served(tmp_path, limits=limits) as served:
        assert send(served, form(purpose=b"batch", file=bytes(1000)))[0] == 200
        status, reply = send(served, form(purpose=b"batch", file=bytes(1001)))
        assert (status, "more than 1000 bytes" in reply["error"]["message"]) == (413, True)
        assert send(served, form(purpose=b"batch", file=bytes(1000)))[0] == 200
        status, reply = send(served, form(purpose=b"batch", file=b"x"))
        assert (status, reply["error"]["code"]) == (400, "quota_exceeded")
        first = served.client().files.list(order="asc").data[0].id
        served.client().files.delete(first)
        assert [send(served, form(purpose=b"batch", file=b"x"))[0] for _ in range(3)] == [200, 200, 400]


def test_a_bound_for_everybody_together(tmp_path: Path) -> None:
    with batches_served(tmp_path, limits=BatchLimits(total_files=2)) as served:
        assert [send(served, form(purpose=b"batch", file=b"x"))[0] for _ in range(3)] == [200, 200, 400]


def test_a_file_that_says_its_length_is_refused_before_it_comes(tmp_path: Path) -> None:
    with (
        batches_served(tmp_path, limits=BatchLimits(file_bytes=1000)) as served,
        socket.create_connection(("127.0.0.1", served.openai_server.port), 60) as client,
    ):
        head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM}\r\ncontent-length: 999999\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_leaves_in_the_middle_leaves_nothing(served: Served) -> None:
    contents = served.folder / "files" / "contents"
    with socket.create_connection(("127.0.0.1", served.openai_server.port), 60) as client:
        body = form(purpose=b"batch", file=bytes(100_000))
        head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM}\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body[:50_000])
        eventually(lambda: any(path.name.startswith(".") for path in contents.iterdir()))
    eventually(lambda: not any(path.name.startswith(".") for path in contents.iterdir()))


def test_too_many_uploads_at_the_same_time(tmp_path: Path) -> None:
    with batches_served(tmp_path, limits=BatchLimits(uploads=1)) as served:
        with socket.create_connection(("127.0.0.1", served.openai_server.port), 60) as client:
            head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM}\r\ncontent-length: 100\r\n\r\n"
            client.sendall(head.encode())
            eventually(lambda: send(served, form(purpose=b"batch", file=b"x"))[0] == 429)
            status, reply, headers = served.ask("/v1/files", b"", headers={"content-type": FORM})
            assert (status, reply["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        eventually(lambda: send(served, form(purpose=b"batch", file=b"x"))[0] == 200)


def test_a_file_that_is_deleted_while_it_is_asked_for(tmp_path: Path) -> None:
    with batches_served(tmp_path) as served:
        file_id = served.upload([line(0)])
        (tmp_path / "files" / "contents" / file_id).unlink()
        assert served.ask(f"/v1/files/{file_id}/content", None, "GET")[0] == 404


def test_a_client_that_reads_slowly(served: Served) -> None:
    content = os.urandom(8_000_000)
    file_id = served.client().files.create(file=content, purpose="batch").id
    connection = http.client.HTTPConnection("127.0.0.1", served.openai_server.port, timeout=60)
    connection.request("GET", f"/v1/files/{file_id}/content")
    response = connection.getresponse()
    assert response.headers["content-length"] == str(len(content))
    pieces = []
    while piece := response.read(70_001):
        pieces.append(piece)
    assert b"".join(pieces) == content
    connection.request("HEAD", f"/v1/files/{file_id}/content")
    response = connection.getresponse()
    assert (response.read(), response.headers["content-length"]) == (b"", str(len(content)))
    connection.close()


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with batches_served(tmp_path / "file") as served:
        status, reply = send(served, form(purpose=b"batch", file=b"x"))
        assert status == 400
        assert "cannot write to its state folder" in reply["error"]["message"]
        assert str(tmp_path) not in str(reply)
        assert served.ask("/v1/models", None, "GET")[0] == 200


def test_nothing_is_made_before_the_first_file(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with batches_served(folder) as served:
        assert served.client().files.list().data == []
        assert served.client().batches.list().data == []
        assert not folder.exists()
        served.upload([line(0)])
        assert folder.stat().st_mode & 0o777 == 0o700


def test_pages_of_other_sites_may_not_upload(tmp_path: Path) -> None:
    routes = lambda: Routes(Middleware(None).http)  # noqa: E731
    with batches_served(tmp_path, make_routes=routes) as served:
        body = form(purpose=b"batch", file=b"x")
        assert send(served, body, origin="http://evil.example")[0] == 403
        assert send(served, body)[0] == 200
        foreign = {"origin": "http://evil.example"}
        assert served.ask("/v1/batches", {}, headers=foreign)[0] == 403
        assert served.ask("/v1/batches/x/cancel", {}, headers=foreign)[0] == 403
        assert served.ask("/v1/files/x", None, "DELETE", headers=foreign)[0] == 403
        assert served.ask("/v1/files", None, "GET", headers=foreign)[0] == 200


def test_everything_belongs_to_a_key(tmp_path: Path) -> None:
    keys = {name: create_key(tmp_path / "keys", name, ["infer"], created=0) for name in ("ann", "bob")}
    guard = open_guard(AccessSettings(keys_file=tmp_path / "keys"), Registry(SystemClock()))
    assert guard is not None
    limits = BatchLimits(key_files=2)
    with batches_served(
        tmp_path / "state", limits=limits, make_routes=lambda: Routes(Middleware(guard).http)
    ) as served:
        ann, bob = keys["ann"], keys["bob"]
        batch = served.begin([line(0)], key=ann)
        file_id = batch.input_file_id
        ended = served.ended(batch.id, ann)
        assert [each["custom_id"] for each in served.lines_of(ended.output_file_id, ann)] == ["line-0"]
        assert [each.id for each in served.client(ann).batches.list()] == [batch.id]
        assert {each.purpose for each in served.client(ann).files.list()} == {"batch", "batch_output"}
        theirs = served.client(bob)
        assert (list(theirs.batches.list()), list(theirs.files.list())) == ([], [])
        for ask in (
            lambda: theirs.files.retrieve(file_id),
            lambda: theirs.files.content(file_id),
            lambda: theirs.files.delete(file_id),
            lambda: theirs.files.content(str(ended.output_file_id)),
            lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        with pytest.raises(openai.BadRequestError, match="No such File object"):
            theirs.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="for one API key"):
            served.upload([line(0)], ann)
        assert served.upload([line(0)], bob)
        with pytest.raises(openai.AuthenticationError):
            served.client("wrong").files.list()


def test_the_window_for_the_disk_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that arrives faster than it is written is stopped, and goes on."""
    monkeypatch.setattr(files, "_WINDOW_BYTES", 1000)
    content = os.urandom(2_000_000)
    made = served.client().files.create(file=content, purpose="batch")
    assert served.client().files.content(made.id).content == content
    assert jsonl([{"a": 1}]) == b'{"a": 1}\n'
