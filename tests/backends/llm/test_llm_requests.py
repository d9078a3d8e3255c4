# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_tokenizers import tokenizer, with_template

from headrace.backends.llm.requests import ParsedRequest, parse_request, with_prompt
from headrace.backends.llm.tokenizer import Tokenizer
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import Generation, GenerationRequest, OutputFormat, PromptImage, Sampling
from headrace.core.requests import InferRequest
from headrace.core.tensors import Tensor


@dataclass(frozen=True)
class Limits:
    max_model_len: int = 64
    default_max_tokens: int | None = None


def _read(generation: Generation, words: Tokenizer | None = None, limits: Limits | None = None) -> ParsedRequest:
    return parse_request(GenerationRequest("m", generation), words or tokenizer("bytes"), limits or Limits())


def _v2(text: Any = "the sea", tensors: dict[str, Any] | None = None, **parameters: Any) -> ParsedRequest:
    given = {"text_input": text, **(tensors or {})}
    inputs = [
        Tensor.of(name, np.asarray([value], dtype=bool if type(value) is bool else object))
        for name, value in given.items()
        if value is not None
    ]
    return parse_request(InferRequest("m", inputs, parameters=parameters), tokenizer("bytes"), Limits())


def test_a_prompt_becomes_tokens_and_leaves_space_for_the_answer() -> None:
    parsed = _read(Generation(prompt="the quick fox", sampling=Sampling(seed=3), adapter="a", stream=True))
    assert tokenizer("bytes").decode(parsed.tokens) == "the quick fox"
    assert parsed.sampling.max_tokens == 64 - len(parsed.tokens) and parsed.sampling.seed == 3
    assert parsed.adapter == "a" and parsed.stream and not parsed.single_reply and parsed.media == ()


@pytest.mark.parametrize(
    ("asked", "default", "expected"), [(5, 9, 5), (None, 9, 9), (None, None, 61), (1000, 9, 61), (None, 1000, 61)]
)
def test_max_tokens_fit(asked: int | None, default: int | None, expected: int) -> None:
    sampling = Sampling(max_tokens=asked)
    parsed = _read(Generation(prompt=[5, 6, 7], sampling=sampling), limits=Limits(64, default))
    assert parsed.tokens == [5, 6, 7] and parsed.sampling.max_tokens == expected


def test_min_tokens_are_not_more_than_fit() -> None:
    parsed = _read(Generation(prompt=[5, 6, 7], sampling=Sampling(min_tokens=1000)))
    assert parsed.sampling.min_tokens == parsed.sampling.max_tokens == 61


def test_messages_go_through_the_template() -> None:
    words = with_template(
        "bytes", "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ style }}"
    )
    messages = ({"role": "user", "content": "hi"},)
    parsed = _read(Generation(messages=messages, template_arguments={"style": "!"}), words)
    assert words.decode(parsed.tokens, skip_special=False) == "<s>[user]hi!"
    assert parsed.tokens[0] == 1
    with pytest.raises(FailedPrecondition, match="chat template"):
        _read(Generation(messages=messages))


