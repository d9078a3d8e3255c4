# SPDX-License-Identifier: Apache-2.0
"""Downloads that were cut off go on where they were; what came is compared with what the store says it has."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_stub import StoreStub
from web_stub import Handler, WebStub, reply

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.core.telemetry.progress import ProgressEvent
from headrace.models.storage import partial_files
from headrace.models.storage import partial_files as journals
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import FetchSettings, fetch_location
from headrace.models.storage.partial_files import Journal, missing
from support.waiting import eventually

PART = 10_000
BODY = bytes(range(256)) * 400  # 102,400 bytes: 11 parts
PARTS = FetchSettings(part_bytes=PART, private_hosts=("127.0.0.1",))
CHILD = """
import json, sys
from pathlib import Path
from headrace.models.storage.fetch import FetchSettings, fetch_location
from headrace.models.storage.credentials import CloudCredentials
metadata, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
fetch_location("s3://bkt/large", folder, CloudCredentials.from_metadata(metadata), settings=FetchSettings(part_bytes=10_000))
"""


@pytest.fixture
def store() -> Iterator[StoreStub]:
    with StoreStub({"bkt": {"large": BODY}}) as stub:
        # As of an object that came in parts, whose ETag says nothing of its content.
        stub.etags["large"] = '"0123456789abcdef0123456789abcdef-2"'
        yield stub


def keys(store: StoreStub) -> CloudCredentials:
    return CloudCredentials.from_metadata(store.metadata("bkt"))


def requested_bytes(store: StoreStub) -> int:
    """How many bytes were asked for. Each range once: what a killed process asked for last may come late."""
    ranges = {headers["range"] for _, headers in store.seen if "range" in headers}
    pairs = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for text in ranges]
    return sum(end + 1 - start for start, end in pairs)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".bringing-")]


def kill_after(store: StoreStub, folder: Path, parts: int) -> None:
    """Let another process download, and kill it when it has asked for so many parts and no other came."""
    count = 0
    lock, reached, go = threading.Lock(), threading.Event(), threading.Event()

    def before(key: str) -> None:
        nonlocal count
        with lock:
            count += 1
            late = count > parts
        if late:
            reached.set()
            go.wait(280)

    store.before = before
    child = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(store.metadata("bkt")), str(folder)])
    try:
        assert reached.wait(120)
        journal = next(folder / name for name in hidden(folder) if name.endswith(".parts"))
        eventually(lambda: len(journal.read_text().splitlines()) >= parts + 1 or child.poll() is not None)
        assert child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(120)
        go.set()
        store.before = lambda key: None


def test_what_a_killed_process_has_downloaded_is_not_downloaded_again(store: StoreStub, tmp_path: Path) -> None:
    kill_after(store, tmp_path, 5)
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    store.seen.clear()
    events: list[ProgressEvent] = []
    path = fetch_location("s3://bkt/large", tmp_path, keys(store), events.append, settings=PARTS)
    assert path.read_bytes() == BODY
    assert requested_bytes(store) == len(BODY) - 5 * PART
    assert events[-1].done == events[-1].total == len(BODY)
    assert hidden(tmp_path) == []


def test_what_was_written_before_the_machine_started_is_not_believed(
    store: StoreStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_after(store, tmp_path, 5)
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(journals, "_BOOT", tmp_path / "boot")
    store.seen.clear()
    assert fetch_location("s3://bkt/large", tmp_path, keys(store), settings=PARTS).read_bytes() == BODY
    assert requested_bytes(store) == len(BODY)


def test_an_object_changed_meanwhile_is_downloaded_again(store: StoreStub, tmp_path: Path) -> None:
    kill_after(store, tmp_path, 5)
    store.etags["large"] = '"other-2"'
    store.buckets["bkt"]["large"] = BODY[::-1]
    assert fetch_location("s3://bkt/large", tmp_path, keys(store), settings=PARTS).read_bytes() == BODY[::-1]


def test_gaps() -> None:
    assert list(missing([], 25, 10)) == [(0, 10), (10, 20), (20, 25)]
    assert list(missing([(0, 10), (12, 25)], 25, 10)) == [(10, 12)]
    assert list(missing([(5, 30)], 30, 10)) == [(0, 5)]
    assert list(missing([], 0, 10)) == []


def test_a_journal_outlives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j", "state")
    first.wrote("a", 0, 5)
    first.wrote("a", 5, 9)
    first.wrote("a", 20, 30)
    first.close()
    with (tmp_path / "j").open("a") as file:
        file.write('["a", 30, 4')
    second = Journal(tmp_path / "j", "state")
    assert second.continues and second.had("a") == [(0, 9), (20, 30)]
    second.wrote("a", 9, 20)
    second.close()
    third = Journal(tmp_path / "j", "state")
    assert third.had("a") == [(0, 30)]
    third.close()
    other = Journal(tmp_path / "j", "another state")
    assert not other.continues and other.had("a") == []
    other.close()


# What stores say of their content


@pytest.mark.parametrize("kind", ["sha256", "crc32", "composite", "unsaid"])
def test_checksums_in_headers(kind: str, store: StoreStub, tmp_path: Path) -> None:
    right = hashlib.sha256(BODY).digest() if kind == "sha256" else zlib.crc32(BODY).to_bytes(4, "big")
    wrong = bytes(len(right))
    name = "x_amz_checksum_sha256" if kind == "sha256" else "x_amz_checksum_crc32"
    # Of an object that came in parts, a checksum is of the whole only where that is said; moto has others and says nothing.
    output = {"composite": "COMPOSITE", "unsaid": ""}.get(kind, "FULL_OBJECT")
    more = {"x_amz_checksum_type": output} if output else {}
    store.headers["large"] = {name: base64.b64encode(wrong).decode(), **more}
    if output != "FULL_OBJECT":
        fetch_location("s3://bkt/large", tmp_path, keys(store))
        return
    with pytest.raises(Unavailable, match=f"another {kind} than its store says"):
        fetch_location("s3://bkt/large", tmp_path, keys(store))
    assert hidden(tmp_path) == []
    store.headers["large"] = {name: base64.b64encode(right).decode(), **more}
    assert fetch_location("s3://bkt/large", tmp_path, keys(store)).read_bytes() == BODY
    assert any(headers.get("x-amz-checksum-mode") == "ENABLED" for _, headers in store.seen)


def test_an_etag_that_is_the_md5(store: StoreStub, tmp_path: Path) -> None:
    store.etags["large"] = f'"{"0" * 32}"'
    with pytest.raises(Unavailable, match="another md5"):
        fetch_location("s3://bkt/large", tmp_path, keys(store))
    # Of what is encrypted with a key of the customer's, it is not one.
    store.headers["large"] = {"x_amz_server_side_encryption": "aws:kms"}
    assert fetch_location("s3://bkt/large", tmp_path, keys(store)).read_bytes() == BODY


def test_a_full_disk(store: StoreStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview, at: int) -> int:
        if at >= 5 * PART:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, at)

    pwrite = os.pwrite
    monkeypatch.setattr(partial_files.os, "pwrite", full)
    with pytest.raises(FailedPrecondition, match=r"no room for s3://bkt/large: it needs 102\.4 kB, and .* free; make"):
        fetch_location("s3://bkt/large", tmp_path, keys(store), settings=PARTS)
    assert hidden(tmp_path) == []
    monkeypatch.undo()
    assert fetch_location("s3://bkt/large", tmp_path, keys(store), settings=PARTS).read_bytes() == BODY


# A file behind a URL


class Cutting:
    """A server that hangs up after some bytes, and can go on there."""

    def __init__(self) -> None:
        self.body, self.etag, self.most = BODY, '"one"', 40_000

    def __call__(self, handler: Handler) -> None:
        start = 0
        wanted = handler.headers.get("Range")
        if wanted and handler.headers.get("If-Range") == self.etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        more = {"content_range": f"bytes {start}-{len(self.body) - 1}/{len(self.body)}"} if start else {}
        sent, length = self.body[start : start + self.most], str(len(self.body) - start)
        named = {"etag": self.etag} if self.etag else {}
        reply(handler, sent, status=206 if start else 200, content_length=length, **named, **more)


def cut(url: str, folder: Path) -> None:
    with pytest.raises(Unavailable, match="before the file's end"):
        fetch_location(url, folder, settings=PARTS)


def test_a_file_behind_a_url_is_resumed(tmp_path: Path) -> None:
    cutting = Cutting()
    with WebStub({"/m.bin": cutting}) as web:
        url = web.url("/m.bin")
        cut(url, tmp_path)
        cut(url, tmp_path)
        events: list[ProgressEvent] = []
        path = fetch_location(url, tmp_path, None, events.append, settings=PARTS)
        assert path.read_bytes() == BODY
        assert [headers.get("Range") for _, headers in web.seen] == [None, "bytes=40000-", "bytes=80000-"]
        assert events[-1].done == len(BODY)
    assert hidden(tmp_path) == []
    assert [path.name for path in path.parent.iterdir()] == ["m.bin"]


def test_a_file_that_changed_or_has_no_etag_is_downloaded_again(tmp_path: Path) -> None:
    cutting = Cutting()
    with WebStub({"/m.bin": cutting}) as web:
        cut(web.url("/m.bin"), tmp_path)
        cutting.etag, cutting.body, cutting.most = '"two"', BODY[::-1], len(BODY)
        assert fetch_location(web.url("/m.bin"), tmp_path, settings=PARTS).read_bytes() == BODY[::-1]
        cutting.etag, cutting.most = "", 40_000
        cut(web.url("/m.bin?2"), tmp_path)
        cutting.most = len(BODY)
        assert fetch_location(web.url("/m.bin?2"), tmp_path, settings=PARTS).read_bytes() == BODY[::-1]
        assert [headers.get("Range") for _, headers in web.seen] == [None, "bytes=40000-", None, None]
