# SPDX-License-Identifier: Apache-2.0
"""Every format of reasoning and of tool calls: generated transcripts, cut anywhere, parse to what was written."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from headrace.api.openai.output_formats import REASONING_FORMATS, TOOL_FORMATS, formats_of
from headrace.api.openai.output_parser import OutputParser, Reasoning, ToolCall
from headrace.core.output_formats import formats_of_template

COUNTS = [200, pytest.param(2000, marks=pytest.mark.slow)]
"""Transcripts for each format."""

SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "string"},
        "more": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "nested": {"type": "object"},
        "items": {"type": "array"},
    },
}
FUNCTIONS = {"get_weather": SCHEMA, "search": SCHEMA, "no-arguments": {}}
LETTERS = [
    "a",
    "Zürich",
    "漢字",
    "🙂",
    "é",
    "<",
    ">",
    "<|",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "'",
    "`",
    "\n",
    "  ",
    ",",
    ":",
    "=",
    "1",
]
Arguments = dict[str, Any]
Calls = list[tuple[str, Arguments]]


@dataclass
class Transcript:
    """What a model means to say."""

    reasoning: str = ""
    text: str = ""
    calls: Calls = field(default_factory=list)
    text_after: str = ""


# How each format writes calls: written from the models' chat templates, apart from the tables that are tested.


def _json_call(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _list(calls: Calls) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_json_call(*call)}\n</tool_call>" for call in calls)


def _deepseek_v3(calls: Calls) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(parts) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(parts) + "<|tool_calls_section_end|>"


def _tag_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _glm(calls: Calls) -> str:
    def call(name: str, arguments: Arguments) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_tag_value(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(call(*each) for each in calls)


def _minimax_m2(calls: Calls) -> str:
    def call(name: str, arguments: Arguments) -> str:
        pairs = "".join(
            f'<parameter name="{key}">{_tag_value(value)}</parameter>\n' for key, value in arguments.items()
        )
        return f'<invoke name="{name}">\n{pairs}</invoke>\n'

    return "<minimax:tool_call>\n" + "".join(call(*each) for each in calls) + "</minimax:tool_call>"


def _qwen3_coder(calls: Calls) -> str:
    def call(name: str, arguments: Arguments) -> str:
        pairs = "".join(f"<parameter={key}>\n{_tag_value(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"

    return "\n".join(call(*each) for each in calls)


def _command_r(calls: Calls) -> str:
    actions = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(actions, indent=4)}<|END_ACTION|>"


def _mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _python(calls: Calls) -> str:
    def call(name: str, arguments: Arguments) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return "[" + ", ".join(call(*each) for each in calls) + "]"


def _harmony_call(name: str, arguments: Arguments) -> str:
    header = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{header}{json.dumps(arguments)}<|call|>"


WRITERS: dict[str, list[Callable[[Calls], str]]] = {
    "command_r": [_command_r],
    "deepseek_v3": [_deepseek_v3],
    "deepseek_v31": [_deepseek_v31],
    "glm45": [_glm],
    "granite": [lambda calls: "<|tool_call|>" + _list(calls), lambda calls: f"<tool_call>{_list(calls)}</tool_call>"],
    "hermes": [_hermes, lambda calls: _hermes(calls).replace("\n", "")],
    "kimi_k2": [_kimi],
    "llama3": [
        lambda calls: "; ".join(_json_call(*call, "parameters") for call in calls),
        lambda calls: "<|python_tag|>" + ";".join(_json_call(*call, "parameters") for call in calls),
    ],
    "minimax": [lambda calls: "<tool_calls>\n" + "\n".join(_json_call(*call) for call in calls) + "\n</tool_calls>"],
    "minimax_m2": [_minimax_m2],
    "mistral": [lambda calls: "[TOOL_CALLS]" + _list(calls), _mistral_named],
    "phi4": [lambda calls: f"<|tool_call|>{_list(calls)}<|/tool_call|>", lambda calls: "functools" + _list(calls)],
    "pythonic": [_python, lambda calls: f"<|python_start|>{_python(calls)}<|python_end|>"],
    "qwen3_coder": [_qwen3_coder],
    "xlam": [_list, lambda calls: f"<tool_call>{_list(calls)}</tool_call>"],
}
FIRST_ONLY = {"llama3", "pythonic", "xlam"}
"""Formats without a marker: calls are the whole answer."""
LAST_ONLY = {*FIRST_ONLY, "granite", "mistral", "phi4"}
"""Formats whose calls have no end, so that no text comes behind them."""
REASONING = {"command_r": "command_r", "mistral": "mistral", "granite": "granite"}
"""The reasoning that a model of a tool format writes; "think" for the others."""
AROUND = {
    "command_r": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": ("Here is my thought process: ", "\nHere is my response: "),
    "kimi_vl": ("◁think▷", "◁/think▷"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "think": ("<think>\n", "\n</think>\n\n"),
}


def a_text(chance: random.Random, sign: str) -> str:
    """Words that tell by their sign where they belong, with anything between them that formats are made of."""
    words = [f"{sign}{number}{chance.choice(LETTERS)}" for number in range(chance.randint(1, 6))]
    return chance.choice([" ", "\n", ""]).join(words).strip() + "."


def a_value(chance: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in chance.sample(list(SCHEMA["properties"]), chance.randint(0, 4)):
        kind = SCHEMA["properties"][name]["type"]  # type: ignore[index]
        made[name] = {
            "string": lambda: a_text(chance, "A"),
            "integer": lambda: chance.randint(-5, 10**6),
            "boolean": lambda: chance.random() < 0.5,
            "object": lambda: {"k": a_text(chance, "A"), "deep": [{"x": None}, 1.5]},
            "array": lambda: [a_text(chance, "A"), [], {}],
        }[kind]()
    return made


def a_transcript(chance: random.Random, kind: str) -> Transcript:
    made = Transcript()
    if chance.random() < 0.6:
        made.reasoning = a_text(chance, "R")
    shape = chance.choice(["plain", "one", "several"])
    if shape != "plain":
        for _ in range(1 if shape == "one" else chance.randint(2, 4)):
            name = chance.choice(list(FUNCTIONS))
            made.calls.append((name, {} if name == "no-arguments" else a_value(chance)))
    if kind == "pythonic":
        made.calls = [(name.replace("no-arguments", "search"), arguments) for name, arguments in made.calls]
    if not made.calls or (kind not in FIRST_ONLY and chance.random() < 0.6):
        made.text = a_text(chance, "T")
    if made.calls and kind not in LAST_ONLY and chance.random() < 0.3:
        made.text_after = a_text(chance, "T")
    return made


def written(chance: random.Random, transcript: Transcript, kind: str, reasoning: str) -> tuple[str, str]:
    """The end of the prompt, and the output."""
    if kind == "harmony":
        return "<|start|>assistant", _harmony(chance, transcript)
    prompt_end = chance.choice(["", "<|im_start|>assistant\n"])
    output = ""
    begin, end = AROUND[reasoning]
    if transcript.reasoning:
        output = begin + transcript.reasoning + end
        if chance.random() < 0.4:  # the template has opened it
            prompt_end, output = begin, output.removeprefix(begin)
    if transcript.text:
        output += transcript.text
    if transcript.calls:
        output += ("\n" if transcript.text and kind != "mistral" else "") + chance.choice(WRITERS[kind])(
            transcript.calls
        )
    return prompt_end, output + transcript.text_after


def _harmony(chance: random.Random, transcript: Transcript) -> str:
    parts = []
    if transcript.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{transcript.reasoning}<|end|>")
    if transcript.text:
        channel = chance.choice(["final", "commentary"]) if transcript.calls else "final"
        parts.append(f"<|start|>assistant<|channel|>{channel}<|message|>{transcript.text}<|end|>")
    parts += [_harmony_call(*call) for call in transcript.calls]
    if transcript.text_after:
        parts.append(f"<|start|>assistant<|channel|>final<|message|>{transcript.text_after}")
    return "".join(parts).removeprefix("<|start|>assistant")


def parser_of(kind: str, reasoning: str) -> OutputParser:
    make = formats_of({"tool_format": kind, "reasoning_format": reasoning}).parser_factory(FUNCTIONS)
    assert make is not None
    return make()


def read(kind: str, reasoning: str, prompt_end: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning, and calls as (name, arguments)."""
    parser = parser_of(kind, reasoning)
    parser.start(prompt_end)
    text, thoughts, calls = "", "", []
    for part in [*(found for piece in pieces for found in parser.push(piece)), *parser.finish()]:
        if isinstance(part, Reasoning):
            thoughts += part.text
        elif isinstance(part, ToolCall):
            if part.name:
                assert part.index == len(calls) and part.id
                calls.append((part.name, part.arguments))
            else:
                calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
        else:
            text += part
    return text, thoughts, calls


