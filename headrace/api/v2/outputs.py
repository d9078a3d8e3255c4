# SPDX-License-Identifier: Apache-2.0
"""Special outputs: classifications, and outputs in shared memory.

The codecs mark a request that has such outputs (`mark_special`). The handlers then make a plan before the request is
computed, so that an impossible request fails early, and apply it to the response. Other requests cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.api.classification import top_classes
from headrace.api.shared_memory import Placement, RegionReader, SharedMemory
from headrace.core.dtypes import BYTES
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest, InferResponse, Parameters, RequestedOutput
from headrace.core.tensors import Buffer, Tensor
from headrace.engine.dataplane import DataPlane

REGION = "shared_memory_region"
_OFFSET = "shared_memory_offset"
_SIZE = "shared_memory_byte_size"
_CLASSES = "classification"


class SpecialOutputs(list[RequestedOutput]):
    """Requested outputs of which at least one is special."""


def mark_special(outputs: list[RequestedOutput]) -> list[RequestedOutput]:
    """Return the outputs, as `SpecialOutputs` if they need a plan. Raise if one is requested twice."""
    if len(outputs) > 1 and len({output.name for output in outputs}) < len(outputs):
        names = [output.name for output in outputs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f"output '{twice[:256]}' already exists in request: request it once")
    for output in outputs:
        parameters = output.parameters
        if parameters and (_CLASSES in parameters or REGION in parameters):
            return SpecialOutputs(outputs)
    return outputs


class OutputPlanner:
    """Makes plans for requests with special outputs."""

    def __init__(self, plane: DataPlane, memory: SharedMemory) -> None:
        self._plane = plane
        self._memory = memory

    def plan(self, request: InferRequest) -> OutputPlan:
        """Return the plan for a request; raise if it is impossible."""
        plan = OutputPlan(self._plane)
        for output in request.outputs:
            parameters = output.parameters
            if _CLASSES in parameters:
                plan.classes[output.name] = _count(output.name, parameters)
                if REGION in parameters:
                    raise InvalidArgument(
                        f"shared memory can't be set in 'shared_memory_region' for output '{output.name[:256]}' that is "
                        "classified: request one of the two"
                    )
            elif REGION in parameters:
                place = self._memory.placement(*region_reference(f"output '{output.name[:256]}'", parameters))
                plan.placed[output.name] = place
        return plan


class OutputPlan:
    """What to do with the outputs of one request."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self.classes: dict[str, int] = {}
        self.placed: dict[str, Placement] = {}

    def apply(self, response: InferResponse) -> InferResponse:
        """Return the response with classes instead of scores, and write outputs to shared memory."""
        outputs = [self._output(response, tensor) for tensor in response.outputs]
        return InferResponse(response.model_name, response.model_version, outputs, response.id, response.parameters)

    def _output(self, response: InferResponse, tensor: Tensor) -> Tensor:
        place = self.placed.get(tensor.name)
        if place is not None:
            place.write(tensor.name, tensor.to_buffer())
            return tensor
        count = self.classes.get(tensor.name)
        if count is None:
            return tensor
        version = self._plane.find(response.model_name, response.model_version)
        labels = version.labels.get(tensor.name, ()) if version is not None else ()
        batched = version is not None and version.config.max_batch_size > 0
        return classify(tensor, count, labels, batched=batched)


def classify(tensor: Tensor, count: int, labels: Any, *, batched: bool) -> Tensor:
    """Return the largest values in Triton's form: `value:index`, and `:label` if there is one."""
    rows = top_classes(tensor, count, labels, batched=batched)
    scores = [score for row in rows for score in row]
    array = np.empty(len(scores), object)
    for position, (value, index, label) in enumerate(scores):
        text = f"{value:f}:{index}" if isinstance(value, float) else f"{value}:{index}"
        array[position] = (f"{text}:{label}" if label else text).encode()
    width = len(rows[0]) if rows else 0
    return Tensor(tensor.name, BYTES, array.reshape((len(rows), width) if batched else (width,)))


def region_reference(what: str, parameters: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return region, offset and size from the parameters of an input or output."""
    name = parameters[REGION]
    if not isinstance(name, str):
        raise InvalidArgument(f"the '{REGION}' of {what} must be a string")
    if _SIZE not in parameters:
        raise InvalidArgument(f"{what} has '{REGION}' and also needs '{_SIZE}'")
    return name, _integer(what, _OFFSET, parameters.get(_OFFSET, 0)), _integer(what, _SIZE, parameters[_SIZE])


def read_input(reader: RegionReader, name: str, parameters: Mapping[str, Any]) -> Buffer:
    """Return the bytes of an input in shared memory."""
    return reader.read(*region_reference(f"input '{name}'", parameters))


def placement_parameters(place: Placement) -> Parameters:
    """Return the response parameters of an output in shared memory."""
    return {REGION: place.region_name, _OFFSET: place.offset, _SIZE: place.byte_size}


def _count(name: str, parameters: Parameters) -> int:
    count = parameters[_CLASSES]
    if type(count) is not int or count <= 0:
        raise InvalidArgument(
            f"the 'classification' of output '{name[:256]}' must be the number of classes to return, 1 or more"
        )
    return count


def _integer(what: str, name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"the '{name}' of {what} must be an integer of 0 or more")
    return value
