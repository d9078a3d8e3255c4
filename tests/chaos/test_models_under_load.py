# SPDX-License-Identifier: Apache-2.0
"""A served folder while everything changes in it, and processes are killed: nobody loses an answer that was not theirs.

Real `headrace serve` in a process of its own, asked by sixteen threads with Triton's clients.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper
from ports import free_port
from tritonclient.utils import InferenceServerException

CLIENTS = 16


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[int, int, subprocess.Popen[bytes]]]:
    """HTTP port, gRPC port and process of a server on this folder."""
    http, grpc = free_port(), free_port()
    program = Path(sys.executable).with_name("headrace")
    ports = ["--http-port", str(http), "--grpc-port", str(grpc)]
    server = subprocess.Popen([program, "serve", folder, *ports, *options])
    try:
        wait_for(lambda: is_ready(http), 60)
        yield http, grpc, server
    finally:
        server.terminate()
        server.wait(60)


def is_ready(port: int, path: str = "/v2/health/ready") -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


class Crowd:
    """Threads that ask until they are stopped, and note what they got."""

    def __init__(self, ask: Callable[[Any, int], str], url: str, *, grpc: bool = False) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._ask = ask
        self._library: Any = tritonclient.grpc if grpc else tritonclient.http
        self._url = url
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]

    def _run(self, number: int) -> None:
        options: Any = [("grpc.use_local_subchannel_pool", 1)]
        more = {"channel_args": options} if self._library is tritonclient.grpc else {}
        with self._library.InferenceServerClient(self._url, **more) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                try:
                    self.answers[self._ask(client, number * 100_000 + turn)] += 1
                except InferenceServerException as error:
                    self.errors.append(str(error))

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def write_version(model: Path, number: int) -> None:
    """A version that adds its own number, written piece by piece as a slow copy would."""
    add = helper.make_node("Add", ["INPUT0", "number"], ["OUTPUT0"])
    graph = helper.make_graph(
        [add],
        "adder",
        [helper.make_tensor_value_info("INPUT0", TensorProto.INT64, ["n", 1])],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.INT64, ["n", 1])],
        [numpy_helper.from_array(np.array([number], np.int64), "number")],
    )
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    onnx.checker.check_model(onnx.load_from_string(content))
    folder = model / str(number)
    folder.mkdir()
    with (folder / "model.onnx").open("wb") as file:
        for start in range(0, len(content), 40):
            file.write(content[start : start + 40])
            file.flush()
            time.sleep(0.02)


def ask_adder(client: Any, value: int) -> str:
    library = tritonclient.grpc if isinstance(client, tritonclient.grpc.InferenceServerClient) else tritonclient.http
    tensor = library.InferInput("INPUT0", [1, 1], "INT64")
    tensor.set_data_from_numpy(np.array([[value]], np.int64))
    answer = client.infer("adder", [tensor])
    response = answer.get_response()
    version = response.model_version if hasattr(response, "model_version") else response["model_version"]
    assert answer.as_numpy("OUTPUT0").ravel().tolist() == [value + int(version)]
    return str(version)


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
def test_versions_come_and_go_under_load_and_nothing_is_lost(tmp_path: Path, grpc: bool) -> None:
    model = tmp_path / "adder"
    model.mkdir()
    (model / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching {}\n')
    write_version(model, 1)
    with served(tmp_path, "--repository-poll-secs", "0.2") as (http_port, grpc_port, _):
        port = grpc_port if grpc else http_port
        with Crowd(ask_adder, f"127.0.0.1:{port}", grpc=grpc) as crowd:
            for number in range(2, 6):
                write_version(model, number)
                wait_for(lambda number=number: is_ready(http_port, f"/v2/models/adder/versions/{number}/ready"), 60)
                wait_for(lambda number=number: crowd.answers[str(number)] > 0, 60)
                shutil.rmtree(model / str(number - 1))
            # Back to a lower number: the higher one goes, and the answers follow.
            write_version(model, 1)
            shutil.rmtree(model / "5")
            wait_for(lambda: is_ready(http_port, "/v2/models/adder/versions/1/ready"), 60)
            seen = crowd.answers["1"]
            wait_for(lambda: crowd.answers["1"] > seen + 100, 60)
    assert crowd.errors == []
    assert set(crowd.answers) == {"1", "2", "3", "4", "5"}
