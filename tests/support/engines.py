# SPDX-License-Identifier: Apache-2.0
"""Engines for tests: the built-in models, or plain functions as models, behind a real data plane.

plane = await builtin_plane()
plane = await plane_of([(config_of("double", max_batch_size=4), lambda inputs: {"OUTPUT0": inputs["INPUT0"] * 2})])
answer = await ask(plane, "double", INPUT0=array)
run_engine(main)                           # in virtual time: queue delays, time-outs and idle limits take no time

In place of a function there may be an object with `close`: an instance, used as it is; or with `open`: a model. For the
parts below the plane there are `pending_of`, a request that belongs to no version, and `Asked`, a caller that notes what it
is told.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.core.clock import SystemClock
from headrace.core.requests import InferRequest, InferResponse, RequestedOutput
from headrace.core.telemetry.metrics import Registry
from headrace.core.telemetry.progress import Reporter, silent
from headrace.core.tensors import Tensor
from headrace.engine import model_loader
from headrace.engine.cache import ResponseCache
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import EngineSettings, open_engine
from headrace.engine.model_loader import ModelLoader
from headrace.engine.repository.directory import Directory, ServedModel
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.services import ModelServices
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import (
    DynamicBatching,
    EnsembleScheduling,
    EnsembleStep,
    InputSpec,
    InstanceGroup,
    ModelConfig,
    OutputSpec,
)
from support.virtual_time import LoopClock, run_virtual

Compute = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class FunctionBackend:
    """A backend whose models are functions from arrays to arrays."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        return None

    def usable_gpus(self, present: int) -> int:
        return present

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> Any:
        function = self._functions[config.name]
        return function if hasattr(function, "open") else FunctionModel(function)


class FunctionModel:
    def __init__(self, function: Any) -> None:
        self._function = function

    def open(self, placement: Placement) -> Any:
        return self._function if hasattr(self._function, "close") else self

    def compute(self, inputs: Mapping[str, Any], requested: Collection[str]) -> Mapping[str, Any]:
        result: Mapping[str, Any] = self._function(inputs)
        return result

    def close(self) -> None:
        pass


def config_of(name: str, **more: Any) -> ModelConfig:
    """One input and one output of any type and shape, batches of up to 64, computed in the loop's thread."""
    settings: dict[str, Any] = {
        "max_batch_size": 64,
        "inputs": (InputSpec("INPUT0", None, None),),
        "outputs": (OutputSpec("OUTPUT0", None, None),),
        "instance_groups": (InstanceGroup(name, runs="inline"),),
        "scheduling": DynamicBatching(),
    }
    return ModelConfig(name, "function", **{**settings, **more})


def step(model: str, inputs: str, outputs: str, version: int = -1) -> EnsembleStep:
    """`inputs` and `outputs` as "theirs=ours theirs=ours"."""

    def mapped(text: str) -> dict[str, str]:
        return dict(pair.split("=") for pair in text.split())

    return EnsembleStep(model, version, mapped(inputs), mapped(outputs))


def ensemble(*steps: EnsembleStep, inputs: str = "IN", outputs: str = "OUT", most: int = 0, **more: Any) -> Any:
    config = config_of(
        "ensemble",
        inputs=tuple(InputSpec(name, None, None) for name in inputs.split()),
        outputs=tuple(OutputSpec(name, None, None) for name in outputs.split()),
        instance_groups=(),
        scheduling=EnsembleScheduling(steps, most),
        **more,
    )
    return config, None


async def plane_of(
    models: Sequence[tuple[ModelConfig, Any]], *, cache: ResponseCache | None = None, limiter: RateLimiter | None = None
) -> DataPlane:
    """A data plane over functions."""
    backend = FunctionBackend({config.name: function for config, function in models})
    services = ModelServices(Registry(SystemClock()))
    loader = ModelLoader(services, ThreadPoolExecutor(2), cache=cache, limiter=limiter or RateLimiter())
    directory = Directory()
    with patch.object(model_loader, "backend_named", lambda _: backend):
        for config, _ in models:
            files = ModelFiles(Path(), 1, Path())
            version = await loader.load(config, files, Reporter(silent, SystemClock(), config.name))
            directory.put(ServedModel(config.name), {1: version})
    services.plane = DataPlane(directory)
    return services.plane


def run_engine(main: Callable[[LoopClock], Coroutine[Any, Any, None]]) -> None:
    """Run a test of the engine in virtual time: its clock and that of the loop are the one that `main` is given.

    For models that compute in the loop's thread, or for runners of the test's own: time does not wait for other threads.
    """
    clock = LoopClock()
    with ExitStack() as patched:
        for name, module in list(sys.modules.items()):
            if name.startswith("headrace.engine.") and hasattr(module, "monotonic_ns"):
                patched.enter_context(patch.object(module, "monotonic_ns", lambda: round(clock.monotonic() * 1e9)))
        run_virtual(main(clock), clock)


