# SPDX-License-Identifier: Apache-2.0
"""What the contract suite starts on every platform: needs Python's own library alone, and no file where it runs.

`python3 -c SOURCE serve --port 8080 WORD...`, or for the process driver "contract_program:main".
"""

import http.server
import json
import os
import signal
import sys


def main() -> None:
    """`serve`: answer every GET with one's words and variables. `fail`: say why and end with 3. `finish`: end with 0."""
    program, words = sys.argv[1], sys.argv[2:]
    if program == "fail":
        print("the reason why", flush=True)
        sys.exit(3)
    if program == "finish":
        print("all is done", flush=True)
        sys.exit(0)
    # The first process of a container ends at SIGTERM only if it says so itself.
    stubborn = program == "stubborn"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda number, frame: os._exit(0))
    reported = json.dumps({"words": words[2:], "environ": dict(os.environ), "pid": os.getpid()}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(reported)))
            self.end_headers()
            self.wfile.write(reported)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("0.0.0.0", int(words[1])), Handler)
    print("serving", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