def cut(chance: random.Random, text: str) -> list[str]:
    """The text in pieces: characters, tokens, or anything."""
    longest = chance.choice([1, 4, 12, 60])
    pieces = []
    while text:
        size = chance.randint(1, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


PAIRS = [(kind, "harmony" if kind == "harmony" else REASONING.get(kind, "think")) for kind in TOOL_FORMATS]
PAIRS += [("hermes", name) for name in REASONING_FORMATS if name not in ("harmony", *(pair[1] for pair in PAIRS))]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("kind", "reasoning"), PAIRS)
def test_transcripts_parse_to_what_was_written(kind: str, reasoning: str, count: int) -> None:
    chance = random.Random(f"{kind} {reasoning}")
    for number in range(count):
        transcript = a_transcript(chance, kind)
        prompt_end, output = written(chance, transcript, kind, reasoning)
        text, thoughts, calls = read(kind, reasoning, prompt_end, cut(chance, output))
        assert thoughts == transcript.reasoning, (number, output)
        assert text == transcript.text + transcript.text_after, (number, output)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == transcript.calls, (number, output)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("kind", "reasoning"), PAIRS)
def test_transcripts_that_are_cut_off_lose_nothing(kind: str, reasoning: str, count: int) -> None:
    chance = random.Random(f"{kind} {reasoning} cut")
    for number in range(count):
        transcript = a_transcript(chance, kind)
        prompt_end, output = written(chance, transcript, kind, reasoning)
        output = output[: chance.randint(0, len(output))]
        whole = read(kind, reasoning, prompt_end, [output])
        assert read(kind, reasoning, prompt_end, cut(chance, output)) == whole, (number, output)
        text, thoughts, calls = whole
        assert transcript.reasoning.startswith(thoughts) or begins_with_marker(thoughts, transcript.reasoning), output
        names = [name for name, _ in calls]
        assert names == [name for name, _ in transcript.calls][: len(names)], (number, output)
        # Every call that is complete in the output is found.
        for (_, arguments), (_, meant) in zip(calls[:-1], transcript.calls, strict=False):
            assert json.loads(arguments) == meant, (number, output)


