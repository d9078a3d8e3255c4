# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the backends `identity` and `python`: their configurations, and repositories of them.

models = make_models(tmp_path / "models", echo=CONFIG, broken=BROKEN)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support.model_cache import made_once

CONFIG = """backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
dynamic_batching { }
"""
BROKEN = CONFIG.replace("dims: [ 4 ] }\noutput", "dimms: [ 4 ] }\noutput")
"""The mistake is on line 3."""
LABELLED = CONFIG.replace("dims: [ 4 ] }\ndynamic", 'dims: [ 4 ] label_filename: "labels.txt" }\ndynamic')
CACHED = CONFIG + "response_cache { enable: true }\n"
TWO = """backend: "identity"
input { name: "ids" data_type: TYPE_INT32 dims: [ -1, 2 ] }
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "same_ids" data_type: TYPE_INT32 dims: [ -1, 2 ] }
output { name: "same_text" data_type: TYPE_STRING dims: [ 1 ] }
"""
PAIR = """backend: "identity"
max_batch_size: 4
input { name: "a" data_type: TYPE_STRING dims: [ 2 ] }
input { name: "b" data_type: TYPE_BF16 dims: [ 3 ] }
output { name: "same_a" data_type: TYPE_STRING dims: [ 2 ] }
output { name: "same_b" data_type: TYPE_BF16 dims: [ 3 ] }
"""
TYPED = """backend: "identity"
input {{ name: "x" data_type: TYPE_{0} dims: [ 2, 2 ] }}
output {{ name: "y" data_type: TYPE_{0} dims: [ 2, 2 ] }}
"""
STORY = """backend: "python"
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "word" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
STORY_PY = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for word in pb.get_input_tensor_by_name(request, "text").as_numpy()[0].split():
                sender.send(pb.InferenceResponse([pb.Tensor("word", np.array([word], dtype=object))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SIZES = """backend: "python"
input { name: "ids" data_type: TYPE_INT32 dims: [ -1, 2 ] }
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "sizes" data_type: TYPE_INT64 dims: [ 2 ] }
"""
SIZES_PY = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb.get_input_tensor_by_name(request, "ids").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("sizes", np.array(array.shape))]) for array in arrays]
"""
FAILING = """backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
FAILING_PY = """
class TritonPythonModel:
    def execute(self, requests):
        raise RuntimeError("not today")
"""

SHARED: Mapping[str, Mapping[str, str]] = {
    "echo": {"config.pbtxt": LABELLED, "labels.txt": "cat\ndog\nbird\nfish\n"},
    "cached": {"config.pbtxt": CACHED},
    "two": {"config.pbtxt": TWO},
    "pair": {"config.pbtxt": PAIR},
    "story": {"config.pbtxt": STORY, "1/model.py": STORY_PY},
    "sizes": {"config.pbtxt": SIZES, "1/model.py": SIZES_PY},
    "failing": {"config.pbtxt": FAILING, "1/model.py": FAILING_PY},
    **{kind.lower(): {"config.pbtxt": TYPED.format(kind)} for kind in ("UINT8", "FP16", "BF16", "BOOL", "INT64")},
}
"""The models of the session server, by name: their files."""


def make_models(folder: Path, **configs: str) -> Path:
    """Write a repository with one version of each model; returns its folder."""
    return write_models(folder, {name: {"config.pbtxt": config} for name, config in configs.items()})


def write_models(folder: Path, models: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a repository: for each model, its files and an empty version 1; returns its folder."""
    for name, files in models.items():
        (folder / name / "1").mkdir(parents=True)
        for path, text in files.items():
            (folder / name / path).write_text(text)
    return folder


def shared_models() -> Path:
    """The repository of the session server, made once per machine. Do not change it."""
    return made_once(write_models, SHARED)
