# SPDX-License-Identifier: Apache-2.0
"""Text generation requests and the parameters of their responses, independent of any protocol.

`api.openai` and the microservice create them; the backends that generate text (`llm`, `openai_proxy`) read them. A request
from v2's `infer` or `generate` has the input `text_input` and parameters instead.

Each response belongs to one choice. It has an output `text_output` with one string, the new text, and parameters:

    index               which of the `n` choices
    prompt_end          in the choice's first response, if `reasoning_end` is set: the last characters of the prompt
    finish_reason       in the choice's last response: stop, length, or tool_calls if another engine returned it
    matched_stop        in the choice's last response, if one of the `stop` strings ended it: that string
    prompt_tokens, cached_tokens, completion_tokens
                        in the choice's last response; cached tokens are prompt tokens taken from the prefix cache
    reasoning_tokens    in the choice's last response, if `reasoning_end` came: how many tokens came up to it
    logprobs            if requested: a JSON list with, for each new token, {token, bytes, logprob,
                        top_logprobs: [{token, bytes, logprob}]}
    prompt_logprobs     if requested, in the choice's first response: the same for each token of the prompt, with token_id
                        and rank (1: the likeliest) in addition. The first token has no logprob (null).
    prompt_text         if `echo` is set, in the choice's first response: the text of the prompt's tokens
    openai              from another engine: its chunk or response as JSON, to be forwarded unchanged
    token_ids           if `tracks_tokens` is set: the new tokens, with commas between them; the choice's first response also
                        has `cached_tokens`, and `tokenizer`, the fingerprint of what made the tokens
    replayed            true if the response repeats one of `continued`
    tokens, token_texts, max_model_len
                        instead of the others, if the prompt was only tokenized: JSON lists, and the model's context length

A request without streaming gets one response per choice. The model's last response to a request is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.core.requests import NO_PARAMETERS, BackgroundRequest, InferRequest, Parameters

TEXT_INPUT, TEXT_OUTPUT, EMBEDDING = "text_input", "text_output", "embedding"
"""Tensor names of text generation models, and the output name of embedding models."""
QUERY, DOCUMENT, SCORE = "query", "document", "score"
"""Tensor names of cross-encoders."""

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters and stop conditions. The defaults are OpenAI's."""

    max_tokens: int | None = None
    """None: up to the context length or the model's own limit."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0: greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end a choice; they are not part of its text."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """Alternatives to report per token; 0 reports the sampled token only, None reports nothing."""
    prompt_logprobs: int | None = None
    """Alternatives to report per token of the prompt; as in `logprobs`."""
    bad_words: tuple[str, ...] = ()
    """Words that are not generated."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None: all."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens of the prompt, the last ones; -1: as many as fit with `max_tokens`; None: keep all."""
    include_stop_str_in_output: bool = False
    """Whether the stop string or stop token that ended a choice is part of its text."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    priority: int = 0
    """Lower is earlier, for models that schedule by priority."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format that a choice's text must have."""

    kind: Literal["json_object", "json_schema", "regex"]
    schema: Mapping[str, Any] | None = None
    regex: str = ""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt: height x width x 3, RGB."""

    pixels: Pixels


@dataclass(frozen=True, slots=True)
class PromptVideo:
    """A video of a prompt as frames: count x height x width x 3, RGB; `seconds[i]` is the time of frame i."""

    frames: Pixels
    seconds: Sequence[float]
    frames_per_second: float
    """The rate of these frames, after sampling."""


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """What one response of another server was made of, for a request that continues there."""

    index: int
    """The choice."""
    tokens: tuple[int, ...]
    cached_tokens: int | None = None
    """In the choice's first response: prompt tokens that were taken from the prefix cache."""
    logprobs: str | None = None
    """The parameter `logprobs` of the response."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A text generation request: either a prompt or messages."""

    prompt: str | Sequence[int] | None = None
    """Text, or tokens."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """For the model's chat template. If a content is a list, an item {"type": "image"} or {"type": "video"} refers to the
    next item of `media`; a text is {"type": "text", "text": ...}."""
    media: tuple[PromptImage | PromptVideo, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More variables for the chat template, such as `add_generation_prompt` and `enable_thinking`."""
    sampling: Sampling = Sampling()
    output_format: OutputFormat | None = None
    output_markers: tuple[str, ...] = ()
    """Special tokens that stay in the text: the markers of the formats of reasoning and tool calls."""
    reasoning_end: str = ""
    """The marker at which reasoning ends; "" for a model that writes none."""
    adapter: str = ""
    """Name of the LoRA adapter; "" for the base model."""
    stream: bool = False
    echo: bool = False
    """Whether the responses have the `prompt_text`."""
    task: Literal["generate", "tokenize", "detokenize"] = "generate"
    """`tokenize`: return the tokens of the prompt or messages; `detokenize`: return the text of a prompt of tokens."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own tokens, such as BOS; None: to a prompt, not to messages."""
    prefill_only: bool = False
    """Compute only the prompt and keep its KV-cache pages for a decode server (`core.kv_transfer`). The one response has no
    text; its parameter `ticket` is the transfer token, "" if no pages are kept."""
    transfer_token: str = ""
    """Signed token for the prompt's KV-cache pages on a prefill server."""
    tracks_tokens: bool = False
    """Whether the responses say of which tokens they are made, so that another server can continue the request."""
    continued: tuple[GeneratedTokens, ...] = ()
    """What another server generated for this request, response by response: these responses are repeated, then new ones
    follow."""
    continued_tokenizer: str = ""
    """The other server's `tokenizer`."""
    path: str = ""
    """Path of the original request, such as /v1/chat/completions."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """JSON body of the original request, for engines with the same protocol."""


class GenerationRequest(InferRequest):
    """An inference request that carries a `Generation` instead of tensors."""

    __slots__ = ("generation",)

    def __init__(
        self,
        model_name: str,
        generation: Generation,
        model_version: str = "",
        id: str = "",
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        super().__init__(model_name, (), model_version, id, (), parameters)
        self.generation = generation


class BackgroundGenerationRequest(GenerationRequest):
    """A generation request that waits while its model has others."""

    __slots__ = ()

    is_background = True


def in_background(request: InferRequest) -> InferRequest:
    """Return the same request for the background."""
    name, version, parameters = request.model_name, request.model_version, request.parameters
    if isinstance(request, GenerationRequest):
        return BackgroundGenerationRequest(name, request.generation, version, request.id, parameters)
    return BackgroundRequest(name, request.inputs, version, request.id, request.outputs, parameters)
