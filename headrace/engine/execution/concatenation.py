# SPDX-License-Identifier: Apache-2.0
"""Batching of tensors: concatenate the inputs of a batch, and split its result into each request's outputs.

Runners call it, in the thread that computes. Requests have been validated; models are not trusted: their results are checked
against the configuration before a caller gets them.

`RaggedConcatenator` is for inputs that differ in shape: concatenated flat (`allow_ragged_batch`), with `batch_input` tensors
that describe the requests, or padded to the largest size of the batch (`pad_value`), with `padded_like` outputs cut back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.core.dtypes import BF16, BYTES, DType, float32_to_bf16
from headrace.core.errors import Internal
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.models.config.types import BatchInput, Dims, ModelConfig, OutputSpec, fits

BatchOutputs = list[Sequence[Tensor]]
"""The outputs of each request of a batch."""


class BatchConcatenator:
    """For batches of requests whose inputs have equal shapes except for the number of rows."""

    def __init__(self, config: ModelConfig) -> None:
        self._name = config.name
        self._batched = config.max_batch_size > 0
        self._outputs = {spec.name: spec for spec in config.outputs}
        self._all = tuple(self._outputs)
        self.all_outputs = self._all
        """The outputs to request from the model if the caller names none."""
        self._single_fixed = single_fixed_output(config)
        self._single = None if self._batched else _single_output(config)
        self._once = [spec.name for spec in config.inputs if spec.is_shape_tensor] if self._batched else ()
        """Shape tensors: a batch has one, since requests in a batch have the same values."""
        self._reshapes = {
            spec.name: (spec.dims or (), spec.reshape) for spec in config.inputs if spec.reshape is not None
        }

    def concatenate(self, batch: Sequence[PendingRequest]) -> dict[str, Array]:
        """Return one array per input, with the rows of the requests in order."""
        if len(batch) == 1:
            inputs = batch[0].request.inputs
            if len(inputs) == 1 and not self._reshapes:
                return {inputs[0].name: inputs[0].array}
            concatenated = {tensor.name: tensor.array for tensor in inputs}
        else:
            concatenated = {}
            for index, tensor in enumerate(batch[0].request.inputs):
                arrays = input_arrays(batch, index, tensor.name)
                concatenated[tensor.name] = arrays[0] if tensor.name in self._once else np.concatenate(arrays)
        for name in self._reshapes:
            if name in concatenated:
                concatenated[name] = self.reshaped(name, concatenated[name])
        return concatenated

    def reshaped(self, name: str, array: Array) -> Array:
        """Return an input with a `reshape` in the model's shape."""
        dims, model_dims = self._reshapes[name]
        return _reshape(array, dims, model_dims, self._batched)

    def requested_outputs(self, batch: Sequence[PendingRequest]) -> Sequence[str]:
        """Return the names of the outputs that at least one request asks for."""
        names: dict[str, None] = {}
        for pending in batch:
            if not pending.request.outputs:
                return self._all
            for output in pending.request.outputs:
                names[output.name] = None
        return tuple(names)

    def split(self, batch: Sequence[PendingRequest], result: Mapping[str, Array]) -> BatchOutputs:
        """Return each request's rows of its requested outputs. Raise `Internal` if the result violates the configuration."""
        if len(batch) == 1:
            return [BatchConcatenator.split_single(self, batch[0], result)]
        rows = sum(pending.rows for pending in batch)
        tensors = self._checked(batch, rows, result)
        only = tensors.get(self._single_fixed[0]) if self._single_fixed is not None else None
        outputs: BatchOutputs = []
        start = 0
        for pending in batch:
            stop = start + pending.rows
            if only is not None and not pending.request.outputs:
                outputs.append((Tensor(only.name, only.dtype, only.array[start:stop]),))
            else:
                outputs.append(self._outputs_of(pending, tensors, slice(start, stop)))
            start = stop
        return outputs

    def accepts(self, outputs: Sequence[Tensor]) -> bool:
        """Return whether outputs need no further check: the only output of a model without batching, as in most streams."""
        if self._single is None or len(outputs) != 1:
            return False
        name, dtype, dims = self._single
        tensor = outputs[0]
        array = tensor.array
        return tensor.dtype is dtype and tensor.name == name and array.dtype == dtype.numpy and fits(array.shape, dims)

    def split_single(self, pending: PendingRequest, result: Mapping[str, Array]) -> Sequence[Tensor]:
        """Return the outputs of a request that was computed alone."""
        request = pending.request
        if self._single_fixed is not None and not request.outputs:
            name, dtype, numpy, dims = self._single_fixed
            only = result.get(name)
            # Anything else takes the general path below, which has the error messages.
            if only is not None and only.dtype is numpy and only.shape == (pending.rows, *dims):
                return (Tensor(name, dtype, only),)
        names = [output.name for output in request.outputs] if request.outputs else self._all
        outputs = []
        for name in names:
            array = result.get(name)
            if array is None:
                raise self._missing(name)
            spec = self._outputs[name]
            dtype = spec.dtype or request.inputs[0].dtype
            outputs.append(Tensor(name, dtype, self.checked_array(spec, dtype, array, pending.rows)))
        return outputs

    def _missing(self, name: str) -> Internal:
        return Internal(f"model '{self._name}' did not return its output '{name}'")

    def _checked(self, batch: Sequence[PendingRequest], rows: int, result: Mapping[str, Array]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in self._all:
            array = result.get(name)
            if array is not None:
                spec = self._outputs[name]
                dtype = spec.dtype or batch[0].request.inputs[0].dtype
                tensors[name] = Tensor(name, dtype, self.checked_array(spec, dtype, array, rows))
        return tensors

    def check_dtype(self, tensor: Tensor) -> None:
        """Raise if an output has another data type with the same numpy type: UINT16 for BF16."""
        spec = self._outputs.get(tensor.name)
        if spec is not None and spec.dtype is not None and tensor.dtype is not spec.dtype:
            raise Internal(
                f"model '{self._name}' returned {tensor.dtype.name} for output '{tensor.name}', "
                f"which its configuration declares {spec.dtype.name}"
            )

    def checked_array(self, spec: OutputSpec, dtype: DType, array: Array, rows: int) -> Array:
        """Return a model's output in the shape that callers expect; raise if it violates the configuration."""
        if array.dtype != dtype.numpy:
            raise Internal(
                f"model '{self._name}' returned {_shown_dtype(array, dtype)} for output '{spec.name}', "
                f"which its configuration declares {dtype.name}"
            )
        if spec.reshape is not None:
            array = _reshape_output(array, spec.reshape, spec, self._batched)
        shape = array.shape
        if self._batched:
            if not shape or shape[0] != rows:
                raise Internal(
                    f"model '{self._name}' returned shape {list(shape)} for output '{spec.name}' of a batch of {rows}: "
                    f"the first dimension must be {rows}"
                )
            shape = shape[1:]
        dims = spec.dims
        if dims is not None and shape != dims and not fits(shape, dims):
            raise Internal(
                f"model '{self._name}' returned shape {list(array.shape)} for output '{spec.name}', "
                f"which its configuration declares {list(dims)}"
            )
        return array

    def _outputs_of(self, pending: PendingRequest, tensors: Mapping[str, Tensor], rows: slice) -> Sequence[Tensor]:
        requested = pending.request.outputs
        names = [output.name for output in requested] if requested else self._all
        outputs = []
        for name in names:
            tensor = tensors.get(name)
            if tensor is None:
                raise self._missing(name)
            outputs.append(Tensor(name, tensor.dtype, tensor.array[rows]))
        return outputs


def _single_output(config: ModelConfig) -> tuple[str, DType, Dims] | None:
    """Return the output of a model with exactly one, of a configured type and without a reshape."""
    if len(config.outputs) != 1:
        return None
    spec = config.outputs[0]
    if spec.dtype is None or spec.dims is None or spec.reshape is not None:
        return None
    return spec.name, spec.dtype, spec.dims


def single_fixed_output(config: ModelConfig) -> tuple[str, DType, np.dtype[Any], Dims] | None:
    """Return the output of a model with exactly one, of fixed type and shape: the most common kind."""
    if len(config.outputs) != 1:
        return None
    (spec,) = config.outputs
    if spec.dtype is None or spec.dims is None or -1 in spec.dims or spec.reshape is not None:
        return None
    return spec.name, spec.dtype, spec.dtype.numpy, spec.dims


def input_arrays(batch: Sequence[PendingRequest], index: int, name: str) -> list[Array]:
    """Return one input of every request. Clients nearly always send inputs in the same order."""
    arrays = []
    for pending in batch:
        inputs = pending.request.inputs
        tensor = inputs[index]
        if tensor.name != name:
            tensor = next(other for other in inputs if other.name == name)
        arrays.append(tensor.array)
    return arrays


def _reshape(array: Array, dims: Dims, target: Dims, batched: bool) -> Array:
    """Reshape from `dims` to `target`. Variable sizes keep their values, in order."""
    front, shape = (array.shape[:1], array.shape[1:]) if batched else ((), array.shape)
    sizes = iter([size for size, declared in zip(shape, dims, strict=False) if declared == -1])
    return array.reshape((*front, *(next(sizes, -1) if size == -1 else size for size in target)))


def _reshape_output(array: Array, configured: Dims, spec: OutputSpec, batched: bool) -> Array:
    dims = spec.dims or ()
    try:
        return _reshape(array, configured, dims, batched)
    except ValueError:
        raise Internal(
            f"shape {list(array.shape)} of output '{spec.name}' cannot be reshaped to the {list(dims)} of its configuration"
        ) from None


def _shown_dtype(array: Any, dtype: DType) -> str:
    return f"{array.dtype} values" if dtype is not BF16 else f"{array.dtype} values instead of the 16 bits of BF16"


class RaggedConcatenator(BatchConcatenator):
    """For models with ragged or padded inputs."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._ragged = {spec.name for spec in config.inputs if spec.allow_ragged_batch}
        self._padding = {spec.name: spec.pad_value for spec in config.inputs if spec.pad_value is not None}
        self._batch_inputs = config.batch_inputs
        self._scattered = {name: output.source_input for output in config.batch_outputs for name in output.target_names}
        self._padded_like = {spec.name: spec.padded_like for spec in config.outputs if spec.padded_like}
        self._input_dims = {spec.name: spec.dims or () for spec in config.inputs}

    def concatenate(self, batch: Sequence[PendingRequest]) -> dict[str, Array]:
        """Return one array per input, flat or padded where configured, and the `batch_input` tensors."""
        concatenated: dict[str, Array] = {}
        for index, tensor in enumerate(batch[0].request.inputs):
            name = tensor.name
            arrays = input_arrays(batch, index, name)
            if name in self._ragged:
                concatenated[name] = np.concatenate([array.reshape(-1) for array in arrays])
            elif name in self._padding:
                concatenated[name] = _pad(arrays, tensor.dtype, self._padding[name])
            else:
                concatenated[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if name in self._reshapes and name not in self._ragged:
                concatenated[name] = self.reshaped(name, concatenated[name])
        for described in self._batch_inputs:
            source = [_input(pending, described.source_input) for pending in batch]
            value = _description(described, source)
            for name in described.target_names:
                concatenated[name] = value
        return concatenated

    def split(self, batch: Sequence[PendingRequest], result: Mapping[str, Array]) -> BatchOutputs:
        """Return each request's rows of its requested outputs, without padding."""
        if self._scattered:
            return self._split_scattered(batch, result)
        outputs = super().split(batch, result)
        if len(batch) == 1 or not self._padded_like:
            return outputs
        return [
            [self._cut_padding(tensor, pending) for tensor in tensors]
            for tensors, pending in zip(outputs, batch, strict=True)
        ]

    def split_single(self, pending: PendingRequest, result: Mapping[str, Array]) -> Sequence[Tensor]:
        """Return the outputs of a request that was computed alone."""
        return self.split((pending,), result)[0] if self._scattered else super().split_single(pending, result)

    def _split_scattered(self, batch: Sequence[PendingRequest], result: Mapping[str, Array]) -> BatchOutputs:
        rows = sum(pending.rows for pending in batch)
        scattered = {name: self._scatter(batch, name, result) for name in self._scattered if name in result}
        tensors = self._checked(batch, rows, {name: array for name, array in result.items() if name not in scattered})
        batch_outputs: BatchOutputs = []
        start = 0
        for position, pending in enumerate(batch):
            stop = start + pending.rows
            outputs = []
            for name in [output.name for output in pending.request.outputs] or self._all:
                if name in scattered:
                    outputs.append(scattered[name][position])
                elif name in tensors:
                    outputs.append(Tensor(name, tensors[name].dtype, tensors[name].array[start:stop]))
                else:
                    raise self._missing(name)
            batch_outputs.append(outputs)
            start = stop
        return batch_outputs

    def _cut_padding(self, tensor: Tensor, pending: PendingRequest) -> Tensor:
        source = self._padded_like.get(tensor.name)
        if source is None:
            return tensor
        spec = self._outputs[tensor.name]
        sizes_and_dims = zip(_input(pending, source).shape[1:], self._input_dims[source], strict=True)
        # The output's variable sizes are those of the input, in order.
        sizes = iter([size for size, declared in sizes_and_dims if declared == -1])
        cuts = [slice(None), *(slice(next(sizes, None)) if size == -1 else slice(None) for size in spec.dims or ())]
        return Tensor(tensor.name, tensor.dtype, tensor.array[tuple(cuts)])

    def _scatter(self, batch: Sequence[PendingRequest], name: str, result: Mapping[str, Array]) -> list[Tensor]:
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


def _pad(arrays: Sequence[Array], dtype: DType, value: float) -> Array:
    sizes = tuple(max(axis) for axis in zip(*(array.shape[1:] for array in arrays), strict=True))
    if all(array.shape[1:] == sizes for array in arrays):
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    rows = sum(array.shape[0] for array in arrays)
    fill: object = value
    if dtype is BYTES:
        fill = b""
    elif dtype is BF16:
        fill = float32_to_bf16(np.array(value, np.float32))
    padded = np.full((rows, *sizes), fill, dtype=dtype.numpy)
    start = 0
    for array in arrays:
        stop = start + array.shape[0]
        padded[(slice(start, stop), *map(slice, array.shape[1:]))] = array
        start = stop
    return padded


def _input(pending: PendingRequest, name: str) -> Array:
    return next(tensor.array for tensor in pending.request.inputs if tensor.name == name)


def _description(described: BatchInput, source: Sequence[Array]) -> Array:
    """Return the `batch_input` tensor that describes the requests of a ragged batch."""
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
