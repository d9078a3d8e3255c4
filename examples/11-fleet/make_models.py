# SPDX-License-Identifier: Apache-2.0
"""Two models, y = 2 x and y = 3 x, as ONNX: build/models/doubler and build/models/tripler."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

for name, factor in (("doubler", 2), ("tripler", 3)):
    folder = Path("build/models", name)
    folder.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1])],
        [numpy_helper.from_array(np.array(factor, np.float32), "factor")],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
