# SPDX-License-Identifier: Apache-2.0
"""A small server for tests of the fleet: a program of somebody else's, which knows nothing of Headrace.

GET /ready, /name (its text and process), /slow?N (answers after N seconds), /stream?N (N pieces, one in 50 ms), /hang
(answers nobody any more), /die (ends), /leak?N (keeps N MiB), /threads?N (starts as many). With --status=500 all but /ready
is answered so; with --delay=N, after N seconds.
"""

import argparse
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

hung = threading.Event()
busy: set[object] = set()
leaked: list[bytes] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet, so that a kill never cuts a short answer in two

    def do_GET(self) -> None:
        busy.add(self)
        self.answer()
        busy.discard(self)

    def answer(self) -> None:
        if hung.is_set():
            time.sleep(3600)
        path, _, query = self.path.partition("?")
        if path == "/hang":
            hung.set()
        if path == "/die":
            os._exit(3)
        if path == "/leak":
            leaked.append(os.urandom(1 << 20) * int(query))
        if path == "/threads":
            for _ in range(int(query)):
                threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        if path == "/slow":
            time.sleep(float(query))
        if path == "/stream":
            self.stream(int(query))
            return
        if path != "/ready":
            time.sleep(options.delay)
        reported = f"{options.text} {os.getpid()} {os.environ.get('LWS_WORKER_INDEX', '')}".encode()
        self.send_response(404 if path == "/never" else 200 if path == "/ready" else options.status)
        self.send_header("Content-Length", str(len(reported)))
        self.end_headers()
        self.wfile.write(reported)

    def stream(self, pieces: int) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(pieces):
            output = f"{options.text} {number}\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(output), output))
            self.wfile.flush()
            time.sleep(0.05)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--text", default="stub")
parser.add_argument("--status", type=int, default=200)
parser.add_argument("--delay", type=float, default=0.0)
options = parser.parse_args()
if options.text == "crash":
    sys.exit("this one crashes at its start")
print(f"{options.text} begins on {options.port}", flush=True)
server = Server((options.host, options.port), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
# Whoever asked is answered; connections without a request are nobody's loss.
while busy:
    time.sleep(0.005)
os._exit(0)
