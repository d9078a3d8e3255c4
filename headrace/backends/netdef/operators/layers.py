# SPDX-License-Identifier: Apache-2.0
"""Translations of Caffe2's convolutions, pooling, normalisation, matrix products and image operators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.backends.netdef.graph import Graph, Shape
from headrace.backends.netdef.operator import (
    Operator,
    channels_first,
    channels_last,
    checked_axis,
    known_rank,
    read,
    write,
)

NOTSET, VALID, SAME, CAFFE_LEGACY_POOLING = range(4)
"""`legacy_pad`: Caffe2's enum LegacyPadding."""

_LARGEST = 2**20


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, strides, dilations and pads per image dimension. Pads: those at the start of each, then at the end."""

    kernel: tuple[int, ...]
    """Empty if the operator has none."""
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    legacy_pad: int

    def padding(self) -> dict[str, Any]:
        """Return ONNX's attributes for the pads."""
        if self.legacy_pad == SAME:
            # Both put the odd pixel at the end.
            return {"auto_pad": "SAME_UPPER"}
        if self.legacy_pad == VALID:
            return {"pads": [0] * len(self.pads)}
        return {"pads": list(self.pads)}


def read_window(operator: Operator, dimensions: int = 2) -> Window:
    """Read the window of an operator; `dimensions` is the default if no argument implies their number."""
    kernel = _sizes(operator, "kernel", 1, dimensions)
    strides = _sizes(operator, "stride", 1, dimensions)
    dilations = _sizes(operator, "dilation", 1, dimensions)
    pads = _pads(operator)
    count = len(kernel) or len(strides) or len(dilations) or len(pads) // 2 or dimensions
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    pads = pads or (0,) * (2 * count)
    if not len(strides) == len(dilations) == count or len(pads) != 2 * count:
        raise operator.fault(f"has a kernel, strides, dilations and pads that are not all for {count} dimensions")
    legacy_pad = operator.integer("legacy_pad", NOTSET)
    if legacy_pad not in (NOTSET, VALID, SAME, CAFFE_LEGACY_POOLING):
        raise operator.fault(f"has legacy_pad {legacy_pad}, which is not known: Caffe2 has 0 to 3")
    if legacy_pad == SAME:
        if set(dilations) != {1}:
            raise operator.fault("has both legacy_pad SAME and a dilation, which Caffe2 cannot compute either")
        if any(stride > size + 1 for stride, size in zip(strides, kernel, strict=False)):
            raise operator.fault("has legacy_pad SAME and strides that skip over pixels, which is not translated")
    return Window(kernel, strides, dilations, pads, legacy_pad)


def _sizes(operator: Operator, name: str, least: int, dimensions: int) -> tuple[int, ...]:
    sizes = operator.integers(f"{name}s")
    if operator.has(name):
        sizes = (operator.integer(name, 0),) * dimensions
    elif operator.has(f"{name}_h", f"{name}_w"):
        sizes = (operator.integer(f"{name}_h", 0), operator.integer(f"{name}_w", 0))
    _check(operator, name, sizes, least)
    return sizes


def _pads(operator: Operator) -> tuple[int, ...]:
    pads = operator.integers("pads")
    if operator.has("pad"):
        pads = (operator.integer("pad", 0),) * 4
    elif operator.has("pad_t", "pad_l", "pad_b", "pad_r"):
        pads = tuple(operator.integer(f"pad_{side}", 0) for side in "tlbr")
    _check(operator, "pad", pads, 0)
    return pads


def _check(operator: Operator, name: str, sizes: tuple[int, ...], least: int) -> None:
    if not all(least <= size <= _LARGEST for size in sizes):
        raise operator.fault(f"has {name} {list(sizes)}: sizes from {least} to {_LARGEST} are possible")


