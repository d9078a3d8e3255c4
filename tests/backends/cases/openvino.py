# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's models: a network that batches, the same from ONNX, one of fixed shape, and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from case import Arrays, Case
from onnx import TensorProto, helper, numpy_helper

from headrace.backends.openvino.model import import_openvino

_RANDOM = np.random.default_rng(8)
_FIRST = _RANDOM.standard_normal((16, 32)).astype(np.float32)
_SECOND = _RANDOM.standard_normal((32, 3)).astype(np.float32)

_MLP_CONFIG = """backend: "openvino"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 3 ] }
dynamic_batching { }
"""


def named(node: Any, name: str) -> Any:
    """Its output under a name that requests can use."""
    node.output(0).get_tensor().set_names({name})
    return node


def parameter(name: str, shape: list[int], kind: str) -> Any:
    ov = import_openvino()
    return named(ov.opset13.parameter(ov.PartialShape(shape), getattr(ov.Type, kind), name=name), name)


def write_ir(folder: Path, config: str, results: list[Any], parameters: list[Any]) -> None:
    ov = import_openvino()
    (folder / "1").mkdir(exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    ov.save_model(ov.Model(results, parameters, "case"), folder / "1" / "model.xml", compress_to_fp16=False)


def write_mlp(folder: Path) -> None:
    ops = import_openvino().opset13
    given = parameter("X", [-1, 16], "f32")
    hidden = ops.relu(ops.matmul(given, ops.constant(_FIRST), False, False))
    write_ir(folder, _MLP_CONFIG, [named(ops.matmul(hidden, ops.constant(_SECOND), False, False), "Y")], [given])


def write_onnx(folder: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["X", "first"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "second"], ["Y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(_FIRST, "first"), numpy_helper.from_array(_SECOND, "second")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "1").mkdir()
    (folder / "config.pbtxt").write_text(_MLP_CONFIG + 'default_model_filename: "model.onnx"\n')
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())


def mlp_inputs(rows: int, seed: int) -> Arrays:
    return {"X": np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)}


def mlp_expected(given: Arrays) -> Arrays:
    return {"Y": np.maximum(given["X"] @ _FIRST, 0) @ _SECOND}


def write_fixed(folder: Path) -> None:
    """Two inputs of different types, no batch, one size that varies."""
    config = """backend: "openvino"
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 3, -1 ] }, { name: "SCALE" data_type: TYPE_FP32 dims: [ 1 ] } ]
output { name: "SCALED" data_type: TYPE_FP32 dims: [ 3, -1 ] }
"""
    ov = import_openvino()
    image, scale = parameter("IMAGE", [3, -1], "u8"), parameter("SCALE", [1], "f32")
    scaled = named(ov.opset13.multiply(ov.opset13.convert(image, "f32"), scale), "SCALED")
    write_ir(folder, config, [scaled], [image, scale])


def fixed_inputs(rows: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        "IMAGE": random.integers(0, 100, (3, int(random.integers(1, 9))), dtype=np.uint8),
        "SCALE": random.integers(1, 9, 1).astype(np.float32),
    }


def fixed_expected(given: Arrays) -> Arrays:
    return {"SCALED": given["IMAGE"].astype(np.float32) * given["SCALE"]}


CASES = [
    Case("openvino_mlp", write_mlp, mlp_inputs, mlp_expected, "model.xml", needs_config=False),
    Case("openvino_weights", write_mlp, mlp_inputs, mlp_expected, "model.bin", needs_config=False),
    Case("openvino_onnx", write_onnx, mlp_inputs, mlp_expected, "model.onnx"),
    Case("openvino_fixed", write_fixed, fixed_inputs, fixed_expected, "model.xml", batches=False, needs_config=False),
]
