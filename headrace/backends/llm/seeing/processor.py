# SPDX-License-Identifier: Apache-2.0
"""Pictures in prompts of any other model, by the processor that its folder names (LLaVA and its like).

Opened by `seeing.opening`. The processor of transformers writes the placeholders and makes the tensors.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from PIL import Image

from headrace.backends.llm.seeing.prepared import (
    Prepared,
    SeeingLimits,
    Text,
    digest_of,
    misplaced,
    prompt_text,
    too_long,
)
from headrace.core.errors import InvalidArgument
from headrace.core.generation import Generation, Picture

log = logging.getLogger("headrace.backends.llm")


class ProcessorEyes:
    """Of one model."""

    def __init__(self, processor: Any, text: Text, limits: SeeingLimits) -> None:
        self._processor = processor
        self._text = text
        self._limits = limits
        self.placeholder: str = processor.image_token

    def prepare(self, generation: Generation, most_tokens: int) -> Prepared:
        """See `Eyes.prepare`."""
        media = generation.media
        self._limits.check(media)
        pictures = [Image.fromarray(medium.pixels) for medium in media if isinstance(medium, Picture)]
        if len(pictures) < len(media):
            raise InvalidArgument(
                "'messages' has a video, and this model sees images only: send single frames as images"
            )
        prompt = prompt_text(generation, self._text)
        places = prompt.count(self.placeholder)
        if places != len(pictures):
            raise misplaced(["image"] * len(pictures), ["image"] * places)
        # Templates that write the first token themselves must not get another.
        first = self._text.hugging_face.bos_token
        adds = not (first is not None and prompt.startswith(first))
        try:
            made = self._processor(text=[prompt], images=pictures, add_special_tokens=adds, return_tensors="pt")
        except Exception:
            log.exception("a processor did not take a request's images")
            raise InvalidArgument(
                "'messages' has an image that this model's processor does not take: send another"
            ) from None
        tokens: list[int] = made["input_ids"][0].tolist()
        if len(tokens) >= most_tokens:
            raise too_long(len(tokens), most_tokens)
        dropped = ("input_ids", "attention_mask")
        arguments = {
            key: value for key, value in made.items() if key not in dropped and isinstance(value, torch.Tensor)
        }
        return Prepared(tokens, arguments, digest_of(media))
