# SPDX-License-Identifier: Apache-2.0
"""Update a service of three replicas under load: count lost requests, and measure the effect on latency.

    .venv/bin/python bench/scenarios/rolling_update.py [--rate 2000] [--rounds 3]

A fleet of this machine (`headrace up`) runs three real servers of a small ONNX network behind the service's router. Requests
are due at even distances whatever comes back, and the time of each counts from when it was due (`bench.openloop`). A first
update, under load, tells how long one takes; then as many seconds without and with an update take turns (`--rounds 3`), and
the medians of both are compared: other work on the machine makes any single one too long. The verbs that ask for it run at a
low priority (`--verbs-nice 0`: at the usual one): what they take, half a second of a core to begin with, is the terminal's,
and was half of what the slowest requests felt on two cores.

Ends with 1 if a request failed, or if the 99th percentile during the update is more than twice the one without.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from batch import WIDTHS, write_mlp

REPLICAS, LIMIT_SECONDS, MOST_RATIO = 3, 300.0, 2.0
ROOT = Path(__file__).parents[2]
_HEADRACE = (sys.executable, "-c", "from headrace.cli.main import main; main()")


class Fleet:
    """A daemon, and the service on it."""

    def __init__(self, folder: Path, verbs_nice: int) -> None:
        self._folder = folder
        self._verbs = ("nice", "-n", str(verbs_nice), *_HEADRACE)
        self._environment = os.environ | {"HEADRACE_STATE_DIR": str(folder / "state")}
        self.revision = 0
        model = folder / "model"
        model.mkdir()
        write_mlp(model / "model.onnx", WIDTHS["small"])

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """While it runs."""
        arguments = [*_HEADRACE, "up", "--port", str(_free_port()), "--ephemeral"]
        with (self._folder / "up.log").open("wb") as log:
            daemon = subprocess.Popen(arguments, stdout=log, stderr=log, env=self._environment)
        try:
            yield
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(LIMIT_SECONDS)

    def apply(self) -> float:
        """Apply the next revision and wait until all replicas are of it; the seconds that took."""
        self.revision += 1
        storage = {"storageUri": f"local://{self._folder / 'model'}", "path": "/mnt/models/mlp"}
        env = [{"name": "REVISION", "value": str(self.revision)}]
        engine = {
            "minReplicas": REPLICAS,
            "maxReplicas": REPLICAS,
            "runner": {
                "name": "ome-container",
                "env": env,
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
            },
        }
        documents = [
            _document("BaseModel", {"modelFormat": {"name": "onnx"}, "storage": storage}),
            _document("InferenceService", {"model": {"name": "mlp", "kind": "BaseModel"}, "engine": engine}),
        ]
        path = self._folder / "service.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        began = time.monotonic()
        self._run("apply", "-f", str(path), "--wait", "--timeout", f"{LIMIT_SECONDS:.0f}")
        self._run("rollout", "status", "mlp", "--wait", "--timeout", f"{LIMIT_SECONDS:.0f}")
        return time.monotonic() - began

    def port(self) -> int:
        """Of the service's router."""
        found = json.loads(self._run("get", "isvc", "mlp", "-o", "json"))
        return int(found["status"]["url"].rpartition(":")[2])

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._verbs, *arguments], check=False, capture_output=True, text=True, env=self._environment
        )
        if done.returncode:
            sys.exit(f"headrace {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--verbs-nice", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(Path(name), options.verbs_nice)
        with fleet.up():
            time.sleep(2)
            fleet.apply()
            message = Path(name) / "request"
            message.write_bytes(_request(fleet.port()))
            with _load(fleet.port(), options.rate, 60, message):
                took = fleet.apply()
            seconds = int(took) + 3
            print(f"an update of {REPLICAS} replicas under {options.rate} requests/s takes {took:.1f} s")
            all_found: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
            for what, found in itertools.islice(itertools.cycle(all_found.items()), 2 * options.rounds):
                with _load(fleet.port(), options.rate, seconds, message) as told:
                    if what == "with":
                        time.sleep(1)
                        fleet.apply()
                found.append(told)
    p99 = {}
    for what, found in all_found.items():
        each = [told["accepted_p99_ms"] for told in found]
        p99[what] = statistics.median(each)
        accepted, failed = (sum(told[name] for told in found) for name in ("accepted", "failed"))
        print(
            f"{what:8} an update: {accepted} answered, {failed} failed, p50 "
            f"{statistics.median(told['accepted_p50_ms'] for told in found):.2f} ms, p99 {p99[what]:.2f} ms "
            f"({' '.join(f'{one:.2f}' for one in each)})"
        )
    ratio = p99["with"] / p99["without"]
    print(f"p99 is {ratio:.2f} times as long (wanted: {MOST_RATIO})")
    lost = sum(told["failed"] + told["rejected"] for figures in all_found.values() for told in figures)
    return 0 if not lost and ratio <= MOST_RATIO else 1


@contextlib.contextmanager
def _load(port: int, rate: int, seconds: int, message: Path) -> Iterator[dict[str, Any]]:
    """Load beside what is done; filled in at the end."""
    found: dict[str, Any] = {}
    arguments = [sys.executable, "-m", "bench.openloop", str(port), str(rate), str(seconds), str(message)]
    asking = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield found
    told, _ = asking.communicate(timeout=LIMIT_SECONDS)
    found.update(json.loads(told))


def _document(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": kind,
        "metadata": {"name": "mlp", "namespace": "default"},
        "spec": spec,
    }


def _request(port: int) -> bytes:
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 32], "data": [0.5] * 32}]}).encode()
    head = f"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
