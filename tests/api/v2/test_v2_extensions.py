# SPDX-License-Identifier: Apache-2.0
"""Classification, raw bodies, numbers that JSON has no word for, request parameters, headers, restricted APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tensors import SPECIAL, same
from tritonclient.utils import InferenceServerException
from v2_servers import ask, functions_served, models_served, write_model

from headrace.api.v2.outputs import classify
from headrace.api.v2.requests import HeaderForwarding
from headrace.api.v2.settings import Restriction, V2Settings
from headrace.core.dtypes import FP32
from headrace.core.errors import FailedPrecondition
from headrace.core.tensors import Tensor
from headrace.models.config.types import InputSpec, OutputSpec
from headrace.net.http.heads import RequestHead
from support.engines import config_of
from support.serving import Serving

IDENTITY = """
backend: "identity"
max_batch_size: {batch}
input {{ name: "INPUT0" data_type: TYPE_{kind} dims: [ {dims} ] }}
output {{ name: "OUTPUT0" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}
"""
SHOWS_PARAMETERS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.array([request.parameters()], object))],
                parameters={"text": "t", "number": 3, "flag": True},
            )
            for request in requests
        ]
"""
SHOWS_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    labelled = write_model(
        folder, "scores", IDENTITY.format(batch=4, kind="FP32", dims="4", more='label_filename: "labels.txt"')
    )
    (labelled / "labels.txt").write_text("zero\none\ntwo\n")
    for name, batch, kind, dims in (
        ("whole", 0, "INT32", "2, 3"),
        ("rows", 8, "FP32", "3"),
        ("free", 8, "FP32", "2, -1"),
        ("freer", 0, "FP32", "-1, -1"),
        ("text", 8, "STRING", "1"),
        ("texts", 0, "STRING", "2"),
        ("half", 8, "FP16", "-1"),
        ("brain", 8, "BF16", "-1"),
    ):
        write_model(folder, name, IDENTITY.format(batch=batch, kind=kind, dims=dims, more=""))
    write_model(folder, "shows", SHOWS_CONFIG, SHOWS_PARAMETERS)
    settings = V2Settings(
        server_id="triton",
        http_header_forward_pattern="X-My-.*|timeout|triton_.*",
        grpc_header_forward_pattern="x-my-.*|timeout|triton_.*",
    )
    with models_served(folder, settings) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(server: Serving, request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = tritonclient.http if request.param == "http" else tritonclient.grpc
    with kind.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        made.kind = kind
        yield made


def infer(client: Any, model: str, array: Any, datatype: str, outputs: Any = None, **more: Any) -> Any:
    tensor = client.kind.InferInput("IN" if model == "shows" else "INPUT0", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor], outputs=outputs, **more)


# Classification.


def test_classes_have_values_places_and_labels(client: Any) -> None:
    scores = np.array([[0.5, 1.0, -2.0, 0.25], [0, 0, 0, 7]], np.float32)
    wanted = client.kind.InferRequestedOutput("OUTPUT0", class_count=2)
    answer = infer(client, "scores", scores, "FP32", [wanted]).as_numpy("OUTPUT0")
    assert answer.shape == (2, 2)
    # The label file ends before the last class.
    assert answer.tolist() == [[b"1.000000:1:one", b"0.500000:0:zero"], [b"7.000000:3", b"0.000000:0:zero"]]


def test_more_classes_than_there_are_and_no_batches(client: Any) -> None:
    array = np.array([[3, 1, 2], [9, 8, 7]], np.int32)
    wanted = client.kind.InferRequestedOutput("OUTPUT0", class_count=100)
    answer = infer(client, "whole", array, "INT32", [wanted]).as_numpy("OUTPUT0")
    assert answer.tolist() == [b"9:3", b"8:4", b"7:5", b"3:0", b"2:2", b"1:1"]


def test_what_has_no_classes(client: Any) -> None:
    wanted = client.kind.InferRequestedOutput("OUTPUT0", class_count=1)
    with pytest.raises(InferenceServerException, match="class result not available for output due to unsupported type"):
        infer(client, "text", np.array([[b"a"]], object), "BYTES", [wanted])


@pytest.mark.parametrize("count", [0, -1, "2", 1.5, True, None, []])
def test_a_wrong_number_of_classes(server: Serving, count: Any) -> None:
    document = {
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": count}}],
    }
    status, answer = ask(server, "POST", "/v2/models/scores/infer", document)
    assert status == 400 and "classification" in answer["error"]


def test_too_many_elements_to_classify() -> None:
    from headrace.core.errors import InvalidArgument

    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        classify(Tensor("O", FP32, np.zeros(1_000_001, np.float32)), 1, (), batched=False)


# Raw bodies.


def post_raw(server: Serving, model: str, body: bytes) -> tuple[int, Any]:
    return ask(server, "POST", f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": "0"})


def binary_of(answer: bytes) -> tuple[Any, bytes]:
    text, brace, binary = answer.rpartition(b"}")
    return json.loads(text + brace), binary


@pytest.mark.parametrize(
    ("model", "array", "shape"),
    [
        ("whole", np.arange(6, dtype=np.int32), [2, 3]),
        ("rows", np.arange(3, dtype=np.float32), [1, 3]),
        ("free", np.arange(10, dtype=np.float32), [1, 2, 5]),
    ],
)
def test_a_raw_body(server: Serving, model: str, array: Any, shape: list[int]) -> None:
    status, answer = post_raw(server, model, array.tobytes())
    document, binary = binary_of(answer)
    assert status == 200 and document["outputs"][0]["shape"] == shape
    assert binary == array.tobytes()


def test_a_raw_body_of_bytes_is_one_element(server: Serving) -> None:
    _, answer = post_raw(server, "text", b"\x89PNG, all of it")
    document, binary = binary_of(answer)
    assert document["outputs"][0]["shape"] == [1, 1]
    assert binary == len(b"\x89PNG, all of it").to_bytes(4, "little") + b"\x89PNG, all of it"


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        ("freer", bytes(8), "can not be deduced because there are more than one variable-sized dimension"),
        ("texts", b"ab", "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]"),
        ("rows", bytes(11), "input byte size mismatch for input 'INPUT0'"),
        ("rows", b"", "input byte size mismatch for input 'INPUT0'"),
        ("free", bytes(12), "input byte size mismatch for input 'INPUT0'"),
    ],
)
def test_raw_bodies_that_do_not_fit(server: Serving, model: str, body: bytes, text: str) -> None:
    status, answer = post_raw(server, model, body)
    assert status == 400 and text in answer["error"]
    assert post_raw(server, "none", body)[0] == 404


