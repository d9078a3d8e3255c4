# SPDX-License-Identifier: Apache-2.0
"""Requests through the proxy to an engine that it has started: a fake of vLLM, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from backends.openai_proxy.proxy_server import Proxied, chat, proxied, write_fake

from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TooLarge,
    Unavailable,
    Unimplemented,
)
from headrace.core.generation import Generation, GenerationRequest, OutputFormat, PromptImage, Sampling
from headrace.core.requests import InferRequest
from headrace.core.tensors import Tensor
from support.waiting import eventually


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    repository = tmp_path_factory.mktemp("proxy")
    write_fake(repository, "m", env='{"GREETING": "at {port}"}')
    write_fake(repository, "narrow", max_in_flight="2")
    write_fake(repository, "impatient", idle_seconds="1")
    with proxied(repository) as running:
        running.load("m")
        yield running


def stats(served: Proxied, model: str = "m") -> Any:
    return served.stats(model)


def v2(text: str | bytes, model: str = "m", parameters: dict[str, Any] | None = None, **inputs: Any) -> InferRequest:
    raw = text.encode() if isinstance(text, str) else text
    arrays = {"text_input": np.array([raw], object), **inputs}
    return InferRequest(model, [Tensor.of(name, array) for name, array in arrays.items()], parameters=parameters or {})


def test_a_generating_model_reports_its_tensors(served: Proxied) -> None:
    metadata = served.plane.metadata("m")
    assert {tensor.name: (tensor.datatype, tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)} == {
        "text_input": ("BYTES", (1,)),
        "stream": ("BOOL", (1,)),
        "sampling_parameters": ("BYTES", (1,)),
        "text_output": ("BYTES", (-1,)),
    }
    config = served.config("m")
    assert config.decoupled and config.max_batch_size == 0
    assert all(spec.optional for spec in config.inputs)


def test_the_engine_gets_its_port_environment_and_folder(served: Proxied) -> None:
    seen = stats(served)
    assert seen["greeting"] == f"at {served.port('m')}"
    assert seen["folder"] == str(served.repository / "m" / "1")


def test_a_stream_arrives_word_by_word(served: Proxied) -> None:
    answer = served.ask(chat("m", "ein schöner 🙂 Tag", stream_options={"include_usage": True}, temperature=0.5))
    assert answer.text == "ein schöner 🙂 Tag"
    assert [chunk["choices"][0]["delta"]["content"] for chunk in answer.raw[:4]] == ["ein", " schöner", " 🙂", " Tag"]
    assert answer.received[-1] == (None, True)
    assert answer.answers[4].parameters["finish_reason"] == "stop"
    last = answer.answers[5].parameters
    assert (last["prompt_tokens"], last["completion_tokens"], last["cached_tokens"]) == (3, 4, 2)
    body = stats(served)["bodies"][-1]
    # Passed on as it was said, under the engine's own name for the model.
    assert body["model"] == "fake/engine"
    assert (body["path"], body["temperature"]) == ("/v1/chat/completions", 0.5)


@pytest.mark.parametrize("behaviour", ["split", "plain", "no-done", "huge"])
def test_a_stream_may_have_any_shape(served: Proxied, behaviour: str) -> None:
    answer = served.ask(chat("m", f"{behaviour} höher 🙂 und weiter"))
    assert answer.text.replace("x" * 3_000_000, "") == "höher 🙂 und weiter"
    assert answer.received[-1] == (None, True)


def test_without_stream_there_is_one_answer(served: Proxied) -> None:
    answer = served.ask(chat("m", "one two", stream=False))
    assert len(answer.received) == 1 and answer.over
    assert answer.text == "one two"
    assert answer.raw[0]["choices"][0]["message"] == {"content": "one two"}
    assert answer.answers[0].parameters["completion_tokens"] == 2


def test_embeddings_pass_through(served: Proxied) -> None:
    answer = served.ask(GenerationRequest("m", Generation(path="/v1/embeddings", body={"model": "m", "input": "text"})))
    assert answer.raw[0]["data"][0]["embedding"] == [0.25, -1.0]
    other = GenerationRequest("m", Generation(path="/v1/audio/speech", body={"model": "m"}))
    assert isinstance(served.ask(other).error, Unimplemented)


def test_an_adapter_is_a_separate_model_there(served: Proxied) -> None:
    body = {"model": "m", "prompt": "a b", "stream": True}
    request = GenerationRequest("m", Generation(path="/v1/completions", body=body, stream=True, adapter="adapter"))
    assert served.ask(request).text == "a b"
    assert stats(served)["bodies"][-1]["model"] == "adapter"


def test_a_request_of_this_server_is_spelled_out(served: Proxied) -> None:
    """Such as the microservice's, which has no body of OpenAI's."""
    sampling = Sampling(max_tokens=2, temperature=0.0, stop=("\n",), logit_bias={5: -1.0})
    wanted = OutputFormat("json_schema", {"type": "object"})
    generation = Generation(messages=({"role": "user", "content": "a b c"},), sampling=sampling, output_format=wanted)
    answer = served.ask(GenerationRequest("m", generation))
    assert answer.text == "a b" and len(answer.received) == 1
    assert "openai" not in answer.answers[0].parameters
    body = stats(served)["bodies"][-1]
    assert body | {"path": 0} == {
        "path": 0,
        "model": "fake/engine",
        "stream": False,
        "messages": [{"role": "user", "content": "a b c"}],
        "max_tokens": 2,
        "temperature": 0.0,
        "stop": ["\n"],
        "logit_bias": {"5": -1.0},
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
    }
    assert served.ask(GenerationRequest("m", Generation(prompt="x y", stream=True))).text == "x y"
    picture = Generation(prompt="what", media=(PromptImage(np.zeros((2, 2, 3), np.uint8)),))
    assert isinstance(served.ask(GenerationRequest("m", picture)).error, Unimplemented)


def test_v2_streams_only_on_request(served: Proxied) -> None:
    response = served.ask(v2("one two three", parameters={"max_tokens": 2, "timeout": 5, "priority": 0}))
    assert [len(response.received), response.text] == [1, "one two"]
    assert response.answers[0].parameters == {
        "index": 0,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 2,
    }
    assert stats(served)["bodies"][-1] == {
        "path": "/v1/completions",
        "model": "fake/engine",
        "prompt": "one two three",
        "max_tokens": 2,
        "stream": False,
    }
    for streaming in (v2("one two", stream=np.array([True])), v2("one two", parameters={"stream": True})):
        response = served.ask(streaming)
        assert [answer.outputs[0].array.tolist() for answer in response.answers] == [[b"one"], [b" two"], [b""]]
        assert response.received[-1] == (None, True)
    options = np.array([b'{"n": 2, "top_k": 4, "stop": ["x"]}'], object)
    response = served.ask(v2("one", sampling_parameters=options, parameters={"top_k": 9}))
    assert response.answers[0].outputs[0].array.tolist() == [b"one", b"one"]
    assert (stats(served)["bodies"][-1]["top_k"], stats(served)["bodies"][-1]["stop"]) == (9, ["x"])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (InferRequest("m", []), "text_input"),
        (v2(b"\xff\xfe"), "UTF-8"),
        (v2("x", sampling_parameters=np.array([b"{"], object)), "not JSON"),
        (v2("x", sampling_parameters=np.array([b"[1]"], object)), "JSON object"),
        (v2("x", parameters={"stream": "yes"}), "true or false"),
        (v2("x", parameters={"model": "other"}), "model"),
    ],
)
def test_requests_that_cannot_be_translated_are_refused(served: Proxied, request_: InferRequest, text: str) -> None:
    error = served.ask(request_).error
    assert isinstance(error, InvalidArgument) and text in error.message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidArgument),
        (404, NotFound),
        (413, TooLarge),
        (418, InvalidArgument),
        (422, InvalidArgument),
        (429, ResourceExhausted),
        (500, Internal),
        (503, Unavailable),
        (504, DeadlineExceeded),
    ],
)
def test_an_error_of_the_engine_keeps_its_text(served: Proxied, status: int, kind: type[HeadraceError]) -> None:
    for stream in (True, False):
        error = served.ask(chat("m", f"refuse {status}", stream=stream)).error
        assert type(error) is kind
        assert error.message == f"refused with {status}"
        assert error.retry_after_seconds == 7


def test_an_invalid_answer_is_unavailable(served: Proxied) -> None:
    assert "not a JSON object" in served.ask(chat("m", "garbage", stream=False)).error.message
    answer = served.ask(chat("m", "unfinished a b"))
    assert isinstance(answer.error, Unavailable) and "before the response was complete" in answer.error.message
    answer = served.ask(chat("m", "drop a b"))
    assert len(answer.answers) == 1
    assert isinstance(answer.error, Unavailable) and "in the middle of its response" in answer.error.message
    answer = served.ask(chat("m", "fail-midway a b"))
    assert len(answer.answers) == 1
    assert isinstance(answer.error, Unavailable) and answer.error.message == "out of pages"
    assert served.ask(chat("m", "still there")).text == "still there"


def test_connections_are_kept(served: Proxied) -> None:
    served.ask(chat("m", "warm up"))
    before = stats(served)["connections"]
    for number in range(20):
        assert served.ask(chat("m", f"word {number}", stream=number % 2 == 0)).text == f"word {number}"
    assert stats(served)["connections"] - before <= 2  # one for each look at the stats


def test_many_concurrent_requests_do_not_mix(served: Proxied) -> None:
    began = [served.begin(chat("m", f"split number {number} speaking")) for number in range(40)]
    for number, streaming in enumerate(began):
        assert served.until(streaming, lambda _: False).text == f"number {number} speaking"


def test_the_engine_stops_when_the_client_hangs_up(served: Proxied) -> None:
    before = stats(served)["hung_up"]
    began = [served.begin(chat("m", "hang on and on", stream=number % 4 > 0)) for number in range(40)]
    for streaming in began[1::4]:
        served.until(streaming, lambda item: len(item.answers) == 1)
    eventually(lambda: stats(served)["open"] == 40, message="the engine works on all")
    served.give_up(began)
    eventually(lambda: stats(served)["hung_up"] - before == 40, message="the engine is told")
    assert stats(served)["open"] == 0
    assert served.ask(chat("m", "still there")).text == "still there"


def test_no_more_than_max_in_flight_are_with_the_engine(served: Proxied) -> None:
    served.load("narrow")
    began = [served.begin(chat("narrow", "hang on")) for _ in range(5)]
    eventually(lambda: stats(served, "narrow")["open"] == 2, message="two are with the engine")
    served.give_up(began[:2])
    eventually(lambda: stats(served, "narrow")["hung_up"] == 2, message="they are given up")
    eventually(lambda: stats(served, "narrow")["open"] == 2, message="the next two follow")
    served.give_up(began)
    assert served.ask(chat("narrow", "free again")).text == "free again"
    assert stats(served, "narrow")["most"] == 2
    served.unload("narrow")


def test_an_engine_that_falls_silent_is_given_up(served: Proxied) -> None:
    served.load("impatient")
    answer = served.ask(chat("impatient", "hang on"))
    assert len(answer.answers) == 1
    assert isinstance(answer.error, Unavailable) and "silent for 1 seconds" in answer.error.message
    eventually(lambda: stats(served, "impatient")["hung_up"] == 1, message="the engine is told")
    served.unload("impatient")


def test_raw_chunks_are_json_of_the_engine(served: Proxied) -> None:
    response = served.ask(chat("m", "a b"))
    assert all(isinstance(answer.parameters["openai"], str) for answer in response.answers)
    assert json.loads(response.answers[0].parameters["openai"])["id"] == "x"
    assert response.answers[0].parameters["index"] == 0
