# SPDX-License-Identifier: Apache-2.0
"""A request for generated text and what its answers tell, in no protocol's words.

Made by `api.openai` and by the microservice, read by the backends that generate (`llm`, `openai_proxy`). A request without
it, from v2's `infer` or `generate`, says the same with an input `text_input` and parameters.

Each answer is about one choice: an output `text_output` of one string, the text that is new, and parameters:

    index               which of the `n` choices
    finish_reason       on the choice's last answer: stop, length, or tool_calls where another engine said so
    prompt_tokens, cached_tokens, completion_tokens
                        on the choice's last answer; cached are those of the prompt that were not computed again
    logprobs            where asked for: the JSON text of a list, for each new token {token, bytes, logprob,
                        top_logprobs: [{token, bytes, logprob}]}
    openai              from another engine: the JSON text of its chunk or answer, to be passed on as it is

A request that does not stream gets one answer for each choice. The model's last answer to a request is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.core.messages import NO_PARAMETERS, InferRequest, Parameters

TEXT_INPUT, TEXT_OUTPUT, EMBEDDING = "text_input", "text_output", "embedding"
"""The names of tensors of models that generate, and of the output of those that embed."""

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and when it is enough. The defaults are OpenAI's."""

    max_tokens: int | None = None
    """None: as many as the context has room for, or the model's own limit."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0: always the likeliest."""
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
    """Texts that end a choice and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """How many alternatives are told at each place; 0 tells of the chosen token only, None nothing."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a choice's text must be."""

    kind: Literal["json_object", "json_schema", "regex"]
    schema: Mapping[str, Any] | None = None
    regex: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image: height x width x 3, RGB."""

    pixels: Pixels


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as frames: count x height x width x 3, RGB; `seconds[i]` is when frame i is shown."""

    frames: Pixels
    seconds: Sequence[float]
    frames_per_second: float
    """Of these frames, after some were left out."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Either a prompt or messages."""

    prompt: str | Sequence[int] | None = None
    """Text, or tokens."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """For the model's chat template. In a content that is a list, an item {"type": "image"} or {"type": "video"} stands
    for the next of `media`; a text is {"type": "text", "text": ...}."""
    media: tuple[Picture | Clip, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More for the template: `add_generation_prompt`, `enable_thinking`, what its author thought of."""
    sampling: Sampling = Sampling()
    output_format: OutputFormat | None = None
    adapter: str = ""
    """The LoRA adapter, by its name; "" for the model as it is."""
    stream: bool = False
    hands: bool = False
    """Only compute the prompt, and keep its pages for another: see `core.handing`. There is one answer, without a text; its
    parameter `ticket` is what the other needs, "" where nothing is kept."""
    ticket: str = ""
    """Pages of the prompt that another has computed, if it is so."""
    path: str = ""
    """Where the request was sent (/v1/chat/completions), and ..."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """... what it said, for engines that speak the same protocol."""


class GenerationRequest(InferRequest):
    """A request for text. It has no tensors."""

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
