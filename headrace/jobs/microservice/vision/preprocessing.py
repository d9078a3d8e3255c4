# SPDX-License-Identifier: Apache-2.0
"""A picture as the array that a model takes: resized, cropped, scaled, normalised, laid out.

The rules are those that Hugging Face's image processors write into preprocessor_config.json; for other models the size is
the input's own, and the job's specs (`image_size`, `image_mean`, `image_std`, `rescale_factor`, `resize_mode`) say the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.core.errors import InvalidArgument
from headrace.core.generation import Pixels

Mode = Literal["stretch", "edges", "letterbox", "keep"]
Array = npt.NDArray[Any]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GREY = 114
_BILINEAR = 2
_SMALL_CONVNEXT = 384
_MOST_EDGE = 8192


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The input of a model that takes pictures."""

    name: str
    height: int
    """-1 for any."""
    width: int
    channels_first: bool = True
    whole_numbers: bool = False
    """Whether it takes UINT8, which is then neither scaled nor normalised."""
    explicit_batch: bool = False
    """Whether a batch dimension of 1 is part of its shape, since the model does not batch."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a picture is prepared."""

    mode: Mode = "stretch"
    height: int = 224
    width: int = 224
    """For `edges`: `height` is what the shorter edge becomes, `width` the most that the longer one may; 0 for any."""
    crop: tuple[int, int] | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    resample: int = _BILINEAR


@dataclass(frozen=True, slots=True)
class Placed:
    """A prepared picture, and how to find a place of it in the original."""

    array: Array
    """Without a batch dimension."""
    scale: tuple[float, float]
    """Prepared pixels for one pixel of the original, across and down."""
    offset: tuple[float, float]
    size: tuple[int, int]
    """Height and width of what the model sees."""
    original: tuple[int, int]


def preprocessing_of(
    told: Mapping[str, Any], specs: Mapping[str, Any], target: ImageInput, *, detects: bool
) -> Preprocessing:
    """From a preprocessor_config.json (empty where there is none), the job's specs, and the input itself."""
    made = _from_processor(told) if told else _from_input(target, detects=detects)
    edge = specs.get("image_size")
    if edge is not None:
        height, width = _pair("image_size", edge)
        made = replace(
            made, mode="stretch" if made.mode == "edges" else made.mode, height=height, width=width, crop=None
        )
    if mode := specs.get("resize_mode"):
        if mode not in ("stretch", "letterbox"):
            raise InvalidArgument(f"resize_mode is {str(mode)[:32]!a}: use stretch or letterbox")
        made = replace(made, mode=mode)
    if (mean := specs.get("image_mean")) is not None:
        made = replace(made, mean=_three("image_mean", mean))
    if (std := specs.get("image_std")) is not None:
        made = replace(made, std=_three("image_std", std))
    if (factor := specs.get("rescale_factor")) is not None:
        made = replace(made, scale=float(factor))
    if target.height > 0 and target.width > 0 and not _gives(made, target):
        # The model takes one size only; what the file says of others cannot be meant for it.
        made = replace(made, mode="letterbox" if made.mode == "letterbox" else "stretch", crop=None)
        made = replace(made, height=target.height, width=target.width)
    return made


def prepare(pixels: Pixels, how: Preprocessing, target: ImageInput) -> Placed:
    """One picture."""
    from PIL import Image

    height, width = pixels.shape[:2]
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    new_height, new_width = _resized(height, width, how)
    if (new_height, new_width) != (height, width):
        picture = picture.resize((new_width, new_height), Image.Resampling(how.resample))
    array: Array = np.asarray(picture)
    offset = (0.0, 0.0)
    if how.mode == "letterbox":
        array, offset = _boxed(array, how.height, how.width)
    if how.crop is not None:
        array, offset = _cropped(array, *how.crop)
    if not target.whole_numbers:
        array = array.astype(np.float32) * np.float32(how.scale)
        array = (array - np.asarray(how.mean, np.float32)) / np.asarray(how.std, np.float32)
    if target.channels_first:
        array = array.transpose(2, 0, 1)
    seen = array.shape[1:] if target.channels_first else array.shape[:2]
    scale = (new_width / width, new_height / height)
    return Placed(np.ascontiguousarray(array), scale, offset, (int(seen[0]), int(seen[1])), (height, width))


