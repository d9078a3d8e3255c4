# SPDX-License-Identifier: Apache-2.0
"""Warm-up: compute the configured requests before a version is ready. The model loader calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

import numpy as np

from headrace.core.dtypes import BF16, BOOL, BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor, tensor_from_buffer
from headrace.engine.scheduling.pending_request import PendingRequest, PendingStream
from headrace.engine.scheduling.request_timeline import TimelineRecorder
from headrace.engine.scheduling.scheduler import Runner
from headrace.models.config.types import ModelConfig, Warmup, WarmupInput, fits


class _WarmupOwner:
    """The owner of warm-up requests: does not count them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version_text = ""
        self.tracks_requests = True
        self.recorder: TimelineRecorder | None = None

    def settle(self, pending: PendingRequest, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """Do nothing: warm-up requests are not counted."""


async def warm_up(runner: Runner, config: ModelConfig, warmup: Warmup, model_folder: Path) -> None:
    """Compute a warm-up request on an instance, `count` times; raise if the model fails."""
    inputs = await asyncio.to_thread(_inputs, config, warmup, model_folder)
    for _ in range(max(1, warmup.count)):
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(
            answer: InferResponse | BaseException | None, final: bool, done: asyncio.Future[None] = done
        ) -> None:
            if isinstance(answer, BaseException):
                done.set_exception(answer)
            elif final:
                done.set_result(None)

        rows = max(1, warmup.batch_size)
        request = InferRequest(config.name, inputs)
        pending = PendingStream(_WarmupOwner(config.name), request, rows, None, answered, monotonic_ns())
        freed = asyncio.Event()
        runner.run([pending], lambda _, freed=freed: freed.set())  # type: ignore[misc]
        try:
            await done
        except HeadraceError as error:
            raise FailedPrecondition(f"warm-up '{warmup.name}' failed: {error.message}") from None
        await freed.wait()


def _inputs(config: ModelConfig, warmup: Warmup, model_folder: Path) -> list[Tensor]:
    for spec in config.inputs:
        source = warmup.inputs.get(spec.name)
        if source is None or spec.dtype is None or spec.dims is None:
            continue
        if source.dtype is not spec.dtype or not fits(source.dims, spec.dims):
            raise FailedPrecondition(
                f"warm-up '{warmup.name}' gives input '{spec.name}' as {source.dtype.name} {list(source.dims)}, and model "
                f"'{config.name}' takes {spec.dtype.name} {list(spec.dims)}: correct the warm-up's data_type and dims"
            )
    return [
        _input(name, source, warmup.batch_size if config.max_batch_size else 0, model_folder)
        for name, source in warmup.inputs.items()
    ]


def _input(name: str, source: WarmupInput, rows: int, model_folder: Path) -> Tensor:
    shape = (rows, *source.dims) if rows else source.dims
    dtype = source.dtype
    if source.source == "file":
        path = model_folder / "warmup" / source.data_file
        try:
            row = tensor_from_buffer(name, dtype, source.dims, path.read_bytes())
        except OSError as error:
            raise FailedPrecondition(f"{path}: the warm-up data cannot be read ({error.strerror})") from None
        except InvalidArgument as error:
            raise FailedPrecondition(f"{path}: the warm-up data is invalid: {error.message}") from None
        return Tensor(name, dtype, np.stack([row.array] * rows) if rows else row.array)
    if dtype is BYTES:
        array = np.full(shape, b"", dtype=object)
    elif source.source == "zero":
        array = np.zeros(shape, dtype.numpy)
    else:
        # Numbers between 0 and 1, or small integers: in the range of every type and of most models.
        generator = np.random.default_rng(0)
        is_integer = dtype is not BF16 and dtype.numpy.kind in "iu"
        array = (generator.integers(0, 100, shape) if is_integer else generator.random(shape)).astype(dtype.numpy)
        if dtype is BOOL:
            array = generator.random(shape) < 0.5
        elif dtype is BF16:
            array = np.zeros(shape, dtype.numpy)
    return Tensor(name, dtype, array)
