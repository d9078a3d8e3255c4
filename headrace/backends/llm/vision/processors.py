# SPDX-License-Identifier: Apache-2.0
"""Multimodal processors: put the images and videos of a request into its prompt, and create the image encoder's inputs.

`open_processor` chooses the one for a model: `QwenProcessor` or, for other families, the transformers processor that the
model folder names.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from headrace.backends.llm.vision.inputs import (
    MediaLimits,
    Medium,
    MultimodalProcessor,
    MultimodalPrompt,
    TokenizerLike,
    frame_size,
    media_hash,
    placeholder_mismatch,
    prompt_text,
    prompt_too_long,
)
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import Generation, PromptImage, PromptVideo

log = logging.getLogger("headrace.backends.llm")
QWEN_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_TEXT, _IMAGE, _VIDEO = range(3)
_VIDEO_CONFIG_FILES = (
    # Where transformers looks, in its order: file, and the member of it.
    ("video_preprocessor_config.json", ""),
    ("processor_config.json", "video_processor"),
    ("preprocessor_config.json", ""),
    ("processor_config.json", "image_processor"),
)
_MAX_CONFIG_BYTES = 16 << 20


def has_vision(config: Any) -> bool:
    """Return whether a transformers configuration has a vision part."""
    return getattr(config, "vision_config", None) is not None


def open_processor(
    folder: Path,
    config: Any,
    tokenizer: TokenizerLike,
    parameters: Mapping[str, str],
    *,
    trust_remote_code: bool = False,
) -> MultimodalProcessor | None:
    """Return the multimodal processor of a model, or None if it is text-only. Reads the folder's processor files."""
    if not has_vision(config):
        return None
    from transformers import AutoImageProcessor, AutoProcessor

    limits = MediaLimits.of(parameters)
    is_qwen = config.model_type in QWEN_MODEL_TYPES
    loader = AutoImageProcessor if is_qwen else AutoProcessor
    try:
        processor = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception:
        log.exception("The image processor in %s could not be read.", folder)
        raise FailedPrecondition(
            f"the image processor in '{folder.name}' could not be read: copy the whole model folder with "
            "preprocessor_config.json; the server's log has the details"
        ) from None
    if is_qwen:
        return QwenProcessor(folder, config, processor, tokenizer, limits)
    if getattr(processor, "image_token", None) is None:
        raise FailedPrecondition(
            f"the processor in '{folder.name}' names no image token: serve it with another engine through backend "
            "'openai_proxy'"
        )
    return HuggingFaceProcessor(processor, tokenizer, limits)


class HuggingFaceProcessor:
    """The transformers processor of any model family but Qwen, LLaVA for example. Images only.

    The processor writes the placeholders and creates the tensors.
    """

    def __init__(self, processor: Any, tokenizer: TokenizerLike, limits: MediaLimits) -> None:
        self._processor = processor
        self._tokenizer = tokenizer
        self._limits = limits
        self.placeholder: str = processor.image_token

    def prepare(self, generation: Generation, max_tokens: int) -> MultimodalPrompt:
        """Implement `MultimodalProcessor.prepare`."""
        media = generation.media
        self._limits.check(media)
        images = [Image.fromarray(medium.pixels) for medium in media if isinstance(medium, PromptImage)]
        if len(images) < len(media):
            raise InvalidArgument(
                "'messages' has a video, and this model sees images only: send single frames as images"
            )
        prompt = prompt_text(generation, self._tokenizer)
        placeholders = prompt.count(self.placeholder)
        if placeholders != len(images):
            raise placeholder_mismatch(["image"] * len(images), ["image"] * placeholders)
        # A template that writes the BOS token must not get another.
        bos = self._tokenizer.hugging_face.bos_token
        add_special = not (bos is not None and prompt.startswith(bos))
        try:
            inputs = self._processor(text=[prompt], images=images, add_special_tokens=add_special, return_tensors="pt")
        except Exception:
            log.exception("The image processor refused the images of a request.")
            raise InvalidArgument(
                "'messages' has an image that this model's processor does not take: send another"
            ) from None
        tokens: list[int] = inputs["input_ids"][0].tolist()
        if len(tokens) >= max_tokens:
            raise prompt_too_long(len(tokens), max_tokens)
        unused = ("input_ids", "attention_mask")
        arguments = {
            key: value for key, value in inputs.items() if key not in unused and isinstance(value, torch.Tensor)
        }
        return MultimodalPrompt(tokens, arguments, media_hash(media))


