# SPDX-License-Identifier: Apache-2.0
"""Requests that differ from an earlier one in their numbers only.

A client writes the same request again and again: the same names, types, shapes and options, byte for byte, around other
numbers. Both codecs recognise those bytes instead of parsing them, and take the numbers from where they know them to be.
"""

from __future__ import annotations

import numpy as np

from headrace.core.dtypes import BYTES
from headrace.core.messages import InferRequest
from headrace.core.tensors import Buffer, Tensor

NAME_LENGTH = 1024
"""Characters in a tensor's name. It stands in error messages, which must not be as long as a request may be."""


class RequestLayout:
    """A request with one tensor of a fixed element size, without its numbers."""

    __slots__ = ("_dtype", "_known", "_name", "_shape", "size")

    def __init__(self, request: InferRequest, size: int) -> None:
        tensor = request.inputs[0]
        self._name = tensor.name
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        # Without its tensor: the first request's numbers are not kept alive for the sake of its shape.
        self._known = InferRequest(
            request.model_name, (), request.model_version, "", request.outputs, request.parameters
        )
        self.size = size
        """Bytes of the tensor."""

    def request(self, buffer: Buffer, offset: int = 0) -> InferRequest:
        """The same request with the numbers that begin at `offset`; the caller has checked that `size` bytes do."""
        known = self._known
        array = np.frombuffer(buffer, self._dtype.numpy, offset=offset).reshape(self._shape)
        return InferRequest(
            known.model_name,
            (Tensor(self._name, self._dtype, array),),
            known.model_version,
            "",
            known.outputs,
            known.parameters,
        )


def can_be_learnt(request: InferRequest) -> bool:
    """Whether a request has the simple form that a layout describes. An id makes each request different."""
    return len(request.inputs) == 1 and not request.id and request.inputs[0].dtype is not BYTES
