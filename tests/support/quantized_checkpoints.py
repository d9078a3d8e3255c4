# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints of a tiny Llama, and the same weights dequantised; written from the formats' descriptions.

quantized, plain = quantized_llama(tmp_path / "models", "awq")        # two model folders; SCHEMES has the names
quantized, plain = quantized_llama(tmp_path / "models", "awq", make="tiny_qwen2", num_hidden_layers=1)

The packing is as simple as possible and shares nothing with the product's. Scales are rounded to how they are stored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support import llm_models
from support.model_cache import copy_of

FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column in each 4 bits of a word, lowest first."""
KEPT = "model.layers.1.mlp.down_proj"
"""A layer that is not quantised."""

Tensors = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""The stored tensors of a weight, by the last part of their names, and the weight as they have it."""


@dataclass
class Scheme:
    """A quantization_config and how it stores a weight."""

    config: dict[str, Any]
    pack: Pack
    file: str = "config.json"
    """Where the configuration is."""


def quantized_llama(folder: Path, scheme: str, **model: Any) -> tuple[Path, Path]:
    """Write a quantised checkpoint and its dequantised twin; return both."""
    sources = (Path(llm_models.__file__),)
    copy_of(folder, _write_pair, scheme, sorted(model.items()), sources=sources)
    return folder / "quantized", folder / "plain"


def _write_pair(folder: Path, scheme: str, model: list[tuple[str, Any]]) -> None:
    settings = dict(model)
    make = getattr(llm_models, settings.pop("make", "tiny_llama"))
    make(folder / "plain", **settings)
    shutil.copytree(folder / "plain", folder / "quantized")
    quantize(folder / "quantized", folder / "plain", SCHEMES[scheme])


def quantize(quantized: Path, plain: Path, scheme: Scheme) -> None:
    """Quantise the linear layers of a model folder, and write what they are to another."""
    weights = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj") or layer == KEPT:
            stored[name] = dequantized[name] = tensor
            continue
        tensors, values = scheme.pack(layer, tensor.float())
        stored.update({f"{layer}.{last}": part.contiguous() for last, part in tensors.items()})
        dequantized[name] = values.float().contiguous()
    write_weights(quantized, stored)
    write_weights(plain, dequantized)
    write_config(quantized, scheme)


def write_weights(folder: Path, tensors: Tensors) -> None:
    path = folder / "model.safetensors"
    path.unlink()  # it may be a link into the cache of models
    save_file(tensors, path, metadata={"format": "pt"})


