# SPDX-License-Identifier: Apache-2.0
"""Reads an adapter in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Called by `adapters.loading`. Turns the two files into matrices by the names of the layers they change, and refuses whatever
else an adapter may be, since half of an adapter is not that adapter. Must not know the model.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from headrace.core.errors import FailedPrecondition, Unimplemented

log = logging.getLogger("headrace.backends")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_BYTES = 16 << 20
_MOST_RANK = 4096
_PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")

_NOT_DONE = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "megatron_config",
)
"""Settings that make an adapter compute something else. Each is off when it is missing, false, null or empty."""
_HARMLESS_STARTS = ("gaussian", "eva", "orthogonal", "true", "false")
"""Ways to begin a training that leave the base model as it is."""


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter adds to one layer: `up(down(x)) * scaling`."""

    down: Any
    """[rank, inputs]."""
    up: Any
    """[outputs, rank]."""
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as its files tell it."""

    changes: Mapping[str, Change]
    """By the name of the layer."""
    replaced: Mapping[str, Mapping[str, Any]]
    """`modules_to_save`: layers that the adapter has whole; their `weight` and perhaps `bias`."""
    copies: Mapping[str, Any]
    """Weights of the base model by their layer: PEFT saves those of the embeddings with an adapter of the head."""


def read_adapter(name: str, folder: Path) -> AdapterFiles:
    """Read and check both files."""
    told = _config(name, folder)
    if told.get("peft_type") != "LORA":
        raise Unimplemented(f"adapter '{name}' is of kind '{str(told.get('peft_type'))[:32]}': this server does LORA")
    for setting in _NOT_DONE:
        if told.get(setting):
            raise Unimplemented(f"adapter '{name}' has '{setting}' in its {CONFIG}, which this server does not do")
    if told.get("bias", "none") != "none":
        raise Unimplemented(f"adapter '{name}' has trained biases (bias in {CONFIG}), which this server does not do")
    start = told.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _HARMLESS_STARTS:
        raise Unimplemented(
            f"adapter '{name}' was begun with '{start[:32]}', which changes the base model too: convert it to a plain "
            "adapter (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    return _sorted(name, told, _weights(name, folder))


def _config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FailedPrecondition(
                f"{CONFIG} of adapter '{name}' is larger than any such file: save the adapter again"
            )
        told = json.loads(path.read_bytes())
    except OSError:
        raise FailedPrecondition(
            f"adapter '{name}' has no {CONFIG} that could be read in '{folder}': correct its path in parameter adapters"
        ) from None
    except (ValueError, RecursionError):
        raise FailedPrecondition(f"{CONFIG} of adapter '{name}' is not JSON: save the adapter again") from None
    if not isinstance(told, dict):
        raise FailedPrecondition(f"{CONFIG} of adapter '{name}' is not a JSON object: save the adapter again")
    return told


def _weights(name: str, folder: Path) -> dict[str, Any]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise FailedPrecondition(
            f"adapter '{name}' has no {WEIGHTS}: other formats of weights can run code when they are read. Save it again "
            "with save_pretrained(..., safe_serialization=True)"
        )
    try:
        tensors: dict[str, Any] = load_file(path)
    except Exception:
        log.exception("adapter %s could not be read", name)
        raise FailedPrecondition(f"{WEIGHTS} of adapter '{name}' is damaged: copy it again") from None
    return tensors


def _sorted(name: str, told: Mapping[str, Any], tensors: Mapping[str, Any]) -> AdapterFiles:
    downs: dict[str, Any] = {}
    ups: dict[str, Any] = {}
    replaced: dict[str, dict[str, Any]] = {}
    copies: dict[str, Any] = {}
    saved = told.get("modules_to_save") or ()
    for key, tensor in tensors.items():
        layer, _, last = key.removeprefix(_PREFIX).rpartition(".")
        if layer.endswith(".lora_A") and last == "weight":
            downs[layer.removesuffix(".lora_A")] = tensor
        elif layer.endswith(".lora_B") and last == "weight":
            ups[layer.removesuffix(".lora_B")] = tensor
        elif layer.rpartition(".")[2] in saved and last in ("weight", "bias"):
            replaced.setdefault(layer, {})[last] = tensor
        elif last == "weight" and (layer.endswith(".base_layer") or layer.rpartition(".")[2] in _EMBEDDINGS):
            copies[layer.removesuffix(".base_layer")] = tensor
        else:
            raise Unimplemented(
                f"adapter '{name}' has a tensor '{key[:128]}', which this server does not know how to use"
            )
    if downs.keys() != ups.keys():
        layer = min(downs.keys() ^ ups.keys())
        raise FailedPrecondition(f"adapter '{name}' has only one of lora_A and lora_B for '{layer}': save it again")
    if not downs and not replaced:
        raise FailedPrecondition(f"{WEIGHTS} of adapter '{name}' changes nothing: save the adapter again")
    changes = {layer: _change(name, told, layer, downs[layer], ups[layer]) for layer in downs}
    return AdapterFiles(changes, replaced, copies)


def _change(name: str, told: Mapping[str, Any], layer: str, down: Any, up: Any) -> Change:
    rank, alpha = _of_layer(name, told, "r", layer), _of_layer(name, told, "lora_alpha", layer)
    if down.ndim != 2 or up.ndim != 2 or not 0 < rank <= _MOST_RANK or (down.shape[0], up.shape[1]) != (rank, rank):
        raise FailedPrecondition(
            f"adapter '{name}' has matrices of {list(down.shape)} and {list(up.shape)} for '{layer}', and its {CONFIG} says "
            f"rank {rank}: they are not of one adapter"
        )
    return Change(down, up, alpha / math.sqrt(rank) if told.get("use_rslora") else alpha / rank)


def _of_layer(name: str, told: Mapping[str, Any], key: str, layer: str) -> Any:
    """The rank or alpha of a layer, which has its own where a pattern of the configuration matches its name."""
    value = told.get(key)
    patterns = told.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    try:
        for pattern, own in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                value = own
                break
        if type(value) is int or (key == "lora_alpha" and type(value) is float and math.isfinite(value)):
            return value
    except (re.error, AttributeError):
        pass
    raise FailedPrecondition(f"{CONFIG} of adapter '{name}' has no usable {key} for '{layer}': save the adapter again")