def conv(operator: Operator, graph: Graph) -> None:
    """Translate Conv. Caffe2's NHWC weights are (out, height, width, in), ONNX's always (out, in, height, width)."""
    values = read(operator, graph, 2, 3)
    window = read_window(operator)
    if window.legacy_pad == CAFFE_LEGACY_POOLING:
        raise operator.fault("has legacy_pad CAFFE_LEGACY_POOLING, which is for pooling")
    rank = len(window.strides) + 2
    last = operator.order() == "NHWC"
    image = channels_first(graph, values[0], rank) if last else values[0]
    weights = channels_first(graph, values[1], rank) if last else values[1]
    shape = graph.shape(weights)
    if window.kernel and shape is not None and shape[2:] != window.kernel:
        raise operator.fault(f"has kernel {list(window.kernel)} and weights {graph.describe(values[1])}")
    group = _group(operator)
    _check_channels(operator, graph, image, values, None if shape is None else shape[1:2], group)
    answer = graph.emit(
        "Conv",
        image,
        weights,
        *values[2:],
        group=group,
        strides=list(window.strides),
        dilations=list(window.dilations),
        **({"kernel_shape": list(window.kernel)} if window.kernel else {}),
        **window.padding(),
    )
    write(operator, graph, channels_last(graph, answer, rank) if last else answer)


def conv_transpose(operator: Operator, graph: Graph) -> None:
    """Translate ConvTranspose. Weights: (in, out, height, width), NHWC (in, height, width, out). `adj`: output padding."""
    values = read(operator, graph, 2, 3)
    window = read_window(operator)
    if window.legacy_pad not in (NOTSET, VALID, SAME):
        raise operator.fault("has a legacy_pad that Caffe2 cannot compute either")
    if set(window.dilations) != {1}:
        raise operator.fault("has a dilation, which Caffe2's ConvTranspose does not know")
    rank = len(window.strides) + 2
    last = operator.order() == "NHWC"
    image = channels_first(graph, values[0], rank) if last else values[0]
    weights = channels_first(graph, values[1], rank) if last else values[1]
    shape = graph.shape(weights)
    _check_channels(operator, graph, image, values, None if shape is None else shape[:1], 1)
    # Here Caffe2 treats both legacy modes as no padding.
    pads = list(window.pads) if window.legacy_pad == NOTSET else [0] * len(window.pads)
    answer = graph.emit(
        "ConvTranspose",
        image,
        weights,
        *values[2:],
        group=_group(operator),
        strides=list(window.strides),
        pads=pads,
        output_padding=_adjustment(operator, window.strides),
        **({"kernel_shape": list(window.kernel)} if window.kernel else {}),
    )
    write(operator, graph, channels_last(graph, answer, rank) if last else answer)


def _check_channels(
    operator: Operator, graph: Graph, image: str, values: list[str], wanted: Shape | None, group: int
) -> None:
    """Reject weights for other channels, which would otherwise fail only at the first request."""
    shape = graph.shape(image)
    if shape is None or len(shape) < 2 or not wanted or None in (shape[1], wanted[0]):
        return
    if shape[1] != (wanted[0] or 0) * group:
        raise operator.fault(
            f"reads {graph.describe(values[0])} with weights {graph.describe(values[1])} in {group} groups, which do not "
            "fit: are both files of one model?"
        )


def _group(operator: Operator) -> int:
    group = operator.integer("group", 1)
    if group < 1:
        raise operator.fault(f"has group {group}")
    return group


def _adjustment(operator: Operator, strides: tuple[int, ...]) -> list[int]:
    sizes = operator.integers("adjs")
    if operator.has("adj"):
        sizes = (operator.integer("adj", 0),) * len(strides)
    elif operator.has("adj_h", "adj_w"):
        sizes = (operator.integer("adj_h", 0), operator.integer("adj_w", 0))
    sizes = sizes or (0,) * len(strides)
    if len(sizes) != len(strides) or not all(0 <= size < stride for size, stride in zip(sizes, strides, strict=True)):
        raise operator.fault(f"has adj {list(sizes)} with strides {list(strides)}: each must be under its stride")
    return list(sizes)


def max_pool(operator: Operator, graph: Graph) -> None:
    """Translate max pooling."""
    _pool(operator, graph, "MaxPool", {})


