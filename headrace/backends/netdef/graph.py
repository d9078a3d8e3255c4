# SPDX-License-Identifier: Apache-2.0
"""The ONNX graph while it is built: nodes, constants, and what is known of the shape of each value.

The translators call it. Caffe2's blobs may be written again and again; each write is a value of its own here, and
`blobs` says which value a blob has now. Knows ONNX, and no operator of Caffe2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference

from headrace.backends.contract import Array

OPSET = 17
_IR_VERSION = 8
_IMPORTS = [helper.make_opsetid("", OPSET)]
_SMALL = 64
_MAX_BYTES = 2**31 - 2**26
"""What protobuf can write, less some room for the nodes."""

Shape = tuple[int | None, ...]


class Unfit(Exception):
    """What is wrong with what an operator asks for; the text goes on after the operator's name."""


class Graph:
    """Made for one model, and finished once."""

    def __init__(self) -> None:
        self.blobs: dict[str, str] = {}
        """The value that each blob has now."""
        self._inputs: dict[str, Any] = {}
        self._nodes: list[Any] = []
        self._constants: dict[str, Array] = {}
        self._types: dict[str, Any] = {}
        self._small: dict[str, Any] = {}
        self._bytes = 0

    def add_input(self, name: str, elem_type: int, shape: Sequence[int] | None) -> None:
        """An input of the model; -1 for any size, None for any shape."""
        sizes = None if shape is None else [None if size < 0 else size for size in shape]
        if sizes and sizes[0] is None:
            sizes[0] = "batch"  # type: ignore[call-overload]  # sizes that have a name stay together through a graph
        kind = helper.make_tensor_type_proto(elem_type, sizes)
        value = self._new(kind)
        self._inputs[value] = name
        self.blobs[name] = value

    def constant(self, array: Array) -> str:
        """A value that is known now. Object arrays are of bytes, and must be UTF-8: ONNX Runtime has no other strings."""
        self._bytes += array.nbytes if array.dtype != object else sum(len(item) for item in array.ravel())
        if self._bytes > _MAX_BYTES:
            raise Unfit("has more than 2 GiB of weights, which no ONNX graph can hold")
        elem_type = TensorProto.STRING if array.dtype == object else helper.np_dtype_to_tensor_dtype(array.dtype)
        value = self._new(helper.make_tensor_type_proto(elem_type, list(array.shape)))
        self._constants[value] = array
        if array.size <= _SMALL and array.dtype != object:
            self._small[value] = numpy_helper.from_array(array, value)
        return value

    def integers(self, *numbers: int) -> str:
        """A list of int64: shapes, axes and the like."""
        return self.constant(np.array(numbers, np.int64))

    def like(self, number: float, value: str) -> str:
        """A single number of the type of `value`."""
        return self.constant(np.array(number, helper.tensor_dtype_to_np_dtype(self.elem_type(value))))

    def emit(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; `inputs` may have "" for one that is left out."""
        return self.emit_many(kind, inputs, 1, **attributes)[0]

    def emit_many(self, kind: str, inputs: Iterable[str], count: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        taken = list(inputs)
        outputs = [f"%{len(self._types) + offset}" for offset in range(count)]
        node = helper.make_node(kind, taken, outputs, **attributes)
        present = {value for value in taken if value}
        found = shape_inference.infer_node_outputs(
            defs.get_schema(kind, OPSET, ""),
            node,
            {value: self._types[value] for value in present},
            {value: self._small[value] for value in present if value in self._small},
            opset_imports=_IMPORTS,
            ir_version=_IR_VERSION,
        )
        for value in outputs:
            self._types[value] = found.get(value) or onnx.TypeProto()
        self._nodes.append(node)
        return outputs

    def array(self, value: str) -> Array | None:
        """What it is, if it is a constant."""
        return self._constants.get(value)

    def elem_type(self, value: str) -> int:
        """ONNX's number for the type of its elements."""
        return int(self._types[value].tensor_type.elem_type)

    def type_name(self, value: str) -> str:
        """The type of its elements, for errors."""
        return str(TensorProto.DataType.Name(self.elem_type(value))).lower()

    def shape(self, value: str) -> Shape | None:
        """Its sizes, None for those that are not known yet; None when not even their number is."""
        kind = self._types[value].tensor_type
        if not kind.HasField("shape"):
            return None
        return tuple(int(size.dim_value) if size.HasField("dim_value") else None for size in kind.shape.dim)

    def rank(self, value: str) -> int | None:
        """How many dimensions it has."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def describe(self, value: str) -> str:
        """Its shape, for errors."""
        shape = self.shape(value)
        return "of unknown shape" if shape is None else str([-1 if size is None else size for size in shape])

    def transposed(self, value: str, axes: Sequence[int]) -> str:
        """With its dimensions in another order; constants at once, so that the graph has them as they are needed."""
        array = self.array(value)
        if array is not None and array.ndim == len(axes):
            return self.constant(np.ascontiguousarray(array.transpose(axes)))
        return self.emit("Transpose", value, perm=list(axes))

    def reshaped(self, value: str, shape: Sequence[int]) -> str:
        """In another shape (0: as it was, -1: what is left); constants at once."""
        array = self.array(value)
        if array is not None and 0 not in shape and array.size:
            try:
                return self.constant(array.reshape(shape))
            except ValueError:
                raise Unfit(f"has weights {list(array.shape)} that do not go into {list(shape)}") from None
        return self.emit("Reshape", value, self.integers(*shape))

    def finish(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The model that gives these blobs. Values get the names of the blobs they are in at the end."""
        names = dict(self._inputs)
        taken = set(names.values())
        for blob in outputs:
            value = self.blobs[blob]
            if blob in taken:
                raise Unfit(
                    f"has '{blob}' as both an input and an output: take it out of the outputs, or rename one in the net"
                )
            if value in names or value in self._constants:
                value = self.emit("Identity", value)
            names[value] = blob
            taken.add(blob)
        for blob, value in self.blobs.items():
            if value not in names and blob not in taken:
                names[value] = blob
                taken.add(blob)
        for number, value in enumerate(self._types):
            if value not in names:
                names[value] = _free(f"value_{number}", taken)
        return self._model(names, outputs)

    def _model(self, names: dict[str, str], outputs: Sequence[str]) -> onnx.ModelProto:
        of_name = {name: value for value, name in names.items()}
        nodes, used = self._needed({of_name[name] for name in outputs})
        for node in nodes:
            node.input[:] = [names[value] if value else "" for value in node.input]
            node.output[:] = [names[value] for value in node.output]
        graph = helper.make_graph(
            nodes,
            "netdef",
            [helper.make_value_info(name, self._types[value]) for value, name in self._inputs.items()],
            [helper.make_value_info(name, self._types[of_name[name]]) for name in outputs],
        )
        model = helper.make_model(graph, opset_imports=_IMPORTS, ir_version=_IR_VERSION, producer_name="headrace")
        # The weights last, since a graph is copied into its model; and one by one, so that they are there only once.
        while self._constants:
            value, array = self._constants.popitem()
            if value in used:
                _fill(model.graph.initializer.add(), array, names[value])
        return model

    def _needed(self, open_values: set[str]) -> tuple[list[Any], set[str]]:
        """The nodes that lead to some values, and all that those read. Nobody asks for most second outputs."""
        needed = []
        for node in reversed(self._nodes):
            if not open_values.isdisjoint(node.output):
                open_values.update(node.input)
                needed.append(node)
        return needed[::-1], open_values

    def _new(self, kind: Any) -> str:
        value = f"%{len(self._types)}"
        self._types[value] = kind
        return value


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _fill(tensor: Any, array: Array, name: str) -> None:
    tensor.name = name
    tensor.dims.extend(array.shape)
    if array.dtype == object:
        tensor.data_type = TensorProto.STRING
        tensor.string_data.extend(bytes(item) for item in array.ravel())
    else:
        tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        # ONNX's order is the little-endian one, which all machines have that ONNX Runtime is built for.
        tensor.raw_data = array.tobytes()
