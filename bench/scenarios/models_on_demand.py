# SPDX-License-Identifier: Apache-2.0
"""Measure models on demand: 200 small ONNX models on a CPU with memory for 20, Zipf traffic from 32 clients.

    .venv/bin/python bench/scenarios/models_on_demand.py
    .venv/bin/python bench/scenarios/models_on_demand.py --models 60 --room 10 --requests 4000

A first server loads every model once, which measures them; its sizes are what "memory for 20" means. Then the same number of
requests, one after the other on each connection, goes to a server with all models and to one with the 20 most popular models
alone. Prints one line of JSON.

Ends with 1 if a request fails, or if p99 of requests that did not have to wait is 1.2 x that of the other server or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

MODELS, ROOM, CLIENTS, REQUESTS = 200, 20, 32, 20_000
HIDDEN = 512
EXPONENT = 1.0
MOST_RATIO = 1.2
_READY = re.compile(r"model\(s\):")
_PORT = re.compile(r"127\.0\.0\.1:(\d+)")
_CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
_WAITED = b"headrace-model-wait:"


@dataclass(slots=True)
class Load:
    """The outcome of a load of requests."""

    resident_ms: list[float] = field(default_factory=list)
    """Latencies of requests whose model was in memory."""
    waited_ms: list[float] = field(default_factory=list)
    """Latencies of requests that waited for their model."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def write_models(folder: Path, count: int, hidden: int = HIDDEN) -> list[str]:
    """Write small networks of random weights; return their names, the most popular first."""
    from onnx import TensorProto, helper, numpy_helper  # takes half a second, and --help needs none

    names = [f"m{number:03}" for number in range(count)]
    dice = np.random.default_rng(2026)
    widths = (16, hidden, hidden, 16)
    for name in names:
        nodes, constants, value = [], [], "INPUT0"
        for layer in range(len(widths) - 1):
            weights = dice.standard_normal(widths[layer : layer + 2], np.float32) / np.float32(widths[layer] ** 0.5)
            last = layer == len(widths) - 2
            out = "OUTPUT0" if last else f"hidden{layer}"
            constants.append(numpy_helper.from_array(weights, f"W{layer}"))
            nodes.append(helper.make_node("MatMul", [value, f"W{layer}"], [out if last else f"product{layer}"]))
            if not last:
                nodes.append(helper.make_node("Relu", [f"product{layer}"], [out]))
            value = out
        ends = [[helper.make_tensor_value_info(end, TensorProto.FLOAT, ["rows", 16])] for end in ("INPUT0", "OUTPUT0")]
        graph = helper.make_graph(nodes, name, *ends, initializer=constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(model.SerializeToString())
        (folder / name / "config.pbtxt").write_text(_CONFIG)
    return names


def request_bytes(name: str) -> bytes:
    """Return a request of one row as it goes over the wire."""
    header = json.dumps(
        {
            "inputs": [
                {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": 64}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    body = header + np.arange(16, dtype=np.float32).tobytes()
    path = f"/v2/models/{name}/infer".encode()
    lengths = b"inference-header-content-length: %d\r\ncontent-length: %d" % (len(header), len(body))
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n%b" % (path, lengths, body)


def zipf_order(names: Sequence[str], requests: int, seed: int) -> list[str]:
    """Return which model each request names: the first is the most popular."""
    dice = random.Random(seed)
    shares = list(accumulate(1 / rank**EXPONENT for rank in range(1, len(names) + 1)))
    return [names[bisect_left(shares, dice.random() * shares[-1])] for _ in range(requests)]


async def send(
    port: int,
    order: Sequence[str],
    clients: int,
    request: Callable[[str], bytes] = request_bytes,
    seconds: float = float("inf"),
) -> Load:
    """Send requests in this order over several connections, each one request at a time, for so long at most."""
    load, left = Load(), iter(order)
    bodies = {name: request(name) for name in set(order)}
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for name in left:
            began = time.perf_counter()
            if began > end:
                break
            writer.write(bodies[name])
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            took_ms = (time.perf_counter() - began) * 1000
            if not head.startswith(b"http/1.1 200"):
                load.failures.append(f"{name}: {body[:200]!r}")
            elif _WAITED in head:
                load.waited_ms.append(took_ms)
            else:
                load.resident_ms.append(took_ms)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.seconds = time.perf_counter() - began
    return load


@contextmanager
def serving(log: Path, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a server; yield its HTTP port. `environment`: variables beside those of this process."""
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        *map(str, arguments),
        "--http-port",
        "0",
        "--allow-grpc=false",
    ]
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [*command, "--allow-metrics", "true", "--log-format", "text"],
            stderr=file,
            stdout=file,
            env={**os.environ, **(environment or {})},
        ) as process,
    ):
        try:
            until = time.monotonic() + 120
            while not _READY.search(log.read_text()):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            port = _PORT.search(log.read_text())
            if port is None:
                raise RuntimeError(f"the server tells no port: {log.read_text()[-2000:]}")
            yield int(port[1])
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def measured(port: int) -> dict[str, float]:
    """Return the sums of the residency metrics of a server, by name."""
    sums: dict[str, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:  # our own server
        for line in answer.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("headrace_model_"):
                key = name.partition("{")[0] + ("_failed" if 'result="failed"' in name else "")
                sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def percentile(values: Sequence[float], part: float) -> float:
    """Return a quantile."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] if values else 0.0


def run(scratch: Path, models: int, room: int, clients: int, requests: int) -> dict[str, Any]:
    """Measure; return the figures."""
    folder, sizes = scratch / "models", scratch / "sizes"
    names = write_models(folder, models)
    common = ("--model-control-mode", "on-demand", "--model-sizes-dir", sizes)
    with serving(scratch / "sizes.log", folder, *common) as port:
        first = asyncio.run(send(port, names, 1))
    found = [json.loads(path.read_text())["memory"]["host"] for path in sizes.glob("*.json")]
    limit = int(statistics.mean(found) * (room + 0.5))
    order = zipf_order(names, requests, 1)
    warm = zipf_order(names, requests // 4, 2)
    with serving(scratch / "on-demand.log", folder, *common, "--host-memory-limit", str(limit)) as port:
        before = asyncio.run(send(port, warm, clients))
        load = asyncio.run(send(port, order, clients))
        sums = measured(port)
    few = scratch / "few"
    few.mkdir()
    for name in names[:room]:
        (few / name).symlink_to(folder / name)
    alone_order = zipf_order(names[:room], requests, 1)
    with serving(scratch / "alone.log", few, "--model-control-mode", "none") as port:
        asyncio.run(send(port, alone_order[: requests // 4], clients))
        alone = asyncio.run(send(port, alone_order, clients))
    p99, p99_alone = percentile(load.resident_ms, 0.99), percentile(alone.resident_ms, 0.99)
    failures = [*first.failures, *before.failures, *load.failures, *alone.failures]
    return {
        "models": models,
        "room": room,
        "clients": clients,
        "requests": requests,
        "model_bytes": round(statistics.mean(found)),
        "limit_bytes": limit,
        "failed_requests": len(failures),
        "failures": failures[:3],
        "requests_per_second": round(requests / load.seconds),
        "requests_per_second_alone": round(requests / alone.seconds),
        "waited_share": round(len(load.waited_ms) / requests, 3),
        "resident_p50_ms": round(percentile(load.resident_ms, 0.5), 3),
        "resident_p99_ms": round(p99, 3),
        "alone_p50_ms": round(percentile(alone.resident_ms, 0.5), 3),
        "alone_p99_ms": round(p99_alone, 3),
        "p99_ratio": round(p99 / p99_alone, 3) if p99_alone else None,
        "waited_p50_ms": round(percentile(load.waited_ms, 0.5), 1),
        "waited_p99_ms": round(percentile(load.waited_ms, 0.99), 1),
        "loads": sums.get("headrace_model_loads_total"),
        "failed_loads": sums.get("headrace_model_loads_total_failed"),
        "evictions": sums.get("headrace_model_evictions_total"),
        "counted_bytes": sums.get("headrace_model_memory_bytes"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else "")
    parser.add_argument("--models", type=int, default=MODELS)
    parser.add_argument("--room", type=int, default=ROOM, help="how many of them the memory is for")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = run(Path(scratch), options.models, options.room, options.clients, options.requests)
    sys.stdout.write(json.dumps(figures) + "\n")
    ratio = figures["p99_ratio"]
    sys.exit(bool(figures["failed_requests"]) or ratio is None or ratio >= MOST_RATIO)


if __name__ == "__main__":
    main()
