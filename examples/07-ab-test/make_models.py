# SPDX-License-Identifier: Apache-2.0
"""Two versions of a model, as ONNX: build/price/v1.0.0 and v1.1.0. The newer one asks for one percent more."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

for version, factor in (("v1.0.0", 1.0), ("v1.1.0", 1.01)):
    weights = np.array([[3.0], [0.5]], np.float32) * np.float32(factor)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["rooms_and_metres", "W"], ["price"])],
        "price",
        [helper.make_tensor_value_info("rooms_and_metres", TensorProto.FLOAT, ["rows", 2])],
        [helper.make_tensor_value_info("price", TensorProto.FLOAT, ["rows", 1])],
        [numpy_helper.from_array(weights, "W")],
    )
    file = Path("build/price", version, "model.onnx")
    file.parent.mkdir(parents=True, exist_ok=True)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
