# SPDX-License-Identifier: Apache-2.0
"""Turn the tensors of a request into a table, for the three tabular backends.

A configuration declares one input, of any name, with all columns; or several inputs, each with one or more columns.
Several inputs are concatenated: in the order of the model's columns if they have their names, else in the
configuration's order. Outputs may have any name, too (`output_sources`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.signature import Port, decode_text
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

INPUT = "input"
"""The default name of the input."""


class Columns:
    """The inputs of one model as columns of a table."""

    def __init__(
        self, config: ModelConfig, width: int, names: Sequence[str], dtypes: Sequence[DType], *, text: bool = False
    ) -> None:
        """`dtypes`: the allowed types of a column, the default first; `text`: BYTES is allowed too."""
        self._model = config.name
        self._width = width
        self._numpy = None if text else dtypes[0].numpy
        allowed = (*dtypes, BYTES) if text else tuple(dtypes)
        specs = list(config.inputs)
        if len(specs) <= 1:
            spec = specs[0] if specs else InputSpec(INPUT, None, None)
            specs = [spec]
            widths = [width]
        else:
            place = {name: index for index, name in enumerate(names)}
            if all(spec.name in place for spec in specs):
                specs.sort(key=lambda spec: place[spec.name])
            widths = [_columns_of(spec) for spec in specs]
            if sum(widths) != width:
                raise InvalidArgument(
                    f"the inputs of model '{config.name}' have {sum(widths)} columns together, and the model has {width}: "
                    "declare one input with all of them, or one for each"
                )
        if len(specs) == 1 and self._numpy is not None and specs[0].dtype in allowed:
            self._numpy = specs[0].dtype.numpy
        self._parts = {spec.name: count for spec, count in zip(specs, widths, strict=True)}
        self.ports = {
            spec.name: Port(spec.name, "table", spec.dtype if spec.dtype in allowed else dtypes[0], (-1, count))
            for spec, count in zip(specs, widths, strict=True)
        }

    def table(self, inputs: Mapping[str, Array]) -> Array:
        """Return all columns as one array, row by row."""
        parts = [self._part(name, count, inputs) for name, count in self._parts.items()]
        rows = parts[0].shape[0]
        if any(part.shape[0] != rows for part in parts):
            raise self._shape_error(inputs)
        if len(parts) == 1:
            table = parts[0]
        elif any(part.dtype == object for part in parts):
            table = np.concatenate([part.astype(object) for part in parts], axis=1)
        else:
            table = np.concatenate(parts, axis=1)
        return table if self._numpy is None else np.ascontiguousarray(table, self._numpy)

    def _part(self, name: str, count: int, inputs: Mapping[str, Array]) -> Array:
        part = inputs.get(name)
        # The libraries do not always check the width: they would read past the end of a row that is too short.
        if part is None or part.ndim != 2 or part.shape[1] != count:
            raise self._shape_error(inputs)
        return np.array(decode_text(name, part), object).reshape(part.shape) if part.dtype == object else part

    def _shape_error(self, inputs: Mapping[str, Array]) -> InvalidArgument:
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        wanted = ", ".join(f"'{name}' [rows, {count}]" for name, count in self._parts.items())
        return InvalidArgument(f"model '{self._model}' does not accept inputs of these shapes: {shapes}. Send {wanted}")


def with_declared_dtype(port: Port, config: ModelConfig, allowed: Collection[DType]) -> Port:
    """Return the port with the data type that the configuration declares for this output, if it is an allowed one."""
    declared = next((spec.dtype for spec in config.outputs if spec.name == port.name), None)
    return Port(port.name, port.kind, declared if declared in allowed else port.dtype, port.shape)


def output_sources(config: ModelConfig, known: Mapping[str, Port]) -> dict[str, str]:
    """Return which known output each declared one is: the one of its name, else the first free one of its type and width.

    The files have no output names, so a configuration may choose them. An output for which nothing is left is not in
    the result.
    """
    sources = {spec.name: spec.name for spec in config.outputs if spec.name in known}
    for spec in config.outputs:
        if spec.name not in sources:
            free = [name for name in known if name not in sources.values()]
            fitting = [name for name in free if _is_like(spec, known[name])]
            if free:
                sources[spec.name] = (fitting or free)[0]
    return sources


def _is_like(spec: OutputSpec, port: Port) -> bool:
    if spec.dtype is not None and port.dtype is not None and _family(spec.dtype) != _family(port.dtype):
        return False
    dims = (spec.dims if spec.reshape is None else spec.reshape) or ()
    return not dims or port.shape is None or dims[-1] in (-1, port.shape[-1])


def _family(dtype: DType) -> str:
    kind = dtype.numpy.kind
    return "integer" if kind in "iub" else kind


def _columns_of(spec: InputSpec) -> int:
    dims = (spec.dims if spec.reshape is None else spec.reshape) or ()
    return dims[-1] if dims and dims[-1] > 0 else 1