def begins_with_marker(found: str, meant: str) -> bool:
    """Whether only the beginning of an end marker is too much: it was cut off there."""
    return found.startswith(meant) and len(found) - len(meant) <= 24


@pytest.mark.parametrize("kind", ["hermes", "kimi_k2", "deepseek_v31", "qwen3_coder", "glm45"])
def test_a_call_before_the_end_of_the_reasoning_is_not_lost(kind: str) -> None:
    (write,) = WRITERS[kind][:1]
    call = write([("search", {"words": "x"})])
    text, thoughts, calls = read(kind, "think", "<think>\n", [f"I will search. {call}</think>\n\nDone."])
    assert (text, thoughts) == ("Done.", "I will search.")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("search", {"words": "x"})]


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("hermes", 'so <tool_call>{"name": "dance", "arguments": {}}</tool_call> there'),
        ("hermes", "<tool_call>I cannot</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|>nothing"),
        ("glm45", "<tool_call>dance\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=dance>\n</function>\n</tool_call>"),
        ("pythonic", "[see the note (1), and [2]]"),
        ("pythonic", "[search(words=open('x'))]"),
        ("xlam", '["a", "list"]'),
        ("llama3", '{"answer": 42}'),
        ("phi4", "functools is a module of Python"),
        ("harmony", "no channels at all"),
    ],
)
def test_what_is_no_call_is_text(kind: str, output: str) -> None:
    for pieces in ([output], list(output)):
        assert read(kind, "harmony" if kind == "harmony" else "none", "", pieces) == (output, "", [])


def cut_bytes(chance: random.Random, text: str) -> list[str]:
    """The text as it is decoded from pieces of its bytes, which may end inside a character."""
    decoder, pieces = codecs.getincrementaldecoder("utf-8")(), []
    encoded = text.encode()
    while encoded:
        size = chance.randint(1, 9)
        pieces.append(decoder.decode(encoded[:size]))
        encoded = encoded[size:]
    return pieces


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("kind", "reasoning"), PAIRS)
def test_transcripts_with_an_error_parse_the_same_however_they_are_cut(kind: str, reasoning: str, count: int) -> None:
    chance = random.Random(f"{kind} {reasoning} error")
    for number in range(count):
        prompt_end, output = written(chance, a_transcript(chance, kind), kind, reasoning)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(output) + 1)
            output = output[:at] + chance.choice([*LETTERS, ""]) + output[at + chance.randint(0, 2) :]
        whole = read(kind, reasoning, prompt_end, [output])
        assert read(kind, reasoning, prompt_end, cut_bytes(chance, output)) == whole, (number, output)


