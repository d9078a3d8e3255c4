# SPDX-License-Identifier: Apache-2.0
"""A request for text into what the engine runs: tokens and checked numbers. Called by the engine for each request.

It may be a `GenerationRequest`, or one of v2 with an input `text_input` and parameters. Making tokens of a long text takes
its time, so this is not for an event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.backends.llm.sampling.checking import check, check_token
from headrace.backends.llm.sampling.reading import SAMPLING_FIELDS, flag_of, format_of, object_of, sampling_of
from headrace.core.errors import InvalidArgument
from headrace.core.generation import TEXT_INPUT, Clip, Generation, GenerationRequest, OutputFormat, Picture, Sampling
from headrace.core.messages import InferRequest
from headrace.core.tensors import Tensor

PROMPT_CHARACTERS = 8_000_000
_SHRINKING = 4
"""By how much a tokenizer may shorten a text before it cuts it: by composing characters, say."""
_OWN_FIELDS = ("stream", "sampling_parameters", "response_format", "adapter", "lora_name", "exclude_input_in_output")
_PROTOCOL_FIELDS = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output", "headers"}
)


class PromptLimits(Protocol):
    """How long a text may be."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""

    @property
    def default_max_tokens(self) -> int | None:
        """Tokens of an answer whose request does not say; None for as many as fit."""


class Words(Protocol):
    """What is needed of a tokenizer: `text.tokenizer.Tokenizer`."""

    vocabulary: int
    longest_token: int

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Text to tokens."""

    def prompt_of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """Messages to text."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be generated. Everything in it was checked, apart from whether there is such an adapter."""

    tokens: list[int]
    """The prompt. Empty where there are media: see `with_prompt`."""
    sampling: Sampling
    """Its `max_tokens` is a number, and fits."""
    format: OutputFormat | None
    adapter: str
    stream: bool
    one_answer: bool
    """Whether all choices are to be in one answer: v2 without `stream`."""
    generation: Generation

    @property
    def media(self) -> tuple[Picture | Clip, ...]:
        """Pictures and clips, of which `seeing` makes the prompt."""
        return self.generation.media


def read_request(request: InferRequest, tokenizer: Words, limits: PromptLimits) -> Ask:
    """Read and check everything; raises InvalidArgument that names the field."""
    if isinstance(request, GenerationRequest):
        generation, of_v2 = request.generation, False
    else:
        generation, of_v2 = _generation_of(request), True
    check(generation.sampling, tokenizer.vocabulary)
    ask = Ask(
        tokens=[],
        sampling=generation.sampling,
        format=generation.output_format,
        adapter=generation.adapter,
        stream=generation.stream,
        one_answer=of_v2 and not generation.stream,
        generation=generation,
    )
    if generation.media:
        return ask
    return with_prompt(ask, _prompt(generation, tokenizer, limits), limits)


def with_prompt(ask: Ask, tokens: list[int], limits: PromptLimits) -> Ask:
    """The same with a prompt, and `max_tokens` that fit behind it. For `seeing`, where the prompt is known later."""
    longest = limits.max_model_len
    if not tokens:
        raise InvalidArgument(f"{_field(ask.generation)} is empty: send some text")
    if len(tokens) >= longest:
        raise InvalidArgument(
            f"{_field(ask.generation)} has {len(tokens)} tokens, but the model's context is {longest} tokens, of which "
            "the answer needs at least one: send a shorter one"
        )
    room = longest - len(tokens)
    sampling = ask.sampling
    most = min(sampling.max_tokens or limits.default_max_tokens or room, room)
    least = min(sampling.min_tokens, most)
    return replace(ask, tokens=tokens, sampling=replace(sampling, max_tokens=most, min_tokens=least))


def _field(generation: Generation) -> str:
    return "prompt" if generation.prompt is not None else "messages"


