# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python backend share: a loop in a thread, fakes of the engine's parts, real child processes."""

from __future__ import annotations

import queue
import textwrap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.python.backend import PythonBackend
from headrace.backends.python.instance import PythonInstance
from headrace.core.clock import SystemClock
from headrace.core.dtypes import DType
from headrace.core.errors import HeadraceError, NotFound
from headrace.core.requests import InferRequest, InferResponse, RequestedOutput
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor
from headrace.models.config.types import ModelConfig, OutputSpec

WAIT = 60.0


class FakeWork:
    """A `Work` that keeps its replies."""

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.cancelled = False
        self.replies: list[tuple[Any, bool, dict[str, Any]]] = []
        self.news: queue.Queue[tuple[Any, bool, dict[str, Any]]] = queue.Queue()
        self.over = threading.Event()

    def reply(self, outputs: Any, *, final: bool = True, parameters: Any = ()) -> None:
        entry = (outputs, final, dict(parameters))
        self.replies.append(entry)
        self.news.put(entry)
        if final or isinstance(outputs, HeadraceError):
            self.over.set()

    def arrays(self, index: int = 0) -> dict[str, np.ndarray]:
        outputs = self.replies[index][0]
        if isinstance(outputs, HeadraceError):
            raise outputs
        return {tensor.name: tensor.array for tensor in outputs}

    @property
    def error(self) -> HeadraceError:
        outputs = self.replies[-1][0]
        assert isinstance(outputs, HeadraceError), self.replies
        return outputs


class FakeServices:
    """`EngineServices` whose other models are an echo, a stream and a failure."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.metrics = Registry(SystemClock())
        self.requests: list[InferRequest] = []
        self.loaded: list[Any] = []
        self.cancelled = 0

    def infer(self, request: InferRequest, answered: Any) -> Any:
        self.requests.append(request)

        def answer() -> None:
            if request.model_name == "echo":
                answered(InferResponse("echo", "1", list(request.inputs), parameters={"seen": True}), True)
            elif request.model_name == "stream":
                for number in range(3):
                    answered(InferResponse("stream", "1", [Tensor.of("OUT", np.array([number]))]), False)
                answered(None, True)
            elif request.model_name == "hang":
                pass
            else:
                answered(NotFound(f"model '{request.model_name}' is not known"), True)

        def cancel() -> None:
            self.cancelled += 1
            answered(None, True)

        self.loop.call_soon(answer)
        return cancel

    def is_ready(self, model_name: str, model_version: str) -> bool:
        return model_name == "echo"

    def load(self, model_name: str, config_json: str, files: Any, done: Any) -> None:
        self.loaded.append((model_name, config_json, dict(files)))
        self.loop.call_soon(done, None if model_name != "bad" else NotFound("no model 'bad' in the repository"))

    def unload(self, model_name: str, done: Any) -> None:
        self.loaded.append(("unload", model_name))
        self.loop.call_soon(done, None)


class Opened:
    """An instance with a blocking way to use it."""

    def __init__(self, backend: BackendFixture, instance: PythonInstance) -> None:
        self.backend = backend
        self.instance = instance
        self.finished = 0
        self.finished_events: queue.Queue[None] = queue.Queue()

    @property
    def pid(self) -> int:
        return self.backend.in_loop(lambda: self.instance._process.pid if self.instance._process else 0)

    def submit(self, *requests: Sequence[Tensor] | InferRequest) -> list[FakeWork]:
        works = [
            FakeWork(request if isinstance(request, InferRequest) else InferRequest("m", list(request)))
            for request in requests
        ]

        def finished() -> None:
            self.finished += 1
            self.finished_events.put(None)

        self.backend.in_loop(lambda: self.instance.execute(works, finished))
        return works

    def infer(self, *requests: Sequence[Tensor] | InferRequest) -> list[FakeWork]:
        works = self.submit(*requests)
        for work in works:
            assert work.over.wait(WAIT), "no answer"
        self.finished_events.get(timeout=WAIT)
        return works

    def one(self, *tensors: Tensor, outputs: Sequence[str] = (), **parameters: Any) -> FakeWork:
        wanted = [RequestedOutput(name) for name in outputs]
        return self.infer(InferRequest("m", tensors, "1", "id-1", wanted, parameters))[0]

    def close(self) -> None:
        if self in self.backend.opened:
            self.backend.opened.remove(self)
            self.instance.close()


class BackendFixture:
    """A loop in a thread of its own, so that the test is the loader thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = uvloop.new_event_loop()
        self.services = FakeServices(self.loop)
        self.backend = PythonBackend()
        self.opened: list[Opened] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def in_loop(self, function: Any) -> Any:
        result: Future[Any] = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self.loop.call_soon_threadsafe(call)
        return result.result(WAIT)

    def files(self, source: str, name: str = "m") -> ModelFiles:
        folder = self.folder / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(textwrap.dedent(source))
        return ModelFiles(self.folder / name, 1, folder)

    def open(self, source: str, name: str = "m", **config: Any) -> Opened:
        config.setdefault("outputs", (OutputSpec("OUT", None, None),))
        model = self.backend.load(ModelConfig(name, "python", **config), self.files(source, name), self.services)
        opened = Opened(self, model.open(Placement(f"{name}_0_cpu")))
        self.opened.append(opened)
        return opened

    def end(self) -> None:
        for opened in list(self.opened):
            opened.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def python_backend(folder: Path) -> Iterator[BackendFixture]:
    backend = BackendFixture(folder)
    try:
        yield backend
    finally:
        backend.end()


def tensor(name: str, array: Any, dtype: DType | None = None) -> Tensor:
    return Tensor.of(name, np.asarray(array)) if dtype is None else Tensor(name, dtype, array)


ECHO = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
                for r in requests
            ]
"""
