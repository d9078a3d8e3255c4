# SPDX-License-Identifier: Apache-2.0
"""A service that does as the file `behaviour` in its model's folder says: "service_programs:serve" for the launcher.

Takes the words of `headrace microservice` and has its routes. Behaviours: ready, loading, broken, dies, mute; the file may
be changed while it runs.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import time
from pathlib import Path

CHAT = "/v1/chat/completions"
_ERRORS = {
    "loading": (503, "model_loading", "half of it is loaded"),
    "broken": (503, "model_load_error", "the weights are torn"),
}


def make_model(folder: Path, behaviour: str = "ready") -> Path:
    """A model of this program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "behaviour").write_text(behaviour)
    return folder


def serve() -> None:
    """Be a service."""
    argv = sys.argv[1:]
    job = json.loads(argv[argv.index("--job") + 1])
    behaviour = Path(job["specs"]["model_path"]) / "behaviour"
    print("started with", json.dumps(argv), flush=True)
    if behaviour.read_text() == "dies":
        print("first reason\nlast reason: no weights", flush=True)
        sys.exit(7)
    if behaviour.read_text() == "mute":
        time.sleep(600)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state = behaviour.read_text()
            if self.path == "/api/v1/health/readiness" and state in _ERRORS:
                self._send_json(_ERRORS[state][0], _error(state))
            else:
                document = {"status": "healthy", "model_state": state, "words": argv, "environ": dict(os.environ)}
                self._send_json(200, document)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            print("asked", flush=True)
            state = behaviour.read_text()
            if state in _ERRORS:
                self._send_json(202 if state == "loading" else 503, _error(state))
                return
            document = json.loads(body)
            if document.get("stream"):
                self._stream(document)
                return
            text = state.partition(":")[2] or json.dumps(document)
            self._send_json(200, {"choices": [{"message": {"role": "assistant", "content": text}}], "model": "m"})

        def _stream(self, asked: dict[str, object]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for piece in ("one ", "two"):
                event = {"choices": [{"delta": {"content": piece}}]}
                self.wfile.write(b"data: %s\n\n" % json.dumps(event).encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def _send_json(self, status: int, body: dict[str, object]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: object) -> None:
            pass

    host, port = argv[argv.index("--host") + 1], int(argv[argv.index("--port") + 1])
    http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()


def _error(state: str) -> dict[str, object]:
    _, kind, message = _ERRORS[state]
    return {"error": {"type": kind, "message": message}}
