# SPDX-License-Identifier: Apache-2.0
"""The models that the tests of the client ask: one for each type, one with labels, one that streams, one with a memory."""

from __future__ import annotations

from pathlib import Path

TYPES = [
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES"),
]

ECHO = """backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }
"""
SAME = """backend: "identity"
input {{ name: "x" data_type: TYPE_{0} dims: [ -1, -1 ] }}
output {{ name: "y" data_type: TYPE_{0} dims: [ -1, -1 ] }}
"""
STORY = """backend: "python"
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "count" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "word" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "place" data_type: TYPE_INT32 dims: [ 2 ] }
model_transaction_policy { decoupled: true }
"""
STORY_PY = '''
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """`count` answers; a negative count fails after so many."""

    def execute(self, requests):
        for request in requests:
            text = pb.get_input_tensor_by_name(request, "text").as_numpy().ravel()[0]
            count = int(pb.get_input_tensor_by_name(request, "count").as_numpy().ravel()[0])
            sender = request.get_response_sender()
            for place in range(abs(count)):
                word = pb.Tensor("word", np.array([text], dtype=object))
                where = pb.Tensor("place", np.array([place, count], dtype=np.int32))
                sender.send(pb.InferenceResponse([word, where]))
            if count < 0:
                sender.send(pb.InferenceResponse(error=pb.TritonError("the story broke off")))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
COUNTER = """backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching { }
"""
COUNTER_PY = '''
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """The sum so far."""

    sums = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            self.sums += pb.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb.InferenceResponse([pb.Tensor("y", np.asarray(self.sums, dtype=np.int32))]))
        return responses
'''


def make_repository(folder: Path) -> Path:
    """Every model that the tests ask."""

    def model(name: str, config: str, code: str = "") -> Path:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if code:
            (folder / name / "1" / "model.py").write_text(code)
        return folder / name

    (model("echo", ECHO) / "labels.txt").write_text("cat\ndog\nbird\nfish: a carp\n")
    for name in TYPES:
        model(f"same_{name}", SAME.format("STRING" if name == "BYTES" else name))
    model("story", STORY, STORY_PY)
    model("counter", COUNTER, COUNTER_PY)
    return folder
