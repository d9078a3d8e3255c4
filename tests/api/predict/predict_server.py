# SPDX-License-Identifier: Apache-2.0
"""`/predict` and nothing else, over a real TorchScript model or over functions, for tests.

with torch_served(folder) as server: ...
with predict_served([(config, function)], settings) as server: ...
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import torch

from headrace.api.predict.grpc import PredictGrpc, predict_schema
from headrace.api.predict.http import PredictHttp
from headrace.api.predict.settings import PredictSettings
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.grpc.services import Services
from headrace.net.grpc.standard_services import ReflectionService
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.engines import Gate, plane_of
from support.serving import Serving, serving
from support.waiting import eventually

WEIGHTS = [[0.5, -0.25, 1.0, 0.0], [0.0, 0.75, -0.5, 2.0]]

CONFIG = """
name: "production" platform: "pytorch_libtorch" max_batch_size: %(most)d
version_policy { all { } }
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters { key: "version_labels" value { string_value: "1=v1.0.0,2=v1.2.0" } }
instance_group [ { kind: KIND_CPU } ]
"""


class Linear(torch.nn.Module):
    """Four floats to two."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor(WEIGHTS) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def expected(row: Sequence[float], scale: float = 1.0) -> list[float]:
    """What `Linear` gives."""
    return [scale * sum(weight * value for weight, value in zip(weights, row, strict=True)) for weights in WEIGHTS]


def make_models(folder: Path, versions: Mapping[int, float], most: int = 8) -> Path:
    """A repository with the model `production`; each version scales differently."""
    (folder / "production").mkdir(parents=True)
    (folder / "production" / "config.pbtxt").write_text(CONFIG % {"most": most})
    for number, scale in versions.items():
        saved = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(Linear(scale).eval()), saved)
        (folder / "production" / str(number)).mkdir()
        (folder / "production" / str(number) / "model.pt").write_bytes(saved.getvalue())
    return folder


def site_of(plane: DataPlane, settings: PredictSettings | None = None, **more: Any) -> Site:
    routes, services = Routes(), Services()
    predict = PredictHttp(plane, settings, **more)
    predict.add_to(routes)
    predict.health.add_to(routes)
    calls = PredictGrpc(plane, settings, key_of=more.get("key_of"))
    calls.add_to(services)
    ReflectionService(services, [predict_schema()]).add_to(services)
    site = Site(routes, services=services)
    site.calls = calls  # type: ignore[attr-defined]
    site.deadlines = (predict._predictor.deadlines, calls.predictor.deadlines)  # type: ignore[attr-defined]
    return site


@contextmanager
def torch_served(
    folder: Path, versions: Mapping[int, float], settings: PredictSettings | None = None, most: int = 8
) -> Iterator[Serving]:
    engines: list[Engine] = []
    make_models(folder, versions, most)

    async def site() -> Site:
        control = RepositorySettings()
        engines.append(open_engine(EngineSettings(repositories=(folder,), repository=control, gpus=0)))
        await engines[0].start()
        created = site_of(engines[0].plane, settings)
        created.plane = engines[0].plane  # type: ignore[attr-defined]
        return created

    with serving(site) as running:
        yield running
        running.call(engines[0].close, 5)


@contextmanager
def predict_served(
    models: Sequence[tuple[Any, Any]], settings: PredictSettings | None = None, **more: Any
) -> Iterator[Serving]:
    planes: list[DataPlane] = []

    async def site() -> Site:
        planes.append(await plane_of(models))
        created = site_of(planes[0], settings, **more)
        created.plane = planes[0]  # type: ignore[attr-defined]
        return created

    async def retire() -> None:
        for version in planes[0].statistics():
            await version.retire(5)

    with serving(site) as running:
        yield running
        running.call(retire)


@contextmanager
def timing_out(server: Serving, gate: Gate, waiting: int = 1) -> Iterator[None]:
    """While a request is made: when the model computes it and so many wait for an answer, their time is over."""
    deadlines = server.site.deadlines  # type: ignore[attr-defined]
    in_the_future = SimpleNamespace(time=lambda: math.inf)

    def end() -> None:
        asyncio.run(gate.entered())
        eventually(lambda: sum(len(deadline._waiting) for deadline in deadlines) == waiting)
        server.call(lambda: [deadline._sweep(in_the_future) for deadline in deadlines])

    thread = threading.Thread(target=end)
    thread.start()
    yield
    thread.join()


def streams_of(server: Serving) -> list[Any]:
    """What serves each open WebSocket of `/predict/stream`."""
    callbacks = [getattr(connection, "on_message", None) for connection in list(server.site.connections)]
    return [callback.__self__ for callback in callbacks if callback is not None]  # type: ignore[attr-defined]


def ask(
    server: Serving,
    path: str = "/predict",
    body: Any = None,
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """One HTTP request: a document is sent as JSON, bytes as they are."""
    status, _, content = ask_raw(server, path, body, method=method, headers=headers)
    return status, json.loads(content)


def ask_raw(
    server: Serving, path: str, body: Any = None, *, method: str = "POST", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    try:
        connection.request(method, path, data, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


class Calls:
    """The stub that grpcio-tools would make of the proto."""

    def __init__(self, channel: grpc.Channel) -> None:
        schema = predict_schema()
        self.request = schema.message("PredictRequest")
        response = schema.message("PredictResponse")
        write, read = self.request.SerializeToString, response.FromString
        self.predict = channel.unary_unary("/InferenceService/Predict", write, read)
        self.predict_stream = channel.stream_stream("/InferenceService/PredictStream", write, read)


@contextmanager
def calls_to(server: Serving) -> Iterator[Calls]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Calls(channel)


class Repeats:
    """A decoupled model: each number of its input is an answer of its own, and nothing follows the last."""

    def __init__(self, *, empty_last: bool = False) -> None:
        self._empty_last = empty_last

    def execute(self, batch: Sequence[Any], finished: Any) -> None:
        for work in batch:
            numbers = work.request.inputs[0].array.ravel()
            for index, number in enumerate(numbers):
                last = index == len(numbers) - 1 and not self._empty_last
                work.reply([Tensor.of("OUTPUT0", number.reshape(1, 1))], final=last)
            if self._empty_last:
                work.reply(None)
        finished()

    def close(self) -> None:
        pass
