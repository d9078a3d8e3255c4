# SPDX-License-Identifier: Apache-2.0
"""Parse and validate a generation request: its prompt as tokens, its sampling params and its output format.

A request is a `GenerationRequest`, or a v2 request with an input `text_input` and parameters. Tokenizing a long prompt takes
long: not for an event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headrace.backends.llm.chat_template import PROMPT_CHARACTERS
from headrace.backends.llm.sampling.bad_words import TokenSequence, tokenize_bad_words
from headrace.backends.llm.sampling.params import (
    SAMPLING_FIELDS,
    check_prompt_logprobs,
    check_sampling,
    check_token_id,
    parse_bool,
    parse_object,
    parse_output_format,
    parse_sampling,
)
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import (
    TEXT_INPUT,
    Generation,
    GenerationRequest,
    OutputFormat,
    PromptImage,
    PromptVideo,
    Sampling,
)
from headrace.core.requests import InferRequest, Parameters
from headrace.core.tensors import Tensor

_PROMPT_END_TOKENS = 16
"""More than the marker that opens reasoning has."""
_NORMALIZATION_FACTOR = 4
"""How far a tokenizer's normalizer may shorten a text, by composing characters for example."""
_OWN_FIELDS = ("stream", "sampling_parameters", "response_format", "adapter", "lora_name", "exclude_input_in_output")
_PROTOCOL_FIELDS = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "timeout", "binary_data_output", "headers"}
)


class PromptLimits(Protocol):
    """Limits on the length of a prompt and its completion."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and completion together."""

    @property
    def default_max_tokens(self) -> int | None:
        """Maximum tokens of a completion whose request sets none; None: as many as fit."""


class TokenizerLike(Protocol):
    """The part of the tokenizer that requests need."""

    vocabulary: int
    longest_token: int

    @property
    def fingerprint(self) -> str:
        """A digest of the vocabulary."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of tokens."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """Return the prompt of chat messages."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated request; only whether its adapter exists is not checked yet."""

    tokens: list[int]
    """The prompt. Empty if there are images or videos, until `with_prompt`."""
    sampling: Sampling
    """With a `max_tokens` that is set and fits the context."""
    format: OutputFormat | None
    adapter: str
    stream: bool
    single_reply: bool
    """Whether one reply has all choices: v2 without `stream`."""
    generation: Generation
    prompt_parameters: Parameters = field(default_factory=dict)
    """The parameters `prompt_end` and `prompt_text` of each choice's first response (`core.generation`)."""
    bad_words: tuple[TokenSequence, ...] = ()

    @property
    def media(self) -> tuple[PromptImage | PromptVideo, ...]:
        """Images and videos, which a multimodal processor puts into the prompt."""
        return self.generation.media


def parse_request(request: InferRequest, tokenizer: TokenizerLike, limits: PromptLimits) -> ParsedRequest:
    """Parse and validate a request; raises InvalidArgument with the name of the field."""
    if isinstance(request, GenerationRequest):
        generation, is_v2 = request.generation, False
    else:
        generation, is_v2 = _parse_v2(request), True
    check_sampling(generation.sampling, tokenizer.vocabulary)
    parsed = ParsedRequest(
        tokens=[],
        sampling=generation.sampling,
        format=generation.output_format,
        adapter=generation.adapter,
        stream=generation.stream,
        single_reply=is_v2 and not generation.stream,
        generation=generation,
    )
    if generation.continued:
        _check_continued(generation, tokenizer)
    if generation.sampling.bad_words:
        words = tokenize_bad_words(generation.sampling.bad_words, lambda text: tokenizer.encode(text, False))
        parsed = replace(parsed, bad_words=words)
    if generation.media:
        if generation.sampling.truncate_prompt_tokens is not None:
            raise InvalidArgument("truncate_prompt_tokens is not for prompts with images or videos: leave it out")
        return parsed
    return with_prompt(parsed, prompt_tokens(generation, tokenizer, limits), limits)


def _check_continued(generation: Generation, tokenizer: TokenizerLike) -> None:
    if generation.continued_tokenizer != tokenizer.fingerprint:
        raise FailedPrecondition(
            "the request was begun with another tokenizer: continue it on a server of the same model"
        )
    for generated in generation.continued:
        if not 0 <= generated.index < generation.sampling.n:
            raise InvalidArgument(f"the request has no choice {generated.index}, which was continued")
        for token in generated.tokens:
            check_token_id("continued", token, tokenizer.vocabulary)


def with_prompt(parsed: ParsedRequest, tokens: list[int], limits: PromptLimits) -> ParsedRequest:
    """Return a copy with this prompt, and with a `max_tokens` that fits behind it."""
    longest = limits.max_model_len
    if not tokens:
        raise InvalidArgument(f"{_prompt_field(parsed.generation)} is empty: send some text")
    sampling = parsed.sampling
    if sampling.truncate_prompt_tokens is not None:
        tokens = tokens[-_kept_tokens(sampling, sampling.truncate_prompt_tokens, limits) :]
    if len(tokens) >= longest:
        raise InvalidArgument(
            f"{_prompt_field(parsed.generation)} has {len(tokens)} tokens, but the model's context is {longest} tokens, "
            "of which the answer needs at least one: send a shorter one"
        )
    check_prompt_logprobs(len(tokens), sampling.prompt_logprobs)
    left = longest - len(tokens)
    most = min(sampling.max_tokens or limits.default_max_tokens or left, left)
    least = min(sampling.min_tokens, most)
    return replace(parsed, tokens=tokens, sampling=replace(sampling, max_tokens=most, min_tokens=least))


def _kept_tokens(sampling: Sampling, asked: int, limits: PromptLimits) -> int:
    """Return how many tokens of the prompt `truncate_prompt_tokens` keeps."""
    if asked > 0:
        return asked
    return max(1, limits.max_model_len - (sampling.max_tokens or limits.default_max_tokens or 1))


