# SPDX-License-Identifier: Apache-2.0
"""The compared servers: the command that starts each on a model folder, and its memory and CPU."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.errors import BenchError

_END_SECONDS = 20


@dataclass(frozen=True)
class ServerKind:
    """A server, and the words that start it."""

    name: str
    package: str
    """Installed if this package can be imported."""
    arguments: tuple[str, ...]
    """After the interpreter; {model}, {name} and {port} are filled in."""

    @property
    def installed(self) -> bool:
        """Whether it can be started here."""
        return importlib.util.find_spec(self.package) is not None

    def command(self, model: Path, port: int, more: Sequence[str]) -> list[str]:
        """Return the command line."""
        filled = [argument.format(model=model, name=model.name, port=port) for argument in self.arguments]
        return [sys.executable, *filled, *more]


_VLLM = ("-m", "vllm.entrypoints.cli.main", "serve", "{model}", "--served-model-name", "{name}")
_SGLANG = ("-m", "sglang.launch_server", "--model-path", "{model}", "--served-model-name", "{name}")
_ADDRESS = ("--host", "127.0.0.1", "--port", "{port}")
_HEADRACE = ("-m", "headrace", "serve", "{model}", "--http-port", "{port}", "--grpc-port", "0", "--metrics-port", "0")
SERVERS = {
    kind.name: kind
    for kind in (
        ServerKind("headrace", "headrace", _HEADRACE),
        ServerKind("vllm", "vllm", (*_VLLM, *_ADDRESS)),
        ServerKind("sglang", "sglang", (*_SGLANG, *_ADDRESS)),
    )
}


class RunningServer:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self._process = process
        self.load_seconds = round(seconds, 1)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the whole process tree so far."""
        total = 0.0
        for process in _tree(self._process.pid):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    @property
    def memory_mib(self) -> int:
        """Resident memory of the whole process tree."""
        total = 0
        for process in _tree(self._process.pid):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total >> 20


@contextlib.contextmanager
def serving(
    kind: ServerKind, model: Path, port: int, more: Sequence[str], log: Path, limit: float
) -> Iterator[RunningServer]:
    """Start a server, wait until it answers a completion, and end it and its children at last."""
    begin = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            kind.command(model, port, more),
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        body = json.dumps({"model": model.name, "prompt": [5, 6, 7], "max_tokens": 1})
        while not _answers(port, body):
            if process.poll() is not None:
                raise BenchError(f"{kind.name} ended with status {process.returncode}: see {log}")
            if time.perf_counter() - begin > limit:
                raise BenchError(f"{kind.name} did not answer within {limit:g} s: see {log}, or raise --load-limit")
            time.sleep(0.1)
        yield RunningServer(process, time.perf_counter() - begin)
    finally:
        children = _tree(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()


def gpu_memory_mib() -> int | None:
    """Return the used memory of the first GPU; None without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def complete(port: int, model: str, prompt: Sequence[int], tokens: int) -> str:
    """Return a greedy answer."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status, content = _post(port, json.dumps(body), 120)
    if status != 200:
        raise BenchError(f"the server answered {status}: {content[:300]!r}")
    document: Any = json.loads(content)
    return str(document["choices"][0]["text"])


def _answers(port: int, body: str) -> bool:
    try:
        return _post(port, body, 30)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _post(port: int, body: str, timeout: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
