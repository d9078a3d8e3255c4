# SPDX-License-Identifier: Apache-2.0
"""A request for a model that works as it is: the smallest one that its configuration allows, of zeros and short texts.

Called by `models`. A small request is all JSON; of a large one only the JSON in front is kept, and a number of zero bytes
that follow it, so that an example never is larger than a page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from shlex import quote
from typing import Any

import orjson

from headrace.api.openapi.describing import Schema
from headrace.api.openapi.v2_routes import LENGTH_FIELD
from headrace.core.dtypes import BYTES, FP32, DType
from headrace.models.config.types import InputSpec, ModelConfig, SequenceBatching

_MOST_ELEMENTS = 256
"""Of all inputs together; above, the example has binary tensors."""
_ANY_SIZE = 4
_SEQUENCE, _SEQUENCE_TEXT = 2_000_000_011, "example"
"""Not what somebody's own sequence is likely to be called; the number fits every type that a model may want it in."""
_BYTES_ITEM = 4
"""Of an empty text on the wire: its length."""


@dataclass(frozen=True, slots=True)
class Example:
    """One request."""

    path: str
    body: dict[str, Any]
    """The JSON, or the JSON in front of the binary tensors."""
    zero_bytes: int = 0
    """How many follow it, all zero."""

    def as_json(self) -> Schema:
        """For the page, which sends it."""
        return {"path": self.path, "body": self.body, "zero_bytes": self.zero_bytes}

    def curl(self, server: str) -> str:
        """For a shell."""
        text = orjson.dumps(self.body)
        target = quote(f"{server}{self.path}")
        if not self.zero_bytes:
            return f"curl -s {target} -H 'content-type: application/json' -d {quote(text.decode())}"
        # printf would take a `%` or a backslash of the text for its own.
        return (
            f"{{ printf %s {quote(text.decode())}; head -c {self.zero_bytes} /dev/zero; }} |\n"
            f"  curl -s {target} -H 'content-type: application/octet-stream' \\\n"
            f"    -H '{LENGTH_FIELD}: {len(text)}' --data-binary @-"
        )


def inputs_of(config: ModelConfig) -> list[InputSpec]:
    """The inputs that clients send: without those that the engine makes itself."""
    made = {name for described in config.batch_inputs for name in described.target_names}
    if isinstance(config.scheduling, SequenceBatching):
        made |= {control.name for control in config.scheduling.controls}
        made |= {state.input_name for state in config.scheduling.states}
    return [spec for spec in config.inputs if spec.name not in made]


def example_of(config: ModelConfig) -> Example | None:
    """None for a model that has nothing to be sent."""
    inputs = inputs_of(config)
    # The protocol wants at least one, even where all may be left out.
    chosen = [spec for spec in inputs if not spec.optional] or inputs[:1]
    if not chosen:
        return None
    shapes = [_shape(config, spec) for spec in chosen]
    sizes = [math.prod(shape) for shape in shapes]
    types = [spec.dtype or FP32 for spec in chosen]
    path = f"/v2/models/{config.name}"
    given = list(zip(chosen, types, shapes, sizes, strict=True))
    small = sum(sizes) <= _MOST_ELEMENTS
    parameters = _parameters(config)
    if config.decoupled:
        if not small:
            return None
        members = {spec.name: _nested(dtype, list(shape)) for spec, dtype, shape, _ in given}
        return Example(f"{path}/generate_stream", {**members, **parameters})
    body: dict[str, Any] = {"parameters": parameters} if parameters else {}
    body["inputs"] = [
        {"name": spec.name, "datatype": dtype.name, "shape": list(shape)}
        | ({"data": [_zero(dtype)] * size} if small else {"parameters": {"binary_data_size": _zeros(dtype, size)}})
        for spec, dtype, shape, size in given
    ]
    zero_bytes = 0 if small else sum(_zeros(dtype, size) for _, dtype, _, size in given)
    return Example(f"{path}/infer", body, zero_bytes)


def _parameters(config: ModelConfig) -> dict[str, Any]:
    if not isinstance(config.scheduling, SequenceBatching):
        return {}
    texts = any(control.kind == "corrid" and control.dtype is BYTES for control in config.scheduling.controls)
    return {"sequence_id": _SEQUENCE_TEXT if texts else _SEQUENCE, "sequence_start": True, "sequence_end": True}


def _shape(config: ModelConfig, spec: InputSpec) -> tuple[int, ...]:
    dims = (_ANY_SIZE,) if spec.dims is None else tuple(max(1, size) for size in spec.dims)
    return (1, *dims) if config.max_batch_size else dims


def _zero(dtype: DType) -> Any:
    if dtype is BYTES:
        return "text"
    return {"b": False, "f": 0.0}.get(dtype.numpy.kind, 0)


def _zeros(dtype: DType, size: int) -> int:
    return size * (dtype.item_bytes or _BYTES_ITEM)


def _nested(dtype: DType, shape: list[int]) -> Any:
    if not shape:
        return _zero(dtype)
    return [_nested(dtype, shape[1:])] * shape[0]
