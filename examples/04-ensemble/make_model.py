# SPDX-License-Identifier: Apache-2.0
"""A classifier that tells which colour a picture has most of, as ONNX, and two pictures to ask about."""

from pathlib import Path

from onnx import TensorProto, helper, save
from PIL import Image

graph = helper.make_graph(
    [helper.make_node("ReduceMean", ["pixels"], ["scores"], axes=[2, 3], keepdims=0)],
    "colours",
    [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["rows", 3, 32, 32])],
    [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 3])],
)
file = Path("models/colours/1/model.onnx")
file.parent.mkdir(parents=True, exist_ok=True)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)

Path("build").mkdir(exist_ok=True)
Image.new("RGB", (640, 480), (20, 60, 200)).save("build/sea.png")
Image.new("RGB", (300, 500), (30, 160, 40)).save("build/meadow.jpg")
