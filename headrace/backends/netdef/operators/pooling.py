# SPDX-License-Identifier: Apache-2.0
"""MaxPool and AveragePool. Listed in `table`."""

from __future__ import annotations

from typing import Any

from headrace.backends.netdef.graph import Graph, Shape
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import channels_first, channels_last, read, write
from headrace.backends.netdef.operators.windows import CAFFE_LEGACY_POOLING, Window, read_window


def max_pool(operator: Operator, graph: Graph) -> None:
    """The largest of each window."""
    _pool(operator, graph, "MaxPool", {})


def average_pool(operator: Operator, graph: Graph) -> None:
    """The mean of the pixels in each window; the pads are not counted, unless told."""
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
    """Caffe rounds up where others round down, unless the last window would begin behind the image.

    It looks only at the pads at the beginnings. Where the sizes are known the pads at the ends are told that give its
    number of windows; ONNX's own rounding up is not the same in all that reads a model.
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
