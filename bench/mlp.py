# SPDX-License-Identifier: Apache-2.0
"""The networks of the `mlp` and `predict` workloads, in numpy and as ONNX.

16 numbers in, hidden layers with ReLU (two of 256 unless told), 16 numbers out; the weights are random, and the same
every time.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

WIDTHS = (16, 256, 256, 16)
# The same kind of network as TorchScript: see torchscript.py.
PREDICT_WIDTHS = (16, 64, 16)
# Some milliseconds a row on one core: 17 million weights, which no cache holds.
SLOW_WIDTHS = (16, 2048, 2048, 2048, 2048, 2048, 16)
SEED = 2026
# Old enough for every ONNX Runtime that a peer may have.
OPSET, IR_VERSION = 17, 8


def weights(widths: tuple[int, ...] = WIDTHS) -> list[tuple[np.ndarray, np.ndarray]]:
    """Matrix and bias of each layer, scaled so that the numbers neither vanish nor grow on their way."""
    random = np.random.default_rng(SEED)
    return [
        (
            (random.standard_normal((rows, columns)) * np.sqrt(2 / rows)).astype(np.float32),
            (random.standard_normal(columns) * 0.1).astype(np.float32),
        )
        for rows, columns in pairwise(widths)
    ]


def answer(rows: np.ndarray, widths: tuple[int, ...] = WIDTHS) -> np.ndarray:
    """What the network makes of these rows, in double precision."""
    values: np.ndarray = rows.astype(np.float64)
    *hidden, (matrix, bias) = ((matrix.astype(np.float64), bias) for matrix, bias in weights(widths))
    for hidden_matrix, hidden_bias in hidden:
        values = np.maximum(values @ hidden_matrix + hidden_bias, 0)
    return np.asarray(values @ matrix + bias)


def write_onnx(file: Path) -> None:
    """Write the network as INPUT0 -> OUTPUT0, with a free first dimension."""
    # Takes half a second to import, and most runs of `bench --help` and the like do not need it.
    from onnx import TensorProto, checker, helper, numpy_helper

    nodes, constants, value = [], [], "INPUT0"
    layers = weights()
    for number, (matrix, bias) in enumerate(layers, start=1):
        constants += [numpy_helper.from_array(matrix, f"W{number}"), numpy_helper.from_array(bias, f"B{number}")]
        is_last = number == len(layers)
        added = "OUTPUT0" if is_last else f"added{number}"
        nodes.append(helper.make_node("MatMul", [value, f"W{number}"], [f"product{number}"]))
        nodes.append(helper.make_node("Add", [f"product{number}", f"B{number}"], [added]))
        if not is_last:
            value = f"hidden{number}"
            nodes.append(helper.make_node("Relu", [added], [value]))
    inputs = [helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, ["rows", WIDTHS[0]])]
    outputs = [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, ["rows", WIDTHS[-1]])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    checker.check_model(model)
    file.write_bytes(model.SerializeToString())
