# SPDX-License-Identifier: Apache-2.0
"""A builder of ONNX graphs: nodes, constants, and the known shape of each value.

The translators use it. A Caffe2 net may write a blob repeatedly; each write is a new value here, and `blobs` maps each
blob to its current value.
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
"""Protobuf's limit, less some space for the nodes."""

Shape = tuple[int | None, ...]


class InvalidOperator(Exception):
    """An operator is invalid; the text continues the operator's name."""


class Graph:
    """The ONNX graph of one model; finished once."""

    def __init__(self) -> None:
        self.blobs: dict[str, str] = {}
        """The current value of each blob."""
        self._inputs: dict[str, Any] = {}
        self._nodes: list[Any] = []
        self._constants: dict[str, Array] = {}
        self._types: dict[str, Any] = {}
        self._small: dict[str, Any] = {}
        self._bytes = 0

    def add_input(self, name: str, elem_type: int, shape: Sequence[int] | None) -> None:
        """Add an input of the model; -1: any size, None: any shape."""
        sizes = None if shape is None else [None if size < 0 else size for size in shape]
        if sizes and sizes[0] is None:
            sizes[0] = "batch"  # type: ignore[call-overload]  # sizes that have a name stay together through a graph
        kind = helper.make_tensor_type_proto(elem_type, sizes)
        value = self._new(kind)
        self._inputs[value] = name
        self.blobs[name] = value

    def constant(self, array: Array) -> str:
        """Add a constant. Object arrays hold bytes, which must be UTF-8: ONNX Runtime has no other strings."""
        self._bytes += array.nbytes if array.dtype != object else sum(len(item) for item in array.ravel())
        if self._bytes > _MAX_BYTES:
            raise InvalidOperator("has more than 2 GiB of weights, which no ONNX graph can hold")
        elem_type = TensorProto.STRING if array.dtype == object else helper.np_dtype_to_tensor_dtype(array.dtype)
        value = self._new(helper.make_tensor_type_proto(elem_type, list(array.shape)))
        self._constants[value] = array
        if array.size <= _SMALL and array.dtype != object:
            self._small[value] = numpy_helper.from_array(array, value)
        return value

    def integers(self, *numbers: int) -> str:
        """Add a constant list of int64: shapes, axes and the like."""
        return self.constant(np.array(numbers, np.int64))

    def like(self, number: float, value: str) -> str:
        """Add a constant scalar with the type of `value`."""
        return self.constant(np.array(number, helper.tensor_dtype_to_np_dtype(self.elem_type(value))))

    def emit(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; "" in `inputs` is an omitted one."""
        return self.emit_many(kind, inputs, 1, **attributes)[0]

    def emit_many(self, kind: str, inputs: Iterable[str], count: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        taken = list(inputs)
        outputs = [f"%{len(self._types) + offset}" for offset in range(count)]
        node = helper.make_node(kind, taken, outputs, **attributes)
        present = {value for value in taken if value}
        inferred = shape_inference.infer_node_outputs(
            defs.get_schema(kind, OPSET, ""),
            node,
            {value: self._types[value] for value in present},
            {value: self._small[value] for value in present if value in self._small},
            opset_imports=_IMPORTS,
            ir_version=_IR_VERSION,
        )
        for value in outputs:
            self._types[value] = inferred.get(value) or onnx.TypeProto()
        self._nodes.append(node)
        return outputs

    def array(self, value: str) -> Array | None:
        """Return the content of a constant, or None."""
        return self._constants.get(value)

    def elem_type(self, value: str) -> int:
        """Return ONNX's number of the element type."""
        return int(self._types[value].tensor_type.elem_type)

    def type_name(self, value: str) -> str:
        """Return the name of the element type, for errors."""
        return str(TensorProto.DataType.Name(self.elem_type(value))).lower()

    def shape(self, value: str) -> Shape | None:
        """Return its sizes, None for unknown ones; None if the rank is unknown."""
        kind = self._types[value].tensor_type
        if not kind.HasField("shape"):
            return None
        return tuple(int(size.dim_value) if size.HasField("dim_value") else None for size in kind.shape.dim)

    def rank(self, value: str) -> int | None:
        """Return the number of dimensions."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def describe(self, value: str) -> str:
        """Return its shape, for errors."""
        shape = self.shape(value)
        return "of unknown shape" if shape is None else str([-1 if size is None else size for size in shape])

    def transposed(self, value: str, axes: Sequence[int]) -> str:
        """Transpose a value; constants at once, so that the graph stores them as needed."""
        array = self.array(value)
        if array is not None and array.ndim == len(axes):
            return self.constant(np.ascontiguousarray(array.transpose(axes)))
        return self.emit("Transpose", value, perm=list(axes))

    def reshaped(self, value: str, shape: Sequence[int]) -> str:
        """Reshape a value (0: keep the size, -1: the rest); constants at once."""
        array = self.array(value)
        if array is not None and 0 not in shape and array.size:
            try:
                return self.constant(array.reshape(shape))
            except ValueError:
                raise InvalidOperator(f"has weights {list(array.shape)} that do not go into {list(shape)}") from None
        return self.emit("Reshape", value, self.integers(*shape))

    def finish(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """Return the model that computes these blobs. Values get the names of the blobs that hold them at the end."""
        names = dict(self._inputs)
        taken = set(names.values())
        for blob in outputs:
            value = self.blobs[blob]
            if blob in taken:
                raise InvalidOperator(
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
        # The weights last, since a graph is copied into its model; one by one, so that each is in memory only once.
        while self._constants:
            value, array = self._constants.popitem()
            if value in used:
                _fill(model.graph.initializer.add(), array, names[value])
        return model

    def _needed(self, pending: set[str]) -> tuple[list[Any], set[str]]:
        """Return the nodes that some values depend on, and all values those read. Most second outputs are unused."""
        needed = []
        for node in reversed(self._nodes):
            if not pending.isdisjoint(node.output):
                pending.update(node.input)
                needed.append(node)
        return needed[::-1], pending

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
        # ONNX is little-endian, as are all machines that ONNX Runtime supports.
        tensor.raw_data = array.tobytes()