def average_pool(operator: Operator, graph: Graph) -> None:
    """Translate average pooling; the pads do not count, unless an argument says so."""
    counted = 1 if operator.integer("count_include_pad", 0) else 0
    _pool(operator, graph, "AveragePool", {"count_include_pad": counted})


def _pool(operator: Operator, graph: Graph, kind: str, attributes: dict[str, Any]) -> None:
    (image,) = read(operator, graph, 1)
    everything = bool(operator.integer("global_pooling", 0))
    window = read_window(operator)
    rank = (graph.rank(image) or 4) if everything else len(window.strides) + 2
    last = operator.order() == "NHWC"
    if last:
        image = channels_first(graph, image, rank)
    if everything:
        answer = graph.emit(f"Global{kind}", image)
    else:
        if not window.kernel:
            raise operator.fault("has no kernel")
        if set(window.dilations) != {1}:
            raise operator.fault("has a dilation, which Caffe2's pooling does not know")
        attributes |= window.padding()
        if window.legacy_pad == CAFFE_LEGACY_POOLING:
            attributes |= _caffe_padding(window, graph.shape(image))
        answer = graph.emit(kind, image, kernel_shape=list(window.kernel), strides=list(window.strides), **attributes)
    write(operator, graph, channels_last(graph, answer, rank) if last else answer)


