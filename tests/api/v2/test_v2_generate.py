# SPDX-License-Identifier: Apache-2.0
"""`generate` and `generate_stream`: members to tensors and parameters, events, errors before and in the middle."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from v2_servers import ask, models_served, write_model

from headrace.api.v2.settings import V2Settings
from support.properties import examples
from support.serving import Serving
from support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
CONFIG = """
backend: "python"
max_batch_size: {batch}
{more}
input {{ name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] }}
input {{ name: "NUMBERS" data_type: TYPE_FP32 dims: [ -1 ] optional: true }}
output {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "SUMS" data_type: TYPE_FP32 dims: [ -1 ] }}
"""
ECHO = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()
        numbers = pb_utils.get_input_tensor_by_name(request, "NUMBERS")
        parameters = json.dumps(json.loads(request.parameters()), sort_keys=True)
        text = f"{prompt.ravel()[0].decode()} {list(prompt.shape)} {parameters}"
        sums = np.zeros(prompt.shape, np.float32) if numbers is None else numbers.as_numpy() * 2
        shape = prompt.shape
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("TEXT", np.array([text], object).reshape(shape)), pb_utils.Tensor("SUMS", sums)]
        )
"""
TOKENS = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The words of the prompt one by one; `fail` is an error, and `big` a megabyte."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for word in pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()[0].decode().split():
                if request.is_cancelled():
                    break
                if word == "fail":
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it failed")))
                    break
                text = "x" * 1_000_000 if word == "big" else word
                out = pb_utils.Tensor("TEXT", np.array([text.encode() if word != "bytes" else b"\\xff"], object))
                sender.send(pb_utils.InferenceResponse([out, pb_utils.Tensor("SUMS", np.zeros(2, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", CONFIG.format(batch=0, more=""), ECHO)
    write_model(folder, "batched", CONFIG.format(batch=4, more=""), ECHO)
    write_model(folder, "words", CONFIG.format(batch=0, more="model_transaction_policy { decoupled: true }"), TOKENS)
    shutil.copytree(EXAMPLES / "repeat", folder / "repeat")
    options = V2Settings(stream_unread_bytes=8_000_000, http_header_forward_pattern="x-my-.*")
    with models_served(folder, options) as running:
        yield running


def generate(server: Serving, model: str, document: Any, kind: str = "generate", **more: Any) -> tuple[int, Any]:
    return ask(server, "POST", f"/v2/models/{model}/{kind}", document, **more)


def events(server: Serving, model: str, document: Any) -> tuple[int, str, list[Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(document))
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    if answer.status != 200:
        return answer.status, "", [json.loads(content)]
    blocks = [block for block in content.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return answer.status, answer.getheader("content-type") or "", [json.loads(block[6:]) for block in blocks]


@pytest.mark.parametrize(("model", "shape"), [("echo", "[1]"), ("batched", "[1, 1]")])
def test_members_are_tensors_or_parameters(server: Serving, model: str, shape: str) -> None:
    document = {"PROMPT": "hello", "temperature": 0.5, "stream": False, "parameters": {"n": 2}, "id": "7"}
    status, answer = generate(server, model, document)
    assert (status, answer) == (
        200,
        {
            "model_name": model,
            "model_version": "1",
            "id": "7",
            "TEXT": f'hello {shape} {{"n": 2, "stream": false, "temperature": 0.5}}',
            "SUMS": 0,
        },
    )


def test_a_name_may_also_be_a_value(server: Serving) -> None:
    status, _ = generate(server, "echo", b'{"PROMPT": "PROMPT", "y": "PROMPT"}', "generate")
    assert status == 200


def test_lists_are_rows(server: Serving) -> None:
    for model in ("echo", "batched"):
        _, answer = generate(server, model, {"PROMPT": ["hello"], "NUMBERS": [1, 2.5, 3]})
        assert answer["SUMS"] == [2, 5, 6]
    _, answer = generate(server, "batched", {"PROMPT": [["hello"]], "NUMBERS": [[1, 2]]}, kind="generate")
    assert answer["SUMS"] == [2, 4]
    assert (
        generate(server, "echo", {"PROMPT": "a"}, headers={"X-My-Name": "me"})[1]["TEXT"] == 'a [1] {"x-my-name": "me"}'
    )


def test_a_version_can_be_named(server: Serving) -> None:
    assert ask(server, "POST", "/v2/models/echo/versions/1/generate", {"PROMPT": "a"})[0] == 200
    assert ask(server, "POST", "/v2/models/echo/versions/2/generate", {"PROMPT": "a"})[0] == 404


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        ({}, "expected number of inputs between 1 and 2 but got 0"),
        ({"prompt": "typo"}, "missing required input(s) ['PROMPT']"),
        ({"PROMPT": 5}, "is not a string"),
        ({"PROMPT": {"a": 1}}, "is not a string"),
        ({"PROMPT": None}, "is not a string"),
        ({"PROMPT": ["a", "b"]}, "unexpected shape"),
        ({"PROMPT": "a", "NUMBERS": "b"}, "is not a number"),
        ({"PROMPT": "a", "NUMBERS": [[1, 2], [3]]}, "different lengths"),
        ({"PROMPT": "a", "x": {"nested": 1}}, "parameter 'x'"),
        ({"PROMPT": "a", "x": [1]}, "parameter 'x'"),
        ({"PROMPT": "a", "triton_x": 1}, "reserved"),
        ({"PROMPT": "a", "parameters": {"y": None}}, "parameter 'y'"),
        ({"PROMPT": "a", "parameters": [1]}, "parameter 'parameters'"),
        ({"PROMPT": "a", "id": 5}, "'id'"),
        (b'{"PROMPT": "a", "PROMPT": "b"}', "'PROMPT' already exists in request"),
        (b'{"PROMPT": "a", "x": 1, "y": "x", "x": 2}', "'x' already exists in request"),
    ],
)
@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
def test_wrong_requests(server: Serving, kind: str, document: Any, text: str) -> None:
    status, answer = generate(server, "echo", document, kind)
    assert status == 400 and text in answer["error"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.dictionaries(
    st.sampled_from(["PROMPT", "NUMBERS", "id", "parameters", "other", "timeout"]), JSON, max_size=4
)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(MEMBERS, st.sampled_from(["generate", "generate_stream"]))
def test_any_document_is_answered_or_refused(server: Serving, document: dict[str, Any], kind: str) -> None:
    status, answer = generate(server, "echo", document, kind)
    assert status in (200, 400), answer


def test_unknown_models(server: Serving) -> None:
    for kind in ("generate", "generate_stream"):
        assert generate(server, "none", {"a": 1}, kind) == (
            404,
            {"error": "Request for unknown model: 'none' is not found"},
        )
        assert ask(server, "GET", f"/v2/models/echo/{kind}")[0] == 405


def test_a_stream_of_answers(server: Serving) -> None:
    status, kind, found = events(server, "words", {"PROMPT": "the quick fox", "id": "9"})
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert [item["TEXT"] for item in found] == ["the", "quick", "fox"]
    assert found[0] == {"model_name": "words", "model_version": "1", "id": "9", "TEXT": "the", "SUMS": [0, 0]}
    assert events(server, "echo", {"PROMPT": "one"})[2][0]["TEXT"] == "one [1] {}"
    assert events(server, "words", {"PROMPT": ""}) == (200, "text/event-stream; charset=utf-8", [])


def test_an_error_before_the_first_answer_has_a_status(server: Serving) -> None:
    status, _, (answer,) = events(server, "words", {"PROMPT": "fail"})
    assert status >= 400 and "it failed" in answer["error"]


def test_an_error_in_the_middle_is_an_event(server: Serving) -> None:
    status, _, found = events(server, "words", {"PROMPT": "one two fail three"})
    assert status == 200 and [item.get("TEXT") for item in found] == ["one", "two", None]
    assert "it failed" in found[2]["error"]
    status, _, found = events(server, "words", {"PROMPT": "one bytes two"})
    assert "not UTF-8" in found[1]["error"] and len(found) == 2


def test_generate_needs_exactly_one_answer(server: Serving) -> None:
    for prompt in ("", "one two", "one two three"):
        status, answer = generate(server, "words", {"PROMPT": prompt})
        assert status == 400 and "generate expects model to produce exactly 1 response" in answer["error"]
    assert generate(server, "words", {"PROMPT": "one"})[1]["TEXT"] == "one"


def settled(server: Serving, model: str) -> int:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        stats = client.get_inference_statistics(model)["model_stats"][0]["inference_stats"]
        return int(stats["success"]["count"] + stats["fail"]["count"])


def test_a_client_that_disconnects_cancels_its_request(server: Serving) -> None:
    before = settled(server, "repeat")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    document = {"IN": list(range(1000)), "DELAY": [50] * 1000}
    connection.request("POST", "/v2/models/repeat/generate_stream", json.dumps(document))
    answer = connection.getresponse()
    assert answer.read(6) == b"data: "
    answer.close()
    connection.close()
    eventually(lambda: settled(server, "repeat") == before + 1)


def test_a_client_that_does_not_read_is_cut_off(server: Serving) -> None:
    before = settled(server, "words")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v2/models/words/generate_stream", json.dumps({"PROMPT": "big " * 200}))
    answer = connection.getresponse()
    eventually(lambda: settled(server, "words") == before + 1)
    with pytest.raises((http.client.HTTPException, OSError)):
        while answer.read(1 << 20):
            pass
    connection.close()
