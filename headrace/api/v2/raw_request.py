# SPDX-License-Identifier: Apache-2.0
"""Raw requests: a body that is nothing but the one tensor of a model with one input.

Called by `json_codec` for `Inference-Header-Content-Length: 0`. Type and shape are the model's; of a size that varies,
one may be worked out from the number of bytes. The texts are Triton's.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.core.dtypes import BYTES
from headrace.core.errors import InvalidArgument
from headrace.core.messages import InferRequest
from headrace.core.tensors import Buffer, Tensor, tensor_from_buffer
from headrace.engine.dataplane import DataPlane

_ALL_BINARY = {"binary_data_output": True}


class RawRequests:
    """Decodes raw requests with what the data plane knows of their model."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def decode(self, model_name: str, model_version: str, body: Buffer) -> InferRequest:
        """The request; its answer is all binary."""
        config = self._plane.config(model_name, model_version)
        if len(config.inputs) != 1:
            raise InvalidArgument(
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)} inputs in "
                f"'{model_name}' model configuration"
            )
        (spec,) = config.inputs
        if spec.dtype is None or spec.dims is None:
            raise InvalidArgument(
                f"model '{model_name}' takes any type and shape: send a request that says which it is"
            )
        batch = (1,) if config.max_batch_size else ()
        if spec.dtype is BYTES:
            if math.prod(spec.dims) not in (1, -1):
                raise InvalidArgument(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
            text = np.empty(1, object)
            text[0] = bytes(body)
            tensor = Tensor(spec.name, BYTES, text.reshape((*batch, *(abs(size) for size in spec.dims))))
        else:
            dims = _deduced(spec.name, spec.dims, len(body) // spec.dtype.item_bytes)
            tensor = tensor_from_buffer(spec.name, spec.dtype, (*batch, *dims), body)
        return InferRequest(model_name, [tensor], model_version, "", (), _ALL_BINARY)


def _deduced(name: str, dims: tuple[int, ...], elements: int) -> tuple[int, ...]:
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized "
            "dimension"
        )
    known = math.prod(size for size in dims if size != -1)
    return tuple(elements // max(known, 1) if size == -1 else size for size in dims)
