# SPDX-License-Identifier: Apache-2.0
"""Translations of Caffe2's operators that fill, reshape, cast, join and split tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from headrace.backends.contract import Array
from headrace.backends.netdef.files import caffe2_message
from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import (
    MANY,
    Operator,
    Translator,
    channels_first,
    channels_last,
    known_rank,
    read,
    write,
)

_NUMPY: dict[str, Any] = {
    "FLOAT": np.float32,
    "INT32": np.int32,
    "BYTE": np.uint8,
    "STRING": object,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT16": np.int16,
    "INT64": np.int64,
    "FLOAT16": np.float16,
    "DOUBLE": np.float64,
}


def numpy_type(operator: Operator, name: str, default: str) -> Any:
    """Return the type of an argument, by its number or its name in any case. `object` is for strings."""
    type_name = default
    argument = operator.arguments.get(name)
    if argument is not None:
        if argument.HasField("s"):
            type_name = operator.text(name, "").upper()
        else:
            values = caffe2_message("TensorProto").DESCRIPTOR.enum_types_by_name["DataType"].values_by_number
            number = operator.integer(name, 0)
            type_name = values[number].name if number in values else str(number)
    if type_name not in _NUMPY:
        raise operator.fault(f"has {name} '{type_name[:32]}', which is not a Caffe2 data type")
    return _NUMPY[type_name]


_MAX_FILL = 2**26
"""The largest tensor that a fill may create: a few bytes of a file must not exhaust the memory."""


def given_tensor(kind: str) -> Translator:
    """Translate a tensor with given elements, of type `kind` unless `dtype` has another."""
    return partial(_given, kind=kind)


def _given(operator: Operator, graph: Graph, *, kind: str) -> None:
    dtype = numpy_type(operator, "dtype", kind)
    shape = operator.integers("shape")
    if operator.inputs:
        raise operator.fault("takes its shape from another tensor, which is not translated: save it with its shape")
    values = _values(operator, dtype)
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise operator.fault(
            f"declares shape {list(shape)} for '{operator.outputs[0] if operator.outputs else ''}', and has "
            f"{values.size} values: the file is damaged"
        )
    write(operator, graph, graph.constant(values.reshape(shape)))


def _values(operator: Operator, dtype: Any) -> Array:
    if dtype is object:
        texts = operator.strings("values")
        values = np.empty(len(texts), object)
        values[:] = texts
        for item in texts:
            try:
                item.decode()
            except UnicodeDecodeError:
                raise operator.fault("has a string that is not UTF-8, which ONNX Runtime cannot hold") from None
        return values
    if np.issubdtype(dtype, np.floating):
        return operator.floats("values").astype(dtype, copy=False)
    numbers = operator.longs("values")
    if dtype is not np.bool_ and numbers.size:
        limits = np.iinfo(dtype)
        if numbers.min() < limits.min or numbers.max() > limits.max:
            raise operator.fault(f"has values that are no {np.dtype(dtype).name}: the file is damaged")
    return numbers.astype(dtype)


def given_bytes(operator: Operator, graph: Graph) -> None:
    """Translate GivenTensorByteStringToUInt8Fill: the elements are the bytes of one string."""
    values = np.frombuffer(b"".join(operator.strings("values")), np.uint8)
    shape = operator.integers("shape")
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise operator.fault(f"declares shape {list(shape)} and has {values.size} bytes: the file is damaged")
    write(operator, graph, graph.constant(values.reshape(shape)))


def constant_fill(operator: Operator, graph: Graph) -> None:
    """Translate a fill with one value, in its own shape or that of another tensor."""
    value = _fill_value(operator)
    if not operator.inputs:
        shape = operator.integers("shape")
        if any(size < 0 for size in shape) or math.prod(shape) > _MAX_FILL:
            raise operator.fault(f"asks for a tensor of shape {list(shape)}: up to {_MAX_FILL} elements are possible")
        write(operator, graph, graph.constant(np.full(shape, value)))
        return
    (like,) = read(operator, graph, 1)
    is_shape_input = bool(operator.integer("input_as_shape", 0))
    shape_value = graph.emit("Cast", like, to=TensorProto.INT64) if is_shape_input else graph.emit("Shape", like)
    if operator.has("extra_shape"):
        shape_value = graph.emit("Concat", shape_value, graph.integers(*operator.integers("extra_shape")), axis=0)
    filled = graph.emit("Expand", graph.constant(value), shape_value)
    write(operator, graph, filled)


def _fill_value(operator: Operator) -> Array:
    argument = operator.arguments.get("value")
    integer = argument is not None and argument.HasField("i") and not argument.HasField("f")
    dtype = numpy_type(operator, "dtype", "INT64" if integer else "FLOAT")
    if dtype is object:
        raise operator.fault("fills with strings, which is not translated")
    if np.issubdtype(dtype, np.floating):
        # Infinities are allowed here, as masks.
        number = 0.0 if argument is None else float(argument.i if integer else argument.f)
        return np.array(number, dtype)
    fill_value = operator.integer("value", 0)
    if dtype is np.bool_:
        return np.array(bool(fill_value))
    limits = np.iinfo(dtype)
    if not limits.min <= fill_value <= limits.max:
        raise operator.fault(f"has a value of {fill_value}, which is no {np.dtype(dtype).name}")
    return np.array(fill_value, dtype)


def random_fill(operator: Operator, graph: Graph) -> None:  # noqa: ARG001  # it is a Translator
    """Reject random fills: what reads them was never trained, and would answer differently after each start."""
    blob = operator.outputs[0] if operator.outputs else ""
    raise operator.fault(
        f"fills '{blob}' with random numbers: the net was saved before it was trained. Save the trained weights "
        "(Caffe2's mobile_exporter or predictor_exporter writes them as GivenTensorFill)"
    )


def reshape(operator: Operator, graph: Graph) -> None:
    """Reshape as in ONNX: 0 keeps a size and -1 takes the rest. The second output is the old shape."""
    value, *shapes = read(operator, graph, 1, 2)
    if shapes:
        needs_cast = graph.elem_type(shapes[0]) != TensorProto.INT64
        array = graph.array(shapes[0])
        if array is not None:
            shape = graph.integers(*(int(size) for size in array.ravel()))
        else:
            shape = graph.emit("Cast", shapes[0], to=TensorProto.INT64) if needs_cast else shapes[0]
    elif operator.has("shape"):
        needs_cast = False
        shape = graph.integers(*operator.integers("shape"))
    else:
        raise operator.fault("has no shape, neither as an argument nor as its second input")
    answers = [graph.emit("Reshape", value, shape)]
    if len(operator.outputs) > 1:
        old = graph.emit("Shape", value)
        answers.append(graph.emit("Cast", old, to=graph.elem_type(shapes[0])) if needs_cast else old)
    write(operator, graph, *answers)


def flatten(operator: Operator, graph: Graph) -> None:
    """Flatten to two dimensions at `axis`."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Flatten", value, axis=operator.integer("axis", 1)))


