# SPDX-License-Identifier: Apache-2.0
"""A request held against its model's configuration: names, types, shapes, sizes. Called by versions for every request.

The texts marked so are Triton's to the letter: clients in the field look for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from headrace.core.dtypes import BF16
from headrace.core.errors import InvalidArgument
from headrace.core.messages import InferRequest
from headrace.core.tensors import Tensor
from headrace.models.config.types import InputSpec, ModelConfig, SequenceBatching, fits

_SHOWN_NAMES = 16
_BF16_EXPONENT = np.uint16(0x7F80)


class RequestChecker:
    """What one model asks of its requests."""

    def __init__(self, config: ModelConfig) -> None:
        self._name = config.name
        self._most = config.max_batch_size
        made = _made_by_the_engine(config)
        self._inputs = {spec.name: spec for spec in config.inputs if spec.name not in made}
        self._required = [spec.name for spec in self._inputs.values() if not spec.optional]
        self._outputs = {spec.name for spec in config.outputs} - made
        self._any_optional = len(self._required) < len(self._inputs)
        free = [spec for spec in self._inputs.values() if not spec.allow_ragged_batch and spec.pad_value is None]
        self._values_of = {spec.name for spec in self._inputs.values() if spec.is_shape_tensor and self._most}
        """Shape tensors: a batch has one for all its requests, so theirs must be equal."""
        self.by_shape = (
            self._any_optional
            or bool(self._values_of)
            or any(spec.dtype is None or spec.dims is None or -1 in spec.dims for spec in free)
        )
        """Whether two right requests can differ so that they cannot share a batch."""
        self._apart = {spec.name for spec in self._inputs.values()} - {spec.name for spec in free}
        self._plain = plain_input(config) if self._most else None

    def check(self, request: InferRequest) -> int:
        """The number of rows of a right request; raises `InvalidArgument` for a wrong one."""
        inputs = request.inputs
        plain = self._plain
        if plain is not None and len(inputs) == 1 and not request.outputs:
            tensor = inputs[0]
            shape = tensor.array.shape
            if (
                shape
                and tensor.dtype is plain.dtype
                and shape[1:] == plain.dims
                and tensor.name == plain.name
                and 0 < shape[0] <= self._most
            ):
                rows: int = shape[0]
                return rows
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
            if spec.is_shape_tensor and self._most and self._is_shape_alone(spec, tensor):
                dims = shape
            elif self._most:
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
        if rows > self._most:
            # Triton's
            raise InvalidArgument(f"inference request batch-size must be <= {self._most} for '{self._name}'")
        return max(rows, 1)

    def key(self, request: InferRequest) -> Hashable:
        """Equal for requests that may share a batch. To be asked only when `by_shape`."""
        if self._values_of:
            return tuple(sorted((tensor.name, tensor.dtype.name, self._alike(tensor)) for tensor in request.inputs))
        if len(request.inputs) == 1 and not self._any_optional:
            tensor = request.inputs[0]
            return () if tensor.name in self._apart else (tensor.dtype.name, tensor.array.shape[1:])
        return tuple(
            sorted(
                (tensor.name, tensor.dtype.name, () if tensor.name in self._apart else tensor.array.shape[1:])
                for tensor in request.inputs
            )
        )

    def _alike(self, tensor: Tensor) -> tuple[int, ...]:
        """What requests that share a batch have in common of an input."""
        if tensor.name in self._values_of:
            spec, array = self._inputs[tensor.name], np.asarray(tensor.array)
            alone = spec.dims is not None and array.ndim == len(spec.dims)
            return tuple(int(value) for value in (array if alone else array[0]).ravel())
        return () if tensor.name in self._apart else tensor.array.shape[1:]

    def _is_shape_alone(self, spec: InputSpec, tensor: Tensor) -> bool:
        """Whether a shape tensor has no batch dimension, as Triton has them; with one, all its rows must be equal."""
        array = np.asarray(tensor.array)  # it may lie on a device
        if spec.dims is not None and array.ndim == len(spec.dims):
            return True
        if array.ndim and len(array) and not (array == array[:1]).all():
            raise InvalidArgument(
                f"input '{tensor.name}' of model '{self._name}' is a shape tensor and has other values in one row than in "
                "another: send it once, without a batch dimension, or such rows apart"
            )
        return False

    def _enough(self, inputs: Sequence[Tensor]) -> bool:
        given = {tensor.name for tensor in inputs}
        return len(inputs) < len(self._inputs) and all(name in given for name in self._required)

    def _unknown_input(self, name: str) -> InvalidArgument:
        allowed = _quoted(sorted(self._inputs))
        noun = "its input is" if len(self._inputs) == 1 else "its inputs are"
        return InvalidArgument(f"unexpected inference input '{name[:256]}' for model '{self._name}': {noun} {allowed}")

    def _wrong_count(self, inputs: Sequence[Tensor]) -> InvalidArgument:
        """Triton's text."""
        given = _names(inputs)
        missing = [name for name in self._required if name not in given]
        if self._any_optional:
            expected = f"expected number of inputs between {len(self._required)} and {len(self._inputs)} but got "
        else:
            expected = f"expected {len(self._inputs)} inputs but got "
        return InvalidArgument(
            f"{expected}{len(inputs)} inputs for model '{self._name}'. Got input(s) {_listed(given)}, "
            f"but missing required input(s) {_listed(missing)}. Please provide all required input(s)."
        )

    def _wrong_shape(self, spec: InputSpec, shape: tuple[int, ...]) -> InvalidArgument:
        """Triton's text."""
        dims = spec.dims or ()
        expected = (-1, *dims) if self._most else dims
        return InvalidArgument(
            f"unexpected shape for input '{spec.name}' for model '{self._name}'. "
            f"Expected {_listed(expected)}, got {_listed(shape)}."
        )


def plain_input(config: ModelConfig) -> InputSpec | None:
    """The input of a model that has one, of fixed type and shape, and nothing else to be looked at: the most common kind."""
    if len(config.inputs) != 1 or _made_by_the_engine(config):
        return None
    (spec,) = config.inputs
    fixed = spec.dtype is not None and spec.dims is not None and -1 not in spec.dims
    special = spec.optional or spec.finite or spec.allow_ragged_batch or spec.pad_value is not None
    return spec if fixed and not special and spec.reshape is None else None


def _made_by_the_engine(config: ModelConfig) -> set[str]:
    """Tensors that callers neither send nor get: those of a stateful model's controls and states, and of the batch."""
    made = {name for described in config.batch_inputs for name in described.target_names}
    if isinstance(config.scheduling, SequenceBatching):
        made |= {control.name for control in config.scheduling.controls}
        made |= {state.input_name for state in config.scheduling.states}
    return made


def _all_finite(tensor: Tensor) -> bool:
    if tensor.dtype is BF16:
        return not np.any((tensor.array & _BF16_EXPONENT) == _BF16_EXPONENT)
    return tensor.dtype.numpy.kind != "f" or bool(np.isfinite(tensor.array).all())


def _names(inputs: Sequence[Tensor]) -> list[str]:
    return [tensor.name[:64] for tensor in inputs[:_SHOWN_NAMES]]


def _listed(items: Sequence[int | str]) -> str:
    """As Triton writes lists: without spaces."""
    return f"[{','.join(map(repr, items))}]"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
