# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models and configurations for the tests of the ONNX backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.onnx.backend import OnnxBackend, OnnxInstance
from headrace.core.dtypes import DTYPES, FP32, DType
from headrace.models.config.messages import new_config
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec

CPU = Placement("test_0_cpu")
NO_SERVICES = cast("EngineServices", None)

ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}

Shape = Sequence[int | str | None] | None


def graph(
    nodes: Sequence[Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    constants: Mapping[str, Any] | None = None,
) -> bytes:
    """A serialised model; inputs and outputs are name -> (type, shape)."""
    created = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(created, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return cast("bytes", model.SerializeToString())


def identity(dtype: str = "FP32", shape: Shape = ("batch", 4), shape_out: Shape = ()) -> bytes:
    """X -> Y, unchanged."""
    kind = ONNX_TYPES[dtype]
    shape_out = shape if shape_out == () else shape_out
    node = helper.make_node("Identity", ["X"], ["Y"])
    return graph([node], {"X": (kind, shape)}, {"Y": (kind, shape_out)})


def placed(folder: Path, model: bytes | None, filename: str = "model.onnx") -> ModelFiles:
    """The model as version 1 of `test`."""
    files = ModelFiles(folder / "test", 1, folder / "test" / "1")
    files.version_folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        (files.version_folder / filename).write_bytes(model)
    return files


def configured(
    inputs: Mapping[str, tuple[DType, Dims]] | None = None,
    outputs: Mapping[str, tuple[DType, Dims]] | None = None,
    max_batch_size: int = 8,
    **more: Any,
) -> ModelConfig:
    """A configuration for `identity()`; any part can be replaced."""
    inputs = {"X": (FP32, (4,))} if inputs is None else inputs
    outputs = {"Y": (FP32, (4,))} if outputs is None else outputs
    more.setdefault("proto", new_config(name="test"))
    return ModelConfig(
        "test",
        "onnxruntime",
        max_batch_size=max_batch_size,
        inputs=tuple(InputSpec(name, dtype, dims) for name, (dtype, dims) in inputs.items()),
        outputs=tuple(OutputSpec(name, dtype, dims) for name, (dtype, dims) in outputs.items()),
        **more,
    )


def open_instance(config: ModelConfig, files: ModelFiles, placement: Placement = CPU) -> OnnxInstance:
    """Load and open."""
    return OnnxBackend().load(config, files, NO_SERVICES).open(placement)


def sample(dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values that show a lost bit, sign or letter."""
    count = int(np.prod(shape))
    if dtype.name == "BYTES":
        words = np.array([b"", b"a", "zwölf".encode(), b"nul\0inside", b"x" * 300], dtype=object)
        return np.resize(words, shape)
    if dtype.name == "BOOL":
        return (np.arange(count) % 3 == 0).reshape(shape)
    random = np.random.default_rng(7)
    bits = random.integers(0, 256, count * dtype.item_bytes, dtype=np.uint8)
    return bits.view(dtype.numpy).reshape(shape)


ALL_DTYPES = list(DTYPES.values())
