# SPDX-License-Identifier: Apache-2.0
"""Measure how long services take to start as processes: one after the other, and ten at once.

    .venv/bin/python bench/scenarios/services.py [--json] [--count 10] [--rounds 7]

The services are real (`headrace microservice` over a small ONNX model). "Accepting" is the first answer to an HTTP request.
Ends with 1 if a number is over its limit, if two services have the same port, or if one is missing from the registry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.platforms.launcher import Launcher, StartRequest

MOST_SECONDS = 1.5
"""From the start of a service to its first answer, beyond what the interpreter itself needs."""
MOST_TOGETHER_SECONDS = 10.0
ARCH = "tao-dataservices"
HEADRACE = Path(sys.executable).parent / "headrace"


def make_model(folder: Path) -> Path:
    """A classifier that tells which colour a picture has most of."""
    from onnx import TensorProto, helper

    folder.mkdir()
    node = helper.make_node("ReduceMean", ["pixels"], ["scores"], axes=[2, 3], keepdims=0)
    graph = helper.make_graph(
        [node],
        "colours",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def interpreter_seconds(rounds: int) -> float:
    """What `python -c pass` takes."""
    taken: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def one_by_one(registry: Path, model: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to the first answer, and to the model being ready."""
    accepting: list[float] = []
    ready: list[float] = []
    async with Launcher(registry) as launcher:
        for _ in range(rounds):
            began = time.perf_counter()
            entry = await launcher.start(StartRequest(ARCH, str(model)))
            accepting.append(time.perf_counter() - began)
            await launcher.wait_ready(entry.job_id)
            ready.append(time.perf_counter() - began)
            await launcher.stop(entry.job_id)
    return accepting, ready


async def at_once(registry: Path, model: Path, count: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until all of the commands have ended, and what they printed."""
    arguments = ["service", "start", "--arch", ARCH, "--model-path", str(model), "--no-wait", "--json"]
    began = time.perf_counter()
    started = await asyncio.gather(
        *(
            asyncio.create_subprocess_exec(HEADRACE, *arguments, "--registry", str(registry), stdout=subprocess.PIPE)
            for _ in range(count)
        )
    )
    printed = await asyncio.gather(*(process.communicate() for process in started))
    taken = time.perf_counter() - began
    failed = [process.returncode for process in started if process.returncode]
    if failed:
        raise SystemExit(f"{len(failed)} of {count} starts failed")
    return taken, [json.loads(out) for out, _ in printed]


async def measure(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """All numbers."""
    model, registry = make_model(folder / "model"), folder / "registry.json"
    bare = interpreter_seconds(rounds)
    accepting, ready = await one_by_one(registry, model, rounds)
    together, entries = await at_once(registry, model, count)
    async with Launcher(registry) as launcher:
        listed = await launcher.list()
        running = [service for service in listed if service.state == "running"]
        await asyncio.gather(*(launcher.stop(service.entry.job_id) for service in listed))
    over = statistics.median(accepting) - bare
    return {
        "cores": os.cpu_count(),
        "interpreter_seconds": round(bare, 3),
        "accepting_seconds": round(statistics.median(accepting), 3),
        "accepting_over_interpreter_seconds": round(over, 3),
        "ready_seconds": round(statistics.median(ready), 3),
        "together": count,
        "together_seconds": round(together, 3),
        "ports": len({entry["host_port"] for entry in entries}),
        "recorded": len(listed),
        "running": len(running),
        "passed": over <= MOST_SECONDS
        and together < MOST_TOGETHER_SECONDS
        and len({entry["host_port"] for entry in entries}) == len(listed) == len(running) == count,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long services take to start as processes.")
    parser.add_argument("--count", type=int, default=10, help="started at once")
    parser.add_argument("--rounds", type=int, default=7, help="started one after the other")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-services-"))
    try:
        found = asyncio.run(measure(folder, options.count, options.rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name.replace('_', ' '):36} {value}")
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
