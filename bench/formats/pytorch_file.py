# SPDX-License-Identifier: Apache-2.0
"""Write a plan of `bench.resnet50` as TorchScript."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.resnet50 import CONVOLUTIONS, EPSILON, Layers, Plan, conv_weights, dense_weights


class Network(nn.Module, Layers):
    """The plan's parts are modules by name, made when the plan is walked for the first time."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self._plan = plan

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self._plan(self, value)

    def conv(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self._part(name, _conv)(value)

    def relu(self, value: torch.Tensor) -> torch.Tensor:
        return torch.relu(value)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right

    def max_pool(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(value, 3, 2, 1)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return torch.flatten(nn.functional.adaptive_avg_pool2d(value, 1), 1)

    def dense(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self._part(name, _dense)(value)

    def _part(self, name: str, make: Callable[[str], nn.Module]) -> nn.Module:
        if name not in self.parts:
            self.parts[name] = make(name).eval()
        return self.parts[name]


def write(file: Path, plan: Plan, name: str, input_shape: tuple[int, ...], outputs: int) -> None:
    """Write the plan as a trace of one call, which leaves the first dimension free."""
    example = torch.zeros(1, *input_shape)
    network = Network(plan).eval()
    with torch.inference_mode():
        network(example)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    torch.jit.trace(network, example).save(str(file))


def _conv(name: str) -> nn.Module:
    conv, weights = CONVOLUTIONS[name], conv_weights(name)
    kernel = nn.Conv2d(conv.taken, conv.given, conv.size, conv.stride, conv.padding, bias=False)
    norm = nn.BatchNorm2d(conv.given, eps=EPSILON)
    kernel.load_state_dict({"weight": torch.from_numpy(weights.kernel)})
    numbers = {"weight": "scale", "bias": "shift", "running_mean": "mean", "running_var": "variance"}
    norm.load_state_dict({key: torch.from_numpy(getattr(weights, part)) for key, part in numbers.items()}, strict=False)
    return nn.Sequential(kernel, norm)


def _dense(name: str) -> nn.Module:
    matrix, bias = dense_weights(name)
    dense = nn.Linear(*matrix.shape)
    dense.load_state_dict({"weight": torch.from_numpy(matrix.T.copy()), "bias": torch.from_numpy(bias)})
    return dense
