# SPDX-License-Identifier: Apache-2.0
"""Whole nets of the kinds that Caffe2's model zoo had, held against PyTorch with the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as torch_functions
from netdef_models import Bottleneck, ResNet50, Writer, randomise
from netdef_nets import Nets, rows
from torch import nn


def close(ours: Any, theirs: torch.Tensor) -> None:
    expected = theirs.detach().numpy()
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=1e-4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def test_mlp_of_the_tutorial() -> None:
    first, second = nn.Linear(784, 100), nn.Linear(100, 10)
    writer = Writer()
    blob = writer.relu(writer.fc("data", first))
    blob = writer.fc(writer.op("Dropout", blob, ratio=0.5, is_test=1), second)
    net = writer.finish(writer.op("Softmax", blob), "softmax")
    # What training left in the net, and nobody asks for.
    net.net.external_input.append("label")
    net.op("LabelCrossEntropy", ["softmax", "label"], ["xent"])
    net.op("AveragedLoss", ["xent"], ["loss"])
    image = rows(5, 1, 28, 28)
    expected = torch.softmax(second(torch.relu(first(torch.from_numpy(image).flatten(1)))), 1)
    close(net.run({"data": image}, ["softmax"])["softmax"], expected)


def test_lenet_of_the_tutorial() -> None:
    first, second = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
    third, last = nn.Linear(800, 500), nn.Linear(500, 10)
    writer = Writer()
    blob = writer.op("MaxPool", writer.conv("data", first), kernel=2, stride=2)
    blob = writer.op("MaxPool", writer.conv(blob, second), kernel=2, stride=2)
    net = writer.finish(writer.op("Softmax", writer.fc(writer.relu(writer.fc(blob, third)), last)), "softmax")
    image = rows(3, 1, 28, 28)
    x = torch.max_pool2d(first(torch.from_numpy(image)), 2)
    x = torch.max_pool2d(second(x), 2).flatten(1)
    close(net.run({"data": image}, ["softmax"])["softmax"], torch.softmax(last(torch.relu(third(x))), 1))


def test_alexnet_with_lrn_groups_and_caffes_pooling() -> None:
    first, second = nn.Conv2d(3, 16, 11, 4), nn.Conv2d(16, 24, 5, 1, 2, groups=2)
    third = nn.Conv2d(24, 16, 3, 1, 1, groups=2)
    sixth, last = nn.Linear(16 * 4 * 4, 32), nn.Linear(32, 10)
    norm = {"size": 5, "alpha": 1e-4, "beta": 0.75, "bias": 1.0}
    pool: dict[str, Any] = {"kernel": 3, "stride": 2, "legacy_pad": 3}
    writer = Writer()
    blob = writer.op("MaxPool", writer.op("LRN", writer.relu(writer.conv("data", first)), **norm), **pool)
    blob = writer.op("MaxPool", writer.op("LRN", writer.relu(writer.conv(blob, second)), **norm), **pool)
    blob = writer.relu(writer.conv(blob, third))
    blob = writer.relu(writer.fc(writer.op("Dropout", blob, is_test=1), sixth))
    net = writer.finish(writer.op("Softmax", writer.fc(blob, last)), "prob")
    image = rows(2, 3, 75, 75)  # 17, 8 and 4 pixels on
    x = torch.relu(first(torch.from_numpy(image)))
    x = torch_functions.max_pool2d(torch_functions.local_response_norm(x, 5, 1e-4, 0.75, 1.0), 3, 2, ceil_mode=True)
    x = torch.relu(second(x))
    x = torch_functions.max_pool2d(torch_functions.local_response_norm(x, 5, 1e-4, 0.75, 1.0), 3, 2, ceil_mode=True)
    x = torch.relu(sixth(torch.relu(third(x)).flatten(1)))
    close(net.run({"data": image}, ["prob"])["prob"], torch.softmax(last(x), 1))


def test_squeezenet() -> None:
    class Fire(nn.Module):
        def __init__(self, channels: int, narrow: int, wide: int) -> None:
            super().__init__()
            self.squeeze = nn.Conv2d(channels, narrow, 1)
            self.one, self.three = nn.Conv2d(narrow, wide, 1), nn.Conv2d(narrow, wide, 3, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.squeeze(x))
            return torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)

        def write(self, writer: Writer, blob: str) -> str:
            blob = writer.relu(writer.conv(blob, self.squeeze))
            one, three = writer.relu(writer.conv(blob, self.one)), writer.relu(writer.conv(blob, self.three))
            created = writer.name("fire")
            writer.nets.op("Concat", [one, three], [created, f"_{created}_dims"], order="NCHW")
            return created

    stem, fires, head = nn.Conv2d(3, 16, 3, 2), [Fire(16, 4, 8), Fire(16, 4, 12)], nn.Conv2d(24, 10, 1)
    writer = Writer()
    # Exporters fill the input too, so that it is there before anything is fed.
    writer.nets.fill("ConstantFill", "data", shape=[1])
    blob = writer.op("MaxPool", writer.relu(writer.conv("data", stem)), kernel=3, stride=2, legacy_pad=3)
    for fire in fires:
        blob = fire.write(writer, blob)
    blob = writer.relu(writer.conv(writer.op("Dropout", blob, is_test=1), head))
    blob = writer.op("AveragePool", blob, global_pooling=1)
    net = writer.finish(writer.op("Softmax", blob), "softmaxout")
    image = rows(2, 3, 36, 36)
    x = torch_functions.max_pool2d(torch.relu(stem(torch.from_numpy(image))), 3, 2, ceil_mode=True)
    x = torch.relu(head(fires[1](fires[0](x)))).mean((2, 3), keepdim=True)
    close(net.run({"data": image}, ["softmaxout"])["softmaxout"], torch.softmax(x, 1))


@pytest.mark.parametrize(("channels", "stride"), [(16, 1), (8, 1), (8, 2)])
def test_resnet_block(channels: int, stride: int) -> None:
    block = Bottleneck(channels, 4, stride)
    randomise(block)
    writer = Writer()
    net = writer.finish(block.write(writer, "data"), "y")
    image = rows(2, channels, 8, 8)
    close(net.run({"data": image}, ["y"])["y"], block(torch.from_numpy(image)))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_mobilenet_block(order: str) -> None:
    """Expanded, each channel for itself, projected, and added; in NHWC as the mobile exporters wrote it."""
    expand, depth = nn.Conv2d(4, 24, 1), nn.Conv2d(24, 24, 3, 1, 1, groups=24)
    project = nn.Conv2d(24, 4, 1)
    image = rows(2, 4, 7, 9)
    net = Nets()
    blob = "data"
    for number, (layer, pad) in enumerate(((expand, 0), (depth, 1), (project, 0))):
        weights = layer.weight.detach().numpy()
        if order == "NHWC":
            weights = weights.transpose(0, 2, 3, 1)
        names = [net.weight(f"w{number}", weights), net.weight(f"b{number}", layer.bias.detach().numpy())]  # type: ignore[union-attr]
        sizes = {"kernel": layer.kernel_size[0], "pad": pad, "group": layer.groups}
        net.op("Conv", [blob, *names], [f"c{number}"], order=order, **sizes)
        blob = f"c{number}"
        if number < 2:
            net.op("Clip", [blob], [blob], min=0.0, max=6.0)
    net.op("Add", [blob, "data"], ["y"])
    x = torch.from_numpy(image)
    expected = x + project(torch_functions.relu6(depth(torch_functions.relu6(expand(x)))))
    if order == "NHWC":
        answer = net.run({"data": np.ascontiguousarray(image.transpose(0, 2, 3, 1))}, ["y"])["y"]
        close(answer.transpose(0, 3, 1, 2), expected)
    else:
        close(net.run({"data": image}, ["y"])["y"], expected)


def test_shufflenet_unit() -> None:
    first, first_bn = nn.Conv2d(12, 6, 1, groups=3, bias=False), nn.BatchNorm2d(6)
    depth, depth_bn = nn.Conv2d(6, 6, 3, 2, 1, groups=6, bias=False), nn.BatchNorm2d(6)
    last, last_bn = nn.Conv2d(6, 12, 1, groups=3, bias=False), nn.BatchNorm2d(12)
    randomise(nn.ModuleList([first_bn, depth_bn, last_bn]))
    writer = Writer()
    blob = writer.relu(writer.bn(writer.conv("data", first), first_bn))
    blob = writer.op("ChannelShuffle", blob, group=3, kernel=1)
    blob = writer.bn(writer.conv(blob, depth), depth_bn)
    blob = writer.bn(writer.conv(blob, last), last_bn)
    short = writer.op("AveragePool", "data", kernel=3, stride=2, pad=1)
    created = writer.name("joined")
    writer.nets.op("Concat", [blob, short], [created, "dims"], axis=1)
    net = writer.finish(writer.relu(created), "y")
    image = rows(2, 12, 8, 8)
    x = torch.from_numpy(image)
    left = nn.ChannelShuffle(3)(torch.relu(first_bn(first(x))))
    left = last_bn(last(depth_bn(depth(left))))
    right = torch_functions.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
    close(net.run({"data": image}, ["y"])["y"], torch.relu(torch.cat([left, right], 1)))


def test_inception_block() -> None:
    one, three, five = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 3, 1, 1), nn.Conv2d(8, 2, 5, 1, 2)
    pooled = nn.Conv2d(8, 3, 1)
    writer = Writer()
    parts = [writer.relu(writer.conv("data", layer)) for layer in (one, three, five)]
    pool = writer.op("MaxPool", "data", kernel=3, stride=1, pad=1)
    parts.append(writer.relu(writer.conv(pool, pooled)))
    writer.nets.op("DepthConcat", parts, ["joined", "dims"])
    net = writer.finish("joined", "y")
    image = rows(2, 8, 6, 6)
    x = torch.from_numpy(image)
    theirs = [one(x), three(x), five(x), pooled(torch.max_pool2d(x, 3, 1, 1))]
    close(net.run({"data": image}, ["y"])["y"], torch.relu(torch.cat(theirs, 1)))


def test_resnet50_all_of_it_but_narrow() -> None:
    module = ResNet50(width=4, classes=20)
    randomise(module)
    net = module.write()
    image = rows(2, 3, 224, 224)
    answer = net.run({"gpu_0/data": image}, ["gpu_0/softmax"])["gpu_0/softmax"]
    close(answer, module(torch.from_numpy(image)))
