# SPDX-License-Identifier: Apache-2.0
"""Measure language models on demand on a GPU: 100 models of one shape, memory for 8, Zipf traffic from 32 clients over HTTP.

    python3 bench/scenarios/llm_on_demand.py                                  # 1.04 billion parameters, bfloat16
    python3 bench/scenarios/llm_on_demand.py --device cpu --small --models 12 --room 4

All models have the same random weights: their files are hard links of one file where the file system allows that, and copies
elsewhere (`weights` in the output says which). So reading them finds them in the page cache, as models in host memory.

A first server loads one model with nothing compiled before, a second one with what was compiled, and a third one in place
of the first; then it puts one to sleep and wakes it. Its sizes are what "memory for 8" means. A second server has that
limit: requests go to the 8 most popular models until they are in memory, then to these alone, and then to all of them.
"alone" is therefore the same server without loads, not another one. Prints one line of JSON, and ends within --seconds.

Ends with 1 if a request failed or the time was too short.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.scenarios.models_on_demand import Load, measured, percentile, send, serving, zipf_order

CONFIG = """backend: "llm"
instance_group {{ kind: {kind} }}
parameters {{ key: "kv_cache_bytes" value {{ string_value: "{cache}" }} }}
parameters {{ key: "max_model_len" value {{ string_value: "1024" }} }}
parameters {{ key: "max_running" value {{ string_value: "32" }} }}
parameters {{ key: "max_step_tokens" value {{ string_value: "1024" }} }}
"""
_TOKENS = 16
_PROMPT = "the quick brown fox jumps over the lazy dog and " * 4
_LEFT_TO_END_SECONDS = 15.0


class OutOfTime(Exception):
    """The run has taken its seconds."""


def write_models(folder: Path, options: argparse.Namespace) -> tuple[list[str], str]:
    """Write the models; return their names, the most popular first, and how their weights are stored."""
    from bench.scenarios.llm_gpu import make_model  # imports PyTorch

    first = folder / "m000" / "1"
    first.mkdir(parents=True)
    make_model(first, options)
    cache = (8 << 20) if options.small else (1 << 30)
    config = CONFIG.format(kind="KIND_CPU" if options.device == "cpu" else "KIND_GPU", cache=cache)
    names, weights = [f"m{number:03}" for number in range(options.models)], "hard links of one file"
    for name in names:
        target = folder / name / "1"
        target.mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(config)
        for file in first.iterdir() if name != "m000" else ():
            try:
                os.link(file, target / file.name)
            except OSError:
                weights = "copies"
                shutil.copyfile(file, target / file.name)
    return names, weights


def request_bytes(name: str) -> bytes:
    """Return a completion request as it goes over the wire."""
    document = {"model": name, "prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps(document).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def post(port: int, path: str, body: bytes = b"{}") -> float:
    """Send one request and return its seconds."""
    began = time.perf_counter()
    url = f"http://127.0.0.1:{port}{path}"
    wanted = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})  # our own server
    with urllib.request.urlopen(wanted, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - began


def ask(port: int, name: str) -> float:
    """Ask one model for a completion; return the seconds."""
    return post(port, "/v1/completions", request_bytes(name).partition(b"\r\n\r\n")[2])


def first_loads(port: int, names: list[str], figures: dict[str, Any]) -> None:
    """Measure the first requests to models; the figures are in seconds, the answer of 16 tokens included."""
    one, two, three = names[:3]
    figures["first_answer_cold_s"] = round(ask(port, one), 3)
    figures["first_answer_compiled_before_s"] = round(ask(port, two), 3)
    figures["answer_resident_s"] = round(ask(port, two), 3)
    post(port, f"/v2/repository/models/{one}/unload")
    figures["first_answer_in_place_of_another_s"] = round(ask(port, three), 3)
    for level in (1, 2):
        post(port, f"/v1/models/{two}/sleep?level={level}")
        figures[f"wake_level_{level}_s"] = round(post(port, f"/v1/models/{two}/wake"), 3)
        figures[f"sleep_level_{level}_again_s"] = round(post(port, f"/v1/models/{two}/sleep?level={level}"), 3)
        figures[f"answer_from_sleep_level_{level}_s"] = round(ask(port, two), 3)


def run(scratch: Path, options: argparse.Namespace, figures: dict[str, Any], end: float) -> list[str]:
    """Measure; return the failures."""
    folder, sizes = scratch / "models", scratch / "sizes"
    names, figures["weights"] = write_models(folder, options)
    place = "host" if options.device == "cpu" else "gpu0"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "TRITON_CACHE_DIR": str(scratch / "triton")}
    common = (folder, "--model-control-mode", "on-demand", "--model-sizes-dir", sizes, "--log-level", "info")
    limit_option = "--host-memory-limit" if options.device == "cpu" else "--gpu-memory-limit"
    with serving(scratch / "first.log", *common, environment=environment) as port:
        first_loads(port, names, figures)
    figures["stages"] = stages(scratch / "first.log")
    found = [json.loads(path.read_text())["memory"].get(place, 0) for path in sizes.glob("*.json")]
    size = max(found)
    limit = int(size * (options.room + 0.5))
    figures |= {"model_bytes": size, "limit_bytes": limit}
    room = names[: options.room]
    with serving(scratch / "second.log", *common, limit_option, str(limit), environment=environment) as port:
        began = time.perf_counter()
        warm = asyncio.run(send(port, [*room, *room], 1, request_bytes))
        figures["room_loaded_s"] = round(time.perf_counter() - began, 3)
        left = end - time.monotonic() - _LEFT_TO_END_SECONDS
        if left < 3:
            raise OutOfTime
        alone_order, order = zipf_order(room, 10**6, 1), zipf_order(names, 10**6, 1)
        alone = asyncio.run(send(port, alone_order, options.clients, request_bytes, left / 3))
        load = asyncio.run(send(port, order, options.clients, request_bytes, left - left / 3))
        sums = measured(port)
        figures |= traffic(alone, load, sums)
        signal.setitimer(signal.ITIMER_REAL, 0)  # all is measured; a server that does not end is killed
    return [*warm.failures, *alone.failures, *load.failures]


def traffic(alone: Load, load: Load, sums: dict[str, float]) -> dict[str, Any]:
    """Return the figures of the traffic."""
    resident, beside = percentile(load.resident_ms, 0.99), percentile(alone.resident_ms, 0.99)
    return {
        "requests": len(load.resident_ms) + len(load.waited_ms),
        "requests_per_second": round((len(load.resident_ms) + len(load.waited_ms)) / load.seconds, 1),
        "requests_per_second_alone": round(len(alone.resident_ms) / alone.seconds, 1),
        "waited_share": round(len(load.waited_ms) / max(1, len(load.resident_ms) + len(load.waited_ms)), 3),
        "waited_p50_ms": round(percentile(load.waited_ms, 0.5), 1),
        "waited_p99_ms": round(percentile(load.waited_ms, 0.99), 1),
        "resident_p50_ms": round(percentile(load.resident_ms, 0.5), 1),
        "resident_p99_ms": round(resident, 1),
        "alone_p50_ms": round(percentile(alone.resident_ms, 0.5), 1),
        "alone_p99_ms": round(beside, 1),
        "p99_ratio": round(resident / beside, 3) if beside else None,
        "loads": sums.get("headrace_model_loads_total"),
        "failed_loads": sums.get("headrace_model_loads_total_failed"),
        "evictions": sums.get("headrace_model_evictions_total"),
    }


def stages(log: Path) -> list[str]:
    """Return the lines of a server's log that say what the stages of loads took, and which runner a model uses."""
    words = ("read weights", "compiled layers and CUDA graphs")
    return [line[-240:] for line in log.read_text().splitlines() if any(word in line for word in words)][:8]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else "")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--room", type=int, default=8, help="how many of them the memory is for")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=150, help="for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    figures: dict[str, Any] = {"models": options.models, "room": options.room, "clients": options.clients}
    failures: list[str] = []

    def stop(_signal: int, _frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, options.seconds)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        try:
            failures = run(Path(scratch), options, figures, end)
        except OutOfTime:
            failures.append("the time was too short")
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if failures:
            for log in sorted(Path(scratch).glob("*.log")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text()[-6000:]}\n")
    figures |= {"failed_requests": len(failures), "failures": failures[:3]}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
