# SPDX-License-Identifier: Apache-2.0
"""Instances of the backend `llm` with tiny models, and ways to ask them: the real thread, a real loop.

On a CPU; with HEADRACE_TEST_DEVICE=cuda, on the first GPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.llm.backend import LlmBackend, LlmModel
from headrace.backends.llm.instance import LlmInstance
from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError
from headrace.core.generation import Generation, GenerationRequest
from headrace.core.kept_memory import KeptMemory
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.requests import InferRequest
from headrace.core.telemetry.metrics import Registry
from headrace.models.adapters import AdapterCatalog
from headrace.models.config.types import ModelConfig, OutputSpec
from support import llm_models

ON_CUDA = os.environ.get("HEADRACE_TEST_DEVICE") == "cuda"
"""For a machine with a GPU, which none that runs all tests has."""
USUAL = {"threads": "1", **({"kv_cache_bytes": str(1 << 28)} if ON_CUDA else {})}
PLACE = Placement("tiny_0_gpu0", "gpu", 0) if ON_CUDA else Placement("tiny_0_cpu")


class Caller:
    """Who waits for the answers to one request. See `contract.Work`."""

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.cancelled = False
        self.late = 0
        """Answers after the last."""
        self.answers: list[tuple[str, dict[str, Any]]] = []
        self.error: HeadraceError | None = None
        self.ended = asyncio.Event()
        self.came = asyncio.Event()

    def reply(self, outputs: Any, *, final: bool = True, parameters: Any = None) -> None:
        self.late += self.ended.is_set()
        if isinstance(outputs, HeadraceError):
            self.error = outputs
            final = True
        elif outputs is not None:
            (tensor,) = outputs
            self.answers.append((b"\n".join(tensor.array.tolist()).decode(), dict(parameters)))
        self.came.set()
        if final:
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.answers)

    @property
    def last(self) -> dict[str, Any]:
        return self.answers[-1][1]

    def texts(self) -> dict[int, str]:
        """By choice."""
        document: dict[int, str] = {}
        for text, parameters in self.answers:
            document[parameters["index"]] = document.get(parameters["index"], "") + text
        return document


class Services:
    """Of the server's engine: only what is used."""

    def __init__(self, kv_transfer: KvTransferSettings | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.metrics = Registry(SystemClock())
        self.kv_transfer = kv_transfer or KvTransferSettings()
        self.nodes: Any = None
        self.kept_memory: KeptMemory | None = None
        self.adapters = AdapterCatalog()


class Served:
    """An instance, and ways to ask it."""

    def __init__(self, model: LlmModel, instance: LlmInstance, metrics: Registry) -> None:
        self.model = model
        self.instance = instance
        self.engine = instance.engine
        self.metrics = metrics
        self.callers: list[Caller] = []

    def begin(self, generation: Generation | InferRequest) -> Caller:
        request = generation if isinstance(generation, InferRequest) else GenerationRequest("tiny", generation)
        caller = Caller(request)
        self.callers.append(caller)
        self.instance.execute([caller], lambda: None)
        return caller

    async def ask(self, generation: Generation | InferRequest) -> Caller:
        caller = self.begin(generation)
        await asyncio.wait_for(caller.ended.wait(), 60)
        if caller.error is not None:
            raise caller.error
        return caller

    async def quiet(self) -> None:
        """Until the engine has nothing to do."""
        while self.engine._requests:
            await asyncio.sleep(0.005)

    def value(self, name: str) -> float:
        (family,) = (family for family in self.metrics.families if family.name == name)
        return sum(getattr(series, "value", sum(getattr(series, "counts", ()))) for _, series in family.collect())


class AsyncLauncher:
    """Makes a runner one that launches before it has read: it keeps the last tokens itself, as a GPU does."""

    def __init__(self, runner: Any) -> None:
        self.launch = runner.launch
        self.last: dict[int, int] = {}
        self.unknown = 0
        self.fails_at = 0
        """Reading the step with this number fails."""
        self.steps = 0
        runner.launch, runner.async_scheduling = self, True

    def __call__(self, chunks: Any, *, greedy: bool, sample: Any = None) -> Any:
        self.steps += 1
        added = [chunk.sequence for chunk in chunks if not chunk.known]
        self.unknown += len(added)
        for sequence in added:
            sequence.tokens.append(self.last[sequence.batch_index])
        step = self.launch(chunks, greedy=greedy, sample=sample)
        for sequence in added:
            sequence.tokens.pop()
        sampled = [chunk for chunk in chunks if chunk.samples]
        for chunk, token in zip(sampled, step.tokens(), strict=True):
            self.last[chunk.sequence.batch_index] = token
        return Unreadable() if self.steps == self.fails_at else step


class Unreadable:
    def tokens(self) -> list[int]:
        raise ValueError("secret words")


@asynccontextmanager
async def served(
    folder: Path | None = None, kv_transfer: KvTransferSettings | None = None, nodes: Any = None, **parameters: str
) -> AsyncIterator[Served]:
    with TemporaryDirectory() as place:
        version = folder or llm_models.tiny_llama(Path(place) / "tiny" / "1")
        services = Services(kv_transfer)
        services.nodes = nodes
        config = ModelConfig(
            "tiny",
            "llm",
            outputs=(OutputSpec("text_output", None, None),),
            decoupled=True,
            parameters={**USUAL, **parameters},
        )
        model = LlmBackend().load(config, ModelFiles(version.parent, 1, version), services)  # type: ignore[arg-type]
        instance = await asyncio.to_thread(model.open, PLACE)
        assert isinstance(instance, LlmInstance)
        assert isinstance(model, LlmModel)
        tiny = Served(model, instance, services.metrics)
        try:
            yield tiny
        finally:
            await asyncio.to_thread(instance.close)
            model.close()
        await asyncio.sleep(0)  # the last answers are on their way to the loop
        assert all(caller.ended.is_set() and not caller.late for caller in tiny.callers)


def runs(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine."""

    def ran() -> None:
        asyncio.run(test())

    ran.__name__, ran.__doc__ = test.__name__, test.__doc__
    return ran
