# SPDX-License-Identifier: Apache-2.0
"""Caffe2's operators on images give what PyTorch's layers give with the same weights, in both orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as torch_functions
from netdef_nets import computed, rows

from headrace.core.errors import InvalidArgument


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=2e-4, atol=2e-5)


def last(array: Any) -> Any:
    """NCHW to NHWC."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


CONVOLUTIONS: list[tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = [
    ({"kernel": 3}, {}, (6, 4, 3, 3)),
    ({"kernel": 3, "pad": 1, "stride": 2}, {"padding": 1, "stride": 2}, (6, 4, 3, 3)),
    ({"kernels": [3, 5], "strides": [1, 2], "pads": [1, 2, 1, 2]}, {"padding": (1, 2), "stride": (1, 2)}, (6, 4, 3, 5)),
    ({"kernel_h": 1, "kernel_w": 3, "stride_h": 2, "stride_w": 1}, {"stride": (2, 1)}, (6, 4, 1, 3)),
    ({"kernel": 3, "dilation": 2}, {"dilation": 2}, (6, 4, 3, 3)),
    ({"kernel": 3, "dilation_h": 1, "dilation_w": 2}, {"dilation": (1, 2)}, (6, 4, 3, 3)),
    ({"kernel": 3, "group": 2, "pad": 1}, {"groups": 2, "padding": 1}, (6, 2, 3, 3)),
    ({"kernel": 3, "group": 4, "pad": 1}, {"groups": 4, "padding": 1}, (4, 1, 3, 3)),
    ({"kernel": 1, "legacy_pad": 1}, {}, (6, 4, 1, 1)),
    ({"kernel": 3, "legacy_pad": 2}, {"padding": "same"}, (6, 4, 3, 3)),
    ({}, {}, (6, 4, 3, 3)),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("given", "theirs", "shape"), CONVOLUTIONS, ids=lambda value: str(value)[:40])
def test_conv(given: dict[str, Any], theirs: dict[str, Any], shape: tuple[int, ...], bias: bool) -> None:
    image, weights, add = rows(2, 4, 9, 11), rows(*shape, seed=2), rows(shape[0], seed=3)
    more = [add] if bias else []
    expected = torch.conv2d(
        torch.from_numpy(image), torch.from_numpy(weights), *(torch.from_numpy(item) for item in more), **theirs
    )
    close(computed("Conv", image, weights=[weights, *more], **given), expected)
    answer = computed("Conv", last(image), weights=[last(weights), *more], order="NHWC", **given)
    close(answer, last(expected.numpy()))


def test_conv_pads_may_differ_on_each_side() -> None:
    image, weights = rows(1, 2, 6, 6), rows(3, 2, 3, 3, seed=2)
    padded = torch_functions.pad(torch.from_numpy(image), (2, 3, 0, 1))  # left, right, top, bottom
    expected = torch.conv2d(padded, torch.from_numpy(weights))
    close(computed("Conv", image, weights=[weights], kernel=3, pad_t=0, pad_l=2, pad_b=1, pad_r=3), expected)


@pytest.mark.parametrize("size", [7, 8, 9])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (4, 1), (2, 2), (5, 3), (1, 2)])
def test_conv_same_puts_the_odd_pixel_at_the_end(size: int, kernel: int, stride: int) -> None:
    image, weights = rows(1, 2, size, size), rows(3, 2, kernel, kernel, seed=2)
    needed = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    padded = torch_functions.pad(torch.from_numpy(image), (needed // 2, needed - needed // 2) * 2)
    expected = torch.conv2d(padded, torch.from_numpy(weights), stride=stride)
    close(computed("Conv", image, weights=[weights], kernel=kernel, stride=stride, legacy_pad=2), expected)


def test_conv_in_one_and_three_dimensions() -> None:
    line, weights = rows(2, 3, 10), rows(4, 3, 3, seed=2)
    expected = torch.conv1d(torch.from_numpy(line), torch.from_numpy(weights), stride=2, padding=1)
    close(computed("Conv", line, weights=[weights], kernels=[3], strides=[2], pads=[1, 1]), expected)
    block, weights = rows(1, 2, 5, 6, 7), rows(3, 2, 3, 3, 3, seed=2)
    expected = torch.conv3d(torch.from_numpy(block), torch.from_numpy(weights))
    close(computed("Conv3D", block, weights=[weights], kernels=[3, 3, 3]), expected)
    close(
        computed("Conv", last(block), weights=[last(weights)], kernels=[3, 3, 3], order="NHWC"), last(expected.numpy())
    )


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        ({"kernel": 3}, {}),
        ({"kernel": 3, "stride": 2, "pad": 1}, {"stride": 2, "padding": 1}),
        ({"kernel": 3, "stride": 2, "pad": 1, "adj": 1}, {"stride": 2, "padding": 1, "output_padding": 1}),
        ({"kernels": [3, 3], "strides": [2, 3], "adjs": [0, 2]}, {"stride": (2, 3), "output_padding": (0, 2)}),
        ({"kernel": 3, "stride": 2, "adj_h": 1, "adj_w": 0}, {"stride": 2, "output_padding": (1, 0)}),
        ({"kernel": 3, "legacy_pad": 2}, {}),
    ],
)
def test_conv_transpose(given: dict[str, Any], theirs: dict[str, Any]) -> None:
    image, weights, add = rows(2, 4, 5, 6), rows(4, 3, 3, 3, seed=2), rows(3, seed=3)
    expected = torch.conv_transpose2d(*(torch.from_numpy(tensor) for tensor in (image, weights, add)), **theirs)
    close(computed("ConvTranspose", image, weights=[weights, add], **given), expected)
    answer = computed("ConvTranspose", last(image), weights=[last(weights), add], order="NHWC", **given)
    close(answer, last(expected.numpy()))


