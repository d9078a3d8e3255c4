# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a chat model's microservice: takes its words, has its routes, and needs Python's own library alone.

The lifecycle tests start it in images that have nothing but Python. It answers a chat with the last text of the user.
"""

import http.server
import json
import os
import signal
import sys


def main() -> None:
    """Serve until SIGTERM."""
    argv = sys.argv[1:]
    job = json.loads(argv[argv.index("--job") + 1])
    port = int(argv[argv.index("--port") + 1])
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Whether the token came is told, and not the token.
            document = {"job_id": job["job_id"], "model_state": "ready", "token": "WANDB_API_KEY" in os.environ}
            self._send_json(document)

        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = document["messages"][-1]["content"]
            print("asked:", text, flush=True)
            answer = f"{job['job_id']} heard: {text}"
            self._send_json({"choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]})

        def _send_json(self, body: dict[str, object]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler)
    print("serving", job["specs"]["model_path"], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
