# SPDX-License-Identifier: Apache-2.0
"""Warm-up: the requests that a configuration wants computed before the model is ready. Called while a version is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

import numpy as np

from headrace.core.dtypes import BF16, BOOL, BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.messages import InferRequest, InferResponse
from headrace.core.tensors import Tensor, tensor_from_buffer
from headrace.engine.scheduling.pending import Pending, StreamPending
from headrace.engine.scheduling.scheduler import Runner
from headrace.engine.scheduling.watching import Watch
from headrace.models.config.types import ModelConfig, Warmup, WarmupInput, fits


class _Nobody:
    """The owner of a warm-up request: it is not counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version_text = ""
        self.follows = True
        self.watch: Watch | None = None

    def settle(self, pending: Pending, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """Nothing to count."""


async def warm_up(runner: Runner, config: ModelConfig, warmup: Warmup, model_folder: Path) -> None:
    """Compute one warm-up request on one instance as often as it says; raises when the model fails on it."""
    inputs = await asyncio.to_thread(_inputs, config, warmup, model_folder)
    for _ in range(max(1, warmup.count)):
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(
            answer: InferResponse | BaseException | None, final: bool, told: asyncio.Future[None] = done
        ) -> None:
            if isinstance(answer, BaseException):
                told.set_exception(answer)
            elif final:
                told.set_result(None)

        rows = max(1, warmup.batch_size)
        request = InferRequest(config.name, inputs)
        pending = StreamPending(_Nobody(config.name), request, rows, None, answered, monotonic_ns())
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
            one = tensor_from_buffer(name, dtype, source.dims, path.read_bytes())
        except OSError as error:
            raise FailedPrecondition(f"{path}: the warm-up data cannot be read ({error.strerror})") from None
        except InvalidArgument as error:
            raise FailedPrecondition(f"{path}: the warm-up data is not right: {error.message}") from None
        return Tensor(name, dtype, np.stack([one.array] * rows) if rows else one.array)
    if dtype is BYTES:
        array = np.full(shape, b"", dtype=object)
    elif source.source == "zero":
        array = np.zeros(shape, dtype.numpy)
    else:
        # Numbers between 0 and 1, or small whole ones: in the range of every type, and of most models.
        generator = np.random.default_rng(0)
        whole = dtype is not BF16 and dtype.numpy.kind in "iu"
        array = (generator.integers(0, 100, shape) if whole else generator.random(shape)).astype(dtype.numpy)
        if dtype is BOOL:
            array = generator.random(shape) < 0.5
        elif dtype is BF16:
            array = np.zeros(shape, dtype.numpy)
    return Tensor(name, dtype, array)
