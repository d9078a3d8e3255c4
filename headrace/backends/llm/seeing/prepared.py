# SPDX-License-Identifier: Apache-2.0
"""A prompt with pictures in it, before the model has looked at them; and what every way to make one shares.

Made by `seeing.qwen` and `seeing.processor` in any thread, read by `seeing.looking` in the engine's. Knows no device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.backends.parameters import number_of
from headrace.core.errors import InvalidArgument
from headrace.core.generation import Clip, Generation, Picture

Medium = Picture | Clip

_LONGEST_TO_SHORTEST = 200
"""What the processors of the Qwen family refuse; a strip narrower than this shows nothing."""


class Text(Protocol):
    """What is needed of the model's tokenizer."""

    @property
    def hugging_face(self) -> Any:
        """The one of transformers."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Text to tokens."""

    def prompt_of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """Messages to a prompt."""


class Eyes(Protocol):
    """One way to put media into prompts."""

    def prepare(self, generation: Generation, most_tokens: int) -> Prepared:
        """The prompt of a request with media. May take long: not for an event loop, nor for the engine's thread."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt and its pictures."""

    tokens: list[int]
    """With as many placeholders for each picture as it has embeddings."""
    arguments: Mapping[str, Any]
    """Tensors for the model's forward, `input_ids` not among them."""
    digest: bytes
    """Of all media, in their order: prompts share pages only where it is equal."""


@dataclass(frozen=True, slots=True)
class SeeingLimits:
    """How much of it a request may bring."""

    total_pixels: int = 25_690_112
    """After resizing, of all pictures and of every second frame: 32,768 embeddings of 28 x 28. Clips are made smaller to
    fit; what does not fit then is refused."""
    max_media: int = 32

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> SeeingLimits:
        """Read parameters `total_pixels` and `max_media` of a configuration."""
        pixels, media = parameters.get("total_pixels", str(cls().total_pixels)), cls().max_media
        if not (pixels.isascii() and pixels.isdigit() and len(pixels) < 12 and int(pixels)):
            raise InvalidArgument(f"parameter total_pixels is '{pixels[:32]}': use a whole number of 1 or more")
        return cls(int(pixels), number_of(parameters, "max_media", media, 4096))

    def check(self, media: Sequence[Medium]) -> None:
        """Refuse too many, and what no processor can take."""
        if len(media) > self.max_media:
            raise InvalidArgument(
                f"'messages' has {len(media)} images and videos, and this model takes {self.max_media} in a request: "
                "send fewer"
            )
        for medium in media:
            height, width = size_of(medium)
            if not height or not width or (isinstance(medium, Clip) and not len(medium.frames)):
                raise InvalidArgument("'messages' has an image or a video without a single pixel: send another")
            if max(height, width) > _LONGEST_TO_SHORTEST * min(height, width):
                raise InvalidArgument(
                    f"'messages' has an image or a video of {width} x {height} pixels: one side may be "
                    f"{_LONGEST_TO_SHORTEST} times the other at most"
                )

    def pixels_of(self, generation: Generation) -> int:
        """The limit of one request, which may set a lower one as `total_pixels` beside the template's arguments."""
        asked = generation.template_arguments.get("total_pixels")
        if asked is None:
            return self.total_pixels
        if type(asked) is not int or not 0 < asked <= self.total_pixels:
            raise InvalidArgument(f"'total_pixels' must be a whole number from 1 to {self.total_pixels}")
        return asked


def size_of(medium: Medium) -> tuple[int, int]:
    """Height and width."""
    pixels = medium.pixels if isinstance(medium, Picture) else medium.frames[0] if len(medium.frames) else None
    return (0, 0) if pixels is None else (pixels.shape[0], pixels.shape[1])


def prompt_text(generation: Generation, text: Text) -> str:
    """The prompt, with one placeholder for each picture."""
    if generation.messages:
        return text.prompt_of(generation.messages, generation.tools, generation.template_arguments)
    if isinstance(generation.prompt, str):
        return generation.prompt
    raise InvalidArgument("a request with images or videos needs 'messages', or a 'prompt' that is text")


def digest_of(media: Sequence[Medium]) -> bytes:
    """The same for the same pixels and times."""
    found = hashlib.blake2b(digest_size=16)
    for medium in media:
        pixels = medium.pixels if isinstance(medium, Picture) else medium.frames
        seconds = () if isinstance(medium, Picture) else (medium.frames_per_second, *medium.seconds)
        found.update(repr((type(medium).__name__, pixels.shape, seconds)).encode())
        found.update(np.ascontiguousarray(pixels).data.cast("B"))
    return found.digest()


def too_long(tokens: int, most_tokens: int) -> InvalidArgument:
    """For a prompt that leaves no room for an answer."""
    return InvalidArgument(
        f"'messages' has {tokens} tokens with its images and videos, and this model takes {most_tokens}, one of them for "
        "the answer: send fewer, smaller or shorter ones"
    )


def misplaced(kinds: Sequence[str], places: Sequence[str]) -> InvalidArgument:
    """For a prompt whose placeholders are not those of its media."""
    return InvalidArgument(
        f"messages: the prompt has places for {_counted(places)}, and the request has {_counted(kinds)}, in this order: "
        "give each an item, and do not write the model's placeholder tokens into texts"
    )


def _counted(kinds: Sequence[str]) -> str:
    return f"{len(kinds)} ({', '.join(kinds[:8])}{', ...' if len(kinds) > 8 else ''})" if kinds else "nothing"
