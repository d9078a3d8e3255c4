# SPDX-License-Identifier: Apache-2.0
"""Every format of reasoning and of tool calls through the whole text path, by models that follow a script.

The models are those of `examples/12-scripted-agent`: tokenizer, scheduler, sampler, stops, parsers and streams are real.
"""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from test_openai_tiny_model import served
from test_output_formats import FUNCTIONS, PAIRS, Transcript, a_transcript, written

from support.serving import Serving

MAKE_MODEL = Path(__file__).parents[3] / "examples/12-scripted-agent/make_model.py"
TURNS = 3
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name]}} for name in FUNCTIONS
]
RESPONSE_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": FUNCTIONS[name], "strict": False} for name in FUNCTIONS
]
MESSAGE_TOOLS: Any = [{"name": name, "input_schema": {"type": "object", **FUNCTIONS[name]}} for name in FUNCTIONS]


class Scripted:
    """A server with a model for each pair of formats, and what each says turn by turn."""

    def __init__(self, server: Serving, scripts: dict[str, list[Transcript]]) -> None:
        url = f"http://127.0.0.1:{server.port}"
        self.scripts = scripts
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.anthropic = Anthropic(base_url=url, api_key="none", max_retries=0)


def a_script(kind: str, reasoning: str) -> list[tuple[Transcript, str]]:
    """Some turns and how the model writes them. A prompt of this template never opens the reasoning."""
    chance, turns = random.Random(f"{kind} {reasoning} script"), []
    while len(turns) < TURNS:
        transcript = a_transcript(chance, kind)
        prompt_end, output = written(chance, transcript, kind, reasoning)
        if prompt_end in ("", "<|im_start|>assistant\n", "<|start|>assistant"):
            turns.append((transcript, output))
    return turns


def served_scripts(folder: Path, pairs: list[tuple[str, str]]) -> Iterator[Scripted]:
    make_model = runpy.run_path(str(MAKE_MODEL))["make_model"]
    scripts = {f"{kind}-{reasoning}": a_script(kind, reasoning) for kind, reasoning in pairs}
    for name, (kind, reasoning) in zip(scripts, pairs, strict=True):
        make_model(folder, name, [output for _, output in scripts[name]], kind, reasoning)
    with served(folder) as server:
        made = Scripted(server, {name: [transcript for transcript, _ in turns] for name, turns in scripts.items()})
        with made.openai, made.anthropic:
            yield made


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    yield from served_scripts(tmp_path_factory.mktemp("scripted"), SOME)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    yield from served_scripts(tmp_path_factory.mktemp("scripted"), [pair for pair in PAIRS if pair not in SOME])


SOME = [("hermes", "think"), ("harmony", "harmony")]
Said = tuple[str, str, list[tuple[str, Any]]]
"""Text, reasoning, and calls."""


def meant(transcript: Transcript) -> Said:
    return transcript.text + transcript.text_after, transcript.reasoning, transcript.calls


def conversation(turn: int) -> list[Any]:
    """A conversation in which the model has had so many turns."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    for number in range(turn):
        messages += [{"role": "assistant", "content": f"turn {number}"}, {"role": "user", "content": "go on"}]
    return messages


def by_chat(scripted: Scripted, model: str, turn: int, *, stream: bool) -> Said:
    client = scripted.openai
    given: Any = {"model": model, "messages": conversation(turn), "tools": CHAT_TOOLS}
    if not stream:
        message: Any = client.chat.completions.create(**given).choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        return message.content or "", getattr(message, "reasoning_content", "") or "", calls
    text, reasoning, parts = "", "", []
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", "") or ""
            for call in choice.delta.tool_calls or ():
                if call.function.name:
                    parts.append((call.function.name, []))
                parts[call.index][1].append(call.function.arguments)
    return text, reasoning, [(name, json.loads("".join(arguments))) for name, arguments in parts]


def by_responses(scripted: Scripted, model: str, turn: int, *, stream: bool) -> Said:
    client = scripted.openai
    given: Any = {"model": model, "input": conversation(turn), "tools": RESPONSE_TOOLS}
    answer: Any = client.responses.create(**given, stream=stream)
    if stream:
        answer = list(answer)[-1].response
    text = "".join(item.content[0].text for item in answer.output if item.type == "message")
    reasoning = "".join(item.content[0].text for item in answer.output if item.type == "reasoning")
    calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
    return text, reasoning, calls


def by_messages(scripted: Scripted, model: str, turn: int, *, stream: bool) -> Said:
    client = scripted.anthropic
    given: Any = {"model": model, "messages": conversation(turn), "tools": MESSAGE_TOOLS, "max_tokens": 4000}
    if stream:
        with client.messages.stream(**given) as events:
            content: Any = events.get_final_message().content
    else:
        content = client.messages.create(**given).content
    text = "".join(block.text for block in content if block.type == "text")
    reasoning = "".join(block.thinking for block in content if block.type == "thinking")
    return text, reasoning, [(block.name, block.input) for block in content if block.type == "tool_use"]


def check(scripted: Scripted, kind: str, reasoning: str) -> None:
    model = f"{kind}-{reasoning}"
    for turn, transcript in enumerate(scripted.scripts[model]):
        for ask in (by_chat, by_responses, by_messages):
            for stream in (False, True):
                said = ask(scripted, model, turn, stream=stream)
                assert said == meant(transcript), (model, turn, ask.__name__, stream)


@pytest.mark.parametrize(("kind", "reasoning"), SOME)
def test_a_script_is_followed_by_every_api(some: Scripted, kind: str, reasoning: str) -> None:
    check(some, kind, reasoning)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reasoning"), [pair for pair in PAIRS if pair not in SOME])
def test_every_format_is_followed_by_every_api(rest: Scripted, kind: str, reasoning: str) -> None:
    check(rest, kind, reasoning)


def test_stops_and_limits_end_a_script(some: Scripted) -> None:
    """In the middle of a script, whatever the API."""
    model, turn = (
        "hermes-think",
        next(
            turn
            for turn, transcript in enumerate(some.scripts["hermes-think"])
            if transcript.text and not transcript.reasoning
        ),
    )
    text = some.scripts[model][turn].text
    stop = text[2:4]
    client = some.openai
    given: Any = {"model": model, "messages": conversation(turn)}
    stopped = client.chat.completions.create(**given, stop=[stop])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        text[: text.index(stop)],
        "stop",
    )
    cut = client.chat.completions.create(**given, max_tokens=1)
    assert cut.choices[0].finish_reason == "length"
    assert text.startswith(cut.choices[0].message.content or "?")
