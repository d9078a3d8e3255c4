# SPDX-License-Identifier: Apache-2.0
"""The server under load: `headrace serve` as a process, with models of its own in explicit mode.

`echo` returns its input, `net` is a small ONNX network, `churned` the same again, to be loaded and unloaded; `writer`
is a tiny language model with random weights, where PyTorch is installed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_TESTS = Path(__file__).parents[1] / "tests"
_READY = "model(s)"
_START_SECONDS = 900.0
_STOP_SECONDS = 60.0
_ECHO = """backend: "identity" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
_WRITER = """backend: "llm"
parameters { key: "threads" value { string_value: "1" } }
parameters { key: "kv_cache_bytes" value { string_value: "8388608" } }
"""
_NET = "max_batch_size: 16 dynamic_batching { }\n"


class Running(NamedTuple):
    """A server that answers."""

    process: psutil.Process
    http_port: int
    grpc_port: int
    generates: bool


class NotServed(Exception):
    """The server did not start, or did not stop as it should."""


@contextmanager
def served(folder: Path, workers: int, *, language: bool) -> Iterator[Running]:
    """Make the models, start a server over them, and stop it with SIGTERM: it has to end well."""
    models = _models(folder / "models", language=language)
    http, grpc, metrics = _free_ports(3)
    arguments = ["serve", str(models), "--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    arguments += ["--model-control-mode", "explicit", "--load-model", "*", "--workers", str(workers)]
    program = "from headrace.cli.main import main; main()"
    log = folder / "server.log"
    with log.open("wb") as output:
        process = psutil.Popen([sys.executable, "-c", program, *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(process, log)
        yield Running(process, int(http), int(grpc), language)
        if not process.is_running():
            raise NotServed(f"the server has ended; {log} says more")
    finally:
        process.terminate()
        try:
            status = process.wait(_STOP_SECONDS)
        except psutil.TimeoutExpired:
            process.kill()
            status = None
    if status != 0:
        raise NotServed(f"after SIGTERM the server ended with {status}; {log} says more")


def _free_ports(count: int) -> list[str]:
    """Asked of the system all at once, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _wait(process: Any, log: Path) -> None:
    ends = time.monotonic() + _START_SECONDS
    while _READY not in log.read_text():
        if time.monotonic() > ends or process.poll() is not None:
            raise NotServed(f"the server does not come up: {log.read_text()[-1000:]}")
        time.sleep(0.1)


def _models(folder: Path, *, language: bool) -> Path:
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text(_ECHO)
    for name in ("net", "churned"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_NET)
        (folder / name / "1" / "model.onnx").write_bytes(_network())
    if language:
        sys.path.insert(0, str(_TESTS))
        from support.llm_models import tiny_llama

        tiny_llama(folder / "writer" / "1")
        (folder / "writer" / "config.pbtxt").write_text(_WRITER)
    return folder


def _network() -> bytes:
    """Relu(x W), of 8 numbers a row."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.eye(8, dtype=np.float32), "W")
    nodes = [helper.make_node("MatMul", ["x", "W"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    inputs = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    outputs = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])
    graph = helper.make_graph(nodes, "net", [inputs], [outputs], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def temporary() -> tempfile.TemporaryDirectory[str]:
    """Where models and the log are."""
    return tempfile.TemporaryDirectory(prefix="headrace-soak-")
