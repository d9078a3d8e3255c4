# SPDX-License-Identifier: Apache-2.0
"""A fake of the Hugging Face Hub: the few endpoints that a download of one model needs, from a folder. For HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "1234567890abcdef1234567890abcdef12345678"


class FakeHub:
    """Which models there are, and what was asked."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.files_open = threading.Event()
        """Files are sent once this is set; listings always."""
        self.files_open.set()
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        for name, folder in self.models.items():
            if path.startswith(f"/api/models/{name}"):
                return self._listing(name, folder)
            prefix = f"/{name}/resolve/{COMMIT}/"
            if path.startswith(prefix):
                self.files_open.wait(300)
                content = (folder / path.removeprefix(prefix)).read_bytes()
                fields = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return 200, fields, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b'{"error":"Repository not found"}'

    def _listing(self, name: str, folder: Path) -> tuple[int, dict[str, str], bytes]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        siblings = [{"rfilename": str(path.relative_to(folder)), "size": path.stat().st_size} for path in files]
        listing: dict[str, Any] = {"id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(path)
            hub.tokens.add(self.headers.get("Authorization", ""))
            status, fields, content = hub.answer(path)
            try:
                self.send_response(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)
            except OSError:
                self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.files_open.set()
        server.shutdown()
        server.server_close()
        thread.join(30)
