# SPDX-License-Identifier: Apache-2.0
"""Batches of requests whose inputs differ in shape: laid end to end (`allow_ragged_batch`), or filled up (`pad_value`).

Used by `runners` for models that have such inputs. A ragged input reaches the model flat, with `batch_input` tensors that
say where each request begins; a padded one has the largest size of the batch, and `padded_like` outputs are cut back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.backends.contract import Array
from headrace.core.dtypes import BF16, BYTES, DType, float32_to_bf16
from headrace.core.errors import Internal
from headrace.core.tensors import Tensor
from headrace.engine.execution.joining import Answers, Joiner, column
from headrace.engine.scheduling.pending import Pending
from headrace.models.config.types import BatchInput, ModelConfig


class RaggedJoiner(Joiner):
    """For models with ragged or padded inputs."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._ragged = {spec.name for spec in config.inputs if spec.allow_ragged_batch}
        self._padding = {spec.name: spec.pad_value for spec in config.inputs if spec.pad_value is not None}
        self._batch_inputs = config.batch_inputs
        self._scattered = {name: output.source_input for output in config.batch_outputs for name in output.target_names}
        self._padded_like = {spec.name: spec.padded_like for spec in config.outputs if spec.padded_like}
        self._input_dims = {spec.name: spec.dims or () for spec in config.inputs}

    def join(self, batch: Sequence[Pending]) -> dict[str, Array]:
        """See `Joiner.join`."""
        joined: dict[str, Array] = {}
        for index, tensor in enumerate(batch[0].request.inputs):
            name = tensor.name
            arrays = column(batch, index, name)
            if name in self._ragged:
                joined[name] = np.concatenate([array.reshape(-1) for array in arrays])
            elif name in self._padding:
                joined[name] = _padded(arrays, tensor.dtype, self._padding[name])
            else:
                joined[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if name in self._reshapes and name not in self._ragged:
                joined[name] = self.reshaped(name, joined[name])
        for described in self._batch_inputs:
            source = [_input(pending, described.source_input) for pending in batch]
            value = _description(described, source)
            for name in described.target_names:
                joined[name] = value
        return joined

    def split(self, batch: Sequence[Pending], result: Mapping[str, Array]) -> Answers:
        """See `Joiner.split`."""
        if self._scattered:
            return self._split_scattered(batch, result)
        answers = super().split(batch, result)
        if len(batch) == 1 or not self._padded_like:
            return answers
        return [
            [self._cut(tensor, pending) for tensor in outputs] for outputs, pending in zip(answers, batch, strict=True)
        ]

    def split_alone(self, pending: Pending, result: Mapping[str, Array]) -> Sequence[Tensor]:
        """See `Joiner.split_alone`."""
        return self.split((pending,), result)[0] if self._scattered else super().split_alone(pending, result)

    def _split_scattered(self, batch: Sequence[Pending], result: Mapping[str, Array]) -> Answers:
        rows = sum(pending.rows for pending in batch)
        scattered = {name: self._scatter(batch, name, result) for name in self._scattered if name in result}
        whole = self._checked(batch, rows, {name: array for name, array in result.items() if name not in scattered})
        answers: Answers = []
        start = 0
        for position, pending in enumerate(batch):
            stop = start + pending.rows
            outputs = []
            for name in [output.name for output in pending.request.outputs] or self._all:
                if name in scattered:
                    outputs.append(scattered[name][position])
                elif name in whole:
                    outputs.append(Tensor(name, whole[name].dtype, whole[name].array[start:stop]))
                else:
                    raise self._missing(name)
            answers.append(outputs)
            start = stop
        return answers

    def _cut(self, tensor: Tensor, pending: Pending) -> Tensor:
        source = self._padded_like.get(tensor.name)
        if source is None:
            return tensor
        spec = self._outputs[tensor.name]
        given = zip(_input(pending, source).shape[1:], self._input_dims[source], strict=True)
        # The output's variable sizes, in order, are the input's.
        sizes = iter([size for size, declared in given if declared == -1])
        cuts = [slice(None), *(slice(next(sizes, None)) if size == -1 else slice(None) for size in spec.dims or ())]
        return Tensor(tensor.name, tensor.dtype, tensor.array[tuple(cuts)])

    def _scatter(self, batch: Sequence[Pending], name: str, result: Mapping[str, Array]) -> list[Tensor]:
        spec = self._outputs[name]
        source = self._scattered[name]
        dtype = spec.dtype or batch[0].request.inputs[0].dtype
        flat = result[name].reshape(-1)
        shapes = [_input(pending, source).shape for pending in batch]
        sizes = [math.prod(shape) for shape in shapes]
        if flat.size != sum(sizes) or flat.dtype != dtype.numpy:
            raise Internal(
                f"model '{self._name}' returned {flat.size} elements of {flat.dtype} for output '{name}', which must "
                f"have {sum(sizes)} of {dtype.name}: as many as the input '{source}' of all requests"
            )
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return [Tensor(name, dtype, part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _padded(arrays: Sequence[Array], dtype: DType, value: float) -> Array:
    sizes = tuple(max(axis) for axis in zip(*(array.shape[1:] for array in arrays), strict=True))
    if all(array.shape[1:] == sizes for array in arrays):
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    rows = sum(array.shape[0] for array in arrays)
    fill: object = value
    if dtype is BYTES:
        fill = b""
    elif dtype is BF16:
        fill = float32_to_bf16(np.array(value, np.float32))
    whole = np.full((rows, *sizes), fill, dtype=dtype.numpy)
    start = 0
    for array in arrays:
        stop = start + array.shape[0]
        whole[(slice(start, stop), *map(slice, array.shape[1:]))] = array
        start = stop
    return whole


def _input(pending: Pending, name: str) -> Array:
    return next(tensor.array for tensor in pending.request.inputs if tensor.name == name)


def _description(described: BatchInput, source: Sequence[Array]) -> Array:
    """What a `batch_input` tells the model about the requests of a ragged batch."""
    counts = [array.size for array in source]
    numpy = described.dtype.numpy
    match described.kind:
        case "BATCH_ELEMENT_COUNT":
            return np.array(counts, numpy)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT":
            return np.cumsum(counts).astype(numpy)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return np.concatenate([[0], np.cumsum(counts)]).astype(numpy)
        case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            return np.empty(max(counts), numpy)
        case "BATCH_ITEM_SHAPE":
            return np.array([array.shape[1:] for array in source for _ in range(array.shape[0])], numpy)
        case "BATCH_ITEM_SHAPE_FLATTEN":
            return np.array(
                [size for array in source for _ in range(array.shape[0]) for size in array.shape[1:]], numpy
            )
