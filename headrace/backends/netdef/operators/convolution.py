# SPDX-License-Identifier: Apache-2.0
"""Conv and ConvTranspose. Listed in `table`."""

from __future__ import annotations

from headrace.backends.netdef.graph import Graph, Shape
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import channels_first, channels_last, read, write
from headrace.backends.netdef.operators.windows import CAFFE_LEGACY_POOLING, NOTSET, SAME, VALID, read_window


def conv(operator: Operator, graph: Graph) -> None:
    """Caffe2's weights for NHWC are (out, height, width, in); ONNX has (out, in, height, width) only."""
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
    """Weights are (in, out, height, width), and for NHWC (in, height, width, out). `adj` is ONNX's output padding."""
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
    # Caffe2 takes both of the legacy modes as no pads at all here.
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
    """Refuse weights for other channels, which would be noticed at the first request only."""
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
