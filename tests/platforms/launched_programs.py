# SPDX-License-Identifier: Apache-2.0
"""Programs for the process driver to start: each is "launched_programs:NAME"."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import time


def serve() -> None:
    """Answers with its words and its variables at the port after --port; ends at SIGTERM, or not."""
    argv = sys.argv[1:]
    reported = json.dumps({"words": argv, "environ": dict(os.environ), "pid": os.getpid(), "cwd": os.getcwd()}).encode()
    if "--stubborn" in argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--family" in argv:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("serving", argv, flush=True)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reported)

        def log_message(self, *arguments: object) -> None:
            pass

    port = int(argv[argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def fail() -> None:
    """Says why, and ends."""
    print("the reason why", flush=True)
    sys.exit(3)


def chatter() -> None:
    """Fills its log."""
    for number in range(20_000):
        print(f"line {number} " + "x" * 40)
    sys.stdout.flush()
    time.sleep(600)
