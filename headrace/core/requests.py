# SPDX-License-Identifier: Apache-2.0
"""Inference requests and responses, independent of any protocol.

The codecs of `api` decode protocol messages into requests and encode responses; the engine takes requests and returns
responses.
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
    """An output that the caller requested, with its own parameters."""

    __slots__ = ("name", "parameters")

    def __init__(self, name: str, parameters: Parameters = NO_PARAMETERS) -> None:
        self.name = name
        self.parameters = parameters


class InferRequest:
    """An inference request. `model_version` is "" for the newest; no `outputs` means all of them."""

    __slots__ = ("id", "inputs", "model_name", "model_version", "outputs", "parameters")

    is_ensemble_step = False
    """Whether the engine created it for a step of an ensemble: its tensors may be in device memory."""
    keep_on_device = False
    """Whether its outputs may stay in device memory."""
    sticky_key = ""
    """In a traffic split, requests with the same key go to the same version; "" for any version."""
    bypass_cache = False
    """Whether a cached response is not acceptable."""
    is_background = False
    """Whether all other requests of its model go first."""

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
    """A request with hints for routing and caching: `sticky_key` and `bypass_cache`."""

    __slots__ = ("bypass_cache", "sticky_key")

    def __init__(
        self,
        model_name: str,
        inputs: Sequence[Tensor],
        model_version: str = "",
        *,
        sticky_key: str = "",
        bypass_cache: bool = False,
    ) -> None:
        super().__init__(model_name, inputs, model_version)
        self.sticky_key = sticky_key
        self.bypass_cache = bypass_cache


class BackgroundRequest(InferRequest):
    """A request that waits while its model has others, such as a line of a batch."""

    __slots__ = ()

    is_background = True


class StepRequest(InferRequest):
    """A request for a step of an ensemble. Arrays on a device are those of `backends.contract.DeviceComputeInstance`."""

    __slots__ = ("keep_on_device",)

    is_ensemble_step = True

    def on_host(self) -> InferRequest:
        """Return the same request with all inputs copied to host memory."""
        inputs = [Tensor(tensor.name, tensor.dtype, np.asarray(tensor.array)) for tensor in self.inputs]
        return InferRequest(self.model_name, inputs, self.model_version, self.id, self.outputs, self.parameters)


class InferResponse:
    """The outputs of a request, and the version that computed them."""

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
