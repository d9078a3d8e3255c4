# SPDX-License-Identifier: Apache-2.0
"""Puts adapters on a model that has been loaded.

Called by the `llm` backend once, after the model is on its device. Holds the shapes of each adapter against the layers it
names; a layer that is not there, or of another size, means that the adapter is for another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.backends.llm.adapters.folder import AdapterFiles, Change, read_adapter
from headrace.backends.llm.adapters.layers import Adapters, ChangedLayer
from headrace.core.errors import FailedPrecondition, Unimplemented

_RENAMED = (
    # How vision-language models called their parts when many adapters were trained, and how they do now.
    ("model.layers.", "model.language_model.layers."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def read_adapters(model: Any, folders: Mapping[str, Path]) -> Adapters:
    """Read the adapters and change the model so that it can compute with each of them."""
    adapters = Adapters(tuple(folders), model.device)
    layers = dict(model.named_modules())
    wrapped: dict[str, ChangedLayer] = {}
    try:
        for name, folder in folders.items():
            _put_on(adapters, model, layers, wrapped, name, read_adapter(name, folder))
    except Exception:
        adapters.close()
        raise
    return adapters


def _put_on(
    adapters: Adapters,
    model: Any,
    layers: Mapping[str, Any],
    wrapped: dict[str, ChangedLayer],
    name: str,
    files: AdapterFiles,
) -> None:
    head = model.get_output_embeddings()

    def changed(told: str) -> tuple[Any, ChangedLayer]:
        place = _found(layers, told)
        if place is None:
            raise FailedPrecondition(
                f"adapter '{name}' changes a layer '{told[:128]}' that the model does not have: it was trained on another"
            )
        layer = layers[place]
        if not isinstance(layer, torch.nn.Linear) and type(layer).__name__ != "Conv1D":
            raise Unimplemented(
                f"adapter '{name}' changes '{told[:128]}', a layer of kind {type(layer).__name__}: this server does linear "
                "ones"
            )
        if place not in wrapped:
            wrapped[place] = adapters.wrap(layer, is_head=layer is head)
        return layer, wrapped[place]

    for told, change in files.changes.items():
        layer, target = changed(told)
        outputs, inputs = _sizes(layer)
        if (change.up.shape[0], change.down.shape[1]) != (outputs, inputs):
            raise FailedPrecondition(
                f"adapter '{name}' has matrices for {change.down.shape[1]} inputs and {change.up.shape[0]} outputs, and "
                f"layer '{told}' of the model has {inputs} and {outputs}: it was trained on another model"
            )
        down, up = (_like(layer, tensor) for tensor in (change.down, change.up))
        target.add(name, Change(down, up, change.scaling))
    for told, copy in files.copies.items():
        place = _found(layers, told)
        own = None if place is None else getattr(layers[place], "weight", None)
        if own is None or own.shape != copy.shape or not torch.equal(own, copy.to(device=own.device, dtype=own.dtype)):
            raise Unimplemented(
                f"adapter '{name}' has its own '{told[:128]}', as after a training with new tokens, which this server does "
                "not do: merge the adapter into the model"
            )
    for told, tensors in files.replaced.items():
        layer, target = changed(told)
        shape = _sizes(layer)
        if "weight" not in tensors or tuple(tensors["weight"].shape) != shape or not isinstance(layer, torch.nn.Linear):
            raise FailedPrecondition(
                f"adapter '{name}' has a whole layer '{told[:128]}' that does not fit the model's, of {list(shape)}: it was "
                "trained on another model, or with more tokens"
            )
        target.replace(name, {key: _like(layer, tensor) for key, tensor in tensors.items()})


def _found(layers: Mapping[str, Any], told: str) -> str | None:
    if told in layers:
        return told
    for old, new in _RENAMED:
        if told.startswith(old) and (place := new + told.removeprefix(old)) in layers:
            return place
    return None


def _sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs; the Conv1D of GPT-2 keeps its weight the other way round."""
    first, second = layer.weight.shape
    return (first, second) if isinstance(layer, torch.nn.Linear) else (second, first)


def _like(layer: Any, tensor: Any) -> Any:
    return tensor.to(device=layer.weight.device, dtype=layer.weight.dtype)
