# SPDX-License-Identifier: Apache-2.0
"""Multimodal inputs: limits on images and videos, and prompts with placeholders for them.

Used by `vision.processors` in any thread; `vision.image_encoder` reads the result in the engine's thread. Knows no device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.backends.model_config import parse_int
from headrace.core.errors import InvalidArgument
from headrace.core.generation import Generation, PromptImage, PromptVideo

Medium = PromptImage | PromptVideo

_MAX_ASPECT_RATIO = 200
"""The limit of the Qwen processors; a narrower strip shows nothing."""


class TokenizerLike(Protocol):
    """The part of the tokenizer that multimodal processors need."""

    @property
    def hugging_face(self) -> Any:
        """The transformers tokenizer."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of a text."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """Return the prompt of chat messages."""


class MultimodalProcessor(Protocol):
    """Puts images and videos into prompts, for one family of models."""

    def prepare(self, generation: Generation, max_tokens: int) -> MultimodalPrompt:
        """Return the prompt of a request with media. Slow: not for an event loop, nor for the engine's thread."""


@dataclass(frozen=True, slots=True)
class MultimodalPrompt:
    """A prompt and the inputs of the image encoder."""

    tokens: list[int]
    """With one placeholder per image embedding."""
    arguments: Mapping[str, Any]
    """Tensors for the model's forward pass, without `input_ids`."""
    media_hash: bytes
    """Hash of all media in their order: prompts share KV pages only if it is equal."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits on the images and videos of a request."""

    total_pixels: int = 25_690_112
    """After resizing, over all images and every second video frame: 32,768 embeddings of 28 x 28. Videos are scaled down
    to fit; what still does not fit is refused."""
    max_media: int = 32

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> MediaLimits:
        """Read the parameters `total_pixels` and `max_media` of a model configuration."""
        default = cls()
        return cls(
            parse_int(parameters, "total_pixels", default.total_pixels, 10**11, 1),
            parse_int(parameters, "max_media", default.max_media, 4096),
        )

    def check(self, media: Sequence[Medium]) -> None:
        """Refuse too many media, and those that no processor accepts."""
        if len(media) > self.max_media:
            raise InvalidArgument(
                f"'messages' has {len(media)} images and videos, and this model takes {self.max_media} in a request: "
                "send fewer"
            )
        for medium in media:
            height, width = frame_size(medium)
            if not height or not width or (isinstance(medium, PromptVideo) and not len(medium.frames)):
                raise InvalidArgument("'messages' has an image or a video without a single pixel: send another")
            if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
                raise InvalidArgument(
                    f"'messages' has an image or a video of {width} x {height} pixels: one side may be "
                    f"{_MAX_ASPECT_RATIO} times the other at most"
                )

    def pixels_of(self, generation: Generation) -> int:
        """Return the pixel limit of a request, which may lower it by `total_pixels` in its template arguments."""
        wanted = generation.template_arguments.get("total_pixels")
        if wanted is None:
            return self.total_pixels
        if type(wanted) is not int or not 0 < wanted <= self.total_pixels:
            raise InvalidArgument(f"'total_pixels' must be a whole number from 1 to {self.total_pixels}")
        return wanted


def frame_size(medium: Medium) -> tuple[int, int]:
    """Return the height and width of an image or a video frame."""
    pixels = medium.pixels if isinstance(medium, PromptImage) else medium.frames[0] if len(medium.frames) else None
    return (0, 0) if pixels is None else (pixels.shape[0], pixels.shape[1])


def prompt_text(generation: Generation, tokenizer: TokenizerLike) -> str:
    """Return the prompt, with one placeholder per image or video."""
    if generation.messages:
        return tokenizer.apply_chat_template(generation.messages, generation.tools, generation.template_arguments)
    if isinstance(generation.prompt, str):
        return generation.prompt
    raise InvalidArgument("a request with images or videos needs 'messages', or a 'prompt' that is text")


def media_hash(media: Sequence[Medium]) -> bytes:
    """Return a hash of pixels and frame times."""
    combined = hashlib.blake2b(digest_size=16)
    for medium in media:
        pixels = medium.pixels if isinstance(medium, PromptImage) else medium.frames
        seconds = () if isinstance(medium, PromptImage) else (medium.frames_per_second, *medium.seconds)
        combined.update(repr((type(medium).__name__, pixels.shape, seconds)).encode())
        combined.update(np.ascontiguousarray(pixels).data.cast("B"))
    return combined.digest()


def prompt_too_long(tokens: int, max_tokens: int) -> InvalidArgument:
    """Return the error for a prompt that leaves no space for a completion."""
    return InvalidArgument(
        f"'messages' has {tokens} tokens with its images and videos, and this model takes {max_tokens}, one of them for "
        "the answer: send fewer, smaller or shorter ones"
    )


def placeholder_mismatch(kinds: Sequence[str], placeholders: Sequence[str]) -> InvalidArgument:
    """Return the error for a prompt whose placeholders do not match its media."""
    return InvalidArgument(
        f"messages: the prompt has places for {_show_kinds(placeholders)}, and the request has {_show_kinds(kinds)}, in "
        "this order: give each an item, and do not write the model's placeholder tokens into texts"
    )


def _show_kinds(kinds: Sequence[str]) -> str:
    return f"{len(kinds)} ({', '.join(kinds[:8])}{', ...' if len(kinds) > 8 else ''})" if kinds else "nothing"