def test_conv_transpose_in_groups() -> None:
    image, weights = rows(2, 4, 5, 6), rows(4, 3, 3, 3, seed=2)
    expected = torch.conv_transpose2d(torch.from_numpy(image), torch.from_numpy(weights), groups=2)
    close(computed("ConvTranspose", image, weights=[weights], kernel=3, group=2), expected)


POOLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kernel": 2, "stride": 2}, {"kernel_size": 2, "stride": 2}),
    ({"kernel": 3, "stride": 2, "pad": 1}, {"kernel_size": 3, "stride": 2, "padding": 1}),
    ({"kernel": 3}, {"kernel_size": 3, "stride": 1}),
    ({"kernels": [2, 3], "strides": [2, 1]}, {"kernel_size": (2, 3), "stride": (2, 1)}),
    ({"kernel_h": 3, "kernel_w": 1}, {"kernel_size": (3, 1), "stride": 1}),
    ({"kernel": 3, "stride": 2, "legacy_pad": 1}, {"kernel_size": 3, "stride": 2}),
    ({"kernel": 3, "stride": 2, "legacy_pad": 3}, {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    (
        {"kernel": 3, "stride": 2, "pad": 1, "legacy_pad": 3},
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    ),
    (
        {"kernel": 2, "stride": 2, "pad": 1, "legacy_pad": 3},
        {"kernel_size": 2, "stride": 2, "padding": 1, "ceil_mode": True},
    ),
    ({"kernel": 3, "stride": 3, "legacy_pad": 3}, {"kernel_size": 3, "stride": 3, "ceil_mode": True}),
]


@pytest.mark.parametrize("size", [(8, 9), (10, 7), (14, 12)])
@pytest.mark.parametrize(("given", "theirs"), POOLS, ids=lambda value: str(value)[:60])
def test_pools(given: dict[str, Any], theirs: dict[str, Any], size: tuple[int, int]) -> None:
    image = rows(2, 3, *size)
    tensor = torch.from_numpy(image)
    largest = torch_functions.max_pool2d(tensor, **theirs)
    close(computed("MaxPool", image, **given), largest)
    close(computed("MaxPool", last(image), order="NHWC", **given), last(largest.numpy()))
    mean = torch_functions.avg_pool2d(tensor, count_include_pad=False, **theirs)
    close(computed("AveragePool", image, **given), mean)
    close(computed("AveragePool", last(image), order="NHWC", **given), last(mean.numpy()))


def test_average_pool_counts_pads_when_configured() -> None:
    image = rows(2, 3, 8, 9)
    expected = torch_functions.avg_pool2d(torch.from_numpy(image), 3, 2, 1)
    close(computed("AveragePool", image, kernel=3, stride=2, pad=1, count_include_pad=1), expected)


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (2, 1), (3, 3)])
def test_pools_with_same_padding(size: int, kernel: int, stride: int) -> None:
    image = rows(1, 2, size, size)
    needed = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    sides = (needed // 2, needed - needed // 2) * 2
    ours = torch_functions.pad(torch.from_numpy(image), sides, value=-torch.inf)
    close(
        computed("MaxPool", image, kernel=kernel, stride=stride, legacy_pad=2),
        torch_functions.max_pool2d(ours, kernel, stride),
    )
    total = torch_functions.avg_pool2d(torch_functions.pad(torch.from_numpy(image), sides), kernel, stride)
    share = torch_functions.avg_pool2d(
        torch_functions.pad(torch.ones_like(torch.from_numpy(image)), sides), kernel, stride
    )
    close(computed("AveragePool", image, kernel=kernel, stride=stride, legacy_pad=2), total / share)


def test_pools_in_one_and_three_dimensions() -> None:
    line, block = torch.from_numpy(rows(2, 3, 10)), torch.from_numpy(rows(1, 2, 6, 7, 8))
    sizes: dict[str, Any] = {"kernels": [3], "strides": [2], "pads": [1, 1]}
    close(computed("MaxPool1D", line.numpy(), **sizes), torch_functions.max_pool1d(line, 3, 2, 1))
    mean = torch_functions.avg_pool1d(line, 3, 2, 1, count_include_pad=False)
    close(computed("AveragePool1D", line.numpy(), **sizes), mean)
    sizes = {"kernels": [2, 3, 2], "strides": [2, 1, 2]}
    close(computed("MaxPool3D", block.numpy(), **sizes), torch_functions.max_pool3d(block, (2, 3, 2), (2, 1, 2)))
    mean = torch_functions.avg_pool3d(block, (2, 3, 2), (2, 1, 2))
    close(computed("AveragePool3D", block.numpy(), **sizes), mean)
    close(computed("AveragePool", last(block.numpy()), order="NHWC", **sizes), last(mean.numpy()))


@pytest.mark.parametrize(("kind", "over"), [("MaxPool", np.max), ("AveragePool", np.mean)])
def test_global_pools(kind: str, over: Any) -> None:
    image = rows(2, 3, 5, 7)
    expected = over(image, axis=(2, 3), keepdims=True)
    close(computed(kind, image, global_pooling=1), expected)
    close(computed(kind, last(image), global_pooling=1, order="NHWC"), last(expected))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_spatial_bn(order: str, epsilon: float) -> None:
    image = rows(3, 4, 5, 6)
    scale, bias, mean = (rows(4, seed=seed) for seed in (2, 3, 4))
    variance = np.abs(rows(4, seed=5)) + 0.1
    expected = torch_functions.batch_norm(
        torch.from_numpy(image), *(torch.from_numpy(tensor) for tensor in (mean, variance, scale, bias)), eps=epsilon
    ).numpy()
    given = image if order == "NCHW" else last(image)
    answer = computed(
        "SpatialBN", given, weights=[scale, bias, mean, variance], order=order, epsilon=epsilon, is_test=1
    )
    close(answer, expected if order == "NCHW" else last(expected))


def test_spatial_bn_of_training_is_refused() -> None:
    weights = [np.ones(3, np.float32)] * 4
    with pytest.raises(InvalidArgument, match=r"operator 0 \(SpatialBN\) of 'model\.netdef' is saved for training"):
        computed("SpatialBN", rows(1, 3, 4, 4), weights=weights)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("size", "alpha", "beta", "bias"), [(5, 1e-4, 0.75, 1.0), (3, 0.5, 0.5, 2.0), (1, 0.1, 1.0, 1.0)]
)
def test_lrn(order: str, size: int, alpha: float, beta: float, bias: float) -> None:
    image = rows(2, 7, 4, 5)
    expected = torch_functions.local_response_norm(torch.from_numpy(image), size, alpha, beta, bias).numpy()
    given = image if order == "NCHW" else last(image)
    answer = computed("LRN", given, order=order, size=size, alpha=alpha, beta=beta, bias=bias)
    close(answer, expected if order == "NCHW" else last(expected))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("height", "width"), [(2.0, 2.0), (1.5, 3.0), (0.5, 1.0), (2.0, 0.7)])
