# SPDX-License-Identifier: Apache-2.0
"""A small program in place of `headrace microservice`, where a process is enough: it starts in a moment."""

from __future__ import annotations

import http.server
import json
import sys


def main() -> None:
    argv = sys.argv[1:]
    job = json.loads(argv[argv.index("--job") + 1])
    body = json.dumps({"job_id": job["job_id"], "model_loaded": True, "status": "healthy"}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    print("stand-in serves", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(argv[argv.index("--port") + 1])), Handler).serve_forever()