def flatten_to_vec(operator: Operator, graph: Graph) -> None:
    """Flatten to one dimension."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Reshape", value, graph.integers(-1)))


def transpose(operator: Operator, graph: Graph) -> None:
    """Transpose by `axes`, or reverse all dimensions."""
    (value,) = read(operator, graph, 1)
    axes = operator.integers("axes")
    write(operator, graph, graph.emit("Transpose", value, **({"perm": list(axes)} if axes else {})))


def nhwc_to_nchw(operator: Operator, graph: Graph) -> None:
    """Move the channels to the front."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, channels_first(graph, value, graph.rank(value) or 4))


def nchw_to_nhwc(operator: Operator, graph: Graph) -> None:
    """Move the channels to the end."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, channels_last(graph, value, graph.rank(value) or 4))


def expand_dims(operator: Operator, graph: Graph) -> None:
    """Insert dimensions of size 1 at the resulting positions `dims`."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Unsqueeze", value, graph.integers(*sorted(set(operator.integers("dims"))))))


def squeeze(operator: Operator, graph: Graph) -> None:
    """Remove dimensions of size 1."""
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Squeeze", value, graph.integers(*sorted(set(operator.integers("dims"))))))


def shape(operator: Operator, graph: Graph) -> None:
    """Output the shape, or the sizes of some `axes`."""
    (value,) = read(operator, graph, 1)
    sizes = graph.emit("Shape", value)
    if operator.has("axes"):
        sizes = graph.emit("Gather", sizes, graph.integers(*operator.integers("axes")), axis=0)
    write(operator, graph, sizes)