def test_resize_nearest(order: str, height: float, width: float) -> None:
    image = rows(2, 3, 6, 10)
    down = np.minimum((np.arange(int(6 * height)) / np.float32(height)).astype(int), 5)
    across = np.minimum((np.arange(int(10 * np.float32(width))) / np.float32(width)).astype(int), 9)
    expected = image[:, :, down][:, :, :, across]
    given = image if order == "NCHW" else last(image)
    answer = computed("ResizeNearest", given, order=order, height_scale=height, width_scale=width)
    close(answer, expected if order == "NCHW" else last(expected))
    scales = np.array([height, width], np.float32)
    close(computed("ResizeNearest", given, weights=[scales], order=order), answer)


def test_upsample_nearest_is_pytorchs() -> None:
    image = rows(2, 3, 4, 5)
    expected = torch_functions.interpolate(torch.from_numpy(image), scale_factor=3, mode="nearest")
    close(computed("UpsampleNearest", image, scale=3), expected)


@pytest.mark.parametrize(("mode", "theirs"), [("constant", "constant"), ("reflect", "reflect"), ("edge", "replicate")])
def test_pad_image(mode: str, theirs: str) -> None:
    image = rows(2, 3, 5, 6)
    more = {"value": 1.5} if mode == "constant" else {}
    expected = torch_functions.pad(torch.from_numpy(image), (2, 0, 1, 3), mode=theirs, **more).numpy()
    sides = {"pad_t": 1, "pad_l": 2, "pad_b": 3, "pad_r": 0}
    close(computed("PadImage", image, mode=mode, **sides, **more), expected)
    close(computed("PadImage", last(image), mode=mode, order="NHWC", **sides, **more), last(expected))
    close(computed("Pad", image, pads=[1, 2, 3, 0], mode=mode, **more), expected)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_channel_shuffle(group: int) -> None:
    image = rows(2, 6, 4, 5)
    expected = torch.nn.ChannelShuffle(group)(torch.from_numpy(image)).numpy()
    close(computed("ChannelShuffle", image, group=group, kernel=1), expected)
    close(computed("ChannelShuffle", last(image), group=group, order="NHWC"), last(expected))