def _from_input(target: ImageInput, *, detects: bool) -> Preprocessing:
    height = target.height if target.height > 0 else 640 if detects else 224
    width = target.width if target.width > 0 else 640 if detects else 224
    if detects:
        return Preprocessing("letterbox", height, width)
    return Preprocessing("stretch", height, width, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _from_processor(told: Mapping[str, Any]) -> Preprocessing:
    mode, height, width = _size(told)
    crop = None
    if told.get("do_center_crop") and told.get("crop_size") is not None:
        crop = _pair("crop_size", told["crop_size"])
    share = told.get("crop_pct")
    if mode == "edges" and isinstance(share, int | float) and share > 0 and not told.get("do_center_crop"):
        # As ConvNeXt has it: small pictures are made larger and cropped, large ones stretched.
        if height < _SMALL_CONVNEXT:
            crop, height = (height, height), int(height / share)
        else:
            mode, width = "stretch", height
    normalises = told.get("do_normalize", True)
    return Preprocessing(
        mode if told.get("do_resize", True) else "keep",
        height,
        width,
        crop,
        float(told.get("rescale_factor", 1 / 255)) if told.get("do_rescale", True) else 1.0,
        _three("image_mean", told.get("image_mean") or IMAGENET_MEAN) if normalises else (0.0, 0.0, 0.0),
        _three("image_std", told.get("image_std") or IMAGENET_STD) if normalises else (1.0, 1.0, 1.0),
        int(told.get("resample", _BILINEAR) or 0),
    )


def _size(told: Mapping[str, Any]) -> tuple[Mode, int, int]:
    size = told.get("size", 224)
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return "edges", _edge("size", size["shortest_edge"]), int(size.get("longest_edge") or 0)
    if isinstance(size, int) and told.get("do_center_crop"):
        return "edges", _edge("size", size), 0
    return ("stretch", *_pair("size", size))


def _resized(height: int, width: int, how: Preprocessing) -> tuple[int, int]:
    if how.mode == "keep":
        return height, width
    if how.mode == "stretch":
        return how.height, how.width
    if how.mode == "letterbox":
        ratio = min(how.height / height, how.width / width)
        return max(1, round(height * ratio)), max(1, round(width * ratio))
    shorter, longer = sorted((height, width))
    raw: float = how.height
    if how.width and longer / shorter * raw > how.width:
        raw = how.width * shorter / longer
    edge, other = round(raw), int(raw * longer / shorter)
    new = (edge, other) if height <= width else (other, edge)
    return max(1, min(new[0], _MOST_EDGE)), max(1, min(new[1], _MOST_EDGE))


def _boxed(array: Array, height: int, width: int) -> tuple[Array, tuple[float, float]]:
    top, left = (height - array.shape[0]) // 2, (width - array.shape[1]) // 2
    made = np.full((height, width, array.shape[2]), _GREY, array.dtype)
    made[top : top + array.shape[0], left : left + array.shape[1]] = array
    return made, (float(left), float(top))


def _cropped(array: Array, height: int, width: int) -> tuple[Array, tuple[float, float]]:
    # A picture smaller than the crop gets a black frame, as Hugging Face's does.
    grow_y, grow_x = max(0, height - array.shape[0]), max(0, width - array.shape[1])
    if grow_y or grow_x:
        before = (grow_y + 1) // 2, (grow_x + 1) // 2
        array = np.pad(array, ((before[0], grow_y - before[0]), (before[1], grow_x - before[1]), (0, 0)))
    top, left = (array.shape[0] - height) // 2, (array.shape[1] - width) // 2
    cropped = array[top : top + height, left : left + width]
    return cropped, (float((grow_x + 1) // 2 - left), float((grow_y + 1) // 2 - top))


def _gives(made: Preprocessing, target: ImageInput) -> bool:
    if made.crop is not None:
        return made.crop == (target.height, target.width)
    return made.mode in ("stretch", "letterbox") and (made.height, made.width) == (target.height, target.width)


def _pair(name: str, size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping) and "height" in size and "width" in size:
        return _edge(name, size["height"]), _edge(name, size["width"])
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return _edge(name, size["shortest_edge"]), _edge(name, size["shortest_edge"])
    if isinstance(size, Sequence) and not isinstance(size, str) and len(size) == 2:
        return _edge(name, size[0]), _edge(name, size[1])
    return _edge(name, size), _edge(name, size)


def _edge(name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= _MOST_EDGE:
        raise InvalidArgument(
            f"{name} of the model's pictures is no size from 1 to {_MOST_EDGE}: write 224 or [224, 224]"
        )
    return value


def _three(name: str, values: Any) -> tuple[float, ...]:
    numbers = values if isinstance(values, list | tuple) else [values] * 3
    if len(numbers) not in (1, 3) or not all(isinstance(each, int | float) for each in numbers):
        raise InvalidArgument(f"{name} of the model's pictures is not a number for each of red, green and blue")
    made = tuple(float(each) for each in numbers)
    return made * 3 if len(made) == 1 else made
