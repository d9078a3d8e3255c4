# SPDX-License-Identifier: Apache-2.0
"""Write a plan of `bench.resnet50` as ONNX, node by node."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, checker, helper, numpy_helper

from bench.formats import FORMATS
from bench.resnet50 import CONVOLUTIONS, EPSILON, Layers, Plan, conv_weights, dense_weights

OPSET, IR_VERSION = 17, 8
ROWS = "rows"


class OnnxLayers(Layers):
    """A value is the name of a tensor."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def conv(self, name: str, value: str) -> str:
        conv, weights = CONVOLUTIONS[name], conv_weights(name)
        kernel = self._constant(f"{name}_kernel", weights.kernel)
        value = self._node(
            "Conv", value, kernel, strides=[conv.stride] * 2, pads=[conv.padding] * 4, kernel_shape=[conv.size] * 2
        )
        numbers = [
            self._constant(f"{name}_{part}", getattr(weights, part)) for part in ("scale", "shift", "mean", "variance")
        ]
        return self._node("BatchNormalization", value, *numbers, epsilon=EPSILON)

    def relu(self, value: str) -> str:
        return self._node("Relu", value)

    def add(self, left: str, right: str) -> str:
        return self._node("Add", left, right)

    def max_pool(self, value: str) -> str:
        return self._node("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)

    def mean(self, value: str) -> str:
        return self._node("Flatten", self._node("GlobalAveragePool", value))

    def dense(self, name: str, value: str) -> str:
        matrix, bias = dense_weights(name)
        return self._node("Gemm", value, self._constant(f"{name}_matrix", matrix), self._constant(f"{name}_bias", bias))

    def _node(self, kind: str, *inputs: str, **attributes: object) -> str:
        output = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def _constant(self, name: str, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name


def write(file: Path, plan: Plan, name: str, input_shape: tuple[int, ...], given: int) -> None:
    """Write the plan with a free first dimension."""
    kind, layers = FORMATS["onnx"], OnnxLayers()
    last = plan(layers, kind.input_name)
    layers.nodes.append(helper.make_node("Identity", [last], [kind.output_name]))
    inputs = [helper.make_tensor_value_info(kind.input_name, TensorProto.FLOAT, [ROWS, *input_shape])]
    outputs = [helper.make_tensor_value_info(kind.output_name, TensorProto.FLOAT, [ROWS, given])]
    graph = helper.make_graph(layers.nodes, name, inputs, outputs, layers.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    checker.check_model(model)
    file.write_bytes(model.SerializeToString())
