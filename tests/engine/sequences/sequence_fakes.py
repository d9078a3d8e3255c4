# SPDX-License-Identifier: Apache-2.0
"""Runners and instances under a test's control, and a caller that sends requests of sequences."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from headrace.backends.contract import Placement
from headrace.core.dtypes import FP32, INT32, UINT64
from headrace.core.errors import HeadraceError
from headrace.core.requests import InferRequest, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import BatchConcatenator
from headrace.engine.execution.runners import ComputeRunner
from headrace.engine.scheduling.dynamic_batcher import FixedDelay
from headrace.engine.scheduling.pending_request import BatchLog, PendingRequest, PendingStream
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.scheduling.scheduler import ExecutionPlacement
from headrace.engine.sequences.implicit_state import StatefulConcatenator
from headrace.engine.sequences.scheduler import SequenceScheduler
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import ControlInput, InputSpec, ModelConfig, OutputSpec, SequenceBatching

START = ControlInput("START", "start", INT32)
END = ControlInput("END", "end", INT32)
READY = ControlInput("READY", "ready", INT32)
CORRID = ControlInput("CORRID", "corrid", UINT64)
ALL_CONTROLS = (START, END, READY, CORRID)


def model(sequences: SequenceBatching, max_batch_size: int = 4, dims: tuple[int, ...] = (1,)) -> ModelConfig:
    return ModelConfig(
        "memory",
        "none",
        max_batch_size=max_batch_size,
        inputs=(InputSpec("X", FP32, dims),),
        outputs=(OutputSpec("Y", FP32, dims),),
        scheduling=sequences,
    )


class Owner:
    """Counts what is settled."""

    name = "memory"
    version_text = "1"
    tracks_requests = True
    recorder = None

    def __init__(self) -> None:
        self.settled = 0

    def settle(self, pending: PendingRequest, outputs: object) -> None:
        self.settled += 1


class HeldRunner:
    """Keeps every batch until the test answers it."""

    resources = ()
    priority = 0
    device = "cpu0"

    def __init__(self, name: str = "held") -> None:
        self.name = name
        self.batches: list[list[PendingRequest]] = []
        """All that it was given."""
        self._held: list[tuple[list[PendingRequest], Any]] = []

    def run(self, batch: Any, free: Any) -> None:
        self.batches.append(list(batch))
        self._held.append((list(batch), free))

    def values(self) -> list[list[float]]:
        """The inputs of all batches, fillers among them."""
        return [[_value(pending, "X") for pending in batch] for batch in self.batches]

    def control(self, name: str, batch: int = -1) -> list[Any]:
        return [_value(pending, name) for pending in self.batches[batch]]

    def answer(self, error: HeadraceError | None = None) -> None:
        """Answer the oldest batch: each input is its own output."""
        batch, free = self._held.pop(0)
        free(self)
        for pending in batch:
            pending.reply(error or [Tensor("Y", FP32, pending.request.inputs[0].array)])


def _value(pending: PendingRequest, name: str) -> Any:
    return next(tensor.array for tensor in pending.request.inputs if tensor.name == name).reshape(-1)[0].item()


class Caller:
    """Sends requests to a scheduler as a version would."""

    def __init__(self, scheduler: SequenceScheduler, max_batch_size: int = 4) -> None:
        self.scheduler = scheduler
        self.owner = Owner()
        self._batched = max_batch_size > 0
        self.answers: list[tuple[int | str, Any]] = []
        """In the order they came."""

    def send(
        self,
        id: Any,
        value: Any,
        flags: str = "",
        *,
        outputs: tuple[str, ...] = (),
        stream: bool = False,
        timeout: int = 0,
    ) -> tuple[PendingRequest, asyncio.Future[Any]]:
        """`flags` has an "S" for START and an "E" for END. `timeout` is in microseconds. The future gets the answer."""
        array = np.atleast_1d(np.asarray(value, np.float32))
        tensor = Tensor("X", FP32, array[np.newaxis] if self._batched else array)
        request = InferRequest(
            "memory",
            [tensor],
            outputs=[RequestedOutput(name) for name in outputs],
            parameters={
                "sequence_id": id,
                "sequence_start": "S" in flags,
                "sequence_end": "E" in flags,
                "timeout": timeout,
            },
        )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def done(result: Any, final: bool = True) -> None:
            shown = result if isinstance(result, BaseException) else result.outputs[0].array.reshape(-1)[0].item()
            self.answers.append((id, shown))
            if final and not future.done():
                future.set_result(shown if isinstance(result, BaseException) else result)

        kind: Any = PendingStream if stream else PendingRequest
        pending = kind(self.owner, request, 1, tensor.array.shape, done, round(loop.time() * 1e9))
        self.scheduler.add(pending)
        return pending, future

    async def ask(self, id: Any, value: Any, flags: str = "", **options: Any) -> Any:
        """Send and wait; returns the response's first value, or raises its error."""
        result = await asyncio.wait_for(self.send(id, value, flags, **options)[1], 100)
        if isinstance(result, BaseException):
            raise result
        return result.outputs[0].array.reshape(-1)[0].item()


async def turns(count: int = 3) -> None:
    """Let the loop do what is due now."""
    for _ in range(count):
        await asyncio.sleep(0)


def scheduler_with_held_runners(
    sequences: SequenceBatching, *, runners: int = 1, max_batch_size: int = 4, log: BatchLog | None = None
) -> tuple[Caller, list[HeldRunner]]:
    """A scheduler with runners that wait for the test."""
    fakes = [HeldRunner(f"held{index}") for index in range(runners)]
    config = model(sequences, max_batch_size)
    scheduler = SequenceScheduler(config, sequences, fakes, log or BatchLog(), limiter=RateLimiter())
    return Caller(scheduler, max_batch_size), fakes


def scheduler_with_compute_runners(
    sequences: SequenceBatching,
    instances: list[Any],
    *,
    config: ModelConfig | None = None,
    runs: Any = "thread",
    initial_states: Any = None,
) -> tuple[Caller, list[ComputeRunner]]:
    """A scheduler with real runners."""
    config = config or model(sequences)
    concatenator = StatefulConcatenator(config, sequences) if sequences.states else BatchConcatenator(config)
    statistics = VersionStatistics()
    runners = [
        ComputeRunner(
            instance,
            Placement(f"i{index}"),
            concatenator,
            statistics,
            FixedDelay(0),
            ExecutionPlacement(runs),
            retry_individually=False,
        )
        for index, instance in enumerate(instances)
    ]
    scheduler = SequenceScheduler(
        config, sequences, runners, statistics.log, limiter=RateLimiter(), initial_states=initial_states
    )
    return Caller(scheduler, config.max_batch_size), runners