def test_media_are_left_to_those_who_see() -> None:
    picture = PromptImage(np.zeros((2, 2, 3), np.uint8))
    parsed = _read(Generation(messages=({"role": "user", "content": [{"type": "image"}]},), media=(picture,)))
    assert parsed.tokens == [] and parsed.media == (picture,)
    assert with_prompt(parsed, [5] * 60, Limits()).sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("generation", "text"),
    [
        (Generation(prompt="the " * 200), r"prompt has \d+ tokens, but the model's context is 64 tokens"),
        (Generation(prompt=[5] * 64), "prompt has 64 tokens, but the model's context is 64"),
        (Generation(prompt=[5] * 1000), "prompt has 1000 tokens"),
        (Generation(prompt=""), "prompt is empty"),
        (Generation(prompt=[]), "prompt is empty"),
        (Generation(), "neither a prompt nor messages"),
        (Generation(prompt=[5, 100_000]), "prompt has 100000, which is not a token id"),
        (Generation(prompt=[5, -1]), "prompt has -1, which is not a token id"),
        (Generation(prompt=[True]), "prompt has True, which is not a token id"),
        (Generation(prompt="\ud800"), "half of a surrogate pair"),
        (Generation(prompt="x" * 9_000_000), "at most 8000000"),
        (Generation(prompt="x" * 7_000_000), r"prompt has \d+ tokens or more, but the model's context is 64 tokens"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(generation: Generation, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        _read(generation)


WRONG: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, "1", True, None)],
    *[("top_p", value) for value in (0, -1, 1.01, math.nan)],
    *[("top_k", value) for value in (-1, 1.5, True, 2**40)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("repetition_penalty", value) for value in (0, -1, 10.1)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("frequency_penalty", value) for value in (-2.1, math.inf)],
    *[("max_tokens", value) for value in (0, -1, 1.0, 10**100)],
    *[("min_tokens", value) for value in (-1, None)],
    *[("n", value) for value in (0, 129)],
    *[("logprobs", value) for value in (-1, 21)],
    *[("seed", value) for value in (2**64, -(2**63) - 1, 0.5)],
    *[("stop", value) for value in (("",), ("x" * 1001,), ("x",) * 17, (5,))],
    *[("stop_token_ids", value) for value in ((10**6,), (-1,), (1,) * 129)],
    *[
        ("logit_bias", value)
        for value in ({10**6: 1.0}, {1: 101}, {1: math.nan}, {"1": 1.0}, dict.fromkeys(range(1025), 0))
    ],
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_every_number_has_its_limits(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}") as error:
        _read(Generation(prompt="x", sampling=replace(Sampling(), **{field: value})))
    assert len(error.value.message) < 200


def test_the_ends_of_ranges_are_within() -> None:
    for sampling in (
        Sampling(temperature=0, top_p=1, min_p=1, repetition_penalty=10, presence_penalty=-2, frequency_penalty=2),
        Sampling(temperature=2.0, seed=2**64 - 1, n=128, logprobs=20, stop=("x" * 1000,) * 16, logit_bias={0: -100}),
        Sampling(seed=-(2**63), logprobs=0, max_tokens=1, min_tokens=1),
    ):
        _read(Generation(prompt="x", sampling=sampling))
    with pytest.raises(InvalidArgument, match="min_tokens is 3, more than max_tokens"):
        _read(Generation(prompt="x", sampling=Sampling(max_tokens=2, min_tokens=3)))


def test_a_v2_request_means_the_same() -> None:
    parsed = _v2(temperature=0, max_tokens=7, stop="END", top_k=3, ignore_eos=True, seed=9, adapter="lo")
    assert tokenizer("bytes").decode(parsed.tokens) == "the sea"
    assert parsed.single_reply and not parsed.stream and parsed.adapter == "lo"
    assert parsed.sampling == Sampling(
        temperature=0.0,
        max_tokens=7,
        stop=("END",),
        top_k=3,
        ignore_eos=True,
        seed=9,
        logit_bias=parsed.sampling.logit_bias,
    )


def test_v2_streams_are_requested_by_tensor_or_parameter() -> None:
    assert _v2(stream=True).stream and not _v2(stream=True).single_reply
    assert _v2(tensors={"stream": True}).stream
    assert not _v2(tensors={"stream": False}).stream


def test_sampling_parameters_are_json_and_single_ones_win() -> None:
    text = json.dumps(
        {"temperature": "0.25", "max_tokens": "5", "stop": ["a", "b"], "logit_bias": {"4": -1}, "n": 2, "top_p": 0.5}
    )
    for parsed in (_v2(tensors={"sampling_parameters": text}, top_p=0.75), _v2(sampling_parameters=text, top_p=0.75)):
        sampling = parsed.sampling
        assert (sampling.temperature, sampling.max_tokens, sampling.n, sampling.top_p) == (0.25, 5, 2, 0.75)
        assert sampling.stop == ("a", "b") and sampling.logit_bias == {4: -1.0}


def test_lists_in_parameters_are_json_text() -> None:
    parsed = _v2(stop='["a", "b"]', stop_token_ids="[4, 5]", logit_bias='{"7": 2}')
    assert parsed.sampling.stop == ("a", "b") and parsed.sampling.stop_token_ids == (4, 5)
    assert parsed.sampling.logit_bias == {7: 2.0}
    assert _v2(stop="[not json").sampling.stop == ("[not json",)


@pytest.mark.parametrize(
    ("given_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, OutputFormat("json_object")),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, OutputFormat("json_schema", {})),
        ({"type": "regex", "regex": "a"}, OutputFormat("regex", regex="a")),
    ],
)
def test_a_format_in_v2(given_format: dict[str, Any], expected: OutputFormat | None) -> None:
    assert _v2(response_format=json.dumps(given_format)).format == expected


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"temprature": 1}, "'temprature' is not known"),
        ({"sampling_parameters": '{"beam_width": 2}'}, "'beam_width'"),
        ({"sampling_parameters": "{"}, "sampling_parameters is not JSON"),
        ({"sampling_parameters": "[]"}, "JSON object"),
        ({"sampling_parameters": '{"sampling_parameters": {}}'}, "'sampling_parameters'"),
        ({"sampling_parameters": '{"stop": 5}'}, "stop must be a string"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: use a whole number"),
        ({"max_tokens": math.inf}, "max_tokens must be a finite number"),
        ({"seed": 10**400}, "seed must be a number"),
        ({"temperature": 3}, "temperature is 3.0: use a number from 0 to 2"),
        ({"stream": "perhaps"}, "stream must be true or false"),
        ({"response_format": '{"type": "yaml"}'}, "response_format"),
        ({"response_format": '{"type": "json_schema"}'}, "response_format"),
        ({"adapter": 5}, "adapter must be"),
        ({"exclude_input_in_output": False}, "exclude_input_in_output"),
    ],
)
def test_invalid_parameters_are_refused(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text.replace("[", r"\[")):
        _v2(**parameters)


def test_fields_of_the_protocol_are_not_unknown_parameters() -> None:
    _v2(
        priority=1,
        timeout=5,
        sequence_id=3,
        triton_enable_empty_final_response=True,
        headers="x",
        **{"x-request-id": "1"},
    )


def test_the_input_is_one_text() -> None:
    with pytest.raises(InvalidArgument, match="no input 'text_input'"):
        _v2(text=None)
    with pytest.raises(InvalidArgument, match="not text in UTF-8"):
        _v2(text=b"\xff")
    with pytest.raises(InvalidArgument, match="prompt is empty"):
        _v2(text="")
    two = Tensor.of("text_input", np.asarray(["a", "b"], dtype=object))
    with pytest.raises(InvalidArgument, match="has 2 elements: send one"):
        parse_request(InferRequest("m", [two]), tokenizer("bytes"), Limits())


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_DEEP = st.recursive(
    _VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@given(
    st.dictionaries(st.sampled_from(sorted(f.name for f in Sampling.__dataclass_fields__.values())), _DEEP, max_size=4)
)
def test_whatever_is_sent_is_read_or_refused(values: dict[str, Any]) -> None:
    try:
        parsed = _v2(sampling_parameters=json.dumps(values))
    except InvalidArgument:
        return
    assert isinstance(parsed.sampling.max_tokens, int)
