# SPDX-License-Identifier: Apache-2.0
"""Operators on the sizes of an image: ResizeNearest and PadImage. Listed in `table`."""

from __future__ import annotations

import numpy as np

from headrace.backends.netdef.graph import Graph
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.arity import channels_first, channels_last, read, write
from headrace.backends.netdef.operators.windows import NOTSET, read_window

_LARGEST_SCALE = 1024.0


def resize_nearest(operator: Operator, graph: Graph) -> None:
    """Each pixel is the one at floor(place / scale), and sizes are rounded down."""
    image, *given = read(operator, graph, 1, 2)
    height, width = operator.number("height_scale", 1.0), operator.number("width_scale", 1.0)
    if given:
        array = graph.array(given[0])
        if array is None or array.size != 2:
            raise operator.fault("takes its scales from the net, which is not translated: only constants are")
        height, width = (float(number) for number in array.ravel())
    _resize(operator, graph, image, height, width)


def upsample_nearest(operator: Operator, graph: Graph) -> None:
    """The same, with one whole `scale`."""
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
        # Whole pixels of floor(place / scale), which others round in their own ways.
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
    """Around the image, with a value, its edge or its mirror."""
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
