# SPDX-License-Identifier: Apache-2.0
"""Caffe2 models: the tutorial's network, an image classifier whose blobs have Caffe2's names, and sums without a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as torch_functions
from case import Arrays, Case
from netdef_nets import Nets, rows

_FIRST, _FIRST_BIAS = rows(32, 16, seed=2), rows(32, seed=3)
_SECOND, _SECOND_BIAS = rows(3, 32, seed=4), rows(3, seed=5)
_KERNEL, _KERNEL_BIAS = rows(4, 3, 3, 3, seed=6), rows(4, seed=7)


def _write(folder: Path, config: str, net: Nets) -> None:
    (folder / "config.pbtxt").write_text(config)
    net.write(folder / "1")


def write_mlp(folder: Path) -> None:
    config = """platform: "caffe2_netdef"
max_batch_size: 8
input { name: "data" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "softmax" data_type: TYPE_FP32 dims: [ 3 ] }
dynamic_batching { }
"""
    net = Nets()
    net.weight("fc1_w", _FIRST)
    net.weight("fc1_b", _FIRST_BIAS)
    net.weight("fc2_w", _SECOND)
    net.weight("fc2_b", _SECOND_BIAS)
    net.op("FC", ["data", "fc1_w", "fc1_b"], ["fc1"])
    net.op("Relu", ["fc1"], ["fc1"])
    net.op("FC", ["fc1", "fc2_w", "fc2_b"], ["fc2"])
    net.op("Softmax", ["fc2"], ["softmax"])
    net.net.external_output.append("softmax")
    _write(folder, config, net)


def mlp_inputs(count: int, seed: int) -> Arrays:
    return {"data": rows(count, 16, seed=seed)}


def mlp_expected(given: Arrays) -> Arrays:
    hidden = np.maximum(given["data"] @ _FIRST.T + _FIRST_BIAS, 0)
    powers = np.exp(hidden @ _SECOND.T + _SECOND_BIAS)
    return {"softmax": powers / powers.sum(axis=1, keepdims=True)}


def write_image(folder: Path) -> None:
    config = """platform: "caffe2_netdef"
max_batch_size: 4
input { name: "gpu_0/data" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 9, 9 ] }
output { name: "gpu_0/pooled" data_type: TYPE_FP32 dims: [ 4, 1, 1 ] }
"""
    net = Nets("gpu_0/data")
    net.weight("gpu_0/conv_w", _KERNEL)
    net.weight("gpu_0/conv_b", _KERNEL_BIAS)
    net.op("Conv", ["gpu_0/data", "gpu_0/conv_w", "gpu_0/conv_b"], ["gpu_0/conv"], kernel=3, stride=2, pad=1)
    net.op("Relu", ["gpu_0/conv"], ["gpu_0/conv"])
    net.op("AveragePool", ["gpu_0/conv"], ["gpu_0/pooled"], global_pooling=1)
    net.net.external_output.append("gpu_0/pooled")
    _write(folder, config, net)


def image_inputs(count: int, seed: int) -> Arrays:
    return {"gpu_0/data": rows(count, 3, 9, 9, seed=seed)}


def image_expected(given: Arrays) -> Arrays:
    image, kernel, bias = (torch.from_numpy(item) for item in (given["gpu_0/data"], _KERNEL, _KERNEL_BIAS))
    x = torch.relu(torch_functions.conv2d(image, kernel, bias, 2, 1))
    return {"gpu_0/pooled": x.mean((2, 3), keepdim=True).numpy()}


def write_sums(folder: Path) -> None:
    config = """backend: "netdef"
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "OUTPUT1" data_type: TYPE_INT64 dims: [ 16 ] } ]
"""
    net = Nets("INPUT0", "INPUT1")
    net.op("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"])
    net.op("Sub", ["INPUT0", "INPUT1"], ["difference"])
    net.op("Cast", ["difference"], ["OUTPUT1"], to=10)
    net.net.external_output.extend(["OUTPUT0", "OUTPUT1"])
    _write(folder, config, net)


def sums_inputs(count: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.integers(-1000, 1000, 16, dtype=np.int32) for name in ("INPUT0", "INPUT1")}


def sums_expected(given: Arrays) -> Arrays:
    first, second = given["INPUT0"], given["INPUT1"]
    return {"OUTPUT0": first + second, "OUTPUT1": (first - second).astype(np.int64)}


CASES = [
    Case("netdef_mlp", write_mlp, mlp_inputs, mlp_expected, "model.netdef"),
    Case("netdef_weights", write_mlp, mlp_inputs, mlp_expected, "init_model.netdef"),
    Case("netdef_image", write_image, image_inputs, image_expected, "model.netdef"),
    Case("netdef_sums", write_sums, sums_inputs, sums_expected, "model.netdef", batches=False),
]
