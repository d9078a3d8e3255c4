# SPDX-License-Identifier: Apache-2.0
"""The same models through v2: `generate`, `generate_stream`, and a stream of gRPC by Triton's own client."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from language_model_server import Server
from openai import OpenAI

pytestmark = pytest.mark.worker("language models")

PROMPT = "the quick brown fox"


def of_openai(client: OpenAI, model: str = "llama") -> str:
    """What the model says, by the other protocol."""
    return client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=12).choices[0].text


def test_generate_and_generate_stream(served: Server, client: OpenAI) -> None:
    body = {"text_input": PROMPT, "temperature": 0, "max_tokens": 12}
    status, whole = served.post("/v2/models/llama/generate", body)
    assert (status, whole["text_output"]) == (200, of_openai(client))
    events = served.events("/v2/models/llama/generate_stream", {**body, "stream": True})
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == whole["text_output"]


def test_an_adapter_and_parameters_as_triton_writes_them(served: Server, client: OpenAI) -> None:
    body = {
        "text_input": PROMPT,
        "sampling_parameters": '{"temperature": "0", "max_tokens": "12", "adapter": "pirate"}',
    }
    status, whole = served.post("/v2/models/llama/generate", body)
    assert (status, whole["text_output"]) == (200, of_openai(client, "pirate"))


def test_what_is_wrong_is_named_in_v2_too(served: Server) -> None:
    for more, field in (
        ({"temperature": 9}, "temperature"),
        ({"adapter": "nobody"}, "nobody"),
        ({"colour": 1}, "colour"),
    ):
        status, reply = served.post("/v2/models/llama/generate", {"text_input": PROMPT, **more})
        assert status in (400, 404), reply
        assert field in reply["error"]
    status, reply = served.post("/v2/models/llama/generate", {"max_tokens": 3})
    assert (status, "text_input" in reply["error"]) == (400, True)


def test_the_stream_of_tritons_client(served: Server, client: OpenAI) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
    stream = triton.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    with triton.InferenceServerClient(f"127.0.0.1:{served.ports[1]}") as asking:
        asking.start_stream(lambda result, error: answers.put((result, error)))
        asking.async_stream_infer(
            "llama", [text, stream], parameters={"temperature": 0, "max_tokens": 12}, enable_empty_final_response=True
        )
        pieces, final = [], False
        while not final:
            result, error = answers.get(timeout=60)
            assert error is None, error
            final = result.get_response().parameters["triton_final_response"].bool_param
            output = result.as_numpy("text_output")
            pieces += [] if output is None else output.reshape(-1).tolist()
        asking.stop_stream()
    assert len(pieces) > 1
    assert b"".join(pieces).decode() == of_openai(client)


def test_an_embedding_by_v2(served: Server, client: OpenAI) -> None:
    data = {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": ["a mill", "to the sea"]}
    status, reply = served.post("/v2/models/embedder/infer", {"inputs": [data]})
    assert status == 200, reply
    output = next(output for output in reply["outputs"] if output["name"] == "embedding")
    assert output["shape"] == [2, 32]
    other = client.embeddings.create(model="embedder", input=["a mill", "to the sea"], encoding_format="float")
    np.testing.assert_allclose(output["data"], [*other.data[0].embedding, *other.data[1].embedding], atol=1e-5)
