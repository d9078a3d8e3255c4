# SPDX-License-Identifier: Apache-2.0
"""A server for tests of scaling by load: tells a number that stands in a file as a metric, and answers slowly if asked.

GET /metrics, /slow?N (answers after N seconds), anything else at once.
"""

import argparse
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        reported = f"{os.getpid()}\n"
        if path == "/slow":
            time.sleep(float(query))
        if path == "/metrics":
            reported = f'# TYPE waiting gauge\nwaiting{{queue="main"}} {options.file.read_text()}\nother 1\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(reported)))
        self.end_headers()
        self.wfile.write(reported.encode())

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--file", type=Path, required=True)
options = parser.parse_args()
server = Server(("127.0.0.1", options.port), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
