# SPDX-License-Identifier: Apache-2.0
"""Load quantised layers through transformers: a quantizer of its own interface, registered while one model is loaded.

transformers renames the tensors of many checkpoints when it loads them, and places each in its module. Modules of ours take
the stored tensors of quantised layers as they are; `finish_layers` then replaces them by `QuantizedLinear`.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from headrace.backends.llm.model_runner import quantized_cuda
from headrace.backends.llm.model_runner.packed_weights import PackedWeights, to_fp8
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear
from headrace.backends.llm.quantization.checkpoint import NOT_MADE_FP8, QuantizedCheckpoint, StoredLayer
from headrace.backends.llm.quantization.repacking import check_values, repack
from headrace.core.errors import FailedPrecondition

log = logging.getLogger("headrace.backends.llm")

_METHOD = "headrace"
_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_SCALE = "weight_scale"
_IGNORED = r"\.((input|output|activation|[kqv])_scale|activation_scale_ub|g_idx|(input|output|weight)_zero_point)$"
"""Tensors that checkpoints have besides, for quantised activations and caches."""


@contextmanager
def quantized_loading(
    folder: Path, checkpoint: QuantizedCheckpoint | None, *, trust_remote_code: bool
) -> Iterator[Mapping[str, Any]]:
    """Yield arguments of `from_pretrained` for a quantised checkpoint, or to make FP8 weights. Hold TRANSFORMERS."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    AUTO_QUANTIZER_MAPPING[_METHOD] = _Quantizer
    try:
        yield {"config": config, "quantization_config": _Config(checkpoint)}
    finally:
        del AUTO_QUANTIZER_MAPPING[_METHOD]


def finish_layers(model: Any, device: torch.device) -> int:
    """Replace the modules that took stored tensors; return how many there were. Raises for damaged tensors.

    The model is on the CPU, and will be moved to `device`.
    """
    layers = []
    for name, module in list(model.named_modules()):
        if isinstance(module, _StoredLinear):
            layers.append(module.finished(name))
            _replace(model, name, layers[-1])
    if device.type == "cuda":
        quantized_cuda.prepare(layers, device)
    return len(layers)


class _Config(QuantizationConfigMixin):
    """What transformers passes to the quantizer."""

    def __init__(self, checkpoint: QuantizedCheckpoint | None) -> None:
        super().__init__(quant_method=_METHOD)
        self.checkpoint = checkpoint
        """None: make FP8 weights."""


class _StoredLinear(nn.Module):
    """Takes the tensors of a linear layer as they are stored, or its weight to be made FP8."""

    def __init__(self, linear: nn.Linear, layer: StoredLayer | None) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = linear.out_features, linear.in_features
        self.bias = linear.bias
        if layer is None:
            self.register_buffer("weight", linear.weight.data)
            self.register_buffer(_SCALE, torch.empty(linear.out_features, 1, device="meta"))
            self.names = ["weight", _SCALE]
        else:
            for name, header in layer.tensors.items():
                self.register_buffer(name, torch.empty(header.shape, dtype=_DTYPES[header.dtype], device="meta"))
            self.names = list(layer.tensors)

    def finished(self, name: str) -> QuantizedLinear:
        tensors = {key: getattr(self, key) for key in self.names}
        if self.layer is not None:
            weights = repack(name, self.layer, tensors)
        else:
            weights = PackedWeights(tensors["weight"], tensors[_SCALE], (1, self.sizes[1]))
            check_values(name, weights)
        for key in self.names:
            delattr(self, key)  # freed layer by layer
        return QuantizedLinear(weights, self.bias, *self.sizes)


class _Quantizer(HfQuantizer):
    """Puts `_StoredLinear` in place of quantised layers, before weights are read."""

    quantization_config: _Config

    def __init__(self, quantization_config: _Config, **_others: Any) -> None:
        # Not quantised before, for transformers: then it converts the weights that it reads, one after the other.
        super().__init__(quantization_config, pre_quantized=quantization_config.checkpoint is not None)
        self._shapes: dict[str, torch.Size] = {}

    def _process_model_before_weight_loading(self, model: Any, **_others: Any) -> Any:
        checkpoint = self.quantization_config.checkpoint
        if checkpoint is None:
            _prepare_fp8(model)
        else:
            _prepare_stored(model, checkpoint)
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, _IGNORED}
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **_others: Any) -> Any:
        self.remove_quantization_config(model)
        for name, tensor in model.state_dict().items():
            # transformers compares shapes only of models without a quantizer.
            if tensor.shape != self._shapes.get(name, tensor.shape):
                raise FailedPrecondition(
                    f"'{name[:128]}' has shape {list(tensor.shape)} in the weights, and the model's config.json needs "
                    f"{list(self._shapes[name])}: copy both again"
                )
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_others: Any) -> bool:
        """Whether a weight is made FP8."""
        module, _, last = param_name.rpartition(".")
        found = model.get_submodule(module)
        return last == "weight" and isinstance(found, _StoredLinear) and found.layer is None

    def get_quantize_ops(self) -> Any:
        """Return what makes a weight FP8."""
        return _MakeFp8()

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _MakeFp8(ConversionOps):
    """Makes a weight FP8 when transformers has read it."""

    def convert(self, input_dict: Mapping[str, Any], **_others: Any) -> dict[str, torch.Tensor]:
        converted = {}
        for name, value in input_dict.items():
            weights = to_fp8(value[0] if isinstance(value, list) else value)
            converted[name] = weights.values
            converted[name.removesuffix("weight") + _SCALE] = weights.scales
        return converted


def _prepare_fp8(model: Any) -> None:
    head = model.get_output_embeddings()
    count = 0
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and not NOT_MADE_FP8.search(name):
            _replace(model, name, _StoredLinear(module, None))
            count += 1
    if not count:
        raise FailedPrecondition(
            f"quantization: fp8 finds no linear layers in a model of class {type(model).__name__}: leave the parameter out"
        )


def _prepare_stored(model: Any, checkpoint: QuantizedCheckpoint) -> None:
    named = _names_in_model(model, checkpoint)
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    for stored_name, layer in checkpoint.layers.items():
        name = named[stored_name]
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            kind = "no layer" if module is None else f"of kind {type(module).__name__}"
            raise FailedPrecondition(
                f"the quantised layer '{stored_name[:128]}' is {kind} in models of class {type(model).__name__}: backend "
                "'llm' computes quantised linear layers; serve it with another engine through backend 'openai_proxy'"
            )
        if (layer.outputs, layer.inputs) != (module.out_features, module.in_features):
            raise FailedPrecondition(
                f"the quantised layer '{stored_name[:128]}' has {layer.outputs} outputs and {layer.inputs} inputs, and the "
                f"model's config.json needs {module.out_features} and {module.in_features}: copy both again"
            )
        if module is head and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
            raise FailedPrecondition(
                f"the layer '{stored_name[:128]}' is quantised, and config.json ties it to the embeddings: copy both again"
            )
        _replace(model, name, _StoredLinear(module, layer))


def _names_in_model(model: Any, checkpoint: QuantizedCheckpoint) -> dict[str, str]:
    """Return the names that transformers gives to layers of the checkpoint."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = model.state_dict()
    found = {}
    for name in checkpoint.layers:
        key = f"{name}.weight"
        renamed, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if renamed not in own and key in own:
            renamed = key
        found[name] = renamed.removesuffix(".weight")
    return found


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
