# SPDX-License-Identifier: Apache-2.0
"""ONNX models: a network that batches, one beside its weights, one of fixed shape, text, and bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from case import Arrays, Case
from onnx import TensorProto, helper, numpy_helper

from headrace.core.dtypes import bf16_to_float32, float32_to_bf16

_RANDOM = np.random.default_rng(4)
_FIRST = _RANDOM.standard_normal((16, 32)).astype(np.float32)
_SECOND = _RANDOM.standard_normal((32, 3)).astype(np.float32)

_MLP_CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 16 ] }
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "BEST" data_type: TYPE_INT64 dims: [ 1 ] } ]
dynamic_batching { }
"""


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: dict[str, Any] | None = None) -> Any:
    tensors = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "case", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _mlp() -> Any:
    nodes = [
        helper.make_node("MatMul", ["X", "first"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "second"], ["Y"]),
        helper.make_node("ArgMax", ["Y"], ["BEST"], axis=1),
    ]
    return _model(
        nodes,
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 16])],
        [
            helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("BEST", TensorProto.INT64, ["n", 1]),
        ],
        {"first": _FIRST, "second": _SECOND},
    )


def _write(folder: Path, config: str, model: Any) -> None:
    (folder / "1").mkdir()
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())


def write_mlp(folder: Path) -> None:
    _write(folder, _MLP_CONFIG, _mlp())


def write_external(folder: Path) -> None:
    """The same with its weights in a file of their own."""
    (folder / "1").mkdir()
    (folder / "config.pbtxt").write_text(_MLP_CONFIG)
    onnx.save_model(
        _mlp(), folder / "1" / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )


def mlp_inputs(rows: int, seed: int) -> Arrays:
    return {"X": np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)}


def mlp_expected(given: Arrays) -> Arrays:
    y = np.maximum(given["X"] @ _FIRST, 0) @ _SECOND
    return {"Y": y, "BEST": y.argmax(axis=1, keepdims=True)}


def write_fixed(folder: Path) -> None:
    """Two inputs of different types, no batch, one size that varies."""
    config = """backend: "onnxruntime"
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 3, -1 ] }, { name: "SCALE" data_type: TYPE_FP16 dims: [ 1 ] } ]
output { name: "SCALED" data_type: TYPE_FP16 dims: [ 3, -1 ] }
"""
    nodes = [
        helper.make_node("Cast", ["IMAGE"], ["a"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["a", "SCALE"], ["SCALED"]),
    ]
    image = helper.make_tensor_value_info("IMAGE", TensorProto.UINT8, [3, "w"])
    scale = helper.make_tensor_value_info("SCALE", TensorProto.FLOAT16, [1])
    scaled = helper.make_tensor_value_info("SCALED", TensorProto.FLOAT16, [3, "w"])
    _write(folder, config, _model(nodes, [image, scale], [scaled]))


def fixed_inputs(rows: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    width = int(random.integers(1, 9))
    return {
        "IMAGE": random.integers(0, 100, (3, width), dtype=np.uint8),
        "SCALE": random.integers(1, 9, 1).astype(np.float16),
    }


def fixed_expected(given: Arrays) -> Arrays:
    return {"SCALED": given["IMAGE"].astype(np.float16) * given["SCALE"]}


def write_text(folder: Path) -> None:
    config = """backend: "onnxruntime"
max_batch_size: 8
input { name: "WORDS" data_type: TYPE_STRING dims: [ 2 ] }
output { name: "SAME" data_type: TYPE_STRING dims: [ 2 ] }
dynamic_batching { }
"""
    words = helper.make_tensor_value_info("WORDS", TensorProto.STRING, ["n", 2])
    same = helper.make_tensor_value_info("SAME", TensorProto.STRING, ["n", 2])
    _write(folder, config, _model([helper.make_node("Identity", ["WORDS"], ["SAME"])], [words], [same]))


def text_inputs(rows: int, seed: int) -> Arrays:
    words = [[f"größer {seed}".encode(), f"{row}".encode()] for row in range(rows)]
    return {"WORDS": np.array(words, dtype=object)}


def text_expected(given: Arrays) -> Arrays:
    return {"SAME": given["WORDS"]}


def write_bf16(folder: Path) -> None:
    config = """backend: "onnxruntime"
max_batch_size: 8
input { name: "X" data_type: TYPE_BF16 dims: [ 4 ] }
output [ { name: "X32" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "SAME" data_type: TYPE_BF16 dims: [ 4 ] } ]
dynamic_batching { }
"""
    nodes = [
        helper.make_node("Cast", ["X"], ["X32"], to=TensorProto.FLOAT),
        helper.make_node("Identity", ["X"], ["SAME"]),
    ]
    given = helper.make_tensor_value_info("X", TensorProto.BFLOAT16, ["n", 4])
    wide = helper.make_tensor_value_info("X32", TensorProto.FLOAT, ["n", 4])
    same = helper.make_tensor_value_info("SAME", TensorProto.BFLOAT16, ["n", 4])
    _write(folder, config, _model(nodes, [given], [wide, same]))


def bf16_inputs(rows: int, seed: int) -> Arrays:
    return {"X": float32_to_bf16(np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32))}


def bf16_expected(given: Arrays) -> Arrays:
    return {"X32": bf16_to_float32(given["X"]), "SAME": given["X"]}


CASES = [
    Case("onnx_mlp", write_mlp, mlp_inputs, mlp_expected, "model.onnx", needs_config=False),
    Case("onnx_external", write_external, mlp_inputs, mlp_expected, "model.onnx.data", needs_config=False),
    Case("onnx_fixed", write_fixed, fixed_inputs, fixed_expected, "model.onnx", batches=False, needs_config=False),
    Case("onnx_text", write_text, text_inputs, text_expected, "model.onnx", needs_config=False),
    Case("onnx_bf16", write_bf16, bf16_inputs, bf16_expected, "model.onnx", needs_config=False),
]
