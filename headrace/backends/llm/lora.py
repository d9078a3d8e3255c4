# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: load them in PEFT's format, and apply those of each request; one step may use several.

The layers of the model stay in place and only their `forward` is replaced, so that names, weights and tied weights do not
change. The rows of one adapter are gathered, multiplied with its two small matrices, and added to the layer's output. Rows
without an adapter, and steps without any, are computed as in the base model.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear
from headrace.backends.llm.scheduler import Chunk
from headrace.backends.model_config import read_json_object
from headrace.core.errors import FailedPrecondition, NotFound, Unimplemented

log = logging.getLogger("headrace.backends")

_RENAMED_PREFIXES = (
    # Old and new names of the parts of vision-language models: many adapters were trained with the old ones.
    ("model.layers.", "model.language_model.layers."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
Rows = Any
"""A slice, or a tensor of row indices."""
Group = tuple[str, Rows]
"""An adapter and its rows."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_RANK = 4096
_PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
_LINEAR = (torch.nn.Linear, QuantizedLinear)
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


def load_adapters(model: Any, folders: Mapping[str, Path]) -> LoraAdapters:
    """Load adapters and wrap the layers of a model, so that it can compute with each of them."""
    adapters = LoraAdapters(tuple(folders), model.device)
    layers = dict(model.named_modules())
    wrapped: dict[str, LoraLayer] = {}
    try:
        for name, folder in folders.items():
            _attach(adapters, model, layers, wrapped, name, read_adapter(name, folder))
    except Exception:
        adapters.close()
        raise
    return adapters


def _attach(
    adapters: LoraAdapters,
    model: Any,
    layers: Mapping[str, Any],
    wrapped: dict[str, LoraLayer],
    name: str,
    adapter: AdapterWeights,
) -> None:
    head = model.get_output_embeddings()

    def wrap(layer_name: str) -> tuple[Any, LoraLayer]:
        path = _find_layer(layers, layer_name)
        if path is None:
            raise FailedPrecondition(
                f"adapter '{name}' changes a layer '{layer_name[:128]}' that the model does not have: it was trained on "
                "another model"
            )
        layer = layers[path]
        if hasattr(layer, "headrace_lora_refusal"):
            raise Unimplemented(f"adapter '{name}' changes '{layer_name[:128]}', {layer.headrace_lora_refusal}")
        if not isinstance(layer, _LINEAR) and type(layer).__name__ != "Conv1D":
            raise Unimplemented(
                f"adapter '{name}' changes '{layer_name[:128]}', a layer of kind {type(layer).__name__}: this server "
                "supports linear layers"
            )
        if path not in wrapped:
            wrapped[path] = adapters.wrap(layer, is_head=layer is head)
        return layer, wrapped[path]

    for layer_name, weights in adapter.lora.items():
        layer, target = wrap(layer_name)
        sharding = getattr(layer, "headrace_sharding", None)
        outputs, inputs = _sizes(layer) if sharding is None else sharding.full_sizes()
        if (weights.lora_b.shape[0], weights.lora_a.shape[1]) != (outputs, inputs):
            raise FailedPrecondition(
                f"adapter '{name}' has matrices for {weights.lora_a.shape[1]} inputs and {weights.lora_b.shape[0]} "
                f"outputs, and layer '{layer_name}' of the model has {inputs} and {outputs}: it was trained on another model"
            )
        lora_a, lora_b = weights.lora_a, weights.lora_b
        if sharding is not None:
            lora_a, lora_b = sharding.shard(lora_a, lora_b)
        lora_a, lora_b = (_like(model, layer, tensor) for tensor in (lora_a, lora_b))
        target.add(name, LoraWeights(lora_a, lora_b, weights.scaling))
    for layer_name, copy in adapter.copies.items():
        path = _find_layer(layers, layer_name)
        own = None if path is None else getattr(layers[path], "weight", None)
        if own is None or own.shape != copy.shape or not torch.equal(own, copy.to(device=own.device, dtype=own.dtype)):
            raise Unimplemented(
                f"adapter '{name}' has its own '{layer_name[:128]}', as after a training with new tokens, which this server "
                "does not support: merge the adapter into the model"
            )
    for layer_name, tensors in adapter.replaced.items():
        layer, target = wrap(layer_name)
        if hasattr(layer, "headrace_sharding"):
            raise Unimplemented(
                f"adapter '{name}' has a whole layer '{layer_name[:128]}', which is sharded here (tensor_parallel): merge "
                "the adapter into the model"
            )
        shape = _sizes(layer)
        if "weight" not in tensors or tuple(tensors["weight"].shape) != shape or not isinstance(layer, _LINEAR):
            raise FailedPrecondition(
                f"adapter '{name}' has a whole layer '{layer_name[:128]}' that does not fit the model's, of {list(shape)}: "
                "it was trained on another model, or with more tokens"
            )
        target.replace(name, {key: _like(model, layer, tensor) for key, tensor in tensors.items()})


def _find_layer(layers: Mapping[str, Any], name: str) -> str | None:
    if name in layers:
        return name
    for old, new in _RENAMED_PREFIXES:
        if name.startswith(old) and (path := new + name.removeprefix(old)) in layers:
            return path
    return None


def _sizes(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs; the weight of GPT-2's Conv1D is transposed."""
    if isinstance(layer, _LINEAR):
        return layer.out_features, layer.in_features
    first, second = layer.weight.shape
    return second, first


def _like(model: Any, layer: Any, tensor: Any) -> Any:
    """Return a tensor of an adapter in the dtype and on the device that a layer computes with."""
    own = next(model.parameters()) if isinstance(layer, QuantizedLinear) else layer.weight
    return tensor.to(device=own.device, dtype=own.dtype)


class LoraAdapters:
    """All adapters of a model, and the rows of the current step that use each."""

    def __init__(self, names: Sequence[str], device: Any) -> None:
        self.names = tuple(names)
        self.body: Sequence[Group] = ()
        """For layers that compute every row of the step."""
        self.head: Sequence[Group] = ()
        """For the head, which computes only rows after which a token is sampled."""
        self._device = device
        self._layers: list[LoraLayer] = []

    @property
    def active(self) -> bool:
        """Whether the current step has rows of an adapter."""
        return bool(self.body)

    def check(self, name: str) -> None:
        """Refuse the name of an unknown adapter; "" is the base model."""
        if name and name not in self.names:
            known = ", ".join(self.names) or "none"
            raise NotFound(f"adapter '{name[:64]}' is not loaded: this model has {known}")

    def select_rows(self, chunks: Sequence[Chunk]) -> None:
        """Set which rows of the next step use which adapter. For `ModelRunner.before_forward`."""
        if not any(chunk.sequence.adapter for chunk in chunks):
            self.body = self.head = ()
            return
        body: dict[str, list[tuple[int, int]]] = {}
        head: dict[str, list[tuple[int, int]]] = {}
        row = sampled = 0
        for chunk in chunks:
            name = chunk.sequence.adapter
            if name:
                _extend(body.setdefault(name, []), row, row + chunk.count)
                if chunk.samples:
                    _extend(head.setdefault(name, []), sampled, sampled + 1)
            row += chunk.count
            sampled += chunk.samples
        self.body = [(name, self._rows(spans)) for name, spans in body.items()]
        self.head = [(name, self._rows(spans)) for name, spans in head.items()]

    @contextmanager
    def applied_to_all(self, name: str) -> Iterator[None]:
        """Use one adapter, or none, for all rows: for a forward pass outside of a step, such as the image encoder's."""
        before = self.body, self.head
        self.body = self.head = [(name, slice(None))] if name else ()
        try:
            yield
        finally:
            self.body, self.head = before

    def wrap(self, layer: Any, *, is_head: bool) -> LoraLayer:
        """Wrap the forward method of a layer."""
        wrapped = LoraLayer(self, layer, is_head=is_head)
        self._layers.append(wrapped)
        return wrapped

    def close(self) -> None:
        """Unwrap all layers."""
        for layer in self._layers:
            layer.unwrap()
        self._layers.clear()

    def _rows(self, spans: Sequence[tuple[int, int]]) -> Rows:
        if len(spans) == 1:
            return slice(*spans[0])
        numbers = [number for first, end in spans for number in range(first, end)]
        return torch.tensor(numbers).to(self._device, non_blocking=True)


class LoraLayer:
    """Replaces the `forward` of a linear layer."""

    def __init__(self, adapters: LoraAdapters, layer: Any, *, is_head: bool) -> None:
        self._adapters = adapters
        self._layer = layer
        self._base_forward = layer.forward
        self._is_head = is_head
        self._sharding = getattr(layer, "headrace_sharding", None)
        """How a tensor-parallel model shards the layer: `tensor_parallel.parallel_layers.LoraSharding`."""
        self._lora: dict[str, LoraWeights] = {}
        self._replaced: dict[str, tuple[Any, Any]] = {}
        layer.forward = self

    def add(self, name: str, weights: LoraWeights) -> None:
        """Set the LoRA weights of an adapter."""
        self._lora[name] = weights

    def replace(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Set the full weights of an adapter that replaces the layer."""
        self._replaced[name] = tensors["weight"], tensors.get("bias", self._layer.bias)

    def unwrap(self) -> None:
        """Restore the layer's own `forward`."""
        del self._layer.forward

    def __call__(self, rows: Any) -> Any:
        """Compute the layer."""
        output = self._base_forward(rows)
        groups = self._adapters.head if self._is_head else self._adapters.body
        if not groups:
            return output
        inputs, outputs = rows.reshape(-1, rows.shape[-1]), output.view(-1, output.shape[-1])
        for name, chosen in groups:
            if name in self._replaced:
                outputs[chosen] = torch.nn.functional.linear(inputs[chosen], *self._replaced[name])
            weights = self._lora.get(name)
            if weights is None:
                continue
            down = torch.nn.functional.linear(inputs[chosen], weights.lora_a)
            if self._sharding is not None:
                down = self._sharding.reduce(down)
            delta = torch.nn.functional.linear(down, weights.lora_b)
            if isinstance(chosen, slice):
                outputs[chosen].add_(delta, alpha=weights.scaling)
            else:
                outputs.index_add_(0, chosen, delta, alpha=weights.scaling)
        return output


def _extend(spans: list[tuple[int, int]], first: int, end: int) -> None:
    """Add a span, merged with the last one if they are adjacent."""
    if spans and spans[-1][1] == first:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((first, end))


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


def read_adapter(name: str, folder: Path) -> AdapterWeights:
    """Read an adapter folder in PEFT's format; refuse an adapter that is not supported completely."""
    config = read_json_object(
        folder / CONFIG,
        f"{CONFIG} of adapter '{name}'",
        f"adapter '{name}' has no {CONFIG} that could be read in '{folder}': correct its path in parameter adapters",
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
    return _sort_tensors(name, config, _read_tensors(name, folder))


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
