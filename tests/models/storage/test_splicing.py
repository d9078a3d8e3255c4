# SPDX-License-Identifier: Apache-2.0
"""Parts that the kernel moves from a socket into a file, and every way in which that gives up and obstore goes on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import HeadraceError
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectLocation
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

CONTENT = os.urandom(5 * 1024 * 1024 + 7)
PART = 2 * 1024 * 1024
PLACE = ObjectLocation("aws", "bkt", "a/b c.bin")


class SignedUrlStore:
    """A store with one object, which answers signed URLs as it is told."""

    def __init__(self) -> None:
        self.counting = threading.Lock()
        self.signed = 0
        self.plain = 0
        self.manner = ""
        self.etag = '"one-2"'
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._head(200, len(CONTENT), [])

            def do_GET(self) -> None:
                signed = "X-Amz-Signature" in self.path
                with store.counting:
                    store.signed += signed
                    store.plain += not signed
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                start, end = int(first), int(last) + 1
                outputs = [("Content-Range", f"bytes {start}-{end - 1}/{len(CONTENT)}")]
                if signed and store.manner == "refuses":
                    self._head(403, 0, [])
                elif signed and store.manner == "whole":
                    self._head(200, len(CONTENT), [])
                    self.wfile.write(CONTENT)
                elif signed and store.manner == "cuts":
                    self._head(206, end - start, outputs)
                    self.wfile.write(CONTENT[start : start + 700_000])
                    self.close_connection = True
                elif self.headers.get("If-Match", store.etag) != store.etag:
                    self._head(412, 0, [])
                else:
                    self._head(206, end - start, outputs)
                    self.wfile.write(CONTENT[start:end])

            def _head(self, status: int, length: int, more: list[tuple[str, str]]) -> None:
                self.send_response(status)
                for name, value in (("Content-Length", str(length)), ("ETag", store.etag), *more):
                    self.send_header(name, value)
                self.send_header("Last-Modified", "Sun, 15 Nov 2026 00:00:00 GMT")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who had enough has hung up

    def source(self) -> ObjectSource:
        keys = {"access_key": "a", "secret_key": "b", "endpoint_url": f"http://127.0.0.1:{self.server.server_port}"}
        limits = ObjectLimits(part_bytes=PART, at_once=2, idle_seconds=120, retry_seconds=1)
        return ObjectSource(PLACE, CloudCredentials.from_metadata({"aws": {"bkt": keys}}), limits)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SignedUrlStore]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    store = SignedUrlStore()
    thread = threading.Thread(target=store.server.serve_forever, args=(0.02,))
    thread.start()
    yield store
    store.server.shutdown()
    thread.join()
    store.server.server_close()


def download(store: SignedUrlStore, folder: Path) -> bytes:
    received: list[int] = []
    source = store.source()
    source.download(source.read_listing(), folder, received.append)
    assert sum(received) == len(CONTENT)
    return (folder / "b c.bin").read_bytes()


def test_parts_are_moved_by_the_kernel(store: SignedUrlStore, tmp_path: Path) -> None:
    assert download(store, tmp_path) == CONTENT
    assert (store.signed, store.plain) == (3, 0)


@pytest.mark.parametrize("manner", ["refuses", "whole", "cuts"])
def test_obstore_resumes_where_it_ends(store: SignedUrlStore, tmp_path: Path, manner: str) -> None:
    store.manner = manner
    assert download(store, tmp_path) == CONTENT
    assert store.plain == 3


def test_a_file_system_that_has_no_splice(
    store: SignedUrlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.splice

    def splice(src: int, dst: int, count: int, **more: Any) -> int:
        if "offset_dst" in more:
            raise OSError(errno.EINVAL, "no splice here")
        return real(src, dst, count, **more)

    monkeypatch.setattr(os, "splice", splice)
    assert download(store, tmp_path) == CONTENT
    assert store.plain > 0


def test_a_full_disk_is_reported(store: SignedUrlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.splice

    def splice(src: int, dst: int, count: int, **more: Any) -> int:
        if "offset_dst" in more:
            raise OSError(errno.ENOSPC, "full")
        return real(src, dst, count, **more)

    monkeypatch.setattr(os, "splice", splice)
    with pytest.raises(HeadraceError, match="room"):
        download(store, tmp_path)


def test_an_object_that_changed_is_refused(store: SignedUrlStore, tmp_path: Path) -> None:
    source = store.source()
    listing = source.read_listing()
    store.etag = '"two-2"'
    with pytest.raises(HeadraceError, match="changed"):
        source.download(listing, tmp_path)


def test_not_through_a_proxy_nor_without_keys(store: SignedUrlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.source()._splicer is not None
    keys = {"endpoint_url": "http://127.0.0.1:9"}
    assert ObjectSource(PLACE, CloudCredentials.from_metadata({"aws": {"bkt": keys}}))._splicer is None
    secret = {"access_key": "a", "secret_key": "b"}
    assert ObjectSource(PLACE, CloudCredentials.from_metadata({"aws": {"bkt": secret}}))._splicer is None
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert store.source()._splicer is None
