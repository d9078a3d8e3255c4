# SPDX-License-Identifier: Apache-2.0
"""A model that takes pictures, as `classifier` and `detector` use it: URLs in, its outputs for each picture out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.dtypes import FP16, FP32, UINT8
from headrace.core.errors import InvalidArgument
from headrace.core.generation import Picture
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.kinds.computing import compute_all
from headrace.jobs.microservice.kinds.contract import MediaItem
from headrace.jobs.microservice.kinds.gathering import Reader, gather
from headrace.jobs.microservice.kinds.parameters import Parameter, ignored
from headrace.jobs.microservice.profiles import MediaRules
from headrace.jobs.microservice.vision.preprocessing import Array, ImageInput, Placed, Preprocessing, prepare
from headrace.models.config.types import ModelConfig
from headrace.models.storage.locations import public_text

IMAGES = Parameter("images", "texts", also=("image", "media", "files"))
BATCH_SIZE = Parameter("batch_size", "integer", 1, least=1, most=256)
ACCEPTED = ignored("conv_mode", "mode", "model")

_COLOURS = 3


@dataclass(frozen=True, slots=True)
class PictureModel:
    """Where it is, what it takes, and how pictures are prepared for it."""

    plane: DataPlane
    model: str
    max_batch_size: int
    target: ImageInput
    preprocessing: Preprocessing
    labels: Mapping[int, str]
    reader: Reader
    rules: MediaRules

    def label(self, index: int) -> str:
        """The word for a class, or its number."""
        return self.labels.get(index, str(index))

    async def look(self, urls: Sequence[str] | None, batch_size: int) -> list[tuple[Placed, Mapping[str, Array]]]:
        """Each picture and what the model says of it."""
        if not urls:
            raise InvalidArgument("'images' is required: give a URL, or a list of URLs")
        items = [MediaItem(url, "image", f"images[{index}]") for index, url in enumerate(urls)]
        found = await gather(self.reader, items, self.rules)
        placed = await asyncio.to_thread(self._prepare, [item for item in found if isinstance(item, Picture)])
        batches = self._batches(placed, batch_size)
        answers = await compute_all(self.plane, self.model, [[self._tensor(batch)] for batch in batches])
        seen: list[tuple[Placed, Mapping[str, Array]]] = []
        for batch, outputs in zip(batches, answers, strict=True):
            for row, each in enumerate(batch):
                seen.append((each, {name: self._row(array, row) for name, array in outputs.items()}))
        return seen

    def _prepare(self, pictures: Sequence[Picture]) -> list[Placed]:
        return [prepare(each.pixels, self.preprocessing, self.target) for each in pictures]

    def _batches(self, placed: Sequence[Placed], batch_size: int) -> list[list[Placed]]:
        """In order; only neighbours of one size share a batch."""
        most = max(1, min(batch_size, self.max_batch_size))
        batches: list[list[Placed]] = []
        for each in placed:
            last = batches[-1] if batches else []
            if last and len(last) < most and last[0].array.shape == each.array.shape:
                last.append(each)
            else:
                batches.append([each])
        return batches

    def _tensor(self, batch: Sequence[Placed]) -> Tensor:
        batched = self.max_batch_size > 0 or self.target.explicit_batch
        array = np.stack([each.array for each in batch]) if batched else batch[0].array
        return Tensor.of(self.target.name, array)

    def _row(self, array: Array, row: int) -> Array:
        return array[row] if self.max_batch_size > 0 or self.target.explicit_batch else array


def image_input(config: ModelConfig) -> ImageInput | None:
    """The one input of a model that takes pictures; None for another model."""
    needed = [spec for spec in config.inputs if not spec.optional]
    if len(needed) != 1 or needed[0].dims is None or needed[0].dtype not in (FP32, UINT8):
        return None
    dims = needed[0].dims
    explicit = config.max_batch_size == 0 and len(dims) == 4 and dims[0] in (1, -1)
    if explicit:
        dims = dims[1:]
    if len(dims) != 3:
        return None
    whole = needed[0].dtype is UINT8
    if dims[0] == _COLOURS:
        return ImageInput(needed[0].name, dims[1], dims[2], True, whole, explicit)
    if dims[2] == _COLOURS:
        return ImageInput(needed[0].name, dims[0], dims[1], False, whole, explicit)
    return None


def output_dims(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The sizes of each output for one picture."""
    explicit = config.max_batch_size == 0
    found = {}
    for spec in config.outputs:
        if spec.dtype in (FP32, FP16) and spec.dims is not None:
            dims = spec.dims
            found[spec.name] = dims[1:] if explicit and len(dims) > 1 and dims[0] in (1, -1) else dims
    return found


def shown(url: str) -> str:
    """A URL in an answer: no picture, no signature."""
    return url.split(",", 1)[0][:64] + ",..." if url[:5].lower() == "data:" else public_text(url)


def one_of(read: Mapping[str, Any], *names: str) -> Any:
    """The first of several parameters that was said."""
    return next((read[name] for name in names if read.get(name) is not None), None)
