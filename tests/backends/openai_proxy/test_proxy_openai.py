# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client through Headrace to another engine: the fake, and a second Headrace with a real, tiny model."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from backends.openai_proxy.proxy_server import stats_of, write_fake, write_model
from openai import OpenAI

from headrace.api.openai.settings import OpenAiSettings
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.server import ServerSettings, build_site
from support.llm_models import tiny_llama
from support.serving import Serving, serving
from support.waiting import eventually

LLM = """
backend: "llm"
parameters { key: "max_model_len" value { string_value: "512" } }
parameters { key: "kv_cache_bytes" value { string_value: "8388608" } }
instance_group [ { kind: KIND_CPU } ]
"""
HELLO: Any = [{"role": "user", "content": "the quick brown fox"}]


def serve(folder: Path) -> Iterator[Serving]:
    """A server with all its protocols over a folder."""
    engines: list[Engine] = []

    async def site() -> Site:
        settings = EngineSettings(repositories=(folder,), repository=RepositorySettings(exit_on_error=False), gpus=0)
        engines.append(open_engine(settings))
        await engines[0].start()
        address = Address.parse("127.0.0.1:0")
        return build_site(engines[0].plane, ServerSettings(http=address, grpc=address, openai=OpenAiSettings()))[0]

    with serving(site) as running:
        yield running
        running.call(engines[0].close, 10)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The engine: a Headrace that computes."""
    folder = tmp_path_factory.mktemp("behind")
    tiny_llama(folder / "tiny" / "1")
    (folder / "tiny" / "config.pbtxt").write_text(LLM)
    yield from serve(folder)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("before")


@pytest.fixture(scope="module")
def before(repository: Path, behind: Serving) -> Iterator[Serving]:
    """The Headrace that clients ask."""
    write_fake(repository, "fake")
    write_model(repository, "remote", url=f"http://127.0.0.1:{behind.port}/v1")
    yield from serve(repository)


@pytest.fixture(scope="module")
def client(before: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{before.port}/v1", api_key="none", max_retries=0) as asking:
        yield asking


@pytest.fixture(scope="module")
def direct(behind: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{behind.port}/v1", api_key="none", max_retries=0) as asking:
        yield asking


def test_the_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "remote"]


def test_answers_are_those_of_the_engine_under_our_name(client: OpenAI, direct: OpenAI) -> None:
    body: Any = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    ours = client.chat.completions.create(model="remote", **body)
    theirs = direct.chat.completions.create(model="tiny", **body)
    assert ours.model == "remote" and theirs.model == "tiny"
    assert ours.choices == theirs.choices
    assert ours.usage is not None and theirs.usage is not None
    assert ours.usage.completion_tokens == theirs.usage.completion_tokens == 12


def test_streams_are_those_of_the_engine(client: OpenAI, direct: OpenAI) -> None:
    body: Any = {"prompt": "the quick", "max_tokens": 20, "temperature": 0, "n": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    ours = list(client.completions.create(model="remote", **body))
    theirs = list(direct.completions.create(model="tiny", **body))
    assert {chunk.model for chunk in ours} == {"remote"}

    def joined_texts(chunks: Any) -> Any:
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts, chunks[-1].usage.completion_tokens

    assert joined_texts(ours) == joined_texts(theirs)
    assert joined_texts(ours)[1] == 40


def test_the_engines_errors_reach_the_client(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="remote", messages=HELLO, temperature=99)
    assert "temperature" in str(caught.value)
    with pytest.raises(openai.RateLimitError) as busy:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "refuse 429"}])
    assert busy.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.InternalServerError) as lost:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "refuse 503"}])
    assert lost.value.status_code == 503


def test_an_error_in_the_middle_of_a_stream_is_reported(client: OpenAI) -> None:
    words = []
    with pytest.raises(openai.APIError, match="out of pages"):
        for chunk in client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "fail-midway one two"}], stream=True
        ):
            words.append(chunk.choices[0].delta.content)
    assert words == ["one"]


def test_embeddings_pass_through(client: OpenAI) -> None:
    answer = client.embeddings.create(model="fake", input="text", encoding_format="float")
    assert answer.data[0].embedding == [0.25, -1.0]


def test_the_messages_api_of_the_engine(before: Serving, behind: Serving) -> None:
    def ask(port: int, model: str) -> tuple[Any, Any, int]:
        with Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as client:
            body: Any = {"model": model, "max_tokens": 12, "messages": HELLO, "extra_body": {"temperature": 0}}
            whole = client.messages.create(**body)
            with client.messages.stream(**body) as stream:
                streamed = stream.get_final_message()
            assert (whole.model, streamed.model) == (model, model)
            assert whole._request_id
            count = client.messages.count_tokens(model=model, messages=HELLO)
        assert [block.text for block in streamed.content] == [block.text for block in whole.content]  # type: ignore[union-attr]
        assert whole.usage.output_tokens == streamed.usage.output_tokens == 12
        return whole.content, whole.stop_reason, count.input_tokens

    ours = ask(before.port, "remote")
    assert ours == ask(behind.port, "tiny")
    assert ours[1] == "max_tokens" and ours[2] > 4


def test_errors_of_the_engines_messages_api(before: Serving) -> None:
    with Anthropic(base_url=f"http://127.0.0.1:{before.port}", api_key="none", max_retries=0) as client:
        body: Any = {"model": "remote", "max_tokens": 12, "messages": HELLO}
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
                client.messages.create(**body, stream=stream, extra_body={"temperature": 99})
            assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match="thread: ") as kept:
            client.messages.create(**body, extra_body={"thread": {"type": "create"}})
        details = kept.value.body["error"]["details"]  # type: ignore[index]
        assert details == {"error_code": "thread_unsupported_request"}


def test_an_engine_without_the_messages_api(before: Serving) -> None:
    with (
        Anthropic(base_url=f"http://127.0.0.1:{before.port}", api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.NotFoundError, match="use /v1/chat/completions"),
    ):
        client.messages.create(model="fake", max_tokens=12, messages=HELLO)


def test_clients_that_hang_up_stop_the_engine(client: OpenAI, repository: Path) -> None:
    port = int((repository.parent / f"{repository.name}.fake.port").read_text())
    before = stats_of(port)["hung_up"]
    for _ in range(20):
        stream = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hang on"}], stream=True
        )
        assert next(iter(stream)).choices[0].delta.content == "on"
        stream.close()
    eventually(lambda: stats_of(port)["hung_up"] - before == 20, message="the engine is told of all")
    eventually(lambda: stats_of(port)["open"] == 0, message="and has nothing more to do")


def test_v2_generates_with_the_same_models(before: Serving) -> None:
    def ask(path: str, document: Any) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", before.port, timeout=60)
        connection.request("POST", f"/v2/models/{path}", json.dumps(document))
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    status, text = ask("fake/generate", {"text_input": "one two three", "parameters": {"max_tokens": 2}})
    assert status == 200
    assert json.loads(text)["text_output"] == "one two" and "openai" not in json.loads(text)
    status, text = ask("fake/generate_stream", {"text_input": "one two", "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["text_output"] for event in events] == ["one", " two", ""]
    assert events[-1]["finish_reason"] == "stop"
    status, text = ask("fake/generate", {"text_input": "refuse 400"})
    assert (status, json.loads(text)["error"]) == (400, "refused with 400")
    status, text = ask("remote/generate", {"text_input": "the quick", "max_tokens": 5, "temperature": 0})
    assert status == 200 and json.loads(text)["completion_tokens"] == 5
