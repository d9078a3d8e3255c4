# SPDX-License-Identifier: Apache-2.0
"""Numbers that come without a shape: binary messages of the WebSocket, and the floats of gRPC.

They are one prediction's only input, row by row, and are given the shape that its model has. The answer is the only output,
flat as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.api.predict.checks import Checker
from headrace.api.predict.known import KnownInput, KnownModel
from headrace.api.predict.reading import Question, Reader
from headrace.core.dtypes import BF16, BYTES, FP32, DType, bf16_to_float32, float32_to_bf16
from headrace.core.errors import InvalidArgument
from headrace.core.messages import InferResponse
from headrace.core.tensors import Tensor
from headrace.net.http.heads import RequestHead

_LABEL = "inputs"


class FlatReader:
    """Reads them."""

    def __init__(self, reader: Reader, checker: Checker) -> None:
        self._reader = reader
        self._checker = checker

    def raw(self, name: str, head: RequestHead, data: bytes) -> Question:
        """Little-endian numbers of the model's own type."""
        known, version = self._reader.find(name)
        only = _only(known)
        dtype = only.dtype or FP32
        if dtype is BYTES:
            raise InvalidArgument(f"model '{known.name}' takes strings: send them as JSON")
        if len(data) % dtype.item_bytes:
            raise InvalidArgument(
                f"{len(data)} bytes are no whole number of {dtype.name}, which have {dtype.item_bytes} each"
            )
        numbers = np.frombuffer(data, dtype.numpy)
        if dtype.numpy.kind == "f":
            self._checker.check_finite(numbers)
        elif dtype is BF16:
            self._checker.check_finite(bf16_to_float32(numbers))
        return self._question(known, version, only, dtype, numbers, head)

    def floats(self, name: str, wanted: str, head: RequestHead, numbers: npt.NDArray[np.float32]) -> Question:
        """Floats, whatever the model's type is."""
        known, version = self._reader.find(name, wanted)
        only = _only(known)
        self._checker.check_finite(numbers)
        dtype = only.dtype or FP32
        cast = numbers if dtype is FP32 else _cast(known.name, dtype, numbers)
        return self._question(known, version, only, dtype, cast, head)

    def _question(
        self, known: KnownModel, version: str, only: KnownInput, dtype: DType, numbers: Any, head: RequestHead
    ) -> Question:
        shape, added = only.counted_shape(_LABEL, len(numbers))
        if self._checker.bounds:
            self._checker.check_bounds(_LABEL, dtype, numbers)
        tensor = Tensor(only.name, dtype, numbers.reshape((1, *shape) if only.batched else shape))
        guide = self._reader.guide(known.name, head, {})
        return Question(known, version, guide, (tensor,), added)


def only_output(question: Question, answer: InferResponse) -> Tensor:
    """The output of a model that has one, of numbers."""
    if len(answer.outputs) != 1:
        names = ", ".join(f"'{tensor.name}'" for tensor in answer.outputs)
        raise InvalidArgument(f"model '{question.known.name}' has several outputs, {names}: ask over HTTP, in JSON")
    tensor = answer.outputs[0]
    if tensor.dtype is BYTES:
        raise InvalidArgument(f"model '{question.known.name}' answers with strings: ask over HTTP, in JSON")
    return tensor


def _only(known: KnownModel) -> KnownInput:
    if known.only is None:
        raise InvalidArgument(
            f"model '{known.name}' has several inputs, {known.input_names()}: send them by name, in JSON over HTTP"
        )
    return known.only


def _cast(model: str, dtype: DType, numbers: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    if dtype is BF16:
        return float32_to_bf16(numbers)
    kind = dtype.numpy.kind
    if kind not in "iuf":
        raise InvalidArgument(f"model '{model}' takes {dtype.name}, not numbers: ask over HTTP, in JSON")
    with np.errstate(all="ignore"):
        cast = numbers.astype(dtype.numpy)
    if kind != "f" and not np.array_equal(cast.astype(np.float64), numbers.astype(np.float64)):
        raise InvalidArgument(f"model '{model}' takes {dtype.name}: send whole numbers that fit it")
    if kind == "f" and not np.array_equal(np.isfinite(cast), np.isfinite(numbers)):
        raise InvalidArgument(f"{_LABEL} has values that do not fit {dtype.name}")
    return cast