def cast(operator: Operator, graph: Graph) -> None:
    """Cast to the type of the argument `to`."""
    if not operator.has("to"):
        raise operator.fault("does not say what it casts to")
    dtype = numpy_type(operator, "to", "FLOAT")
    if dtype is object:
        raise operator.fault("casts to strings, which Caffe2 cannot do either")
    _cast(operator, graph, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def cast_to(elem_type: int) -> Translator:
    """Return a translator for an operator that casts to one type."""
    return partial(_cast, to=elem_type)


def _cast(operator: Operator, graph: Graph, *, to: int) -> None:
    (value,) = read(operator, graph, 1)
    write(operator, graph, graph.emit("Cast", value, to=to))


def gather(operator: Operator, graph: Graph) -> None:
    """Gather rows by index."""
    value, rows = read(operator, graph, 2)
    write(operator, graph, graph.emit("Gather", value, rows, axis=operator.integer("axis", 0)))


def tile(operator: Operator, graph: Graph) -> None:
    """Repeat `tiles` times along `axis`."""
    (value,) = read(operator, graph, 1)
    rank = known_rank(operator, graph, value)
    times, axis = operator.integer("tiles", 1), operator.integer("axis", 0)
    if not (-rank <= axis < rank and times >= 0):
        raise operator.fault(f"has tiles {times} and axis {axis}, and reads {graph.describe(value)}")
    repeats = [1] * rank
    repeats[axis] = times
    write(operator, graph, graph.emit("Tile", value, graph.integers(*repeats)))


_END = 2**62


def concat(operator: Operator, graph: Graph) -> None:
    """Concatenate along `axis` or the channels of `order`; `add_axis` stacks. The second output has the sizes."""
    values = read(operator, graph, 1, MANY)
    axis = _axis(operator)
    stacked = bool(operator.integer("add_axis", 0))
    joined = [graph.emit("Unsqueeze", value, graph.integers(axis)) for value in values] if stacked else values
    answers = [graph.emit("Concat", *joined, axis=axis)]
    if len(operator.outputs) > 1:
        answers.append(_sizes_along(graph, joined, axis))
    write(operator, graph, *answers)


def _sizes_along(graph: Graph, values: list[str], axis: int) -> str:
    """Return the sizes as a constant if they are known, so that a Split by them has known shapes too."""
    shapes = [graph.shape(value) for value in values]
    sizes = [None if shape is None else shape[axis] for shape in shapes]
    if all(size is not None for size in sizes):
        return graph.constant(np.array(sizes, np.int32))
    is_shape_input = [
        graph.emit("Gather", graph.emit("Shape", value), graph.integers(axis), axis=0) for value in values
    ]
    return graph.emit("Cast", graph.emit("Concat", *is_shape_input, axis=0), to=TensorProto.INT32)


def split(operator: Operator, graph: Graph) -> None:
    """Split into the outputs: by the sizes of `split` or of the second input, or equally."""
    value, *sizes_input = read(operator, graph, 1, 2)
    count = len(operator.outputs)
    if not count:
        raise operator.fault("has no output: the net is damaged")
    sizes = operator.integers("split")
    inputs = [value]
    if sizes_input:
        array = graph.array(sizes_input[0])
        if array is None:
            inputs.append(graph.emit("Cast", sizes_input[0], to=TensorProto.INT64))
        else:
            inputs.append(graph.constant(array.astype(np.int64)))
    elif sizes:
        if len(sizes) != count or any(size < 0 for size in sizes):
            raise operator.fault(f"has {count} outputs and split {list(sizes)}")
        inputs.append(graph.integers(*sizes))
    axis = _axis(operator)
    pieces = graph.emit_many("Split", inputs, count, axis=axis)
    if operator.integer("add_axis", 0):
        pieces = [graph.emit("Squeeze", piece, graph.integers(axis)) for piece in pieces]
    write(operator, graph, *pieces)


def slice_tensor(operator: Operator, graph: Graph) -> None:
    """Slice from `starts` to `ends`. Negative numbers count from the end, and -1 is the end: one more than in ONNX."""
    value, *limits_inputs = read(operator, graph, 1, 3)
    if len(limits_inputs) == 2:
        arrays = [graph.array(value) for value in limits_inputs]
        if arrays[0] is None or arrays[1] is None:
            raise operator.fault("has computed starts or ends, which are not supported: only constants are")
        starts, ends = (tuple(int(number) for number in array.ravel()) for array in arrays if array is not None)
    else:
        starts, ends = operator.integers("starts"), operator.integers("ends")
    if not starts or len(starts) != len(ends):
        raise operator.fault(f"has starts {list(starts)} and ends {list(ends)}")
    bounds = [graph.integers(*(_counted(number) for number in numbers)) for numbers in (starts, ends)]
    write(operator, graph, graph.emit("Slice", value, *bounds, graph.integers(*range(len(starts)))))


def top_k(operator: Operator, graph: Graph) -> None:
    """Output the largest values and their indices."""
    (value,) = read(operator, graph, 1)
    count = operator.integer("k", -1)
    if count < 1:
        raise operator.fault(f"has k {count}")
    axis = operator.integer("axis", -1)
    answers = graph.emit_many("TopK", [value, graph.integers(count)], 2, axis=axis)
    write(operator, graph, *answers)


def channel_shuffle(operator: Operator, graph: Graph) -> None:
    """Shuffle channels: as a matrix with a row per group, transposed."""
    (image,) = read(operator, graph, 1)
    group = operator.integer("group", 1)
    shape = graph.shape(image)
    rank = known_rank(operator, graph, image)
    last = operator.order() == "NHWC"
    axis = rank - 1 if last else 1
    channels = shape[axis] if shape is not None and rank > 2 else None
    if group < 1 or channels is None or channels % group:
        raise operator.fault(f"has group {group}, and reads {graph.describe(image)}, whose channels it must divide")
    if last:
        grouped = graph.emit("Reshape", image, graph.integers(*[0] * axis, group, channels // group))
        transposed = graph.emit("Transpose", grouped, perm=[*range(axis), axis + 1, axis])
        shuffled = graph.emit("Reshape", transposed, graph.integers(*[0] * axis, channels))
    else:
        spatial = [size if size is not None else -1 for size in shape[2:]] if shape is not None else []
        sizes = graph.emit("Shape", image) if spatial.count(-1) > 1 else graph.integers(0, channels, *spatial)
        pixels = -1 if -1 in spatial else math.prod(spatial)
        grouped = graph.emit("Reshape", image, graph.integers(0, group, channels // group, pixels))
        transposed = graph.emit("Transpose", grouped, perm=[0, 2, 1, 3])
        shuffled = graph.emit("Reshape", transposed, sizes)
    write(operator, graph, shuffled)


def _axis(operator: Operator) -> int:
    if operator.has("axis"):
        return operator.integer("axis", 1)
    return 3 if operator.order() == "NHWC" else 1


def _counted(number: int) -> int:
    return number if number >= 0 else _END if number == -1 else number + 1
