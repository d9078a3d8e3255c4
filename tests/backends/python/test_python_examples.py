# SPDX-License-Identifier: Apache-2.0
"""Models as people write them for Triton, run unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backends.python.harness import BackendFixture, python_backend, tensor

from headrace.core.dtypes import FP32, INT32
from headrace.models.config.types import InputSpec, OutputSpec

VECTORS = {
    "inputs": (InputSpec("INPUT0", FP32, (4,)), InputSpec("INPUT1", FP32, (4,))),
    "outputs": (OutputSpec("OUTPUT0", FP32, (4,)), OutputSpec("OUTPUT1", FP32, (4,))),
}


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[BackendFixture]:
    with python_backend(tmp_path) as backend:
        yield backend


def pair() -> list:
    return [tensor("INPUT0", np.full(4, 5, np.float32)), tensor("INPUT1", np.full(4, 2, np.float32))]


ADD_SUB = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.model_config = model_config = json.loads(args["model_config"])
            sum_config = pb_utils.get_output_config_by_name(model_config, "OUTPUT0")
            difference_config = pb_utils.get_output_config_by_name(model_config, "OUTPUT1")
            self.sum_dtype = pb_utils.triton_string_to_numpy(sum_config["data_type"])
            self.difference_dtype = pb_utils.triton_string_to_numpy(difference_config["data_type"])

        def execute(self, requests):
            responses = []
            for request in requests:
                left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
                right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
                responses.append(pb_utils.InferenceResponse(output_tensors=[
                    pb_utils.Tensor("OUTPUT0", (left + right).astype(self.sum_dtype)),
                    pb_utils.Tensor("OUTPUT1", (left - right).astype(self.difference_dtype)),
                ]))
            return responses

        def finalize(self):
            print("Cleaning up...")
"""


def test_add_sub(backend: BackendFixture) -> None:
    for work in backend.open(ADD_SUB, **VECTORS).infer(pair(), pair()):
        assert {name: array.tolist() for name, array in work.arrays().items()} == {
            "OUTPUT0": [7] * 4,
            "OUTPUT1": [3] * 4,
        }


SQUARE = """
    import json
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.model_config = json.loads(args["model_config"])
            if not pb_utils.using_decoupled_model_transaction_policy(self.model_config):
                raise pb_utils.TritonModelException("the model can only be served decoupled")
            if pb_utils.get_input_config_by_name(self.model_config, "IN")["data_type"] != "TYPE_INT32":
                raise pb_utils.TritonModelException("IN must be INT32")
            self.in_flight = 0
            self.lock = threading.Lock()

        def execute(self, requests):
            for request in requests:
                self.process(request)
            return None

        def process(self, request):
            thread = threading.Thread(target=self.respond, args=(
                request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()))
            thread.daemon = True
            with self.lock:
                self.in_flight += 1
            thread.start()

        def respond(self, response_sender, in_input):
            for _ in range(int(in_input[0])):
                response_sender.send(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", in_input)]))
            response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            with self.lock:
                self.in_flight -= 1

        def finalize(self):
            while self.in_flight:
                pass
"""


def test_square(backend: BackendFixture) -> None:
    opened = backend.open(SQUARE, decoupled=True, inputs=(InputSpec("IN", INT32, (1,)),))
    four, none = opened.infer(*([tensor("IN", np.array([n], np.int32))] for n in (4, 0)))
    assert [work[0][0].array.tolist() for work in four.replies[:-1]] == [[4]] * 4
    assert len(none.replies) == 1


BLS = """
    import asyncio
    import json
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.model_config = json.loads(args["model_config"])

        {async_}def execute(self, requests):
            responses = []
            for request in requests:
                inputs = [pb_utils.get_input_tensor_by_name(request, name) for name in ("INPUT0", "INPUT1")]
                inner = pb_utils.InferenceRequest(
                    model_name="echo", requested_output_names=["INPUT0", "INPUT1"], inputs=inputs)
                answer = {call}
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
                first = pb_utils.get_output_tensor_by_name(answer, "INPUT0")
                responses.append(pb_utils.InferenceResponse(output_tensors=[
                    pb_utils.Tensor.from_dlpack("OUTPUT0", first.to_dlpack()),
                    pb_utils.Tensor("OUTPUT1", pb_utils.get_output_tensor_by_name(answer, "INPUT1").as_numpy()),
                ]))
            return responses
"""


@pytest.mark.parametrize(("async_", "call"), [("", "inner.exec()"), ("async ", "await inner.async_exec()")])
def test_calling_another_model(backend: BackendFixture, async_: str, call: str) -> None:
    (work,) = backend.open(BLS.format(async_=async_, call=call), **VECTORS).infer(pair())
    assert work.arrays()["OUTPUT0"].tolist() == [5] * 4
    assert work.arrays()["OUTPUT1"].tolist() == [2] * 4


BLS_SQUARE = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                inner = pb_utils.InferenceRequest(model_name="stream", inputs=[], requested_output_names=["OUT"])
                total = 0
                for answer in inner.exec(decoupled=True):
                    if answer.has_error():
                        raise pb_utils.TritonModelException(answer.error().message())
                    # The last response may be empty.
                    if len(answer.output_tensors()) > 0:
                        total += pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()[0]
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.array([total]))]))
            return responses
"""


def test_adding_up_a_stream_of_another_model(backend: BackendFixture) -> None:
    assert backend.open(BLS_SQUARE).one(tensor("IN", [1])).arrays()["SUM"] == [3]


def test_text_in_and_out(backend: BackendFixture) -> None:
    opened = backend.open("""
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                texts = pb_utils.get_input_tensor_by_name(requests[0], "TEXT").as_numpy()
                upper = np.array([text.decode("utf-8").upper() for text in texts], dtype=np.object_)
                raw = pb_utils.serialize_byte_tensor(upper)
                assert pb_utils.deserialize_bytes_tensor(raw).tolist() == [text.encode() for text in upper]
                assert pb_utils.triton_to_numpy_type(13) is np.object_ and pb_utils.numpy_to_triton_type(np.float32) == 11
                mixed = np.array([1, None, b"x"], dtype=object)
                fixed = np.array([b"ab", b"c"])
                outputs = [pb_utils.Tensor(n, a) for n, a in (("OUT", upper), ("S", fixed), ("M", mixed))]
                return [pb_utils.InferenceResponse(outputs)]
    """)
    arrays = opened.one(tensor("TEXT", np.array(["grün".encode(), b"b"], dtype=object))).arrays()
    assert arrays["OUT"].tolist() == ["GRÜN".encode(), b"B"]
    assert arrays["S"].tolist() == [b"ab", b"c"]
    assert arrays["M"].tolist() == [b"1", b"None", b"x"]
