# SPDX-License-Identifier: Apache-2.0
"""Request validation: check names, types, shapes and sizes against a model's configuration. Versions call it per request.

Messages marked as Triton's are exactly Triton's, because clients match them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from headrace.core.dtypes import BF16, DType
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest
from headrace.core.tensors import Tensor
from headrace.models.config.types import InputSpec, ModelConfig, fits

_KNOWN_FORMS = 256
_SHOWN_NAMES = 16
_BF16_EXPONENT = np.uint16(0x7F80)


class RequestValidator:
    """Validates the requests of one model."""

    def __init__(self, config: ModelConfig) -> None:
        self._name = config.name
        self._max_rows = config.max_batch_size
        internal = config.internal_inputs()
        self._inputs = {spec.name: spec for spec in config.inputs if spec.name not in internal}
        self._required = [spec.name for spec in self._inputs.values() if not spec.optional]
        self._outputs = {spec.name for spec in config.outputs} - internal
        self._any_optional = len(self._required) < len(self._inputs)
        concatenated = [
            spec for spec in self._inputs.values() if not spec.allow_ragged_batch and spec.pad_value is None
        ]
        self._shape_tensors = {spec.name for spec in self._inputs.values() if spec.is_shape_tensor and self._max_rows}
        """A batch has one shape tensor for all its requests, so theirs must be equal."""
        self.needs_batch_key = (
            self._any_optional
            or bool(self._shape_tensors)
            or any(spec.dtype is None or spec.dims is None or -1 in spec.dims for spec in concatenated)
        )
        """Whether two valid requests can differ so that they cannot be in the same batch."""
        self._ragged = {spec.name for spec in self._inputs.values()} - {spec.name for spec in concatenated}
        """Ragged or padded inputs, which may differ in shape."""
        self._batches_by_key = self.needs_batch_key and config.scheduling is not None
        self._remembers = not self._shape_tensors and not any(spec.finite for spec in self._inputs.values())
        """Whether names, types and shapes decide, and never the values."""
        self.known: dict[tuple[str, DType, tuple[int, ...]], tuple[int, Hashable]] = {}
        """What `accept` returned for requests with one input of this name, type and shape, and no requested outputs. Clients
        repeat themselves, and one look-up replaces all checks. Always the same object."""

    def accept(self, request: InferRequest) -> tuple[int, Hashable]:
        """Return the rows of a valid request and its batch key, if it needs one; raise `InvalidArgument` otherwise."""
        inputs = request.inputs
        if len(inputs) != 1 or request.outputs:
            return self.check(request), self.batch_key(request) if self._batches_by_key else None
        tensor = inputs[0]
        form = (tensor.name, tensor.dtype, tensor.array.shape)
        accepted = self.known.get(form)
        if accepted is None:
            accepted = self.check(request), self.batch_key(request) if self._batches_by_key else None
            if self._remembers:
                if len(self.known) >= _KNOWN_FORMS:
                    self.known.clear()
                self.known[form] = accepted
        return accepted

    def check(self, request: InferRequest) -> int:
        """Return the number of rows of a valid request; raise `InvalidArgument` otherwise."""
        inputs = request.inputs
        known = self._inputs
        if len(inputs) != len(known) and (not self._any_optional or not self._enough(inputs)):
            raise self._wrong_count(inputs)
        rows = -1
        for tensor in inputs:
            spec = known.get(tensor.name)
            if spec is None:
                raise self._unknown_input(tensor.name)
            shape = tensor.array.shape
            if tensor.dtype is not spec.dtype and spec.dtype is not None:
                raise InvalidArgument(  # Triton's
                    f"inference input '{tensor.name}' data-type is '{tensor.dtype.name}', "
                    f"but model '{self._name}' expects '{spec.dtype.name}'"
                )
            if spec.is_shape_tensor and self._max_rows and self._has_no_batch_dimension(spec, tensor):
                dims = shape
            elif self._max_rows:
                if not shape or shape[0] == 0:
                    raise InvalidArgument(
                        f"input '{tensor.name}' of model '{self._name}' needs a batch dimension of at least 1"
                    )
                if rows not in (-1, shape[0]):
                    raise InvalidArgument(
                        f"input '{tensor.name}' batch size does not match other inputs for model '{self._name}': "
                        f"{shape[0]} and {rows}"
                    )
                rows = shape[0]
                dims = shape[1:]
            else:
                dims = shape
            if dims != spec.dims and spec.dims is not None and not fits(dims, spec.dims):
                raise self._wrong_shape(spec, shape)
            if spec.finite and not _all_finite(tensor):
                raise InvalidArgument(
                    f"input '{tensor.name}' has NaN or infinite values, which model '{self._name}' does not take"
                )
        if len(inputs) > 1 and len({tensor.name for tensor in inputs}) < len(inputs):
            raise InvalidArgument(f"an input is given twice for model '{self._name}': {_listed(_names(inputs))}")
        for output in request.outputs:
            if output.name not in self._outputs:
                raise InvalidArgument(
                    f"unexpected inference output '{output.name[:256]}' for model '{self._name}': "
                    f"it has {_quoted(sorted(self._outputs))}"
                )
        if rows > self._max_rows:
            # Triton's
            raise InvalidArgument(f"inference request batch-size must be <= {self._max_rows} for '{self._name}'")
        return max(rows, 1)

    def batch_key(self, request: InferRequest) -> Hashable:
        """Return a key that is equal for requests that may be in the same batch. Only if `needs_batch_key`."""
        if self._shape_tensors:
            return tuple(sorted((tensor.name, tensor.dtype.name, self._shared(tensor)) for tensor in request.inputs))
        if len(request.inputs) == 1 and not self._any_optional:
            tensor = request.inputs[0]
            return () if tensor.name in self._ragged else (tensor.dtype.name, tensor.array.shape[1:])
        return tuple(
            sorted(
                (tensor.name, tensor.dtype.name, () if tensor.name in self._ragged else tensor.array.shape[1:])
                for tensor in request.inputs
            )
        )

    def _shared(self, tensor: Tensor) -> tuple[int, ...]:
        """Return what an input must have in common in all requests of a batch."""
        if tensor.name in self._shape_tensors:
            spec, array = self._inputs[tensor.name], np.asarray(tensor.array)
            unbatched = spec.dims is not None and array.ndim == len(spec.dims)
            return tuple(int(value) for value in (array if unbatched else array[0]).ravel())
        return () if tensor.name in self._ragged else tensor.array.shape[1:]

    def _has_no_batch_dimension(self, spec: InputSpec, tensor: Tensor) -> bool:
        """Return whether a shape tensor has no batch dimension, as in Triton; with one, all its rows must be equal."""
        array = np.asarray(tensor.array)  # it may be in device memory
        if spec.dims is not None and array.ndim == len(spec.dims):
            return True
        if array.ndim and len(array) and not (array == array[:1]).all():
            raise InvalidArgument(
                f"input '{tensor.name}' of model '{self._name}' is a shape tensor with different values in its rows: send "
                "it once, without a batch dimension, or send such rows in separate requests"
            )
        return False

    def _enough(self, inputs: Sequence[Tensor]) -> bool:
        names = {tensor.name for tensor in inputs}
        return len(inputs) < len(self._inputs) and all(name in names for name in self._required)

    def _unknown_input(self, name: str) -> InvalidArgument:
        allowed = _quoted(sorted(self._inputs))
        noun = "its input is" if len(self._inputs) == 1 else "its inputs are"
        return InvalidArgument(f"unexpected inference input '{name[:256]}' for model '{self._name}': {noun} {allowed}")

    def _wrong_count(self, inputs: Sequence[Tensor]) -> InvalidArgument:
        """Triton's text."""
        names = _names(inputs)
        missing = [name for name in self._required if name not in names]
        if self._any_optional:
            expected = f"expected number of inputs between {len(self._required)} and {len(self._inputs)} but got "
        else:
            expected = f"expected {len(self._inputs)} inputs but got "
        return InvalidArgument(
            f"{expected}{len(inputs)} inputs for model '{self._name}'. Got input(s) {_listed(names)}, "
            f"but missing required input(s) {_listed(missing)}. Please provide all required input(s)."
        )

    def _wrong_shape(self, spec: InputSpec, shape: tuple[int, ...]) -> InvalidArgument:
        """Triton's text."""
        dims = spec.dims or ()
        expected = (-1, *dims) if self._max_rows else dims
        return InvalidArgument(
            f"unexpected shape for input '{spec.name}' for model '{self._name}'. "
            f"Expected {_listed(expected)}, got {_listed(shape)}."
        )


def single_fixed_input(config: ModelConfig) -> InputSpec | None:
    """Return the input of a model with exactly one, of fixed type and shape and without options: the most common kind."""
    if len(config.inputs) != 1 or config.internal_inputs():
        return None
    (spec,) = config.inputs
    fixed = spec.dtype is not None and spec.dims is not None and -1 not in spec.dims
    special = spec.optional or spec.finite or spec.allow_ragged_batch or spec.pad_value is not None
    return spec if fixed and not special and spec.reshape is None else None


def _all_finite(tensor: Tensor) -> bool:
    if tensor.dtype is BF16:
        return not np.any((tensor.array & _BF16_EXPONENT) == _BF16_EXPONENT)
    return tensor.dtype.numpy.kind != "f" or bool(np.isfinite(tensor.array).all())


def _names(inputs: Sequence[Tensor]) -> list[str]:
    return [tensor.name[:64] for tensor in inputs[:_SHOWN_NAMES]]


def _listed(items: Sequence[int | str]) -> str:
    """Format a list as Triton does: without spaces."""
    return f"[{','.join(map(repr, items))}]"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
