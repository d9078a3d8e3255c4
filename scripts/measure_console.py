# SPDX-License-Identifier: Apache-2.0
"""What a console that looks on costs its server: `python scripts/measure_console.py [--models 100] [--seconds 30]`.

Serves that many small models, of which some are asked now and then so that they have numbers, and compares the processor
time of the server's process while nobody looks with that while one page asks once a second. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

_CONFIG = """name: "{name}" backend: "identity" max_batch_size: 8
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }} ]
"""
_BODY = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
_LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=30)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text) / "models"
        names = [f"model-{place:03}" for place in range(asked.models)]
        for name in names:
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "config.pbtxt").write_text(_CONFIG.format(name=name))
        log = Path(text) / "log"
        command = [Path(sys.executable).parent / "headrace", "serve", folder, "--http-port", "0", "--grpc-port", "0"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while "model(s)" not in log.read_text():
                if process.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.1)
            url = f"http://127.0.0.1:{_LISTENING.findall(log.read_text())[0]}"
            for name in names:
                _ask(f"{url}/v2/models/{name}/infer", json.dumps(_BODY).encode())
            alone = _share(process.pid, asked.seconds, lambda: None)
            watched = _share(process.pid, asked.seconds, lambda: _ask(f"{url}/console/api/live"))
            size = len(_ask(f"{url}/console/api/live"))
        finally:
            process.terminate()
            process.wait()
    told = {"models": asked.models, "idle_percent": alone, "watched_percent": watched, "answer_bytes": size}
    sys.stdout.write(json.dumps({**told, "console_percent": round(watched - alone, 3)}) + "\n")


def _share(pid: int, seconds: int, each_second: Callable[[], object]) -> float:
    """Percent of a core that a process took, while something was done once a second."""
    before, began = _processor_seconds(pid), time.monotonic()
    for count in range(1, seconds + 1):
        each_second()
        time.sleep(max(0.0, began + count - time.monotonic()))
    return round(100 * (_processor_seconds(pid) - before) / (time.monotonic() - began), 3)


def _processor_seconds(pid: int) -> float:
    # In nanoseconds, where ticks of a hundredth of a second would be coarser than what is measured.
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _ask(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"accept-encoding": "gzip", "user-agent": f"measure/{os.getpid()}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


if __name__ == "__main__":
    main()