def change_weights(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Damage, add or remove tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write_weights(folder, tensors)


def write_config(folder: Path, scheme: Scheme) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.unlink()
    if scheme.file == "config.json":
        content["quantization_config"] = scheme.config
    else:
        (folder / scheme.file).write_text(json.dumps(scheme.config))
    path.write_text(json.dumps(content))


def fp8(scale_name: str, strategy: str, *, block: tuple[int, int] = (32, 48), four: bool = False) -> Pack:
    """FP8 with a scale for everything, for each output or for each block."""

    def pack(_layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "channel": (1, columns)}.get(strategy, block)
        scales = torch.empty(-(-rows // high), -(-columns // wide))
        values, dequantized = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                here = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
                scale = scales[row, column] = weight[here].abs().max() / 448
                values[here] = (weight[here] / scale).to(FP8)
                dequantized[here] = values[here].float() * scale
        if strategy == "tensor":
            scales = scales[0, 0]
        if four:
            scales = scales[:, None, :, None]
        return {"weight": values, scale_name: scales}, dequantized

    return pack


def _round(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, symmetric: bool
) -> tuple[Any, Any, Any, torch.Tensor]:
    """Integers from 0, zero points and scales (float16) by output and group, and the dequantised weight."""
    rows, columns, count = *weight.shape, int(groups.max()) + 1
    most = (1 << bits) - 1
    numbers = np.zeros((rows, columns), np.int64)
    zeros, scales = np.zeros((rows, count), np.int64), np.zeros((rows, count), np.float16)
    dequantized = torch.zeros(weight.shape)
    for row in range(rows):
        for group in range(count):
            here = (groups == group).numpy()
            part = weight[row].numpy()[here]
            if symmetric:
                scale, zero = np.float16(abs(part).max() / (most // 2)), (most + 1) // 2
            else:
                low, high = min(part.min(), 0), max(part.max(), 0)
                scale = np.float16((high - low) / most)
                zero = int(np.clip(round(-low / float(scale)), 0, most))
            scales[row, group], zeros[row, group] = scale, zero
            numbers[row, here] = np.clip(np.round(part / np.float32(scale)) + zero, 0, most)
            dequantized[row, here] = torch.tensor((numbers[row, here] - zero) * np.float32(scale), dtype=torch.float32)
    return numbers, zeros, scales, dequantized


def _words(numbers: Any, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack the last dimension into int32, the first number in the lowest bits, or in `order`."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        word, place = divmod(column, per_word)
        source = word * per_word + (order[place] if order else place)
        words[:, word] |= (numbers[:, source].astype(np.uint32) << np.uint32(bits * place)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def _groups(columns: int, size: int) -> torch.Tensor:
    return torch.arange(columns) // (size if size > 0 else columns)


def awq(size: int) -> Pack:
    """AWQ's gemm format: transposed, zero points always, values interleaved in each word."""

    def pack(_layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales, dequantized = _round(weight, 4, _groups(weight.shape[1], size), False)
        tensors = {
            "qweight": _words(numbers.T, 4, AWQ_ORDER),
            "qzeros": _words(zeros.T, 4, AWQ_ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return tensors, dequantized

    return pack


def gptq(bits: int, size: int, *, symmetric: bool, stored_less: int, act_order: bool = False) -> Pack:
    """GPTQ's formats: transposed, packed along the inputs; the first format stores zero points less one."""

    def pack(_layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = _groups(weight.shape[1], size)
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(5))]
        numbers, zeros, scales, dequantized = _round(weight, bits, groups, symmetric)
        tensors = {
            "qweight": _words(numbers, bits).T,
            "qzeros": _words((zeros.T - stored_less) & ((1 << bits) - 1), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": groups.int(),
        }
        return tensors, dequantized

    return pack


def packed(bits: int, size: int, *, symmetric: bool = True, act_order: bool = False) -> Pack:
    """compressed-tensors' pack-quantized: an output's weights are consecutive; zero points are packed along the outputs."""

    def pack(_layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = _groups(weight.shape[1], size)
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(6))]
        numbers, zeros, scales, dequantized = _round(weight, bits, groups, symmetric)
        tensors = {
            "weight_packed": _words(numbers, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(zeros.T, bits).T
        if act_order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, dequantized

    return pack


def compressed(layout: str, weights: dict[str, Any], activations: Any = None, **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*1.mlp.down_proj"],
        **more,
    }


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def integers(bits: int, size: int, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": True, **strategy, **more}


def _mixed(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return (packed(4, 16) if ".mlp." in layer else fp8("weight_scale", "channel"))(layer, weight)


_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_MIXED = compressed("mixed-precision", {})
_MIXED["config_groups"] = {
    "group_0": {
        "targets": ["re:.*self_attn.*_proj"],
        "weights": floats("channel"),
        "input_activations": _DYNAMIC,
        "format": "float-quantized",
    },
    "group_1": {"targets": ["re:.*mlp.*_proj"], "weights": integers(4, 16), "format": "pack-quantized"},
}

SCHEMES = {
    "ct-fp8-tensor": Scheme(
        compressed("naive-quantized", floats("tensor"), floats("tensor", dynamic=False)), fp8("weight_scale", "tensor")
    ),
    "ct-fp8-channel": Scheme(
        compressed("float-quantized", floats("channel"), _DYNAMIC), fp8("weight_scale", "channel")
    ),
    "ct-fp8-block": Scheme(
        compressed("float-quantized", floats("block", block_structure=[32, 48]), _DYNAMIC),
        fp8("weight_scale", "block"),
    ),
    "ct-int4": Scheme(compressed("pack-quantized", integers(4, 32)), packed(4, 32)),
    "ct-int4-asymmetric": Scheme(
        compressed("pack-quantized", integers(4, 16, symmetric=False)), packed(4, 16, symmetric=False)
    ),
    "ct-int4-channel": Scheme(compressed("pack-quantized", integers(4, -1)), packed(4, -1)),
    "ct-int4-act-order": Scheme(
        compressed("pack-quantized", integers(4, 32, actorder="group")), packed(4, 32, act_order=True)
    ),
    "ct-int8": Scheme(compressed("pack-quantized", integers(8, 64)), packed(8, 64)),
    "ct-mixed": Scheme(_MIXED, _mixed),
    "modelopt-fp8": Scheme(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8("weight_scale", "tensor")
    ),
    "modelopt-file": Scheme(
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]},
        },
        fp8("weight_scale", "channel"),
        file="hf_quant_config.json",
    ),
    "modelopt-block": Scheme(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        fp8("weight_scale", "block", block=(128, 128), four=True),
    ),
    "fp8-block": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]},
        fp8("weight_scale_inv", "block", block=(32, 32)),
    ),
    "fp8-tensor": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8("weight_scale_inv", "tensor"),
    ),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    "awq-channel": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "GEMM"}, awq(-1)
    ),
    "gptq": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        gptq(4, 32, symmetric=True, stored_less=1),
    ),
    "gptq-asymmetric": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "checkpoint_format": "gptq"},
        gptq(4, 16, symmetric=False, stored_less=1),
    ),
    "gptq-v2": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, symmetric=False, stored_less=0),
    ),
    "gptq-act-order": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
        gptq(4, 32, symmetric=True, stored_less=1, act_order=True),
    ),
    "gptq-8-bit": Scheme(
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": True, "sym": False},
        gptq(8, 64, symmetric=False, stored_less=1, act_order=True),
    ),
}