def test_a_raw_body_for_two_inputs() -> None:
    inputs = (InputSpec("A", FP32, (1,)), InputSpec("B", FP32, (1,)))
    config = config_of("two", inputs=inputs, outputs=(OutputSpec("A", FP32, (1,)),))
    with functions_served([(config, lambda inputs: inputs)]) as running:
        status, answer = post_raw(running, "two", bytes(8))
    assert status == 400
    assert "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'two'" in answer["error"]


# Numbers.


@pytest.mark.parametrize(("model", "datatype"), [("rows", "FP32"), ("half", "FP16"), ("brain", "BF16")])
def test_special_numbers_over_json_both_ways(server: Serving, model: str, datatype: str) -> None:
    text = b'{"inputs":[{"name":"INPUT0","datatype":"%b","shape":[1,3],"data":[NaN,Infinity,-Infinity]}]}'
    status, answer = ask(server, "POST", f"/v2/models/{model}/infer", text % datatype.encode())
    assert status == 200
    numbers = answer["outputs"][0]["data"]
    assert np.isnan(numbers[0]) and numbers[1:] == [float("inf"), float("-inf")]


def test_tritonclient_reads_special_numbers_in_json(server: Serving) -> None:
    array = np.array([[np.nan, 1.5, -np.inf], [np.inf, -0.0, 3e38]], np.float32)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        tensor = tritonclient.http.InferInput("INPUT0", [2, 3], "FP32")
        tensor.set_data_from_numpy(array, binary_data=False)
        outputs = [tritonclient.http.InferRequestedOutput("OUTPUT0", binary_data=False)]
        assert same(client.infer("rows", [tensor], outputs=outputs).as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize(("model", "datatype"), [("half", "FP16"), ("brain", "BF16")])
def test_half_precision_is_numbers_in_json(server: Serving, model: str, datatype: str) -> None:
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": [1, 3], "data": [1.5, -2, 0.25]}
    _, answer = ask(server, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    assert answer["outputs"][0]["data"] == [1.5, -2, 0.25] and answer["outputs"][0]["datatype"] == datatype
    assert SPECIAL[datatype].size


# Parameters and headers.


def request_facts(client: Any, **more: Any) -> dict[str, Any]:
    answer = infer(client, "shows", np.array([1], np.int32), "INT32", **more)
    document: dict[str, Any] = json.loads(answer.as_numpy("OUT")[0])
    return document


def test_parameters_reach_the_model_and_reserved_ones_do_not(client: Any) -> None:
    own = {"name": "value", "number": 3, "flag": True, "fraction": 0.5}
    assert request_facts(client, parameters=own, priority=1, timeout=9_000_000) == own


def test_a_models_own_parameters_come_back(client: Any) -> None:
    response = infer(client, "shows", np.array([1], np.int32), "INT32").get_response()
    if isinstance(response, dict):
        assert response["parameters"] == {"text": "t", "number": 3, "flag": True}
    else:
        results = {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()
        }
        assert results == {"text": "t", "number": 3, "flag": True}


@pytest.mark.parametrize(
    "parameters",
    [
        {"triton_x": 1},
        {"triton_final_response": True},
        {"x": []},
        {"x": {}},
        {"x": None},
        {"triton_enable_empty_final_response": 1},
        {"priority": "high"},
        {"timeout": 1.5},
        {"timeout": True},
        {"sequence_id": 1.5},
        {"sequence_start": 1},
        {"binary_data_output": "yes"},
    ],
)
def test_parameters_that_are_refused(server: Serving, parameters: dict[str, Any]) -> None:
    document = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}], "parameters": parameters}
    status, answer = ask(server, "POST", "/v2/models/shows/infer", document)
    assert status == 400 and "parameter" in answer["error"]