def _caffe_padding(window: Window, shape: Shape | None) -> dict[str, Any]:
    """Return the pads of CAFFE_LEGACY_POOLING, which rounds up unless the last window would start behind the image.

    It considers only the pads at the start. If the sizes are known, the pads at the end are set to give its number of
    windows; ONNX's own ceil mode differs between implementations.
    """
    count = len(window.kernel)
    begins = window.pads[:count]
    sizes = [None] * count if shape is None else list(shape[2:])
    ends = []
    for begin, size, kernel, stride in zip(begins, sizes, window.kernel, window.strides, strict=True):
        if size is None:
            return {"pads": [*begins, *begins], "ceil_mode": 1}
        windows = -(-(size + 2 * begin - kernel) // stride) + 1
        if begin > 0 and (windows - 1) * stride >= size + begin:
            windows -= 1
        ends.append(max(0, (windows - 1) * stride + kernel - size - begin))
    return {"pads": [*begins, *ends]}


def spatial_bn(operator: Operator, graph: Graph) -> None:
    """Normalise by the mean and variance from training."""
    image, scale, bias, mean, variance, *_ = read(operator, graph, 5, 7)
    if not operator.integer("is_test", 0):
        raise operator.fault(
            "is saved for training, where it takes the mean of each batch: export the net with is_test=1"
        )
    last = operator.order() == "NHWC"
    rank = known_rank(operator, graph, image) if last else 0
    if last:
        image = channels_first(graph, image, rank)
    epsilon = operator.number("epsilon", 1e-5)
    answer = graph.emit("BatchNormalization", image, scale, bias, mean, variance, epsilon=epsilon)
    write(operator, graph, channels_last(graph, answer, rank) if last else answer)


def lrn(operator: Operator, graph: Graph) -> None:
    """Normalise over neighbouring channels. Caffe2 and ONNX both divide alpha by the size."""
    (image,) = read(operator, graph, 1)
    size = operator.integer("size", 0)
    if size < 1 or size % 2 == 0 or size > 2**16:
        raise operator.fault(f"has size {size}: it must be odd")
    last = operator.order() == "NHWC"
    if last:
        image = channels_first(graph, image, 4)
    answer = graph.emit(
        "LRN",
        image,
        size=size,
        alpha=operator.number("alpha", 0.0),
        beta=operator.number("beta", 0.0),
        bias=operator.number("bias", 1.0),
    )
    write(operator, graph, channels_last(graph, answer, 4) if last else answer)


def softmax(operator: Operator, graph: Graph) -> None:
    """Flatten all dimensions from `axis` on for a softmax; ONNX uses the axis alone."""
    (value,) = read(operator, graph, 1)
    rank = known_rank(operator, graph, value)
    axis = checked_axis(operator, operator.integer("axis", 1), rank)
    if axis == rank - 1:
        answer = graph.emit("Softmax", value, axis=-1)
    else:
        flat = graph.emit("Softmax", graph.emit("Flatten", value, axis=axis), axis=-1)
        answer = graph.emit("Reshape", flat, _shape_of(graph, value))
    write(operator, graph, answer)


def affine_channel(operator: Operator, graph: Graph) -> None:
    """Scale each channel and add its bias."""
    image, scale, bias = read(operator, graph, 3)
    if operator.order() == "NCHW":
        ones = [1] * (known_rank(operator, graph, image) - 2)
        scale, bias = graph.reshaped(scale, [-1, *ones]), graph.reshaped(bias, [-1, *ones])
    write(operator, graph, graph.emit("Add", graph.emit("Mul", image, scale), bias))


def _shape_of(graph: Graph, value: str) -> str:
    """Return its shape as a constant if at most one size is unknown, so that the result's shape is known too."""
    shape = graph.shape(value)
    if shape is not None and sum(size is None for size in shape) <= 1 and 0 not in shape:
        return graph.integers(*(-1 if size is None else size for size in shape))
    return graph.emit("Shape", value)


def fc(operator: Operator, graph: Graph) -> None:
    """Translate FC: X, flattened from `axis` on, times the transpose of W, plus b."""
    _fully_connected(operator, graph, transposed=True)


def fc_transposed(operator: Operator, graph: Graph) -> None:
    """Translate FCTransposed: FC with W as it is."""
    _fully_connected(operator, graph, transposed=False)


def _fully_connected(operator: Operator, graph: Graph, *, transposed: bool) -> None:
    rows, weights, bias = read(operator, graph, 3)
    axis = operator.integer("axis", 1)
    rank = graph.rank(rows)
    if axis != 1:
        axis = checked_axis(operator, axis, known_rank(operator, graph, rows))
    flat = rows if rank == 2 and axis == 1 else graph.emit("Flatten", rows, axis=axis)
    matrix = _matrix(operator, graph, weights, "axis_w")
    ours, theirs = graph.shape(flat), graph.shape(matrix)
    if ours is not None and theirs is not None:
        sizes = (ours[-1], theirs[-1 if transposed else 0])
        if None not in sizes and sizes[0] != sizes[1]:
            # Otherwise ONNX Runtime would fail only at the first request.
            raise operator.fault(
                f"reads {graph.describe(rows)} with weights {graph.describe(weights)}, which do not fit: are both files "
                "of one model, and the dims of the configuration right?"
            )
    answer = graph.emit("Gemm", flat, matrix, bias, transB=int(transposed))
    if axis != 1:
        begin = graph.emit("Slice", graph.emit("Shape", rows), graph.integers(0), graph.integers(axis))
        shape = graph.emit("Concat", begin, graph.integers(-1), axis=0)
        answer = graph.emit("Reshape", answer, shape)
    write(operator, graph, answer)


def matmul(operator: Operator, graph: Graph) -> None:
    """Multiply two matrices; either may be transposed first."""
    left, right = read(operator, graph, 2)
    answer = graph.emit(
        "Gemm",
        _matrix(operator, graph, left, "axis_a"),
        _matrix(operator, graph, right, "axis_b"),
        transA=int(bool(operator.integer("trans_a", 0))),
        transB=int(bool(operator.integer("trans_b", 0))),
    )
    write(operator, graph, answer)


def batch_matmul(operator: Operator, graph: Graph) -> None:
    """Multiply as `numpy.matmul`, with the last two dimensions transposed on request."""
    values = read(operator, graph, 2)
    for place, name in enumerate(("trans_a", "trans_b")):
        if operator.integer(name, 0):
            rank = known_rank(operator, graph, values[place])
            if rank < 2:
                raise operator.fault(f"has {name}, and reads {graph.describe(values[place])}")
            values[place] = graph.transposed(values[place], [*range(rank - 2), rank - 1, rank - 2])
    write(operator, graph, graph.emit("MatMul", *values))


def _matrix(operator: Operator, graph: Graph, value: str, name: str) -> str:
    """Flatten to two dimensions at the axis in the argument `name`."""
    axis = operator.integer(name, 1)
    shape = graph.shape(value)
    if shape is not None and len(shape) == 2 and axis in (1, -1):
        return value
    if shape is None:
        return graph.emit("Flatten", value, axis=axis)
    axis = checked_axis(operator, axis, len(shape))
    if graph.array(value) is not None:
        sizes = [size or 0 for size in shape]
        return graph.reshaped(value, [math.prod(sizes[:axis]), math.prod(sizes[axis:])])
    return graph.emit("Flatten", value, axis=axis)


_LARGEST_SCALE = 1024.0


def resize_nearest(operator: Operator, graph: Graph) -> None:
    """Resize by nearest neighbour: each pixel is the one at floor(position / scale), and sizes are rounded down."""
    image, *given = read(operator, graph, 1, 2)
    height, width = operator.number("height_scale", 1.0), operator.number("width_scale", 1.0)
    if given:
        array = graph.array(given[0])
        if array is None or array.size != 2:
            raise operator.fault("has computed scales, which are not supported: only constants are")
        height, width = (float(number) for number in array.ravel())
    _resize(operator, graph, image, height, width)


def upsample_nearest(operator: Operator, graph: Graph) -> None:
    """Resize by one integer `scale`."""
    (image,) = read(operator, graph, 1)
    scale = float(operator.integer("scale", 2))
    _resize(operator, graph, image, scale, scale)


def _resize(operator: Operator, graph: Graph, image: str, height: float, width: float) -> None:
    if not (0 < height <= _LARGEST_SCALE and 0 < width <= _LARGEST_SCALE):
        raise operator.fault(f"has scales {height:g} and {width:g}: from over 0 to {_LARGEST_SCALE:g} are possible")
    last = operator.order() == "NHWC"
    shape = graph.shape(image)
    sizes = (None, None) if shape is None or len(shape) != 4 else (shape[1:3] if last else shape[2:])
    if (height.is_integer() and width.is_integer()) or None in sizes:
        answer = _resized(graph, image, height, width, last)
    else:
        # Integer indices of floor(position / scale), which resize operators round in different ways.
        answer = image
        for axis, (size, scale) in enumerate(zip(sizes, (height, width), strict=True), 1 if last else 2):
            places = (np.arange(_scaled(size or 0, scale)) / np.float32(scale)).astype(np.int64)
            answer = graph.emit("Gather", answer, graph.constant(np.minimum(places, (size or 1) - 1)), axis=axis)
    write(operator, graph, answer)


def _scaled(size: int, scale: float) -> int:
    return int(np.float32(size) * np.float32(scale))


def _resized(graph: Graph, image: str, height: float, width: float, last: bool) -> str:
    if last:
        image = channels_first(graph, image, 4)
    answer = graph.emit(
        "Resize",
        image,
        "",
        graph.constant(np.array([1, 1, height, width], np.float32)),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    return channels_last(graph, answer, 4) if last else answer


def pad_image(operator: Operator, graph: Graph) -> None:
    """Pad the image with a value, its edge or its mirror."""
    (image,) = read(operator, graph, 1)
    window = read_window(operator)
    if window.legacy_pad != NOTSET:
        raise operator.fault("has a legacy_pad, where only pads are possible")
    mode = operator.text("mode", "constant")
    if mode not in ("constant", "reflect", "edge"):
        raise operator.fault(f"has mode '{mode[:16]}': constant, reflect and edge are possible")
    count = len(window.pads) // 2
    begins, ends = window.pads[:count], window.pads[count:]
    last = operator.order() == "NHWC"
    pads = [0, *begins, 0, 0, *ends, 0] if last else [0, 0, *begins, 0, 0, *ends]
    inputs = [image, graph.integers(*pads)]
    if mode == "constant":
        inputs.append(graph.like(operator.number("value", 0.0), image))
    write(operator, graph, graph.emit("Pad", *inputs, mode=mode))