def test_orders_are_turned_round() -> None:
    image = rows(2, 3, 4, 5)
    close(computed("NCHW2NHWC", image), last(image))
    close(computed("NHWC2NCHW", last(image)), image)


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("Conv", {"kernel": 3, "stride": 0}, r"has stride \[0, 0\]"),
        ("Conv", {"kernel": 5}, r"has kernel \[5, 5\] and weights \[4, 3, 3, 3\]"),
        ("Conv", {"kernel": 3, "pad": -1}, "has pad"),
        ("Conv", {"kernel": 3, "group": 0}, "has group 0"),
        ("Conv", {"kernel": 3, "order": "CHWN"}, "has order 'CHWN', which is neither NCHW nor NHWC"),
        ("Conv", {"kernel": 3, "legacy_pad": 9}, "has legacy_pad 9, which is not known"),
        ("Conv", {"kernel": 3, "legacy_pad": 2, "dilation": 2}, "both legacy_pad SAME and a dilation"),
        ("Conv", {"kernels": [3, 3], "strides": [1]}, "not all for 2 dimensions"),
        ("Conv", {"kernel": 2.5}, "has an argument 'kernel' that is not a whole number"),
        ("Conv", {"kernel": 2**40}, "is out of range"),
        ("ConvTranspose", {"kernel": 3, "adj": 1}, "each must be under its stride"),
        ("ConvTranspose", {"kernel": 3, "dilation": 2}, "has a dilation"),
    ],
)
def test_arguments_that_cannot_be_are_refused(kind: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        computed(kind, rows(1, 3 if kind == "Conv" else 4, 8, 8), weights=[rows(4, 3, 3, 3)], **arguments)
    assert str(caught.value).startswith(f"operator 0 ({kind}) of 'model.netdef' ")


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("MaxPool", {}, "has no kernel"),
        ("AveragePool", {"kernel": 2, "dilation": 2}, "has a dilation"),
        ("LRN", {"size": 4}, "it must be odd"),
        ("ChannelShuffle", {"group": 4}, "whose channels it must divide"),
        ("ResizeNearest", {"height_scale": -1.0}, "has scales"),
        ("ResizeNearest", {"height_scale": 1e9}, "has scales"),
        ("PadImage", {"pad": 1, "mode": "wrap"}, "has mode 'wrap'"),
    ],
)
def test_so_are_those_of_pools_and_the_like(kind: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        computed(kind, rows(1, 3, 8, 8), **arguments)
