# SPDX-License-Identifier: Apache-2.0
"""Arrays through the engine: a request as something to wait for. Called by the kinds that compute tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.core.dtypes import BF16, bf16_to_float32
from headrace.core.messages import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.vision.preprocessing import Array

_AT_ONCE = 8
"""Requests of one caller that wait in the engine at the same time: enough for a batch, too few to crowd others out."""


async def compute(plane: DataPlane, model: str, inputs: Sequence[Tensor]) -> Mapping[str, Array]:
    """The outputs by name, BF16 as FP32. Cancelling the caller's task gives the request up in the engine too."""
    answered: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def done(result: InferResponse | BaseException | None) -> None:
        if answered.done():
            return
        if isinstance(result, BaseException):
            answered.set_exception(result)
        elif result is not None:
            answered.set_result(result)

    pending = plane.infer(InferRequest(model, inputs), done)
    try:
        response = await answered
    except asyncio.CancelledError:
        pending.cancel()
        raise
    return {
        tensor.name: bf16_to_float32(tensor.array) if tensor.dtype is BF16 else tensor.array
        for tensor in response.outputs
    }


async def compute_all(plane: DataPlane, model: str, requests: Sequence[Sequence[Tensor]]) -> list[Mapping[str, Array]]:
    """Several, side by side, so that the engine can batch them; the first failure is that of all."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(inputs: Sequence[Tensor]) -> Mapping[str, Array]:
        async with room:
            return await compute(plane, model, inputs)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(inputs)) for inputs in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def rounded(value: float, digits: int = 6) -> float:
    """A number as an answer shows it; NaN and infinities, which JSON has not, as 0."""
    return round(float(value), digits) if np.isfinite(value) else 0.0


def plain(array: Array) -> Any:
    """An array as JSON: texts decoded."""
    if array.dtype == object:
        flat = [each.decode(errors="replace") if isinstance(each, bytes) else each for each in array.ravel()]
        return np.asarray(flat, object).reshape(array.shape).tolist()
    return array.tolist()
