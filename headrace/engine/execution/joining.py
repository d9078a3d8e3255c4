# SPDX-License-Identifier: Apache-2.0
"""Requests to one batch of arrays, and the batch's result back to each request's outputs.

Called by `runners`, the joining in whatever thread computes. Trusts that requests were checked; trusts no model: what it
returns is held against its configuration before anyone gets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.core.dtypes import BF16, DType
from headrace.core.errors import Internal
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.pending import Pending
from headrace.models.config.types import Dims, ModelConfig, OutputSpec, fits

Answers = list[Sequence[Tensor]]
"""The outputs for each request of a batch."""


class Joiner:
    """For batches of requests whose inputs have equal shapes, the number of rows aside."""

    def __init__(self, config: ModelConfig) -> None:
        self._name = config.name
        self._batched = config.max_batch_size > 0
        self._outputs = {spec.name: spec for spec in config.outputs}
        self._all = tuple(self._outputs)
        self.all_names = self._all
        """What a model is asked for when the caller names no outputs."""
        self._plain = plain_output(config)
        self._single = None if self._batched else _single_output(config)
        self._once = [spec.name for spec in config.inputs if spec.is_shape_tensor] if self._batched else ()
        """Inputs that a batch has once: requests that share one have the same values there."""
        self._reshapes = {
            spec.name: (spec.dims or (), spec.reshape) for spec in config.inputs if spec.reshape is not None
        }

    def join(self, batch: Sequence[Pending]) -> dict[str, Array]:
        """One array per input, the rows of the requests in order."""
        if len(batch) == 1:
            inputs = batch[0].request.inputs
            if len(inputs) == 1 and not self._reshapes:
                return {inputs[0].name: inputs[0].array}
            joined = {tensor.name: tensor.array for tensor in inputs}
        else:
            joined = {}
            for index, tensor in enumerate(batch[0].request.inputs):
                arrays = column(batch, index, tensor.name)
                joined[tensor.name] = arrays[0] if tensor.name in self._once else np.concatenate(arrays)
        for name in self._reshapes:
            if name in joined:
                joined[name] = self.reshaped(name, joined[name])
        return joined

    def reshaped(self, name: str, array: Array) -> Array:
        """An input that has a `reshape`, in the shape the model wants."""
        dims, wanted = self._reshapes[name]
        return _reshaped(array, dims, wanted, self._batched)

    def wanted(self, batch: Sequence[Pending]) -> Sequence[str]:
        """The outputs that at least one request asks for, by name."""
        names: dict[str, None] = {}
        for pending in batch:
            if not pending.request.outputs:
                return self._all
            for output in pending.request.outputs:
                names[output.name] = None
        return tuple(names)

    def split(self, batch: Sequence[Pending], result: Mapping[str, Array]) -> Answers:
        """Each request's rows of each output it asked for. Raises `Internal` for a result that cannot be right."""
        if len(batch) == 1:
            return [Joiner.split_alone(self, batch[0], result)]
        rows = sum(pending.rows for pending in batch)
        whole = self._checked(batch, rows, result)
        only = whole.get(self._plain[0]) if self._plain is not None else None
        answers: Answers = []
        start = 0
        for pending in batch:
            stop = start + pending.rows
            if only is not None and not pending.request.outputs:
                answers.append((Tensor(only.name, only.dtype, only.array[start:stop]),))
            else:
                answers.append(self._outputs_of(pending, whole, slice(start, stop)))
            start = stop
        return answers

    def takes(self, outputs: Sequence[Tensor]) -> bool:
        """Whether they are right as they are: one, the only one of a model without batches. Most of a stream's are."""
        if self._single is None or len(outputs) != 1:
            return False
        name, dtype, dims = self._single
        tensor = outputs[0]
        array = tensor.array
        return tensor.dtype is dtype and tensor.name == name and array.dtype == dtype.numpy and fits(array.shape, dims)

    def split_alone(self, pending: Pending, result: Mapping[str, Array]) -> Sequence[Tensor]:
        """The outputs of a request that was computed alone."""
        request = pending.request
        if self._plain is not None and not request.outputs:
            name, dtype, numpy, dims = self._plain
            whole = result.get(name)
            # Anything unusual goes the long way round, where the words for it are.
            if whole is not None and whole.dtype is numpy and whole.shape == (pending.rows, *dims):
                return (Tensor(name, dtype, whole),)
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

    def _checked(self, batch: Sequence[Pending], rows: int, result: Mapping[str, Array]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for name in self._all:
            array = result.get(name)
            if array is not None:
                spec = self._outputs[name]
                dtype = spec.dtype or batch[0].request.inputs[0].dtype
                whole[name] = Tensor(name, dtype, self.checked_array(spec, dtype, array, rows))
        return whole

    def check_dtype(self, tensor: Tensor) -> None:
        """Refuse an output of another type that has the same numpy form: UINT16 for BF16."""
        spec = self._outputs.get(tensor.name)
        if spec is not None and spec.dtype is not None and tensor.dtype is not spec.dtype:
            raise Internal(
                f"model '{self._name}' returned {tensor.dtype.name} for output '{tensor.name}', "
                f"which its configuration declares {spec.dtype.name}"
            )

    def checked_array(self, spec: OutputSpec, dtype: DType, array: Array, rows: int) -> Array:
        """An output as the model gave it, in the shape its callers expect; or the reason why it cannot be right."""
        if array.dtype != dtype.numpy:
            raise Internal(
                f"model '{self._name}' returned {_shown_dtype(array, dtype)} for output '{spec.name}', "
                f"which its configuration declares {dtype.name}"
            )
        if spec.reshape is not None:
            array = _reshaped_output(array, spec.reshape, spec, self._batched)
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

    def _outputs_of(self, pending: Pending, whole: Mapping[str, Tensor], rows: slice) -> Sequence[Tensor]:
        requested = pending.request.outputs
        names = [output.name for output in requested] if requested else self._all
        outputs = []
        for name in names:
            tensor = whole.get(name)
            if tensor is None:
                raise self._missing(name)
            outputs.append(Tensor(name, tensor.dtype, tensor.array[rows]))
        return outputs


def _single_output(config: ModelConfig) -> tuple[str, DType, Dims] | None:
    """The output of a model that has one, of a type that is told and given as it is."""
    if len(config.outputs) != 1:
        return None
    spec = config.outputs[0]
    if spec.dtype is None or spec.dims is None or spec.reshape is not None:
        return None
    return spec.name, spec.dtype, spec.dims


def plain_output(config: ModelConfig) -> tuple[str, DType, np.dtype[Any], Dims] | None:
    """The output of a model that has one, of fixed type and shape: the most common kind."""
    if len(config.outputs) != 1:
        return None
    (spec,) = config.outputs
    if spec.dtype is None or spec.dims is None or -1 in spec.dims or spec.reshape is not None:
        return None
    return spec.name, spec.dtype, spec.dtype.numpy, spec.dims


def column(batch: Sequence[Pending], index: int, name: str) -> list[Array]:
    """One input of every request. Clients send inputs in the same order, nearly always."""
    arrays = []
    for pending in batch:
        inputs = pending.request.inputs
        tensor = inputs[index]
        if tensor.name != name:
            tensor = next(other for other in inputs if other.name == name)
        arrays.append(tensor.array)
    return arrays


def _reshaped(array: Array, dims: Dims, wanted: Dims, batched: bool) -> Array:
    """From the shape that `dims` describe to the one of `wanted`. Variable sizes stay what they are, one by one."""
    front, shape = (array.shape[:1], array.shape[1:]) if batched else ((), array.shape)
    sizes = iter([size for size, declared in zip(shape, dims, strict=False) if declared == -1])
    return array.reshape((*front, *(next(sizes, -1) if size == -1 else size for size in wanted)))


def _reshaped_output(array: Array, given: Dims, spec: OutputSpec, batched: bool) -> Array:
    dims = spec.dims or ()
    try:
        return _reshaped(array, given, dims, batched)
    except ValueError:
        raise Internal(
            f"shape {list(array.shape)} of output '{spec.name}' cannot be reshaped to the {list(dims)} of its configuration"
        ) from None


def _shown_dtype(array: Any, dtype: DType) -> str:
    return f"{array.dtype} values" if dtype is not BF16 else f"{array.dtype} values instead of the 16 bits of BF16"