MALFORMED = [
    ("hermes", '<tool_call>{"name": "search", "arguments": {"words": "x"}}</tool_call>', 0, 1),
    ("hermes", '<tool_call>{"name": "search", "arguments" {}}</tool_call>', 1, 0),
    ("hermes", '<tool_call>{"name": "dance", "arguments": {}}</tool_call>', 1, 0),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"words": }}</tool_call>', 1, 1),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"words": "x', 0, 1),  # cut off
    ("hermes", "no call, but <this>", 0, 0),
    ("kimi_k2", "<|tool_calls_section_begin|>nothing", 1, 0),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{1}<|tool_call_end|>",
        1,
        1,
    ),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"words": x}', 1, 1),
    ("qwen3_coder", "<tool_call>\n<function=dance>\n</function>\n</tool_call>", 1, 0),
    ("harmony", "<|channel|>commentary to=functions.search<|message|>{words}<|call|>", 1, 1),
    ("harmony", "<|channel|>commentary to=functions.search<|message|>{}<|call|>", 0, 1),
    ("llama3", '{"answer": 42}', 0, 0),  # nothing says that it is a call
    ("llama3", '<|python_tag|>{"name": "search", "parameters": {"words": "x"]}', 1, 1),
]


@pytest.mark.parametrize(("kind", "output", "malformed", "calls"), MALFORMED)
def test_malformed_calls_are_counted(kind: str, output: str, malformed: int, calls: int) -> None:
    for pieces in ([output], list(output)):
        counted: list[bool] = []
        parser = parser_of(kind, "harmony" if kind == "harmony" else "none")
        parser.on_malformed_call = partial(counted.append, True)
        parser.start("")
        found = [*(piece for each in pieces for piece in parser.push(each)), *parser.finish()]
        assert len(counted) == malformed
        assert len([piece for piece in found if isinstance(piece, ToolCall) and piece.name]) == calls
        if not calls:
            assert "".join(piece for piece in found if isinstance(piece, str)) == output


def test_arguments_are_passed_on_as_they_come() -> None:
    for kind, reasoning in PAIRS:
        if kind == "pythonic":
            continue  # a call is evaluated as a whole
        prompt_end, output = written(
            random.Random(1), Transcript(calls=[("search", {"words": "A" * 300})]), kind, reasoning
        )
        parser = parser_of(kind, reasoning)
        parser.start(prompt_end)
        seen = [piece for letter in output for piece in parser.push(letter) if isinstance(piece, ToolCall)]
        assert len(seen) > 250, kind


TEMPLATES = {
    "hermes": ("{{ '<tool_call>' }}{% if enable_thinking %}<think>{% endif %}", ("hermes", "think")),
    "a model that only talks": ("{{ messages }}", ("", "")),
    "gpt-oss": ("<|channel|>analysis<|message|> ... <|constrain|>json", ("harmony", "harmony")),
    "DeepSeek-R1": ("<｜tool▁calls▁begin｜> '\\n```json\\n' </think>", ("deepseek_v3", "think")),
    "DeepSeek-V3.1": ("<｜tool▁calls▁begin｜><｜tool▁sep｜></think>", ("deepseek_v31", "think")),
    "Qwen3-Coder": ("<tool_call>\\n<function=", ("qwen3_coder", "")),
    "GLM-4.5": ("<tool_call><arg_key></think>", ("glm45", "think")),
    "Mistral": ("[TOOL_CALLS][THINK]", ("mistral", "mistral")),
    "Llama 3.1": ("<|python_tag|>", ("llama3", "")),
}


@pytest.mark.parametrize(("template", "formats"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_tells_the_formats(template: str, formats: tuple[str, str]) -> None:
    assert formats_of_template(template) == formats
    assert not formats[0] or formats[0] in TOOL_FORMATS
    assert not formats[1] or formats[1] in REASONING_FORMATS
