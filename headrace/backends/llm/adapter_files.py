# SPDX-License-Identifier: Apache-2.0
"""Read LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors` of a folder.

An adapter that this server cannot compute completely is refused, with what to do about it. Nothing here knows the model.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from headrace.backends.model_config import read_json_object
from headrace.core.errors import FailedPrecondition, Unimplemented

log = logging.getLogger("headrace.backends")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_RANK = 4096
_PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
_UNSUPPORTED_SETTINGS = (
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
"""Settings that change what an adapter computes. Each is off if missing, false, null or empty."""
_SUPPORTED_INIT = ("gaussian", "eva", "orthogonal", "true", "false")
"""Initializations that leave the base model unchanged."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The LoRA matrices of one layer: it adds `lora_b(lora_a(x)) * scaling`."""

    lora_a: Any
    """[rank, inputs]."""
    lora_b: Any
    """[outputs, rank]."""
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter as it is stored."""

    lora: Mapping[str, LoraWeights]
    """By layer name."""
    replaced: Mapping[str, Mapping[str, Any]]
    """`modules_to_save`: layers that the adapter replaces, with `weight` and perhaps `bias`."""
    copies: Mapping[str, Any]
    """Weights of the base model by layer name: PEFT saves the embeddings with an adapter of the head."""


def read_adapter(name: str, folder: Path, max_rank: int | None = None) -> AdapterWeights:
    """Read an adapter folder in PEFT's format; refuse an adapter that is not supported completely, or of a larger rank."""
    config = read_json_object(
        folder / CONFIG,
        f"{CONFIG} of adapter '{name}'",
        f"adapter '{name}' has no {CONFIG} that could be read in '{folder}': save the adapter there, or correct its path",
    )
    if config.get("peft_type") != "LORA":
        raise Unimplemented(
            f"adapter '{name}' is of kind '{str(config.get('peft_type'))[:32]}': this server supports LORA"
        )
    for setting in _UNSUPPORTED_SETTINGS:
        if config.get(setting):
            raise Unimplemented(f"adapter '{name}' has '{setting}' in its {CONFIG}, which this server does not support")
    if config.get("bias", "none") != "none":
        raise Unimplemented(
            f"adapter '{name}' has trained biases (bias in {CONFIG}), which this server does not support"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _SUPPORTED_INIT:
        raise Unimplemented(
            f"adapter '{name}' was initialized with '{init[:32]}', which changes the base model too: convert it to a plain "
            "adapter (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if max_rank is not None:
        _check_rank(name, config, max_rank)
    return _sort_tensors(name, config, _read_tensors(name, folder))


def _check_rank(name: str, config: Mapping[str, Any], max_rank: int) -> None:
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    largest = max((rank for rank in ranks if type(rank) is int), default=0)
    if largest > max_rank:
        raise FailedPrecondition(
            f"adapter '{name}' has rank {largest}, and this model takes ranks up to {max_rank}: set the model's parameter "
            f"max_lora_rank to {largest} and load the model again"
        )


def _read_tensors(name: str, folder: Path) -> dict[str, Any]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise FailedPrecondition(
            f"adapter '{name}' has no {WEIGHTS}: other formats of weights can run code when they are read. Save it again "
            "with save_pretrained(..., safe_serialization=True)"
        )
    try:
        tensors: dict[str, Any] = load_file(path)
    except Exception:
        log.exception("Adapter %s could not be read.", name)
        raise FailedPrecondition(f"{WEIGHTS} of adapter '{name}' is damaged: copy it again") from None
    return tensors


def _sort_tensors(name: str, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> AdapterWeights:
    lora_a: dict[str, Any] = {}
    lora_b: dict[str, Any] = {}
    replaced: dict[str, dict[str, Any]] = {}
    copies: dict[str, Any] = {}
    saved = config.get("modules_to_save") or ()
    for key, tensor in tensors.items():
        layer, _, last = key.removeprefix(_PREFIX).rpartition(".")
        if layer.endswith(".lora_A") and last == "weight":
            lora_a[layer.removesuffix(".lora_A")] = tensor
        elif layer.endswith(".lora_B") and last == "weight":
            lora_b[layer.removesuffix(".lora_B")] = tensor
        elif layer.rpartition(".")[2] in saved and last in ("weight", "bias"):
            replaced.setdefault(layer, {})[last] = tensor
        elif last == "weight" and (layer.endswith(".base_layer") or layer.rpartition(".")[2] in _EMBEDDINGS):
            copies[layer.removesuffix(".base_layer")] = tensor
        else:
            raise Unimplemented(f"adapter '{name}' has a tensor '{key[:128]}', which this server does not support")
    if lora_a.keys() != lora_b.keys():
        layer = min(lora_a.keys() ^ lora_b.keys())
        raise FailedPrecondition(f"adapter '{name}' has only one of lora_A and lora_B for '{layer}': save it again")
    if not lora_a and not replaced:
        raise FailedPrecondition(f"{WEIGHTS} of adapter '{name}' changes nothing: save the adapter again")
    lora = {layer: _lora_weights(name, config, layer, lora_a[layer], lora_b[layer]) for layer in lora_a}
    return AdapterWeights(lora, replaced, copies)


def _lora_weights(name: str, config: Mapping[str, Any], layer: str, lora_a: Any, lora_b: Any) -> LoraWeights:
    rank, alpha = _layer_setting(name, config, "r", layer), _layer_setting(name, config, "lora_alpha", layer)
    shapes_match = lora_a.ndim == 2 and lora_b.ndim == 2 and (lora_a.shape[0], lora_b.shape[1]) == (rank, rank)
    if not 0 < rank <= _MAX_RANK or not shapes_match:
        raise FailedPrecondition(
            f"adapter '{name}' has matrices of {list(lora_a.shape)} and {list(lora_b.shape)} for '{layer}', and its "
            f"{CONFIG} has rank {rank}: they do not belong to one adapter"
        )
    return LoraWeights(lora_a, lora_b, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _layer_setting(name: str, config: Mapping[str, Any], key: str, layer: str) -> Any:
    """Return the rank or alpha of a layer; patterns of the configuration override the default."""
    value = config.get(key)
    patterns = config.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
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
