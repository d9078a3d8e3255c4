# SPDX-License-Identifier: Apache-2.0
"""What a training job would leave: a classifier of colours in build/colours, with its labels; and a picture."""

from pathlib import Path

from onnx import TensorProto, helper, save
from PIL import Image

folder = Path("build/colours")
folder.mkdir(parents=True, exist_ok=True)
graph = helper.make_graph(
    [helper.make_node("ReduceMean", ["pixels"], ["scores"], axes=[2, 3], keepdims=0)],
    "colours",
    [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["rows", 3, 32, 32])],
    [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 3])],
)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
(folder / "labels.txt").write_text("red\ngreen\nblue\n")
Image.new("RGB", (64, 48), "red").save("build/rose.png")
