# SPDX-License-Identifier: Apache-2.0
"""A served folder while everything changes in it: nobody loses an answer, or gets one that is not theirs.

Real `headrace serve` in a process of its own, asked by sixteen threads with Triton's clients.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from chaos_server import ECHO, Server, add_model, served
from load_clients import LoadClients
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

from support.waiting import eventually

pytestmark = pytest.mark.slow
CLIENTS = 16


class InferThreads:
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

    def __enter__(self) -> InferThreads:
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
def test_versions_are_added_and_removed_under_load_and_nothing_is_lost(tmp_path: Path, grpc: bool) -> None:
    model = tmp_path / "models" / "adder"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching {}\n')
    write_version(model, 1)
    with served(tmp_path / "models", tmp_path / "log", "--repository-poll-secs", "0.2") as server:
        port = server.ports.grpc if grpc else server.ports.http
        with InferThreads(ask_adder, f"127.0.0.1:{port}", grpc=grpc) as clients:
            for number in range(2, 6):
                write_version(model, number)
                eventually(lambda number=number: server.is_ready(f"/v2/models/adder/versions/{number}/ready"))
                eventually(lambda number=number: clients.answers[str(number)] > 0)
                shutil.rmtree(model / str(number - 1))
            # Back to a lower number: the higher one goes, and the answers follow.
            write_version(model, 1)
            shutil.rmtree(model / "5")
            eventually(lambda: server.is_ready("/v2/models/adder/versions/1/ready"))
            seen = clients.answers["1"]
            eventually(lambda: clients.answers["1"] > seen + 100)
    assert clients.errors == []
    assert set(clients.answers) == {"1", "2", "3", "4", "5"}


@pytest.mark.timeout(300)
def test_a_storm_of_loads_reloads_and_unloads(tmp_path: Path) -> None:
    """Four threads change three models, at random and against each other, under clients of every protocol."""
    names = ("one", "two", "three")
    for name in names:
        add_model(tmp_path / "models", name, ECHO)
    protocols = ("v2 http", "v2 grpc", "v2 stream", "v1 http", "v1 grpc", "predict", "predict stream", "websocket")
    with served(
        tmp_path / "models", tmp_path / "log", "--model-control-mode", "explicit", "--load-model", "*"
    ) as server:
        models = dict(zip(protocols, names * 3, strict=False))
        before = server.descriptors()
        with LoadClients(server.ports, protocols, models=models) as clients:
            clients.wait_for(5)
            storms = [
                threading.Thread(target=storm, args=(server, tmp_path / "models", names, seed)) for seed in range(4)
            ]
            for thread in storms:
                thread.start()
            for thread in storms:
                thread.join(100)
            for name in names:
                assert server.post(f"/v2/repository/models/{name}/load") == 200
            clients.wait_for(10)
        clients.check()
        # Who meets an unloaded model is told that it is not there, or not ready yet, and nothing else.
        known = ("unknown model", "Servable not found", "unable to find platform", "Server not ready")
        reported = clients.texts("error_answers") + clients.texts("cut")  # gRPC's UNAVAILABLE counts as cut
        assert [text for text in reported if not any(word in text for word in known)] == []
        eventually(lambda: server.descriptors() <= before + 8, message=lambda: f"{before}, {server.descriptors()}")


def storm(server: Server, folder: Path, names: tuple[str, ...], seed: int) -> None:
    chance = random.Random(seed)
    for turn in range(30):
        name = chance.choice(names)
        if chance.random() < 0.3:  # something to reload
            config = f'{ECHO}parameters {{ key: "turn" value {{ string_value: "{seed}.{turn}" }} }}\n'
            beside = folder.parent / f"config.{seed}"
            beside.write_text(config)
            beside.rename(folder / name / "config.pbtxt")
        action = "unload" if chance.random() < 0.4 else "load"
        # 499: another thread wanted the opposite before this one was through.
        assert server.post(f"/v2/repository/models/{name}/{action}") in {200, 499}