class QwenProcessor:
    """The processor of the Qwen family: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and models trained from them, as Cosmos-Reason.

    The chat template writes one placeholder per image or video; it is expanded to one per embedding, counted from the sizes
    before a pixel is touched. Images go through the folder's image processor, videos through `PatchConfig`. In Qwen3-VL a
    video is text with times, and an image after each.
    """

    def __init__(
        self, folder: Path, config: Any, image_processor: Any, tokenizer: TokenizerLike, limits: MediaLimits
    ) -> None:
        self._image_processor = image_processor
        self._tokenizer = tokenizer
        self._limits = limits
        self._has_timestamps = config.model_type.startswith("qwen3")
        self._has_frame_rate = config.model_type == "qwen2_5_vl"
        self._patches: PatchConfig = read_patch_config(folder, image_processor, whole_video=self._has_timestamps)
        self._image, self._video = config.image_token_id, config.video_token_id
        self._start, self._end = config.vision_start_token_id, config.vision_end_token_id

    def prepare(self, generation: Generation, max_tokens: int) -> MultimodalPrompt:
        """Implement `MultimodalProcessor.prepare`."""
        media = generation.media
        self._limits.check(media)
        total_pixels = self._limits.pixels_of(generation)
        ids = self._tokenizer.encode(prompt_text(generation, self._tokenizer), generation.messages == ())
        self._check_placeholders(ids, media)
        grids = [self._grid(medium, total_pixels) for medium in media]
        merged = self._patches.merge**2
        used = sum(math.prod(grid) // merged for grid in grids) * self._patches.factor**2
        if used > total_pixels:
            raise InvalidArgument(
                f"'messages' has images and videos of {used} pixels after resizing, and this model takes 'total_pixels' of "
                f"{total_pixels} in a request: send fewer or smaller ones"
            )
        tokens, kinds = self._expand(ids, media, grids)
        if len(tokens) >= max_tokens:
            raise prompt_too_long(len(tokens), max_tokens)
        arguments = {"mm_token_type_ids": torch.tensor([kinds], dtype=torch.int), **self._pixels(media, grids)}
        return MultimodalPrompt(tokens, arguments, media_hash(media))

    def _check_placeholders(self, ids: Sequence[int], media: Sequence[Medium]) -> None:
        names = {self._image: "image", self._video: "video"}
        placeholders = [names[token] for token in ids if token in names]
        kinds = ["image" if isinstance(medium, PromptImage) else "video" for medium in media]
        if placeholders != kinds:
            raise placeholder_mismatch(kinds, placeholders)

    def _grid(self, medium: Medium, total_pixels: int) -> tuple[int, int, int]:
        height, width = frame_size(medium)
        if isinstance(medium, PromptVideo):
            return self._patches.grid(len(medium.frames), height, width, total_pixels)
        # Only the number of patches is needed before the processor runs; it computes the sides.
        return 1, 1, self._image_processor.get_number_of_image_patches(height, width, {})

    def _expand(
        self, ids: Sequence[int], media: Sequence[Medium], grids: Sequence[tuple[int, int, int]]
    ) -> tuple[list[int], list[int]]:
        """Return the tokens, and for each whether it is text, image or video."""
        tokens: list[int] = []
        kinds: list[int] = []
        remaining = iter(zip(media, grids, strict=True))
        skip = False
        for index, token in enumerate(ids):
            if skip:
                skip = False
                continue
            if token not in (self._image, self._video):
                tokens.append(token)
                kinds.append(_TEXT)
                continue
            medium, grid = next(remaining)
            if isinstance(medium, PromptVideo) and self._has_timestamps:
                # The times are outside of the start and end tokens of each image, so those around the video go.
                if tokens[-1:] == [self._start] and ids[index + 1 : index + 2] == [self._end]:
                    tokens.pop()
                    kinds.pop()
                    skip = True
                self._add_timed_frames(tokens, kinds, medium, grid)
            else:
                count = math.prod(grid) // self._patches.merge**2
                tokens += [token] * count
                kinds += [_IMAGE if token == self._image else _VIDEO] * count
        return tokens, kinds

    def _add_timed_frames(
        self, tokens: list[int], kinds: list[int], video: PromptVideo, grid: tuple[int, int, int]
    ) -> None:
        frames, count = self._patches.frames, grid[1] * grid[2] // self._patches.merge**2
        for time in range(grid[0]):
            first = video.seconds[min(time * frames, len(video.frames) - 1)]
            last = video.seconds[min((time + 1) * frames, len(video.frames)) - 1]
            text = self._tokenizer.encode(f"<{(first + last) / 2:.1f} seconds>", False)
            tokens += [*text, self._start, *([self._video] * count), self._end]
            kinds += [*([_TEXT] * (len(text) + 1)), *([_VIDEO] * count), _TEXT]

    def _pixels(self, media: Sequence[Medium], grids: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        images = [Image.fromarray(medium.pixels) for medium in media if isinstance(medium, PromptImage)]
        if images:
            inputs = self._image_processor(images=images, return_tensors="pt")
            tensors.update(pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"])
        videos = [(medium, grid) for medium, grid in zip(media, grids, strict=True) if isinstance(medium, PromptVideo)]
        if videos:
            tensors["pixel_values_videos"] = torch.cat([self._patches.patchify(video, grid) for video, grid in videos])
            tensors["video_grid_thw"] = torch.tensor([grid for _, grid in videos])
            if self._has_frame_rate:
                rates = [video.frames_per_second if video.frames_per_second > 0 else 1.0 for video, _ in videos]
                tensors["second_per_grid_ts"] = torch.tensor([self._patches.frames / rate for rate in rates])
        return tensors


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """How a video is cut into patches, as the Qwen family reads them.

    transformers' video processors need torchvision; this needs PyTorch only. A patch is a square of two consecutive frames.
    Patches of one embedding are next to each other.
    """

    patch: int
    merge: int
    frames: int
    """Frames per patch."""
    min_pixels: int
    max_pixels: int
    """Per frame; per video if `whole_video`."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    rescale: float
    whole_video: bool

    @property
    def factor(self) -> int:
        """The side, in pixels, of the square of one embedding."""
        return self.patch * self.merge

    def grid(self, count: int, height: int, width: int, total_pixels: int) -> tuple[int, int, int]:
        """Return the patches in time, height and width of a video with at most `total_pixels` in every second frame."""
        count = max(count, self.frames)
        if self.whole_video:
            if height < self.factor or width < self.factor:
                larger = max(self.factor / height, self.factor / width)
                height, width = int(height * larger), int(width * larger)
            least, most = self.min_pixels / count, min(self.max_pixels, total_pixels * self.frames) / count
        else:
            # More frames make each frame smaller, down to a useful size.
            share = max(total_pixels * self.frames // count, int(self.min_pixels * 1.05))
            least, most = self.min_pixels, min(self.max_pixels, share)
        # With `whole_video`, time is rounded as the sides are.
        weight = round(count / self.frames) * self.frames / count if self.whole_video else 1.0
        rows, columns = _fit_size(height, width, self.factor, least, most, weight)
        return -(-count // self.frames), rows // self.patch, columns // self.patch

    def patchify(self, video: PromptVideo, grid: tuple[int, int, int]) -> Any:
        """Return `[patches, values of a patch]`; two frames at a time, to save memory."""
        times, rows, columns = grid
        size = (rows * self.patch, columns * self.patch)
        parts = []
        for time in range(times):
            chosen = [min(time * self.frames + offset, len(video.frames) - 1) for offset in range(self.frames)]
            frames = torch.from_numpy(video.frames[chosen]).permute(0, 3, 1, 2)
            parts.append(self._cut(self._normalize(_resize(frames, size)), rows, columns))
        return torch.cat(parts)

    def _normalize(self, frames: Any) -> Any:
        mean, deviation = torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.deviation).view(-1, 1, 1)
        return (frames.float() * self.rescale - mean) / deviation

    def _cut(self, frames: Any, rows: int, columns: int) -> Any:
        count, channels = frames.shape[:2]
        merge, patch = self.merge, self.patch
        patches = frames.reshape(count, channels, rows // merge, merge, patch, columns // merge, merge, patch)
        # To: row and column of the embedding, row and column inside it, channel, frame, pixel.
        return patches.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, channels * count * patch * patch)


def read_patch_config(folder: Path, image_processor: Any, *, whole_video: bool) -> PatchConfig:
    """Read the folder's video configuration; defaults come from its image processor."""
    config = _read_video_config(folder)
    size = config.get("size")
    sizes = size if isinstance(size, Mapping) else {}
    patch = _number(config, "patch_size", image_processor.patch_size)
    default_pixels = (patch * 2) ** 2
    return PatchConfig(
        patch,
        _number(config, "merge_size", image_processor.merge_size),
        _number(config, "temporal_patch_size", image_processor.temporal_patch_size),
        _number(config, "min_pixels", _number(sizes, "shortest_edge", 128 * default_pixels)),
        _number(config, "max_pixels", _number(sizes, "longest_edge", 768 * default_pixels)),
        _triple(config, "image_mean", image_processor.image_mean),
        _triple(config, "image_std", image_processor.image_std),
        float(image_processor.rescale_factor),
        whole_video,
    )


def _read_video_config(folder: Path) -> Mapping[str, Any]:
    for name, part in _VIDEO_CONFIG_FILES:
        path = folder / name
        if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
            continue
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            raise FailedPrecondition(f"'{folder.name}/{name}' is not JSON: copy or save the model again") from None
        section = content.get(part) if part and isinstance(content, dict) else content
        if isinstance(section, dict):
            return section
    return {}


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return int(default)
    if type(value) is not int or not 0 < value < 1 << 40:
        raise FailedPrecondition(f"the model's configuration of videos has {key} that is not a number: copy it again")
    return value


def _triple(config: Mapping[str, Any], key: str, default: Any) -> tuple[float, ...]:
    value = config.get(key, default)
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise FailedPrecondition(
            f"the model's configuration of videos has {key} that is not three numbers: copy it again"
        )
    return tuple(float(channel) for channel in value)


def _fit_size(height: int, width: int, factor: int, least: float, most: float, weight: float) -> tuple[int, int]:
    """Return the size nearest to a frame's whose sides are multiples of `factor` and that has `least` to `most` pixels."""
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns * weight > most:
        scale = math.sqrt(height * width / most)
        return max(factor, int(height / scale / factor) * factor), max(factor, int(width / scale / factor) * factor)
    if rows * columns * weight < least or not rows or not columns:
        scale = math.sqrt(least / (height * width))
        return max(1, math.ceil(height * scale / factor)) * factor, max(1, math.ceil(width * scale / factor)) * factor
    return rows, columns


def _resize(frames: Any, size: tuple[int, int]) -> Any:
    if tuple(frames.shape[-2:]) == size:
        return frames
    resized = torch.nn.functional.interpolate(
        frames.float(), size=size, mode="bicubic", antialias=True, align_corners=False
    )
    # As in an image: integers from 0 to 255.
    return resized.round_().clamp_(0, 255)