def with_prompt_parameters(parsed: ParsedRequest, tokenizer: TokenizerLike) -> ParsedRequest:
    """Return a copy with the parameters about the prompt that are of use."""
    generation = parsed.generation
    parameters: dict[str, bool | int | float | str] = {}
    if generation.reasoning_end:
        # The prompt may open the reasoning.
        parameters["prompt_end"] = tokenizer.decode(parsed.tokens[-_PROMPT_END_TOKENS:], skip_special=False)
    if generation.echo:
        parameters["prompt_text"] = tokenizer.decode(parsed.tokens)
    if generation.tracks_tokens:
        parameters["tokenizer"] = tokenizer.fingerprint
    return replace(parsed, prompt_parameters=parameters) if parameters else parsed


def _prompt_field(generation: Generation) -> str:
    return "prompt" if generation.prompt is not None else "messages"


def prompt_tokens(generation: Generation, tokenizer: TokenizerLike, limits: PromptLimits) -> list[int]:
    """Return the tokens of a text prompt or of messages."""
    prompt, add_special = generation.prompt, generation.add_special_tokens
    longest = limits.max_model_len if generation.sampling.truncate_prompt_tokens is None else None
    if prompt is None:
        if not generation.messages:
            raise InvalidArgument("the request has neither a prompt nor messages: send one of them")
        text = tokenizer.apply_chat_template(generation.messages, generation.tools, generation.template_arguments)
        return _encode("messages", text, tokenizer, longest, add_special=add_special is True)
    if isinstance(prompt, str):
        # An empty prompt stays empty: some tokenizers would add a BOS token to it.
        return _encode("prompt", prompt, tokenizer, longest, add_special=add_special is not False) if prompt else []
    if len(prompt) > limits.max_model_len and generation.sampling.truncate_prompt_tokens is None:
        return list(prompt)  # too long: `with_prompt` refuses it, no need to check each token
    for token in prompt:
        check_token_id("prompt", token, tokenizer.vocabulary)
    return list(prompt)


def _encode(field: str, text: str, tokenizer: TokenizerLike, longest: int | None, *, add_special: bool) -> list[int]:
    """Return the tokens of a text; `longest`: tokens that it may have, None if it is truncated later."""
    if len(text) > PROMPT_CHARACTERS:
        raise InvalidArgument(f"{field} has {len(text)} characters; at most {PROMPT_CHARACTERS} are allowed")
    # Refuse a text that cannot fit before tokenizing it, which takes a second per million characters.
    least = len(text) // (tokenizer.longest_token * _NORMALIZATION_FACTOR)
    if longest is not None and least > longest:
        raise InvalidArgument(
            f"{field} has {least} tokens or more, but the model's context is {longest} tokens: send a shorter one"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} is not valid Unicode: it has half of a surrogate pair") from None
    return tokenizer.encode(text, add_special)


def _parse_v2(request: InferRequest) -> Generation:
    """Read a v2 request: input tensors and parameters."""
    inputs = {tensor.name: tensor for tensor in request.inputs}
    values: dict[str, Any] = {}
    for name, value in request.parameters.items():
        if name in SAMPLING_FIELDS or name in _OWN_FIELDS:
            values[name] = value
        # A name with a hyphen is a forwarded header.
        elif name not in _PROTOCOL_FIELDS and not name.startswith("triton_") and "-" not in name:
            raise InvalidArgument(
                f"parameter {name[:64]!a} is not known: use {', '.join((*SAMPLING_FIELDS, *_OWN_FIELDS))}"
            )
    for name in ("stream", "sampling_parameters", "exclude_input_in_output"):
        if name in inputs:
            values.setdefault(name, _scalar(inputs[name]))
    if TEXT_INPUT not in inputs:
        raise InvalidArgument(f"the request has no input '{TEXT_INPUT}': send the prompt as one string")
    nested = parse_object("sampling_parameters", values.pop("sampling_parameters", {}))
    for name in nested:
        if name == "sampling_parameters" or (name not in SAMPLING_FIELDS and name not in _OWN_FIELDS):
            raise InvalidArgument(f"sampling_parameters has {name[:64]!a}, which is not known")
    return _parse_v2_values(_scalar(inputs[TEXT_INPUT]), {**nested, **values})


def _parse_v2_values(prompt: Any, values: dict[str, Any]) -> Generation:
    if not isinstance(prompt, str):
        raise InvalidArgument(f"input '{TEXT_INPUT}' must be one string of BYTES")
    stream = parse_bool("stream", values.pop("stream", False))
    if not parse_bool("exclude_input_in_output", values.pop("exclude_input_in_output", True)):
        raise InvalidArgument("exclude_input_in_output cannot be false: answers never repeat the prompt")
    shape = values.pop("response_format", None)
    adapter = values.pop("adapter", None) or values.pop("lora_name", None) or ""
    values.pop("lora_name", None)
    if not isinstance(adapter, str):
        raise InvalidArgument("adapter must be the name of an adapter")
    return Generation(
        prompt=prompt,
        sampling=parse_sampling({name: value for name, value in values.items() if name in SAMPLING_FIELDS}),
        output_format=None if shape is None else parse_output_format(shape),
        adapter=adapter,
        stream=stream,
    )


def _scalar(tensor: Tensor) -> Any:
    """Return the only element of an input as a Python value."""
    if tensor.array.size != 1:
        raise InvalidArgument(f"input '{tensor.name}' has {tensor.array.size} elements: send one")
    value = tensor.array.reshape(-1)[0]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"input '{tensor.name}' is not text in UTF-8") from None
    return value.item() if hasattr(value, "item") else value
