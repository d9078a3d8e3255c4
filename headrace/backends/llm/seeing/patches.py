# SPDX-License-Identifier: Apache-2.0
"""A clip to the patches that models of the Qwen family read. Called by `seeing.qwen`.

transformers has this in its video processors, which need torchvision; here PyTorch is enough. A patch is a square of two
frames that follow each other. Patches that become one embedding lie beside each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import FailedPrecondition
from headrace.core.generation import Clip

_FILES = (
    # Where transformers looks, in its order; the second is what to take of the file.
    ("video_preprocessor_config.json", ""),
    ("processor_config.json", "video_processor"),
    ("preprocessor_config.json", ""),
    ("processor_config.json", "image_processor"),
)
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Patching:
    """How a clip is cut up."""

    patch: int
    merge: int
    frames: int
    """In a patch."""
    least_pixels: int
    most_pixels: int
    """Of a frame; of the whole clip where `whole` is set."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    rescale: float
    whole: bool

    @property
    def factor(self) -> int:
        """The side of the square that becomes one embedding."""
        return self.patch * self.merge

    def grid(self, count: int, height: int, width: int, total_pixels: int) -> tuple[int, int, int]:
        """Patches in time, height and width, of a clip that may have so many pixels in all (in every second frame)."""
        count = max(count, self.frames)
        if self.whole:
            if height < self.factor or width < self.factor:
                larger = max(self.factor / height, self.factor / width)
                height, width = int(height * larger), int(width * larger)
            least, most = self.least_pixels / count, min(self.most_pixels, total_pixels * self.frames) / count
        else:
            # Clips of many frames get smaller ones, down to a size that still shows something.
            share = max(total_pixels * self.frames // count, int(self.least_pixels * 1.05))
            least, most = self.least_pixels, min(self.most_pixels, share)
        # Time is rounded as the sides are where it counts with them.
        weight = round(count / self.frames) * self.frames / count if self.whole else 1.0
        rows, columns = _fitted(height, width, self.factor, least, most, weight)
        return -(-count // self.frames), rows // self.patch, columns // self.patch

    def cut(self, clip: Clip, grid: tuple[int, int, int]) -> Any:
        """`[patches, values of a patch]`, frame by frame so that memory is taken for two at a time."""
        times, rows, columns = grid
        size = (rows * self.patch, columns * self.patch)
        parts = []
        for time in range(times):
            taken = [min(time * self.frames + place, len(clip.frames) - 1) for place in range(self.frames)]
            frames = torch.from_numpy(clip.frames[taken]).permute(0, 3, 1, 2)
            parts.append(self._patches(self._normal(_resized(frames, size)), rows, columns))
        return torch.cat(parts)

    def _normal(self, frames: Any) -> Any:
        mean, deviation = torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.deviation).view(-1, 1, 1)
        return (frames.float() * self.rescale - mean) / deviation

    def _patches(self, frames: Any, rows: int, columns: int) -> Any:
        count, channels = frames.shape[:2]
        merge, patch = self.merge, self.patch
        cut = frames.reshape(count, channels, rows // merge, merge, patch, columns // merge, merge, patch)
        # To: row and column of the embedding, row and column inside it, channel, frame, pixel.
        return cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, channels * count * patch * patch)


def read_patching(folder: Path, images: Any, *, whole: bool) -> Patching:
    """What the folder says about videos, and where it says nothing, what its processor of images does."""
    told = _told(folder)
    size = told.get("size")
    sizes = size if isinstance(size, Mapping) else {}
    patch = _number(told, "patch_size", images.patch_size)
    usual = (patch * 2) ** 2
    return Patching(
        patch,
        _number(told, "merge_size", images.merge_size),
        _number(told, "temporal_patch_size", images.temporal_patch_size),
        _number(told, "min_pixels", _number(sizes, "shortest_edge", 128 * usual)),
        _number(told, "max_pixels", _number(sizes, "longest_edge", 768 * usual)),
        _triple(told, "image_mean", images.image_mean),
        _triple(told, "image_std", images.image_std),
        float(images.rescale_factor),
        whole,
    )


def _told(folder: Path) -> Mapping[str, Any]:
    for name, part in _FILES:
        path = folder / name
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            continue
        try:
            told = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            raise FailedPrecondition(f"'{folder.name}/{name}' is not JSON: copy or save the model again") from None
        found = told.get(part) if part and isinstance(told, dict) else told
        if isinstance(found, dict):
            return found
    return {}


def _number(told: Mapping[str, Any], key: str, default: int) -> int:
    value = told.get(key)
    if value is None:
        return int(default)
    if type(value) is not int or not 0 < value < 1 << 40:
        raise FailedPrecondition(f"the model's configuration of videos has {key} that is no number: copy it again")
    return value


def _triple(told: Mapping[str, Any], key: str, default: Any) -> tuple[float, ...]:
    value = told.get(key, default)
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise FailedPrecondition(
            f"the model's configuration of videos has {key} that is not three numbers: copy it again"
        )
    return tuple(float(each) for each in value)


def _fitted(height: int, width: int, factor: int, least: float, most: float, weight: float) -> tuple[int, int]:
    """The size nearest to a frame's own whose sides are multiples of `factor`, between two numbers of pixels."""
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns * weight > most:
        scale = math.sqrt(height * width / most)
        return max(factor, int(height / scale / factor) * factor), max(factor, int(width / scale / factor) * factor)
    if rows * columns * weight < least or not rows or not columns:
        scale = math.sqrt(least / (height * width))
        return max(1, math.ceil(height * scale / factor)) * factor, max(1, math.ceil(width * scale / factor)) * factor
    return rows, columns


def _resized(frames: Any, size: tuple[int, int]) -> Any:
    if tuple(frames.shape[-2:]) == size:
        return frames
    made = torch.nn.functional.interpolate(
        frames.float(), size=size, mode="bicubic", antialias=True, align_corners=False
    )
    # As pictures: whole numbers of 0 to 255.
    return made.round_().clamp_(0, 255)
