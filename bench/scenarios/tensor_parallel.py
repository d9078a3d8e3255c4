# SPDX-License-Identifier: Apache-2.0
"""Measure tensor parallelism on this machine's CPUs: memory while loading, the message of a step, and a killed rank.

    python bench/scenarios/tensor_parallel.py memory 2       # the shard of one rank, and by how much its memory grew
    python bench/scenarios/tensor_parallel.py step 2         # microseconds until all ranks have a step of 32 sequences
    python bench/scenarios/tensor_parallel.py step 2 --tcp   # the same by TCP on loopback, as from node to node
    python bench/scenarios/tensor_parallel.py kill 2 20      # seconds until an answer after kill -9 of a rank

Each prints a JSON object. The models are made here; `--folder` names another for `memory` and `kill`. That ranks answer as
one process is a test: python -m pytest tests/backends/llm/test_llm_tensor_parallel_processes.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEQUENCES, STEPS = 32, 2000
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
"""A model whose shard is much larger than what else a process allocates."""


def measure_memory(folder: Path, degree: int) -> dict[str, Any]:
    """Load the shard of the first rank, in this process."""
    import torch

    from headrace.backends.llm.model_runner.model_loader import check_folder
    from headrace.backends.llm.settings import LlmSettings
    from headrace.backends.llm.tensor_parallel.communicator import Peers
    from headrace.backends.llm.tensor_parallel.loading import check_shardable, load_shard

    settings = LlmSettings(folder, tensor_parallel=degree)
    checked = check_folder(settings)
    check_shardable(checked, settings)
    load_shard(checked, settings, torch.device("meta"), Peers(0, degree))  # imports what transformers imports late
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = _peak_bytes()
    model = load_shard(checked, settings, torch.device("cpu"), Peers(0, degree))
    peak = _peak_bytes() - before
    shard = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"shard_bytes": shard, "peak_bytes": peak, "ratio": round(peak / shard, 3)}


def _peak_bytes() -> int:
    """Return the largest resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024


def measure_step(degree: int, *, tcp: bool = False) -> dict[str, Any]:
    """Send steps to processes that decode them and tell when."""
    from headrace.backends.llm.scheduler import Chunk, Sequence
    from headrace.backends.llm.tensor_parallel.link import Kind
    from headrace.backends.llm.tensor_parallel.step_codec import StepEncoder

    links = [_decoding_process(tcp=tcp) for _ in range(degree - 1)]
    sequences = [Sequence(list(range(100)), 4096) for _ in range(SEQUENCES)]
    for index, sequence in enumerate(sequences):
        sequence.batch_index, sequence.pages = index, list(range(index * 300, index * 300 + 300))
    encoder = StepEncoder(())
    first = encoder.encode([Chunk(sequence, 0, 100, True) for sequence in sequences], greedy=True, sampled=False)
    latencies: list[float] = []
    processor: list[float] = []
    for number in range(STEPS):
        for sequence in sequences:
            sequence.tokens.append(number)
        chunks = [Chunk(sequence, 100 + number, 1, True) for sequence in sequences]
        began, used = time.monotonic_ns(), time.thread_time_ns()
        message = encoder.encode(chunks, greedy=True, sampled=False) if number else first
        for link in links:
            link.send(Kind.STEP, message)
        sent = time.monotonic_ns()
        processor.append((time.thread_time_ns() - used) / 1000)
        arrived = max(int.from_bytes(link.receive(60)[1], "little") for link in links)
        latencies.append((max(arrived, sent) - began) / 1000)
    for link in links:
        link.close()
    latencies = sorted(latencies[100:])
    return {
        "ranks": degree,
        "sequences": SEQUENCES,
        "processor_us": round(statistics.median(processor), 1),
        "median_us": round(statistics.median(latencies), 1),
        "p99_us": round(latencies[int(len(latencies) * 0.99)], 1),
        "least_us": round(latencies[0], 1),
    }


def _decoding_process(*, tcp: bool) -> Any:
    """Start a process that decodes steps as a rank does, and answers each with the time; return the link to it."""
    from headrace.backends.llm.tensor_parallel.link import Link

    ours, theirs = _tcp_pair() if tcp else socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _decode_steps(Link(theirs))
        os._exit(0)
    theirs.close()
    return Link(ours)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def _decode_steps(link: Any) -> None:
    from headrace.backends.llm.tensor_parallel.link import Kind, LinkClosed
    from headrace.backends.llm.tensor_parallel.step_codec import StepDecoder

    decoder = StepDecoder(())
    try:
        while True:
            _, message = link.receive()
            decoder.decode(message)
            link.send(Kind.STEP, time.monotonic_ns().to_bytes(8, "little"))
    except LinkClosed:
        pass


async def measure_kills(folder: Path, degree: int, count: int) -> dict[str, Any]:
    """Kill a rank again and again, and ask until there is an answer."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "backends")]
    from llm_instances import served

    from headrace.core.errors import Unavailable
    from headrace.core.generation import Generation, Sampling

    question = Generation(prompt="the quick brown fox", sampling=Sampling(temperature=0.0, max_tokens=8))
    seconds: list[float] = []
    async with served(folder, tensor_parallel=str(degree)) as tiny:
        group: Any = tiny.engine.runner._group  # type: ignore[attr-defined]
        expected = (await tiny.ask(question)).text
        for number in range(count):
            await _await_spares(group)
            began = time.monotonic()
            os.kill(group._ranks[number % (degree - 1)].pid, signal.SIGKILL)
            answer = ""
            while not answer:
                try:
                    answer = (await tiny.ask(question)).text
                except Unavailable:
                    await asyncio.sleep(0.01)
            seconds.append(time.monotonic() - began)
            print(f"kill {number + 1} of {count}: {seconds[-1]:.2f} s", file=sys.stderr)
            if answer != expected:
                raise SystemExit("another answer after a rank was killed")
    return {"kills": count, "median_s": round(statistics.median(seconds), 2), "longest_s": round(max(seconds), 2)}


async def _await_spares(group: Any) -> None:
    """Wait until the processes in reserve have imported what they need: then they say hello."""
    count = len(group._ranks)
    while True:
        spares = [spare.link.fileno() for spare in group._source._spares]
        if len(spares) == count and len(select.select(spares, [], [], 0)[0]) == count:
            return
        await asyncio.sleep(0.1)


def _tiny_model(folder: Path, **sizes: int) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    from support import llm_models

    return llm_models.tiny_llama(folder, **sizes)


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    memory, step, kill = (kinds.add_parser(name) for name in ("memory", "step", "kill"))
    for kind in (memory, kill):
        kind.add_argument("--folder", type=Path, help="a model in Hugging Face's format")
    for kind in (memory, step, kill):
        kind.add_argument("degree", type=int, help="ranks")
    kill.add_argument("count", type=int)
    step.add_argument("--tcp", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made = Path(place, "tiny", "1")
        if options.kind == "memory":
            result = measure_memory(options.folder or _tiny_model(made, **LARGER), options.degree)
        elif options.kind == "step":
            result = measure_step(options.degree, tcp=options.tcp)
        else:
            result = asyncio.run(measure_kills(options.folder or _tiny_model(made), options.degree, options.count))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
