# SPDX-License-Identifier: Apache-2.0
"""A real `headrace serve` in a process of its own, on a folder with a model for each protocol, and its processes by name.

with served(chaos_models(tmp_path), tmp_path / "log", "--workers", "2") as server:
    clients = LoadClients(server.ports)
    os.kill(server.worker(1), signal.SIGKILL)
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from chaos_clients import Ports

from support.ports import free_port
from support.programs import Program
from support.waiting import eventually

ENGINE = Path(__file__).parents[1] / "backends" / "openai_proxy" / "fake_engine.py"
TENSORS = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
ECHO = f"""backend: "identity"
{TENSORS}
dynamic_batching {{ }}
instance_group [{{ kind: KIND_CPU count: 2 }}]
parameters {{ key: "sleep_milliseconds" value {{ string_value: "2" }} }}
"""
PYTHON = f'backend: "python"\n{TENSORS}'
PYTHON_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""
STARTED = re.compile(r"started worker (\d+) \(pid (\d+)\)")


def chaos_models(folder: Path, names: Sequence[str] = ("echo", "snake", "repeater")) -> Path:
    """`echo` for most protocols, `snake` is the same in Python, `repeater` repeats chats."""
    models = folder / "models"
    command = json.dumps([sys.executable, str(ENGINE), "--port", "{port}"])
    repeater = (
        f'backend: "openai_proxy"\nparameters {{ key: "command" value {{ string_value: {json.dumps(command)} }} }}\n'
    )
    repeater += 'parameters { key: "served_model" value { string_value: "fake/engine" } }\n'
    configs = {"echo": ECHO, "snake": PYTHON, "repeater": repeater}
    for name in names:
        add_model(models, name, configs[name], PYTHON_MODEL if name == "snake" else "")
    return models


def add_model(models: Path, name: str, config: str, code: str = "") -> None:
    (models / name / "1").mkdir(parents=True)
    if code:
        (models / name / "1" / "model.py").write_text(code)
    (models / name / "config.pbtxt").write_text(config)


class Server:
    """A running server."""

    def __init__(self, program: Program, ports: Ports) -> None:
        self.program = program
        self.ports = ports

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.program.process

    @property
    def log(self) -> str:
        return self.program.log

    def worker(self, index: int) -> int:
        """The process that is worker `index` now."""
        return int([pid for worker, pid in STARTED.findall(self.log) if int(worker) == index][-1])

    def child(self, word: str) -> int:
        """The one process under the server whose command has this word."""
        results = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if child.status() != psutil.STATUS_ZOMBIE and any(word in part for part in child.cmdline()):
                    results.append(child.pid)
        assert len(results) == 1, results
        return results[0]

    def descriptors(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def is_ready(self, path: str = "/v2/health/ready") -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.http}{path}", timeout=60):
                return True
        except OSError:
            return False

    def post(self, path: str, body: bytes = b"") -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.http}{path}", body, timeout=100) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def ended(self) -> int:
        """Its exit status; it was told to end."""
        return self.process.wait(100)


@contextmanager
def running(
    log: Path, ports: Ports, *arguments: str | Path, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """Start `headrace WORDS` and wait until it is ready; it may end in any way."""
    program = Program(*arguments, log=log, env=environment)
    server = Server(program.start(), ports)
    try:
        eventually(lambda: program.process.poll() is not None or server.is_ready(), message=lambda: server.log)
        assert program.process.poll() is None, server.log
        yield server
    finally:
        if program.process.poll() is None:
            program.send(signal.SIGCONT)
            program.process.terminate()
        program.wait()


@contextmanager
def served(models: Path, log: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """`headrace serve` over a folder of models."""
    ports = Ports(free_port(), free_port())
    arguments = ("--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--allow-metrics", "false", *options)
    quick = {"INFERENCE_STREAM_MESSAGES_PER_SECOND": "0"}
    with running(log, ports, "serve", models, *arguments, environment=quick | (environment or {})) as server:
        yield server
