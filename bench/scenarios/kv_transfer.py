# SPDX-License-Identifier: Apache-2.0
"""Compare two servers that prefill and decode with one prefill and one decode server.

    .venv/bin/python bench/scenarios/kv_transfer.py                     # a random model that a laptop computes
    .venv/bin/python bench/scenarios/kv_transfer.py --device cuda --hidden 2048 --layers 16 --prompt-tokens 4000
    .venv/bin/python bench/scenarios/kv_transfer.py --model ~/models/qwen

Both times there are two servers behind one router, and the same load: some clients have answers streamed all the time, and
long prompts come in between. Told are the time to the first token of the long prompts, and the gaps between tokens of those
who stream. One run each; on a machine with other work the longest gaps are that work's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

_START_SECONDS = 300.0
_WORDS = "water runs fast through the headrace to the mill and grinds corn "
_LAYOUTS = {"together": ("", ""), "apart": ("prefill", "decode")}


@dataclass
class Latencies:
    """What the clients measured, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A Llama with random weights, which talks nonsense as fast as a real one of its size."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<s>", "</s>", *sorted(set(_WORDS.split())), *(f"w{number}" for number in range(2000))]
    word_level = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<s>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=32768,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(folder)


def write_repository(folder: Path, model: Path | None, options: argparse.Namespace) -> None:
    """A folder of models with one model."""
    version = folder / "measured" / "1"
    version.mkdir(parents=True)
    if model is None:
        make_model(version, options.hidden, options.layers)
    values = {"threads": "1", "kv_cache_bytes": str(options.kv_cache_bytes), "max_step_tokens": options.step_tokens}
    if model is not None:
        values["model_path"] = str(model.absolute())
    kind = "KIND_GPU" if options.device == "cuda" else "KIND_CPU"
    lines = ['backend: "llm"', f"instance_group {{ kind: {kind} count: 1 }}"]
    lines += [f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in values.items()]
    (folder / "measured" / "config.pbtxt").write_text("\n".join(lines) + "\n")


@contextmanager
def running(repository: Path, roles: tuple[str, str], logs: Path) -> Iterator[list[int]]:
    """Two servers and a router; their ports."""
    headrace = (sys.executable, "-c", "from headrace.cli.main import main; main()")
    ports = [free_port() for _ in range(3)]
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> None:
        log = (logs / f"{len(processes)}.log").open("wb")
        processes.append(
            subprocess.Popen(
                [*headrace, *arguments], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        )

    try:
        backends = []
        for port, role in zip(ports[:2], roles, strict=True):
            of_role = ["--role", role] if role else []
            start(
                "serve", str(repository), "--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0", *of_role
            )
            backends += ["--backend", f"http://127.0.0.1:{port}" + (f",role={role}" if role else "")]
        start("router", *backends, "--port", str(ports[2]), "--handing-least-bytes", "512")
        for port in ports[:2]:
            wait_for(f"http://127.0.0.1:{port}/v2/health/ready")
        wait_for(f"http://127.0.0.1:{ports[2]}/v2/health/ready")
        time.sleep(6)  # both have to be up by the router's own checks
        yield ports
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for(url: str) -> None:
    """Until it answers well."""
    ends = time.monotonic() + _START_SECONDS
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{url} did not become ready")


async def load(port: int, options: argparse.Namespace) -> Latencies:
    """Clients that stream, and long prompts in between."""
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    measured = Latencies()
    over = asyncio.Event()

    async def stream(prompt: str, tokens: int) -> list[float]:
        messages: Any = [{"role": "user", "content": prompt}]
        began = time.monotonic()
        times = []
        answer = await client.chat.completions.create(
            model="measured",
            messages=messages,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in answer:
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.monotonic() - began)
            if over.is_set():
                await answer.close()
                break
        return times

    async def talk(number: int) -> None:
        while not over.is_set():
            times = await stream(f"w{number} {_WORDS}", 400)
            measured.gaps += [later - earlier for earlier, later in itertools.pairwise(times)]

    talkers = [asyncio.create_task(talk(number)) for number in range(options.talkers)]
    await asyncio.sleep(options.pause)
    measured.gaps.clear()
    for number in range(options.prompts):
        prompt = " ".join(f"w{(number * 7 + word * 13) % 2000}" for word in range(options.prompt_tokens))
        times = await stream(prompt, 4)
        measured.first.append(times[0])
        await asyncio.sleep(options.pause)
    over.set()
    await asyncio.gather(*talkers, return_exceptions=True)
    return measured


def told(values: list[float]) -> str:
    """A row of the table."""
    ordered = sorted(values)
    at = {share: ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 for share in (0.5, 0.95, 0.99)}
    return f"{at[0.5]:8.1f} {at[0.95]:8.1f} {at[0.99]:8.1f} {statistics.fmean(values) * 1000:8.1f} {ordered[-1] * 1000:8.1f}"


def handed(ports: list[int]) -> str:
    """What the servers and the router say of prompts that were handed over; a time is the mean of one."""
    pages = [f"http://127.0.0.1:{port}/metrics" for port in ports[:2]] + [f"http://127.0.0.1:{ports[2]}/router/metrics"]
    metrics: dict[str, float] = {}
    for page in pages:
        with urllib.request.urlopen(page, timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if "handing" in line and not line.startswith("#") and "_bucket" not in line:
                    name, _, value = line.rpartition(" ")
                    metrics[name] = float(value)
    outcomes = [f"{outcome}: {count:g}" for name, count in metrics.items() if (outcome := _outcome(name))]
    for side, action in (("prefill", "kept"), ("decode", "taken")):
        seconds, count, size = (
            sum(value for name, value in metrics.items() if suffix in name and f'side="{side}"' in name)
            for suffix in ("handing_seconds_sum", "handing_seconds_count", "handing_bytes_total")
        )
        if count:
            outcomes.append(f"{action} in {seconds / count * 1000:.1f} ms, {size / count / 2**20:.1f} MiB")
    return "; ".join(outcomes) or "nothing handed over"


def _outcome(name: str) -> str:
    return name.partition('headrace_router_handings_total{outcome="')[2].rstrip('"}')


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder in place of a random model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--talkers", type=int, default=4)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between long prompts")
    parser.add_argument("--step-tokens", default="512", help="tokens of one step of a server")
    parser.add_argument("--kv-cache-bytes", type=int, default=512 << 20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        repository, logs = Path(place) / "models", Path(place)
        write_repository(repository, options.model, options)
        print(f"{'milliseconds':32}{'p50':>8} {'p95':>8} {'p99':>8} {'mean':>8} {'max':>8}")
        for name, roles in _LAYOUTS.items():
            with running(repository, roles, logs) as ports:
                measured = asyncio.run(load(ports[2], options))
                print(f"{name + ': first token, long':32}{told(measured.first)}")
                print(f"{name + ': gap between tokens':32}{told(measured.gaps)}   ({len(measured.gaps)})")
                print(f"  {handed(ports)}")


if __name__ == "__main__":
    main()
