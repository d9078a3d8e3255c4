# SPDX-License-Identifier: Apache-2.0
"""A model for the fleet, y = 2 x, as ONNX: build/models/doubler/model.onnx."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

folder = Path("build/models/doubler")
folder.mkdir(parents=True, exist_ok=True)
graph = helper.make_graph(
    [helper.make_node("Mul", ["x", "two"], ["y"])],
    "doubler",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 2])],
    [numpy_helper.from_array(np.array(2, np.float32), "two")],
)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
