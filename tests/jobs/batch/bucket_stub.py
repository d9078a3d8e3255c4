# SPDX-License-Identifier: Apache-2.0
"""A bucket on loopback that takes and gives objects as S3 does, as far as a job needs it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from headrace.models.storage.credentials import CloudCredentials


class Bucket:
    """Objects by key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.closed = False
        """Whether nothing may be written."""
        self.port = 0

    @property
    def credentials(self) -> CloudCredentials:
        details = {"access_key": "AK", "secret_key": "SK", "endpoint_url": f"http://127.0.0.1:{self.port}"}
        return CloudCredentials.from_metadata({"aws": {"bucket": details}})


@contextmanager
def bucket_stub() -> Iterator[Bucket]:
    bucket = Bucket()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            key = unquote(parts.path).removeprefix("/bucket").lstrip("/")
            if key:
                result = bucket.objects.get(key)
                self._answer(404 if result is None else 200, result or b"")
                return
            prefix = parse_qs(parts.query).get("prefix", [""])[0]
            entries = "".join(
                f"<Contents><Key>{item}</Key><Size>{len(content)}</Size><ETag>{_etag(content)}</ETag>"
                "<LastModified>2026-11-15T00:00:00.000Z</LastModified></Contents>"
                for item, content in sorted(bucket.objects.items())
                if item.startswith(prefix)
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            self._answer(200, text.encode())

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if bucket.closed:
                self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
                return
            bucket.objects[unquote(urlsplit(self.path).path).removeprefix("/bucket/")] = content
            self._answer(200, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", _etag(body))
            self.send_header("Last-Modified", "Sun, 15 Nov 2026 00:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    bucket.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
