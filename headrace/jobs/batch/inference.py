# SPDX-License-Identifier: Apache-2.0
"""Send items to the model. Called by `runner`.

`TensorClient` puts many rows of a tensor model into one request. `KindClient` sends every item of any other model as one
request, as the microservice does; the engine batches or schedules concurrent requests.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.core.dtypes import BOOL, BYTES, FP32
from headrace.core.errors import HeadraceError, Internal, InvalidArgument, ResourceExhausted, Unavailable, with_message
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.engine.dataplane import DataPlane
from headrace.jobs.batch.blocks import PlainInput, Rows, is_plain
from headrace.jobs.batch.sources import Item
from headrace.jobs.microservice.model_kinds.contract import ModelKind
from headrace.jobs.microservice.model_kinds.tensors import compute, to_json
from headrace.models.config.types import InputSpec, ModelConfig, fits

log = logging.getLogger("headrace.batch")

Outcome = Mapping[str, Any] | HeadraceError
_MAX_ATTEMPTS = 4
_RESERVED = ("id", "inputs")
"""Fields of an item that are not inputs."""
_RETRY_SECONDS = 0.1
_INTERNAL = "internal error; the job's log has the details"

Row = bytes | npt.NDArray[Any]
"""Packed numbers, or an array, without the batch dimension."""
_MAX_DEPTH = 16
_REAL_TYPES, _INTEGER_TYPES = frozenset({int, float}), frozenset({int})


class InferenceClient(Protocol):
    """The model of a batch job."""

    @property
    def max_batch(self) -> int:
        """Return the maximum number of items per request."""

    @property
    def in_flight(self) -> int:
        """Return the default number of concurrent requests."""

    def prepare(self, item: Item) -> tuple[Any, Any]:
        """Return the key that items of one request share, and the item as `infer` takes it.

        May run in any thread. Raises InvalidArgument.
        """

    async def infer(self, prepared: Sequence[Any]) -> list[Outcome]:
        """Return the outcome of each item. Raises only errors that end the job."""


class KindClient:
    """One inference request per item."""

    max_batch = 1

    def __init__(self, kind: ModelKind) -> None:
        self._kind = kind
        # Enough for the batches of a GPU; images and videos are large and slow to decode.
        self.in_flight = {"llm": 256, "embedding": 256, "video": 1}.get(kind.model_type, 64)

    def prepare(self, item: Item) -> tuple[Any, Item]:
        """Return the key and the prepared item."""
        return None, item

    async def infer(self, prepared: Sequence[Item]) -> list[Outcome]:
        """Return the outcome of each item."""
        return [await self._infer_one(item) for item in prepared]

    async def _infer_one(self, item: Item) -> Outcome:
        try:
            output: dict[str, Any] = await _with_retries(lambda: self._kind.infer(item.body))
        except HeadraceError as error:
            message = error.message
            for url, name in item.names.items():
                message = message.replace(url, name)
            return with_message(error, message)
        except Exception:
            log.exception("Inference of item %d failed.", item.index)
            return Internal(_INTERNAL)
        for prediction in output.get("predictions") or ():
            prediction["image"] = item.names.get(prediction["image"], prediction["image"])
        return output


class TensorClient:
    """Many rows of tensors per request."""

    def __init__(self, plane: DataPlane, config: ModelConfig, batch_size: int | None = None) -> None:
        self._plane = plane
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._inputs = {spec.name: InputRows(spec) for spec in config.inputs}
        self._required = [spec.name for spec in config.inputs if not spec.optional]
        limit = max(1, config.max_batch_size)
        self.max_batch = limit if batch_size is None else max(1, min(batch_size, limit))
        instances = sum(group.count * max(1, len(group.gpus)) for group in config.instance_groups) or 1
        # Per instance: the batch that it computes, the next one, and one that is being read.
        self.in_flight = 3 * instances + 1 if self._batched else max(16, 4 * instances)

    @property
    def plain(self) -> PlainInput | None:
        """Return the input for the fast path (`blocks`), if the model is batched and has one input of numbers."""
        is_single = len(self._inputs) == 1 and self._batched and self.max_batch > 1
        plain_input = next(iter(self._inputs.values())).plain if is_single else None
        return None if plain_input is None or plain_input.name in _RESERVED else plain_input

    async def infer_block(self, rows: Rows) -> Mapping[str, Any] | list[Outcome]:
        """Run a block of rows; return arrays with a row per item, or the outcomes of `infer`."""
        ((name, input_rows),) = self._inputs.items()
        try:
            batch = [input_rows.join(rows)]
            outputs = await _with_retries(lambda: compute(self._plane, self._model, batch))
            if is_plain(outputs) and all(len(array) == len(rows) for array in outputs.values()):
                return dict(outputs)
        except Exception:
            log.debug("Retrying %d items one by one.", len(rows), exc_info=True)
        return await self.infer([{name: row} for row in rows])

    def prepare(self, item: Item) -> tuple[Any, dict[str, Row]]:
        """Return the key and the prepared item."""
        inputs = item.body.get("inputs")
        if not isinstance(inputs, dict) or len(item.body) != 1:
            raise InvalidArgument(f"give {', '.join(self._inputs)}: nested lists of values, and no other fields")
        for name in self._required:
            if name not in inputs:
                raise InvalidArgument(f"the input {name!a} is missing")
        rows: dict[str, Row] = {}
        key = []
        for name, values in inputs.items():
            input_rows = self._inputs.get(name)
            if input_rows is None:
                names = ", ".join(self._inputs)
                raise InvalidArgument(f"{str(name)[:64]!a} is not an input of the model, which takes {names}")
            shape, rows[name] = input_rows.row(values)
            key.append((name, shape))
        return tuple(key), rows

    async def infer(self, prepared: Sequence[Mapping[str, Row]]) -> list[Outcome]:
        """Return the outcome of each item."""
        try:
            return await self._infer_batch(prepared)
        except HeadraceError as error:
            # Retry one by one, to find the item that fails.
            return [error] if len(prepared) == 1 else [(await self.infer([item]))[0] for item in prepared]
        except Exception:
            log.exception("Inference of %d items failed.", len(prepared))
            return [Internal(_INTERNAL)] * len(prepared)

    async def _infer_batch(self, prepared: Sequence[Mapping[str, Row]]) -> list[Outcome]:
        batch = [self._inputs[name].join([item[name] for item in prepared]) for name in prepared[0]]
        if not self._batched:
            single = [Tensor(tensor.name, tensor.dtype, tensor.array[0]) for tensor in batch]
            outputs = await _with_retries(lambda: compute(self._plane, self._model, single))
            return [{"outputs": {name: _value(array) for name, array in outputs.items()}}]
        outputs = await _with_retries(lambda: compute(self._plane, self._model, batch))
        for name, array in outputs.items():
            if array.shape[:1] != (len(prepared),):
                raise Internal(f"the model's output {name!a} does not have one row per item: set max_batch_size to 0")
        values = {name: _values(array) for name, array in outputs.items()}
        return [{"outputs": {name: rows[row] for name, rows in values.items()}} for row in range(len(prepared))]


def _value(array: Any) -> Any:
    """Return an array that can be written as JSON."""
    if array.dtype == BYTES.numpy:
        return to_json(array)
    return array if array.flags.c_contiguous and array.ndim else array.tolist()


def _values(array: Any) -> Any:
    """Return the rows of an array, each as `_value`."""
    if array.dtype == BYTES.numpy or array.ndim == 1 or not array.flags.c_contiguous:
        return to_json(array)
    return array


async def _with_retries(infer: Any) -> Any:
    """Retry a few times if a queue is full or the model is being replaced."""
    for attempts_left in range(_MAX_ATTEMPTS - 1, -1, -1):
        try:
            return await infer()
        except (ResourceExhausted, Unavailable) as error:
            if not attempts_left:
                raise
            await asyncio.sleep(error.retry_after_seconds or _RETRY_SECONDS * (_MAX_ATTEMPTS - attempts_left))
    raise Internal(_INTERNAL)


class InputRows:
    """One input of a tensor model: values of items to rows, rows to the tensor of a batch.

    A list of numbers is packed into bytes, and a batch joins those bytes: a tenth of the cost of an array per item.
    """

    def __init__(self, spec: InputSpec) -> None:
        self._spec = spec
        self._dtype = spec.dtype or FP32
        self._code = "" if self._dtype is BOOL else self._dtype.struct_code
        self._kinds = _REAL_TYPES if self._dtype.name.startswith("FP") else _INTEGER_TYPES

    def row(self, values: Any) -> tuple[Any, Row]:
        """Return the row of an item, and the key that rows of one batch share."""
        if type(values) is list and self._code:
            packed = self._packed(values)
            if packed is not None:
                return len(values), packed
        array = self._array(values)
        return array.shape, array

    @property
    def plain(self) -> PlainInput | None:
        """Return the input for the fast path; None if it is not a list of fixed length."""
        dims = self._spec.dims
        if not self._code or dims is None or len(dims) != 1 or dims[0] < 1:
            return None
        return PlainInput(self._spec.name, dims[0], self._dtype.numpy, _packer(dims[0], self._code).pack)

    def join(self, rows: Sequence[Row] | npt.NDArray[Any]) -> Tensor:
        """Join rows with the same key into a batch."""
        if isinstance(rows, np.ndarray):
            array = rows
        elif isinstance(rows[0], bytes):
            array = np.frombuffer(b"".join(rows), self._dtype.numpy).reshape(len(rows), -1)  # type: ignore[arg-type]
        else:
            array = np.stack(rows)
        return Tensor(self._spec.name, self._dtype, array)

    def _packed(self, values: list[Any]) -> bytes | None:
        """Pack a list of numbers; None if it is unusual or invalid."""
        dims = self._spec.dims
        if not values or not self._kinds.issuperset(map(type, values)):
            return None
        if dims is None or len(dims) != 1 or dims[0] not in (len(values), -1):
            return None
        try:
            return _packer(len(values), self._code).pack(*values)
        except (struct.error, OverflowError):
            return None

    def _array(self, values: Any) -> npt.NDArray[Any]:
        spec = self._spec
        if isinstance(values, np.ndarray):
            tensor = Tensor.of(spec.name, np.ascontiguousarray(values))
            if spec.dtype is not None and tensor.dtype is not spec.dtype:
                raise InvalidArgument(
                    f"the array has type {tensor.dtype.name}, but the input {spec.name!a} has type {self._dtype.name}"
                )
        else:
            shape = _shape_of(spec.name, values)
            if not shape and spec.dims == (1,):
                shape = [1]
            tensor = tensor_from_values(spec.name, self._dtype, shape, values)
        if spec.dims is not None and not fits(tensor.array.shape, spec.dims):
            expected = list(spec.dims)
            raise InvalidArgument(
                f"the input {spec.name!a} has the shape {list(tensor.array.shape)}, but one item has {expected}"
                + (" (-1 is any size)" if -1 in expected else "")
            )
        return tensor.array


@lru_cache(maxsize=256)
def _packer(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def _shape_of(name: str, values: Any) -> list[int]:
    shape: list[int] = []
    while isinstance(values, list):
        shape.append(len(values))
        if len(shape) > _MAX_DEPTH:
            raise InvalidArgument(f"the input {name!a} is nested too deeply: at most {_MAX_DEPTH} levels")
        values = values[0] if values else None
    return shape