def _prompt(generation: Generation, tokenizer: Words, limits: PromptLimits) -> list[int]:
    prompt = generation.prompt
    if prompt is None:
        if not generation.messages:
            raise InvalidArgument("the request has neither a prompt nor messages: send one of them")
        text = tokenizer.prompt_of(generation.messages, generation.tools, generation.template_arguments)
        return _encoded("messages", text, tokenizer, limits, add_special=False)
    if isinstance(prompt, str):
        # Some tokenizers begin every text with a token of their own, which makes nothing look like something.
        return _encoded("prompt", prompt, tokenizer, limits, add_special=True) if prompt else []
    if len(prompt) > limits.max_model_len:
        # What is far too long is not looked through first.
        return list(prompt)
    for token in prompt:
        check_token("prompt", token, tokenizer.vocabulary)
    return list(prompt)


def _encoded(field: str, text: str, tokenizer: Words, limits: PromptLimits, *, add_special: bool) -> list[int]:
    if len(text) > PROMPT_CHARACTERS:
        raise InvalidArgument(f"{field} has {len(text)} characters; at most {PROMPT_CHARACTERS} are allowed")
    # What cannot fit is not made into tokens first: that takes a second for each million characters.
    least = len(text) // (tokenizer.longest_token * _SHRINKING)
    if least > limits.max_model_len:
        raise InvalidArgument(
            f"{field} has {least} tokens or more, but the model's context is {limits.max_model_len} tokens: send a "
            "shorter one"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} is text that UTF-8 cannot carry: it has half of a surrogate pair") from None
    return tokenizer.encode(text, add_special)


def _generation_of(request: InferRequest) -> Generation:
    """From v2's tensors and parameters."""
    inputs = {tensor.name: tensor for tensor in request.inputs}
    values: dict[str, Any] = {}
    for name, value in request.parameters.items():
        if name in SAMPLING_FIELDS or name in _OWN_FIELDS:
            values[name] = value
        # A name with a hyphen is a header that was passed on.
        elif name not in _PROTOCOL_FIELDS and not name.startswith("triton_") and "-" not in name:
            raise InvalidArgument(
                f"parameter {name[:64]!a} is not known: use {', '.join((*SAMPLING_FIELDS, *_OWN_FIELDS))}"
            )
    for name in ("stream", "sampling_parameters", "exclude_input_in_output"):
        if name in inputs:
            values.setdefault(name, _one(inputs[name]))
    if TEXT_INPUT not in inputs:
        raise InvalidArgument(f"the request has no input '{TEXT_INPUT}': send the prompt as one string")
    nested = object_of("sampling_parameters", values.pop("sampling_parameters", {}))
    for name in nested:
        if name == "sampling_parameters" or (name not in SAMPLING_FIELDS and name not in _OWN_FIELDS):
            raise InvalidArgument(f"sampling_parameters has {name[:64]!a}, which is not known")
    return _generation(_one(inputs[TEXT_INPUT]), {**nested, **values})


def _generation(prompt: Any, values: dict[str, Any]) -> Generation:
    if not isinstance(prompt, str):
        raise InvalidArgument(f"input '{TEXT_INPUT}' must be one string of BYTES")
    stream = flag_of("stream", values.pop("stream", False))
    if not flag_of("exclude_input_in_output", values.pop("exclude_input_in_output", True)):
        raise InvalidArgument("exclude_input_in_output cannot be false: answers never repeat the prompt")
    shape = values.pop("response_format", None)
    adapter = values.pop("adapter", None) or values.pop("lora_name", None) or ""
    values.pop("lora_name", None)
    if not isinstance(adapter, str):
        raise InvalidArgument("adapter must be the name of an adapter")
    return Generation(
        prompt=prompt,
        sampling=sampling_of({name: value for name, value in values.items() if name in SAMPLING_FIELDS}),
        output_format=None if shape is None else format_of(shape),
        adapter=adapter,
        stream=stream,
    )


def _one(tensor: Tensor) -> Any:
    """The only element of an input, as Python has it."""
    if tensor.array.size != 1:
        raise InvalidArgument(f"input '{tensor.name}' has {tensor.array.size} elements: send one")
    value = tensor.array.reshape(-1)[0]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"input '{tensor.name}' is not text in UTF-8") from None
    return value.item() if hasattr(value, "item") else value
