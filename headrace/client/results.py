# SPDX-License-Identifier: Apache-2.0
"""What a server computed: arrays by name. Made by both protocols, read by callers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from headrace.core.dtypes import BF16, BYTES, bf16_to_float32
from headrace.core.errors import InvalidArgument
from headrace.core.messages import NO_PARAMETERS
from headrace.core.messages import Parameters as ResponseParameters
from headrace.core.tensors import Tensor


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One class of a row."""

    value: float
    index: int
    label: str
    """"" where the model has no label for it."""


class Result(Mapping[str, npt.NDArray[Any]]):
    """The outputs by name, as numpy arrays: BYTES are arrays of `bytes`, BF16 is widened to float32."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        tensors: Sequence[Tensor],
        request_id: str = "",
        parameters: ResponseParameters = NO_PARAMETERS,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        """The version that computed it."""
        self.request_id = request_id
        """The id that was given to `infer`, or the one the request has in the server's log."""
        self.parameters = parameters
        """What the server said beside the outputs."""
        self.tensors = {tensor.name: tensor for tensor in tensors}
        """The outputs as they came: `tensors["y"].dtype.name` is the type, BF16 is its bits."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One output."""
        tensor = self.tensors.get(name)
        if tensor is None:
            there = ", ".join(self.tensors) or "none"
            raise KeyError(f"no output {name!r}; there are: {there}")
        return bf16_to_float32(tensor.array) if tensor.dtype is BF16 else tensor.array

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """How many outputs there are."""
        return len(self.tensors)

    def classes(self, name: str) -> list[list[ClassScore]]:
        """An output that was asked for as `Output(name, classes=N)`: the classes of each row, the largest first."""
        array = self[name]
        if self.tensors[name].dtype is not BYTES:
            raise InvalidArgument(f"output '{name}' is no classification: ask for it with Output('{name}', classes=5)")
        rows = array.reshape(1, -1) if array.ndim < 2 else array.reshape(array.shape[0], -1)
        return [[_score(name, text) for text in row] for row in rows]

    def __repr__(self) -> str:
        """Names, types and shapes; never the data, which may be large."""
        outputs = ", ".join(repr(tensor) for tensor in self.tensors.values())
        return f"Result({self.model_name!r} version {self.model_version}: {outputs})"


def _score(name: str, text: bytes) -> ClassScore:
    """`value:index` or `value:index:label`."""
    value, _, rest = text.decode(errors="replace").partition(":")
    index, _, label = rest.partition(":")
    try:
        return ClassScore(float(value), int(index), label)
    except ValueError:
        raise InvalidArgument(
            f"output '{name}' has text that is no class: ask for it with Output('{name}', classes=5)"
        ) from None