def test_reserved_parameters_over_grpc(server: Serving) -> None:
    request = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="shows")
    request.inputs.add(name="IN", datatype="INT32", shape=[1])
    request.raw_input_contents.append(bytes(4))
    request.parameters["triton_x"].bool_param = True
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failure:
            stub.ModelInfer(request, timeout=30)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "reserved for Triton usage" in failure.value.details()


def test_headers_become_parameters_where_their_names_match(client: Any) -> None:
    headers = {"x-my-name": "me", "x-mine": "not this one", "x-my-id": "9"}
    assert request_facts(client, headers=headers) == {"x-my-name": "me", "x-my-id": "9"}
    assert request_facts(client, headers={"x-my-name": "me"}, parameters={"x-my-name": "own"}) == {"x-my-name": "own"}
    # What was learnt from one request is not another's.
    assert request_facts(client) == {}


@pytest.mark.parametrize("name", ["timeout", "triton_grpc_error"])
def test_headers_cannot_set_reserved_parameters(client: Any, name: str) -> None:
    with pytest.raises(InferenceServerException, match=f"'{name}' matches .* reserved for Triton usage") as refused:
        request_facts(client, headers={name: "7"})
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("pattern", "ignore_case", "forwarded"),
    [
        ("X-.*", True, True),
        ("X-.*", False, False),
        ("x-.*", False, True),
        ("(?i)X-.*", False, True),
        ("(?-i)X-.*", True, False),
        ("(?-i)x-.*", True, True),
        ("x-(?i:ID)", False, True),
    ],
)
def test_header_patterns_in_the_syntax_of_re2(pattern: str, ignore_case: bool, forwarded: bool) -> None:
    head = RequestHead(b"POST", b"/", [(b"x-id", b"1")], version="1.1")
    merged = HeaderForwarding(pattern, ignore_case=ignore_case).merged(head, {})
    assert merged == ({"x-id": "1"} if forwarded else {})


def test_the_server_has_the_name_it_was_given(client: Any) -> None:
    metadata = client.get_server_metadata()
    name = metadata["name"] if isinstance(metadata, dict) else metadata.name
    extensions = metadata["extensions"] if isinstance(metadata, dict) else metadata.extensions
    assert name == "triton" and {"classification", "trace", "logging"} <= set(extensions)


# Restricted APIs.

RESTRICTED = V2Settings(
    http_restrictions=(Restriction.parse("inference,statistics:X-Key=secret"), Restriction.parse("trace:other=1")),
    grpc_restrictions=(Restriction.parse("inference,model-repository:key=secret"),),
)


def test_restricted_apis_need_their_header() -> None:
    with functions_served([(config_of("same"), lambda inputs: {"OUTPUT0": inputs["INPUT0"]})], RESTRICTED) as running:
        tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}
        for path in ("/v2/models/same/infer", "/v2/models/same/generate"):
            for headers in ({}, {"x-key": "wrong"}, {"x-key": ""}):
                status, answer = ask(running, "POST", path, {"inputs": [tensor]}, headers)
                assert (status, answer) == (403, {"error": "This API is restricted, expecting header 'X-Key'"})
        assert ask(running, "POST", "/v2/models/same/infer", {"inputs": [tensor]}, {"x-key": "secret"})[0] == 200
        assert ask(running, "GET", "/v2/models/stats")[0] == 403
        assert ask(running, "GET", "/v2/trace/setting", headers={"x-key": "secret"})[0] == 403
        assert ask(running, "GET", "/v2/trace/setting", headers={"other": "1"})[0] == 200
        assert ask(running, "GET", "/v2/models/same")[0] == 200
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
            client.kind = tritonclient.grpc
            one, text = np.ones((1, 1), np.int32), "restricted, expecting header 'triton-grpc-protocol-key'"
            with pytest.raises(InferenceServerException, match=text):
                infer(client, "same", one, "INT32")
            with pytest.raises(InferenceServerException, match=text):
                client.get_model_repository_index()
            right = {"triton-grpc-protocol-key": "secret"}
            assert infer(client, "same", one, "INT32", headers=right).as_numpy("OUTPUT0") == one
            assert client.get_model_repository_index(headers=right).models
            assert client.get_inference_statistics().model_stats


@pytest.mark.parametrize(
    "text", ["inference", "inference:key", "nonsense:key=value", "inference:=value", ":k=v", "trace:k="]
)
def test_restrictions_that_are_none(text: str) -> None:
    with pytest.raises(FailedPrecondition, match="restriction"):
        Restriction.parse(text)
