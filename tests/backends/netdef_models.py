# SPDX-License-Identifier: Apache-2.0
"""Whole Caffe2 nets beside the PyTorch modules they are made from. `Writer` writes a module's layers as operators."""

from __future__ import annotations

from typing import Any

import torch
from netdef_nets import Nets
from torch import nn


class Writer:
    """Adds operators with the weights of PyTorch's layers to a net, in place where Caffe2's own exporters do so."""

    def __init__(self, inputs: tuple[str, ...] = ("data",), prefix: str = "") -> None:
        self.nets = Nets(*inputs)
        self._prefix = prefix
        self._count = 0

    def name(self, word: str) -> str:
        self._count += 1
        return f"{self._prefix}{word}_{self._count}"

    def weight(self, word: str, tensor: torch.Tensor) -> str:
        return self.nets.weight(self.name(word), tensor.detach().numpy())

    def conv(self, blob: str, layer: nn.Conv2d) -> str:
        created = self.name("conv")
        weights = [self.weight("w", layer.weight)]
        if layer.bias is not None:
            weights.append(self.weight("b", layer.bias))
        sizes: dict[str, Any] = {
            "kernel": layer.kernel_size[0],
            "stride": layer.stride[0],
            "pad": int(layer.padding[0]),
        }
        self.nets.op("Conv", [blob, *weights], [created], group=layer.groups, order="NCHW", **sizes)
        return created

    def bn(self, blob: str, layer: nn.BatchNorm2d) -> str:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        tensors = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
        weights = [self.weight("bn", tensor) for tensor in tensors]
        self.nets.op("SpatialBN", [blob, *weights], [blob], is_test=1, epsilon=layer.eps, order="NCHW")
        return blob

    def relu(self, blob: str) -> str:
        self.nets.op("Relu", [blob], [blob])
        return blob

    def fc(self, blob: str, layer: nn.Linear) -> str:
        created = self.name("fc")
        self.nets.op("FC", [blob, self.weight("w", layer.weight), self.weight("b", layer.bias)], [created])
        return created

    def op(self, kind: str, *blobs: str, **arguments: Any) -> str:
        created = self.name(kind.lower())
        self.nets.op(kind, blobs, [created], **arguments)
        return created

    def finish(self, blob: str, output: str) -> Nets:
        self.nets.op("Copy", [blob], [output])
        self.nets.net.external_output.append(output)
        return self.nets


def randomise(module: nn.Module, seed: int = 5) -> nn.Module:
    """Random weights, batch statistics among them, that keep numbers near 1."""
    torch.manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.2)
            layer.running_mean = torch.randn(layer.num_features) * 0.2
            layer.running_var = torch.rand(layer.num_features) + 0.5
    return module.eval()


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * 4
        self.a, self.a_bn = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.b, self.b_bn = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.c, self.c_bn = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.short: nn.Conv2d | None = None
        if stride > 1 or channels != out:
            self.short, self.short_bn = nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a_bn(self.a(x)))
        y = self.c_bn(self.c(torch.relu(self.b_bn(self.b(y)))))
        return torch.relu(y + (x if self.short is None else self.short_bn(self.short(x))))

    def write(self, writer: Writer, blob: str) -> str:
        created = writer.relu(writer.bn(writer.conv(blob, self.a), self.a_bn))
        created = writer.relu(writer.bn(writer.conv(created, self.b), self.b_bn))
        created = writer.bn(writer.conv(created, self.c), self.c_bn)
        short = blob if self.short is None else writer.bn(writer.conv(blob, self.short), self.short_bn)
        return writer.relu(writer.op("Sum", created, short))


class ResNet50(nn.Module):
    """All of it, as wide as `width` says; 64 is the real one."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem, self.stem_bn = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = (width << stage) * 4
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.stem_bn(self.stem(x))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return torch.softmax(self.fc(x.mean((2, 3))), 1)

    def write(self, data: str = "gpu_0/data", output: str = "gpu_0/softmax") -> Nets:
        writer = Writer((data,), "gpu_0/")
        blob = writer.relu(writer.bn(writer.conv(data, self.stem), self.stem_bn))
        blob = writer.op("MaxPool", blob, kernel=3, stride=2, pad=1)
        for block in self.blocks:
            assert isinstance(block, Bottleneck)
            blob = block.write(writer, blob)
        blob = writer.op("AveragePool", blob, kernel=7, stride=1)
        blob = writer.fc(blob, self.fc)
        return writer.finish(writer.op("Softmax", blob), output)
