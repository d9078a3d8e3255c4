# SPDX-License-Identifier: Apache-2.0
"""Tensor models and embedding models, and how tensors go through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.core.dtypes import BF16, BYTES, FP32, bf16_to_float32
from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.model_kinds.contract import (
    Chat,
    ChatAnswer,
    Parameter,
    chat_unsupported,
    ignored,
    read_parameters,
)
from headrace.jobs.microservice.model_kinds.image_transforms import Array
from headrace.models.config.types import ModelConfig

_MAX_DEPTH = 16

_MAX_CONCURRENT = 8
"""Concurrent engine requests per caller: enough for a batch, too few to starve others."""


class TensorsKind:
    """Any other model: {"inputs": {name: nested lists}} to {"outputs": {name: nested lists}}, with the batch dimension."""

    model_type = "tensors"
    parameters: tuple[Parameter, ...] = (Parameter("inputs", "object"), *ignored("conv_mode", "mode", "model"))

    def __init__(self, plane: DataPlane, config: ModelConfig) -> None:
        if config.decoupled:
            raise Unimplemented(
                f"model '{config.name}' is decoupled and returns no text: serve it with `headrace serve`, which streams"
            )
        self._plane = plane
        self._model = config.name
        self._types = {spec.name: spec.dtype or FP32 for spec in config.inputs}

    async def infer(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Run an inference request."""
        inputs = read_parameters(self.parameters, fields)["inputs"]
        names = ", ".join(self._types)
        if not inputs:
            raise InvalidArgument(f"'inputs' is required: an object with {names}, each nested lists of values")
        tensors = []
        for name, values in inputs.items():
            if name not in self._types:
                raise InvalidArgument(f"'inputs' has {name[:64]!a}, and the model takes {names}")
            tensors.append(self._tensor(name, values))
        outputs = await compute(self._plane, self._model, tensors)
        return {"response": "", "outputs": {name: to_json(array) for name, array in outputs.items()}}

    async def chat(self, chat: Chat) -> ChatAnswer:
        """Reject chats."""
        raise chat_unsupported("computes tensors")

    async def close(self) -> None:
        """Do nothing."""

    def _tensor(self, name: str, values: Any) -> Tensor:
        shape: list[int] = []
        level = values
        while isinstance(level, list):
            shape.append(len(level))
            level = level[0] if level else None
            if len(shape) > _MAX_DEPTH:
                raise InvalidArgument(f"'inputs.{name}' is nested too deeply: at most {_MAX_DEPTH} levels")
        tensor = tensor_from_values(name, self._types[name], shape or [1], values)
        return Tensor(name, tensor.dtype, np.ascontiguousarray(tensor.array))


class EmbeddingKind:
    """Texts to vectors. Every text is one request; the engine batches them."""

    model_type = "embedding"
    parameters: tuple[Parameter, ...] = (
        Parameter("input", "texts", aliases=("text", "texts", "prompt")),
        *ignored("conv_mode", "mode", "model"),
    )

    def __init__(self, plane: DataPlane, model: str, *, batched: bool) -> None:
        self._plane = plane
        self._model = model
        self._shape = (1, 1) if batched else (1,)

    async def infer(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Run an inference request."""
        texts = read_parameters(self.parameters, fields)["input"]
        if not texts or not all(texts):
            raise InvalidArgument(
                "'input' (or 'text') is required: give a string or a list of strings, none of them empty"
            )
        responses = await compute_all(self._plane, self._model, [[self._tensor(text)] for text in texts])
        vectors = [np.asarray(response[EMBEDDING], np.float32).ravel() for response in responses]
        return {
            "response": f"{len(vectors)} embeddings of {vectors[0].size} numbers",
            "embeddings": [vector.tolist() for vector in vectors],
            "dimensions": int(vectors[0].size),
            "total_texts": len(vectors),
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """Reject chats."""
        raise chat_unsupported("embeds texts")

    async def close(self) -> None:
        """Do nothing."""

    def _tensor(self, text: str) -> Tensor:
        array = np.empty(1, object)
        array[0] = text.encode(errors="replace")
        return Tensor(TEXT_INPUT, BYTES, array.reshape(self._shape))


async def compute(plane: DataPlane, model: str, inputs: Sequence[Tensor]) -> Mapping[str, Array]:
    """Run one request; return the outputs by name, BF16 as FP32. Cancelling the caller cancels the request."""
    future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def done(result: InferResponse | BaseException | None) -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        elif result is not None:
            future.set_result(result)

    pending = plane.infer(InferRequest(model, inputs), done)
    try:
        response = await future
    except asyncio.CancelledError:
        pending.cancel()
        raise
    return {
        tensor.name: bf16_to_float32(tensor.array) if tensor.dtype is BF16 else tensor.array
        for tensor in response.outputs
    }


async def compute_all(plane: DataPlane, model: str, requests: Sequence[Sequence[Tensor]]) -> list[Mapping[str, Array]]:
    """Run several requests concurrently, so that the engine can batch them; the first failure fails all."""
    limit = asyncio.Semaphore(_MAX_CONCURRENT)

    async def run(inputs: Sequence[Tensor]) -> Mapping[str, Array]:
        async with limit:
            return await compute(plane, model, inputs)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(inputs)) for inputs in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def rounded(value: float, digits: int = 6) -> float:
    """Round a number for JSON; NaN and infinities become 0."""
    return round(float(value), digits) if np.isfinite(value) else 0.0


def to_json(array: Array) -> Any:
    """Return an array as JSON values; bytes are decoded."""
    if array.dtype == object:
        flat = [item.decode(errors="replace") if isinstance(item, bytes) else item for item in array.ravel()]
        return np.asarray(flat, object).reshape(array.shape).tolist()
    return array.tolist()