async def builtin_plane() -> DataPlane:
    """The models that every Headrace carries."""
    engine = open_engine(EngineSettings())
    await engine.start()
    return engine.plane


async def ask(plane: DataPlane, model: str, *, request: dict[str, Any] | None = None, **arrays: Any) -> InferResponse:
    """Compute one request and wait for its answer; raises the error if that is what it is."""
    result = await submit(plane, model, request=request, **arrays).answer()
    if isinstance(result, BaseException):
        raise result
    return result


@asynccontextmanager
async def serving_plane(models: Sequence[tuple[ModelConfig, Any]], **more: Any) -> Any:
    """A data plane whose models are retired at the end, their threads with them."""
    plane = await plane_of(models, **more)
    try:
        yield plane
    finally:
        for version in plane.statistics():
            await version.retire(10)


def submit(plane: DataPlane, model: str, *, request: dict[str, Any] | None = None, **arrays: Any) -> RecordingCaller:
    """Begin one request."""
    caller = RecordingCaller()
    caller.pending = plane.infer(InferRequest(model, tensors_of(**arrays), **(request or {})), caller)
    return caller


async def answers(asked: Sequence[RecordingCaller]) -> list[InferResponse | BaseException]:
    """What each was told, in their order."""
    return list(await asyncio.gather(*(one.answer() for one in asked)))


def array_of(result: InferResponse | BaseException, name: str = "OUTPUT0") -> Any:
    """One output of an answer that must not be an error."""
    if isinstance(result, BaseException):
        raise result
    return next(output.array for output in result.outputs if output.name == name)


def counted(plane: DataPlane, model: str) -> VersionStatistics:
    """The accounts of a model's only version."""
    (version,) = plane.statistics(model)
    return version.statistics


def tensors_of(**arrays: Any) -> list[Tensor]:
    """Arrays as tensors of their own types; tensors as they are."""
    return [array if isinstance(array, Tensor) else Tensor.of(name, array) for name, array in arrays.items()]


class RecordingCaller:
    """A caller: notes every answer, and can be waited for."""

    pending: PendingRequest

    def __init__(self) -> None:
        self.received: list[Any] = []
        self._event = asyncio.Event()

    def __call__(self, result: InferResponse | BaseException) -> None:
        self.received.append(result)
        self._event.set()

    async def answer(self) -> InferResponse | BaseException:
        await asyncio.wait_for(self._event.wait(), 100)
        result: InferResponse | BaseException = self.received[0]
        return result


class Streamed:
    """A caller of a stream: notes (answer, is it the last), and can be waited for."""

    pending: PendingRequest

    def __init__(self, plane: DataPlane, model: str, **arrays: Any) -> None:
        self.received: list[tuple[Any, bool]] = []
        self._event = asyncio.Event()
        self.pending = plane.infer_stream(InferRequest(model, tensors_of(**arrays)), self)

    def __call__(self, result: InferResponse | BaseException | None, final: bool) -> None:
        self.received.append((result, final))
        if final:
            self._event.set()

    async def all(self) -> list[tuple[Any, bool]]:
        await asyncio.wait_for(self._event.wait(), 100)
        return self.received


class Recorder:
    """A model that notes the INPUT0 of each execution."""

    def __init__(self, compute: Callable[[Any], Any] = lambda rows: rows) -> None:
        self.received: list[Any] = []
        self._compute = compute

    def __call__(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        self.received.append(inputs["INPUT0"])
        return {"OUTPUT0": self._compute(inputs["INPUT0"])}

    @property
    def rows(self) -> list[int]:
        return [len(given) for given in self.received]


class Gate:
    """A model that computes when it is let: give its group `runs="thread"`."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self._entered = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        self.received.append(inputs["INPUT0"])
        self._entered.release()
        if not self._open.acquire(timeout=60):
            raise TimeoutError
        return {"OUTPUT0": inputs["INPUT0"]}

    async def entered(self, times: int = 1) -> None:
        """Wait until so many more executions have begun."""
        for _ in range(times):
            if not await asyncio.to_thread(self._entered.acquire, timeout=100):
                raise TimeoutError

    def let(self, times: int = 1) -> None:
        """Let so many executions end."""
        self._open.release(times)


class NullOwner:
    """An owner that counts nothing."""

    name = "m"
    version_text = "1"

    def settle(self, pending: PendingRequest, outputs: Sequence[Tensor] | BaseException | None) -> None:
        pass


def pending_of(
    rows: int = 1,
    key: Hashable = None,
    arrived_ns: int = 0,
    *,
    parameters: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    done: Any = None,
    **arrays: Any,
) -> PendingRequest:
    """A request that nobody waits for, unless `done` is given."""
    request = InferRequest(
        "m", tensors_of(**arrays), outputs=[RequestedOutput(name) for name in outputs], parameters=parameters or {}
    )
    return PendingRequest(NullOwner(), request, rows, key, done or (lambda result: None), arrived_ns)
