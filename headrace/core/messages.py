# SPDX-License-Identifier: Apache-2.0
"""A request for inference and its answer, in no protocol's words.

Made by the codecs of `api`, carried by the engine, read back by the codecs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from headrace.core.tensors import Tensor

ParameterValue = bool | int | float | str
Parameters = Mapping[str, ParameterValue]

NO_PARAMETERS: Parameters = MappingProxyType({})


class RequestedOutput:
    """An output the caller asked for, with its own parameters."""

    __slots__ = ("name", "parameters")

    def __init__(self, name: str, parameters: Parameters = NO_PARAMETERS) -> None:
        self.name = name
        self.parameters = parameters


class InferRequest:
    """What a caller wants computed. `model_version` is "" for the newest; no `outputs` means all of them."""

    __slots__ = ("id", "inputs", "model_name", "model_version", "outputs", "parameters")

    inside = False
    """Whether it was made inside the engine, for a step of an ensemble: then its tensors may lie on a device."""
    stays_on_device = False
    """Whether its answer may lie there too."""
    sticky_key = ""
    """Whom it is for, where versions of a model share its traffic: one key, one version. "" for nobody in particular."""
    fresh = False
    """Whether an answer that was kept will not do."""

    def __init__(
        self,
        model_name: str,
        inputs: Sequence[Tensor],
        model_version: str = "",
        id: str = "",
        outputs: Sequence[RequestedOutput] = (),
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters = parameters


class GuidedRequest(InferRequest):
    """A request that says more than what to compute: see `sticky_key` and `fresh`."""

    __slots__ = ("fresh", "sticky_key")

    def __init__(
        self,
        model_name: str,
        inputs: Sequence[Tensor],
        model_version: str = "",
        *,
        sticky_key: str = "",
        fresh: bool = False,
    ) -> None:
        super().__init__(model_name, inputs, model_version)
        self.sticky_key = sticky_key
        self.fresh = fresh


class StepRequest(InferRequest):
    """A step of an ensemble. Arrays on a device are those of `backends.contract.DeviceComputing`."""

    __slots__ = ("stays_on_device",)

    inside = True

    def on_host(self) -> InferRequest:
        """The same for models that compute elsewhere: what lies on a device is copied."""
        inputs = [Tensor(tensor.name, tensor.dtype, np.asarray(tensor.array)) for tensor in self.inputs]
        return InferRequest(self.model_name, inputs, self.model_version, self.id, self.outputs, self.parameters)


class InferResponse:
    """What was computed, and by which version."""

    __slots__ = ("id", "model_name", "model_version", "outputs", "parameters")

    def __init__(
        self,
        model_name: str,
        model_version: str,
        outputs: Sequence[Tensor],
        id: str = "",
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.outputs = outputs
        self.parameters = parameters
