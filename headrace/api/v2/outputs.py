# SPDX-License-Identifier: Apache-2.0
"""Outputs that a client wants otherwise than as a tensor in the answer: as classes, or in memory that it shares.

The codecs mark a request that has such outputs (`requested`); the handlers then ask for a plan before the request is
computed, so that what cannot be done is refused early, and carry it out on the answer. Other requests pay nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.api.classification import top_classes
from headrace.api.shared_memory.regions import Placement, RegionReader, SharedMemory
from headrace.core.dtypes import BYTES
from headrace.core.errors import InvalidArgument
from headrace.core.messages import InferRequest, InferResponse, Parameters, RequestedOutput
from headrace.core.tensors import Buffer, Tensor
from headrace.engine.dataplane import DataPlane

REGION = "shared_memory_region"
_OFFSET = "shared_memory_offset"
_SIZE = "shared_memory_byte_size"
_CLASSES = "classification"


class SpecialOutputs(list[RequestedOutput]):
    """Requested outputs of which one is special."""


def requested(outputs: list[RequestedOutput]) -> list[RequestedOutput]:
    """The same, marked where it needs a plan."""
    for output in outputs:
        parameters = output.parameters
        if parameters and (_CLASSES in parameters or REGION in parameters):
            return SpecialOutputs(outputs)
    return outputs


class OutputPlanner:
    """Makes plans."""

    def __init__(self, plane: DataPlane, memory: SharedMemory) -> None:
        self._plane = plane
        self._memory = memory

    def plan(self, request: InferRequest) -> OutputPlan:
        """What is to be done with the answer; raises for what cannot be done."""
        plan = OutputPlan(self._plane)
        for output in request.outputs:
            parameters = output.parameters
            if _CLASSES in parameters:
                plan.classes[output.name] = _count(output.name, parameters)
                if REGION in parameters:
                    raise InvalidArgument(
                        f"shared memory can't be set in 'shared_memory_region' for output '{output.name[:256]}' that is "
                        "classified: ask for one of the two"
                    )
            elif REGION in parameters:
                place = self._memory.placement(*region_of(f"output '{output.name[:256]}'", parameters))
                plan.placed[output.name] = place
        return plan


class OutputPlan:
    """For one request."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self.classes: dict[str, int] = {}
        self.placed: dict[str, Placement] = {}

    def carried_out(self, response: InferResponse) -> InferResponse:
        """The answer with its classes in place of scores. What goes to shared memory is written there."""
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
        return classified(tensor, count, labels, batched=batched)


def classified(tensor: Tensor, count: int, labels: Any, *, batched: bool) -> Tensor:
    """The largest values as Triton writes them: `value:index`, and `:label` where there is one."""
    rows = top_classes(tensor, count, labels, batched=batched)
    scores = [score for row in rows for score in row]
    array = np.empty(len(scores), object)
    for place, (value, index, label) in enumerate(scores):
        text = f"{value:f}:{index}" if isinstance(value, float) else f"{value}:{index}"
        array[place] = (f"{text}:{label}" if label else text).encode()
    width = len(rows[0]) if rows else 0
    return Tensor(tensor.name, BYTES, array.reshape((len(rows), width) if batched else (width,)))


def region_of(what: str, parameters: Mapping[str, Any]) -> tuple[str, int, int]:
    """Region, offset and size in the parameters of an input or output."""
    name = parameters[REGION]
    if not isinstance(name, str):
        raise InvalidArgument(f"the '{REGION}' of {what} must be a string")
    if _SIZE not in parameters:
        raise InvalidArgument(f"{what} has '{REGION}' and needs '{_SIZE}', too")
    return name, _whole(what, _OFFSET, parameters.get(_OFFSET, 0)), _whole(what, _SIZE, parameters[_SIZE])


def read_input(reader: RegionReader, name: str, parameters: Mapping[str, Any]) -> Buffer:
    """The bytes of an input that lies in shared memory."""
    return reader.read(*region_of(f"input '{name}'", parameters))


def placed_parameters(place: Placement) -> Parameters:
    """What the answer says of an output that is in shared memory."""
    return {REGION: place.region_name, _OFFSET: place.offset, _SIZE: place.byte_size}


def _count(name: str, parameters: Parameters) -> int:
    count = parameters[_CLASSES]
    if type(count) is not int or count <= 0:
        raise InvalidArgument(
            f"the 'classification' of output '{name[:256]}' must be the number of classes to return, 1 or more"
        )
    return count


def _whole(what: str, name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"the '{name}' of {what} must be a whole number of 0 or more")
    return value
