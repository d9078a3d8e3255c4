# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs and a backend that cannot use them: models that do not insist go to the CPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from headrace.backends.contract import ModelFiles
from headrace.engine.model_loader import placements_of
from headrace.engine.repository.load_plan import read_load_plan


def folder_with(tmp_path: Path, config: str) -> Path:
    model = tmp_path / "m"
    (model / "1").mkdir(parents=True)
    shape = ["n", 4]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), model / "1/model.onnx"
    )
    (model / "config.pbtxt").write_text(config)
    return model


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ("", ["cpu"]),
        ("instance_group [{ count: 2 }]", ["cpu", "cpu"]),
        ("instance_group [{ kind: KIND_GPU }]", ["gpu", "gpu"]),
    ],
)
def test_instances_are_placed_without_a_gpu_provider(tmp_path: Path, config: str, kinds: list[str]) -> None:
    """ONNX Runtime's CPU build is the one of the tests; the machine is said to have two GPUs."""
    model = folder_with(tmp_path, f'backend: "onnxruntime"\n{config}\n')
    finished = read_load_plan(model, None, 2).complete(ModelFiles(model, 1, model / "1"))
    assert [placement.kind for _, placement in placements_of(finished)] == kinds
