# SPDX-License-Identifier: Apache-2.0
"""What the contract suite runs its cases on: an engine over a folder, in a thread of its own, driven from the test's.

served = Served(repository)
served.load("onnx_mlp")
answer = served.infer("onnx_mlp", inputs)
served.close()
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from case import Arrays, Case
from google.protobuf import json_format

from headrace.backends.contract import EngineServices, Model, ModelFiles, Placement
from headrace.backends.table import backend_named
from headrace.core.dtypes import BF16, dtype_named
from headrace.core.errors import HeadraceError
from headrace.core.requests import InferRequest, InferResponse, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.repository.states import State
from headrace.models.config.types import ModelConfig
from support.engines import RecordingCaller

T = TypeVar("T")

LONGEST_SECONDS = 100
"""For one load or answer: under the test's own limit, so that it is this one that tells what was waited for."""


class Served:
    """A repository under explicit control."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        settings = RepositorySettings(mode="explicit", unload_wait_seconds=30)

        async def begin() -> Engine:
            engine = open_engine(EngineSettings(repositories=(repository,), repository=settings, gpus=0))
            await engine.start()
            return engine

        self._engine = self.wait(begin())

    def close(self) -> None:
        """Retire everything and end the thread."""
        self.wait(self._engine.close(30))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def plane(self) -> DataPlane:
        return self._engine.plane

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the engine's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONGEST_SECONDS)

    def load(self, name: str, **changes: Any) -> None:
        """Load a model; with `changes`, fields of its configuration as JSON has them, load it again with those."""
        config_json = self.config_json(name, **changes) if changes else None
        self.wait(self.plane.load(name, config_json))

    def load_all(self, names: Sequence[str]) -> None:
        """Load models at the same time, as a server does when it starts."""

        async def together() -> None:
            await asyncio.gather(*(self.plane.load(name) for name in names))

        self.wait(together())

    def unload(self, name: str) -> None:
        """Unload a model and wait for its memory."""
        self.wait(self.plane.unload(name))

    def config(self, name: str) -> ModelConfig:
        return self.plane.config(name)

    def config_json(self, name: str, **changes: Any) -> str:
        """The configuration of a loaded model, completed, with some fields changed."""
        message = json_format.MessageToDict(self.config(name).proto, preserving_proto_field_name=True)
        return json.dumps(message | changes)

    def state(self, name: str) -> tuple[State, str]:
        """Where version 1 stands, and why; the model as a whole where it failed before."""
        control = self._engine.control
        assert control is not None
        result = control.state_of(name, 1) or control.state_of(name, None)
        assert result is not None, name
        return result.state, result.reason

    def executions(self, name: str) -> int:
        """How many batches a model has computed."""
        (version,) = self.plane.statistics(name)
        return sum(batch.count for batch in version.statistics.batches.values())

    def tensors(self, name: str, arrays: Arrays) -> list[Tensor]:
        """Arrays as the tensors that a client would make of them."""
        types = {tensor.name: tensor.datatype for tensor in self.plane.metadata(name).inputs}
        bf16 = {key for key, array in arrays.items() if types.get(key) == "BF16" and array.dtype == np.uint16}
        return [Tensor(key, BF16, array) if key in bf16 else Tensor.of(key, array) for key, array in arrays.items()]

    def infer(self, name: str, arrays: Arrays, outputs: Collection[str] = ()) -> Arrays:
        """One request, and its answer."""
        (answer,) = self.infer_all(name, [arrays], outputs)
        return answer

    def infer_all(self, name: str, requests: Sequence[Arrays], outputs: Collection[str] = ()) -> list[Arrays]:
        """Requests that are all there before the first is answered; raises the first error."""

        async def ask() -> list[InferResponse | BaseException]:
            asked = []
            for arrays in requests:
                one = RecordingCaller()
                wanted = [RequestedOutput(output) for output in outputs]
                self.plane.infer(InferRequest(name, self.tensors(name, arrays), outputs=wanted), one)
                asked.append(one)
            return list(await asyncio.gather(*(one.answer() for one in asked)))

        answers = []
        for told in self.wait(ask()):
            if isinstance(told, BaseException):
                raise told
            answers.append({tensor.name: tensor.array for tensor in told.outputs})
        return answers

    def opened(self, name: str) -> tuple[Model, Any]:
        """A model and an instance of it beside the engine's own, made as the engine makes them."""
        services: EngineServices = self._engine._loader._services
        model = backend_named(self.config(name).backend).load(self.config(name), self.files(name), services)
        return model, model.open(self.placement(name))

    def placement(self, name: str) -> Placement:
        return Placement(f"{name}_9_cpu")

    def files(self, name: str) -> ModelFiles:
        folder = self.repository / name
        return ModelFiles(folder, 1, folder / "1")


def check(case: Case, given: Arrays, answer: Mapping[str, Any]) -> None:
    """Hold an answer against what the case expects."""
    wanted = case.expected(given)
    assert set(wanted) <= set(answer), f"{case.name} answered {sorted(answer)} in place of {sorted(wanted)}"
    for name, array in wanted.items():
        got = answer[name]
        where = f"output {name} of {case.name}"
        assert got.shape == array.shape, f"{where} has shape {got.shape} in place of {array.shape}"
        if got.dtype == object:
            assert got.tolist() == array.tolist(), where
        else:
            np.testing.assert_allclose(got, array, rtol=case.tolerance, atol=case.tolerance, err_msg=where)


def as_received(arrays: Arrays) -> Arrays:
    """Arrays as they come from a connection: read-only, and where a message put them, at an odd address."""
    received = {}
    for name, array in arrays.items():
        if array.dtype == object:
            received[name] = array
        else:
            message = b"\0" + np.ascontiguousarray(array).tobytes()
            received[name] = np.frombuffer(memoryview(message)[1:], array.dtype).reshape(array.shape)
    return received


def refusal(work: Any, *arguments: Any) -> HeadraceError:
    """The error that a call must end in."""
    try:
        work(*arguments)
    except HeadraceError as error:
        return error
    raise AssertionError(f"{work.__name__} took what it must refuse: {arguments}")


def dtype_other_than(name: str) -> Any:
    """A numpy type that a tensor of this data type does not have."""
    return np.dtype(np.float64) if dtype_named(name).numpy != np.float64 else np.dtype(np.int8)
