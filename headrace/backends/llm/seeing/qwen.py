# SPDX-License-Identifier: Apache-2.0
"""Media in prompts of the Qwen family (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and what is trained from them, as Cosmos-Reason).

Opened by `seeing.opening`. The template writes one placeholder for each picture or clip; here it becomes as many as the
model has embeddings for it, counted from the sizes before a pixel is touched. Pictures go through the folder's own image
processor, clips through `seeing.patches`. In Qwen3-VL a clip is a text with times, and a picture after each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from headrace.backends.llm.seeing.patches import Patching, read_patching
from headrace.backends.llm.seeing.prepared import (
    Medium,
    Prepared,
    SeeingLimits,
    Text,
    digest_of,
    misplaced,
    prompt_text,
    size_of,
    too_long,
)
from headrace.core.errors import InvalidArgument
from headrace.core.generation import Clip, Generation, Picture

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")

_TEXT, _IMAGE, _VIDEO = range(3)


class QwenEyes:
    """Of one model."""

    def __init__(self, folder: Path, config: Any, images: Any, text: Text, limits: SeeingLimits) -> None:
        self._images = images
        self._text = text
        self._limits = limits
        self._says_times = config.model_type.startswith("qwen3")
        self._says_pace = config.model_type == "qwen2_5_vl"
        self._patching: Patching = read_patching(folder, images, whole=self._says_times)
        self._image, self._video = config.image_token_id, config.video_token_id
        self._start, self._end = config.vision_start_token_id, config.vision_end_token_id

    def prepare(self, generation: Generation, most_tokens: int) -> Prepared:
        """See `Eyes.prepare`."""
        media = generation.media
        self._limits.check(media)
        total_pixels = self._limits.pixels_of(generation)
        ids = self._text.encode(prompt_text(generation, self._text), generation.messages == ())
        self._check_places(ids, media)
        grids = [self._grid(medium, total_pixels) for medium in media]
        merged = self._patching.merge**2
        used = sum(math.prod(grid) // merged for grid in grids) * self._patching.factor**2
        if used > total_pixels:
            raise InvalidArgument(
                f"'messages' has images and videos of {used} pixels after resizing, and this model takes 'total_pixels' of "
                f"{total_pixels} in a request: send fewer or smaller ones"
            )
        tokens, kinds = self._expanded(ids, media, grids)
        if len(tokens) >= most_tokens:
            raise too_long(len(tokens), most_tokens)
        arguments = {"mm_token_type_ids": torch.tensor([kinds], dtype=torch.int), **self._pixels(media, grids)}
        return Prepared(tokens, arguments, digest_of(media))

    def _check_places(self, ids: Sequence[int], media: Sequence[Medium]) -> None:
        names = {self._image: "image", self._video: "video"}
        places = [names[token] for token in ids if token in names]
        kinds = ["image" if isinstance(medium, Picture) else "video" for medium in media]
        if places != kinds:
            raise misplaced(kinds, places)

    def _grid(self, medium: Medium, total_pixels: int) -> tuple[int, int, int]:
        height, width = size_of(medium)
        if isinstance(medium, Clip):
            return self._patching.grid(len(medium.frames), height, width, total_pixels)
        # The sides are found again when the processor has run; their product is all that is needed before.
        return 1, 1, self._images.get_number_of_image_patches(height, width, {})

    def _expanded(
        self, ids: Sequence[int], media: Sequence[Medium], grids: Sequence[tuple[int, int, int]]
    ) -> tuple[list[int], list[int]]:
        """Tokens, and of each whether it is text, an image's or a video's."""
        tokens: list[int] = []
        kinds: list[int] = []
        left = iter(zip(media, grids, strict=True))
        skip = False
        for place, token in enumerate(ids):
            if skip:
                skip = False
                continue
            if token not in (self._image, self._video):
                tokens.append(token)
                kinds.append(_TEXT)
                continue
            medium, grid = next(left)
            if isinstance(medium, Clip) and self._says_times:
                # The times stand outside of the marks around each picture, so those around the whole go.
                if tokens[-1:] == [self._start] and ids[place + 1 : place + 2] == [self._end]:
                    tokens.pop()
                    kinds.pop()
                    skip = True
                self._add_timed(tokens, kinds, medium, grid)
            else:
                count = math.prod(grid) // self._patching.merge**2
                tokens += [token] * count
                kinds += [_IMAGE if token == self._image else _VIDEO] * count
        return tokens, kinds

    def _add_timed(self, tokens: list[int], kinds: list[int], clip: Clip, grid: tuple[int, int, int]) -> None:
        frames, count = self._patching.frames, grid[1] * grid[2] // self._patching.merge**2
        for time in range(grid[0]):
            first = clip.seconds[min(time * frames, len(clip.frames) - 1)]
            last = clip.seconds[min((time + 1) * frames, len(clip.frames)) - 1]
            said = self._text.encode(f"<{(first + last) / 2:.1f} seconds>", False)
            tokens += [*said, self._start, *([self._video] * count), self._end]
            kinds += [*([_TEXT] * (len(said) + 1)), *([_VIDEO] * count), _TEXT]

    def _pixels(self, media: Sequence[Medium], grids: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        pictures = [Image.fromarray(medium.pixels) for medium in media if isinstance(medium, Picture)]
        if pictures:
            made = self._images(images=pictures, return_tensors="pt")
            found.update(pixel_values=made["pixel_values"], image_grid_thw=made["image_grid_thw"])
        clips = [(medium, grid) for medium, grid in zip(media, grids, strict=True) if isinstance(medium, Clip)]
        if clips:
            found["pixel_values_videos"] = torch.cat([self._patching.cut(clip, grid) for clip, grid in clips])
            found["video_grid_thw"] = torch.tensor([grid for _, grid in clips])
            if self._says_pace:
                paces = [clip.frames_per_second if clip.frames_per_second > 0 else 1.0 for clip, _ in clips]
                found["second_per_grid_ts"] = torch.tensor([self._patching.frames / pace for pace in paces])
        return found
