# SPDX-License-Identifier: Apache-2.0
"""The whole server in a process of its own, over a folder with one model of each kind, for tests that treat it badly.

with described_server(make_models(tmp_path)) as server:
    requests to ("127.0.0.1", server.port)
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

BODY_BYTES = 4 * 1024 * 1024
"""The server's limit for a body: small, so that a test need not send much to be over it."""

_UPPER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        upper = np.array([text.upper() for text in texts.ravel()], dtype=object).reshape(texts.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("UPPER", upper)])
"""

_REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[:16]:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_CONFIGS = {
    "echo": """backend: "identity" max_batch_size: 8
        input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
        output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]""",
    "large": """backend: "identity" max_batch_size: 2
        input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 3, 32, 32 ] } ]
        output [ { name: "IMAGE_OUT" data_type: TYPE_UINT8 dims: [ 3, 32, 32 ] } ]""",
    "sums": """backend: "onnxruntime" max_batch_size: 8
        input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]
        input [ { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
        output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]""",
    "upper": """backend: "python" max_batch_size: 0
        input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
        output [ { name: "UPPER" data_type: TYPE_STRING dims: [ -1 ] } ]""",
    "repeat": """backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
        input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
        output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]""",
}


def make_models(folder: Path) -> Path:
    """One model of each kind: identity, a large one, ONNX, Python, decoupled Python."""
    for name, config in _CONFIGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'name: "{name}" {config}')
    (folder / "upper/1/model.py").write_text(_UPPER)
    (folder / "repeat/1/model.py").write_text(_REPEAT)
    _write_sums(folder / "sums/1/model.onnx")
    return folder


def _write_sums(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    inputs = [helper.make_tensor_value_info(f"INPUT{n}", TensorProto.INT32, ["batch", 16]) for n in (0, 1)]
    output = helper.make_tensor_value_info("OUTPUT0", TensorProto.INT32, ["batch", 16])
    graph = helper.make_graph([helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"])], "sums", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))


@dataclass(frozen=True)
class DescribedServer:
    port: int
    process: psutil.Popen

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def document(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/openapi.json", timeout=30) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def alive(self) -> bool:
        """Whether it still answers, and still computes."""
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
        request = urllib.request.Request(f"{self.url}/v2/models/echo/infer", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return self.process.poll() is None and json.load(answer)["outputs"][0]["data"] == [1, 2, 3, 4]

    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)


@contextmanager
def described_server(models: Path, log: Path, mode: str = "none", memory: str = "off") -> Iterator[DescribedServer]:
    """Start it and wait for its models; what it logs goes to a file. `memory` is "on" for clients' shared memory."""
    command = [sys.executable, __file__, str(models), mode, memory]
    with log.open("wb") as errors:
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start:\n{log.read_text()}")
        yield DescribedServer(int(line), process)
    finally:
        process.terminate()
        try:
            process.wait(100)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(100)
        process.stdout.close()


def _main(models: str, mode: str, memory: str) -> None:
    import asyncio
    import logging
    import signal
    from functools import partial

    import uvloop

    from headrace.api.metrics.settings import MetricsSettings
    from headrace.api.openai.settings import OpenAiSettings
    from headrace.api.openapi.http import OpenApi
    from headrace.api.predict.settings import PredictSettings
    from headrace.api.v2.settings import V2Settings
    from headrace.core.limits import Limits
    from headrace.core.telemetry.tracing import NO_TRACING
    from headrace.engine.engine import EngineSettings, open_engine
    from headrace.engine.repository.settings import RepositorySettings
    from headrace.net.negotiation import NegotiatingProtocol
    from headrace.net.server import HttpServer
    from headrace.net.sockets import Address
    from headrace.programs.serve.protocols import build_protocols
    from headrace.programs.serve.server import ServerSettings

    logging.basicConfig(level=logging.WARNING)
    address = Address.parse("127.0.0.1:0")
    repository = RepositorySettings(mode=mode, load_models=("*",))  # type: ignore[arg-type]
    settings = ServerSettings(
        http=address,
        grpc=address,
        metrics_settings=MetricsSettings(),
        v2=V2Settings(allow_client_shm=memory == "on"),
        predict=PredictSettings(model="echo"),
        openai=OpenAiSettings(batch_folder=Path(models).parent / "batches"),
        limits=Limits(body_bytes=BODY_BYTES),
        engine=EngineSettings(repositories=(models,), repository=repository, gpus=0),
    )

    async def serve() -> None:
        engine = open_engine(settings.engine)
        protocols = build_protocols(engine, settings, NO_TRACING, None)
        routes = protocols.site.routes
        if ("GET", "/openapi.json") not in routes.listed():
            OpenApi(protocols.plane, routes).add_to(routes)
        protocols.start()
        await engine.start()
        server = HttpServer(protocols.site, address, partial(NegotiatingProtocol, protocols.site))
        await server.start()
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        print(server.port, flush=True)
        await stopped.wait()
        await server.drain(0.0)
        await engine.close(1.0)
        await protocols.close()

    uvloop.run(serve())


if __name__ == "__main__":
    _main(*sys.argv[1:])
