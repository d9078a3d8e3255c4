# SPDX-License-Identifier: Apache-2.0
"""Read an adapter for the slots of a model: fetch it, check that it fits, and convert it to the model's dtype.

Runs in the threads of `adapter_store`, while the engine computes: it reads files and shapes, and changes nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from headrace.backends.llm.adapter_files import CONFIG, WEIGHTS, LoraWeights, read_adapter
from headrace.backends.llm.lora import (
    SlotWeights,
    check_copy,
    check_sizes,
    find_layer,
    layer_sizes,
    linear_layer,
    own_tensor,
    takes_adapters,
)
from headrace.core.errors import FailedPrecondition, Unavailable, Unimplemented
from headrace.core.files import cache_folder
from headrace.models.adapters import AdapterSource
from headrace.models.storage.fetch import FetchSettings, fetch_location
from headrace.models.storage.locations import HubLocation

_FLOAT_BYTES = 4
_SPARE_BYTES = 1 << 20
"""For the header of a file of tensors."""
_HUB_IDLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory, ready to be copied into a slot."""

    name: str
    digest: bytes
    """Of its files: what was computed with other content does not belong to this adapter."""
    weights: Mapping[str, SlotWeights]
    """By the path of the layer."""

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return sum(int(weight.lora_a.nbytes + weight.lora_b.nbytes) for weight in self.weights.values())


class AdapterReader:
    """Reads adapters for one model. Holds no layer of it, so that its memory can be freed."""

    def __init__(self, model: Any, max_rank: int, is_closing: Callable[[], bool]) -> None:
        self._max_rank = max_rank
        self._is_closing = is_closing
        self._layers = {path: ref(layer) for path, layer in model.named_modules()}
        self._model = ref(model)
        sizes = [layer_sizes(layer) for layer in model.modules() if takes_adapters(layer)]
        embeddings = [layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Embedding)]
        head = model.get_output_embeddings()
        copies = 2 * max([*embeddings, 0 if head is None else getattr(head, "weight", torch.empty(0)).numel()])
        adapter = sum(max_rank * (outputs + inputs) for outputs, inputs in sizes)
        self._max_bytes = _FLOAT_BYTES * (adapter + copies) + _SPARE_BYTES
        """The largest file that can be an adapter of this model."""

    def __call__(self, source: AdapterSource) -> LoadedAdapter:
        """Read an adapter; raise with the reason if it cannot be served."""
        folder = source.folder if source.folder is not None else self._fetched(source)
        name = source.name
        self._check_size(name, folder)
        adapter = read_adapter(name, folder, self._max_rank)
        model = self._model()
        layers = {path: layer for path, reference in self._layers.items() if (layer := reference()) is not None}
        if model is None or len(layers) < len(self._layers):
            raise Unavailable(f"adapter '{name}' cannot be loaded: its model is being unloaded")
        if adapter.replaced:
            raise Unimplemented(
                f"adapter '{name}' has the whole layer '{min(adapter.replaced)[:128]}' (modules_to_save), for which an "
                "adapter that is loaded on demand has no memory: name it in the model's parameter adapters, or merge it "
                "into the model"
            )
        for layer_name, copy in adapter.copies.items():
            path = find_layer(layers, layer_name)
            own = None if path is None else getattr(layers[path], "weight", None)
            if own is not None and not own.numel():
                raise Unavailable(f"adapter '{name}' cannot be checked while its model sleeps: wake the model")
            check_copy(name, layer_name, own, copy)
        weights = {}
        for layer_name, matrices in adapter.lora.items():
            path = linear_layer(layers, name, layer_name)
            check_sizes(name, layer_name, matrices, layer_sizes(layers[path]))
            weights[path] = self._converted(name, layer_name, matrices, own_tensor(model, layers[path]))
        return LoadedAdapter(name, _digest(folder), weights)

    def _fetched(self, source: AdapterSource) -> Path:
        repository, _, revision = source.hub.partition("@")
        settings = FetchSettings(
            max_bytes=self._max_bytes,
            idle_seconds=_HUB_IDLE_SECONDS,
            hub_files=(CONFIG, WEIGHTS),
        )
        location = HubLocation(repository, revision)
        return fetch_location(location, cache_folder() / "models", cancelled=self._is_closing, settings=settings)

    def _check_size(self, name: str, folder: Path) -> None:
        """Refuse a file that is too large before it is read."""
        try:
            size = os.stat(folder / WEIGHTS).st_size
        except OSError:
            return  # `read_adapter` says what is missing
        if size > self._max_bytes:
            raise FailedPrecondition(
                f"{WEIGHTS} of adapter '{name}' has {size} bytes, and an adapter of this model has at most "
                f"{self._max_bytes} with rank {self._max_rank}: it was trained on another model, or set the model's "
                "parameter max_lora_rank higher"
            )

    def _converted(self, name: str, layer_name: str, weights: LoraWeights, own: Any) -> SlotWeights:
        # The scaling is part of lora_b, so that one product serves rows of several adapters.
        lora_b = weights.lora_b.float() * weights.scaling
        tensors = [tensor.to(own.dtype).contiguous() for tensor in (weights.lora_a, lora_b.T)]
        # Rows of all adapters share products in captured steps, where 0 times infinity would reach other requests.
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            raise FailedPrecondition(
                f"adapter '{name}' has infinite or undefined numbers for '{layer_name[:128]}' in "
                f"{str(own.dtype).removeprefix('torch.')}: its training has failed, or it needs another dtype"
            )
        return SlotWeights(*(tensor.pin_memory() if own.is_cuda else tensor for tensor in tensors))


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
