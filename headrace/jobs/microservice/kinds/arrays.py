# SPDX-License-Identifier: Apache-2.0
"""Every other model that the engine serves: numbers and texts in by the names of its inputs, the same out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.kinds.computing import compute, plain
from headrace.jobs.microservice.kinds.contract import Chat, ChatAnswer
from headrace.jobs.microservice.kinds.generating import refused
from headrace.jobs.microservice.kinds.parameters import Parameter, ignored, read_parameters
from headrace.models.config.types import ModelConfig

_DEEPEST = 16


class ArraysKind:
    """{"inputs": {name: nested lists}} to {"outputs": {name: nested lists}}. With a batch dimension, where there is one."""

    model_type = "tensors"
    parameters: tuple[Parameter, ...] = (Parameter("inputs", "object"), *ignored("conv_mode", "mode", "model"))

    def __init__(self, plane: DataPlane, config: ModelConfig) -> None:
        if config.decoupled:
            raise Unimplemented(
                f"model '{config.name}' is decoupled and gives no text: serve it with `headrace serve`, which streams"
            )
        self._plane = plane
        self._model = config.name
        self._types = {spec.name: spec.dtype or FP32 for spec in config.inputs}

    async def infer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Kind.infer`."""
        inputs = read_parameters(self.parameters, given)["inputs"]
        names = ", ".join(self._types)
        if not inputs:
            raise InvalidArgument(f"'inputs' is required: an object with {names}, each nested lists of values")
        tensors = []
        for name, values in inputs.items():
            if name not in self._types:
                raise InvalidArgument(f"'inputs' has {name[:64]!a}, and the model takes {names}")
            tensors.append(self._tensor(name, values))
        outputs = await compute(self._plane, self._model, tensors)
        return {"response": "", "outputs": {name: plain(array) for name, array in outputs.items()}}

    async def chat(self, chat: Chat) -> ChatAnswer:
        """See `Kind.chat`."""
        raise refused("computes tensors")

    async def close(self) -> None:
        """See `Kind.close`."""

    def _tensor(self, name: str, values: Any) -> Tensor:
        shape: list[int] = []
        level = values
        while isinstance(level, list):
            shape.append(len(level))
            level = level[0] if level else None
            if len(shape) > _DEEPEST:
                raise InvalidArgument(f"'inputs.{name}' is nested too deeply: at most {_DEEPEST} lists in each other")
        tensor = tensor_from_values(name, self._types[name], shape or [1], values)
        return Tensor(name, tensor.dtype, np.ascontiguousarray(tensor.array))
