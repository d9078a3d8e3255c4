# SPDX-License-Identifier: Apache-2.0
"""The quantisation schemes that checkpoints declare: parse the configuration, and refuse by name what cannot be computed.

Declared in `quantization_config` of config.json, or in ModelOpt's hf_quant_config.json. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.backends.model_config import read_json_object
from headrace.core.errors import FailedPrecondition

SERVED = (
    "FP8 (per tensor, channel or block) of compressed-tensors, ModelOpt or Hugging Face fp8, or with integer weights of AWQ "
    "(gemm, 4 bits), GPTQ or compressed-tensors (pack-quantized; 4 or 8 bits)"
)
"""For error texts."""
_OTHER_ENGINES = "or serve it with another engine through backend 'openai_proxy'"
_MAX_GROUP = 1 << 20
_CLASS_TARGETS = ("Linear", "ReplicatedLinear")
"""Targets of compressed-tensors that mean every linear layer."""

Storage = Literal["fp8", "awq", "gptq", "packed"]
"""How a checkpoint stores a layer: `packed` is compressed-tensors' pack-quantized."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of some layers are quantised."""

    method: str
    """`quant_method` of the configuration."""
    storage: Storage
    bits: int = 8
    group_size: int = 0
    """Integers: inputs that share a scale; 0: all of them."""
    block: tuple[int, int] | None = None
    """FP8: outputs and inputs that share a scale; None: one scale, or one for each output."""
    zero_offset: int = 0
    """GPTQ: added to stored zero points."""
    has_zeros: bool = False
    """compressed-tensors: zero points are stored, because weights are asymmetric."""
    act_order: bool = False
    """Inputs belong to groups in the order of their activations: `g_idx` has the group of each."""

    def __str__(self) -> str:
        if self.storage == "fp8":
            scales = f"blocks of {self.block[0]}x{self.block[1]}" if self.block else "per tensor or channel"
            return f"{self.method} FP8, {scales}"
        groups = f"groups of {self.group_size}" if self.group_size else "per channel"
        return f"{self.method} INT{self.bits}, {groups}" + (", act order" if self.act_order else "")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The schemes of a checkpoint, and the layers that they are for."""

    rules: Sequence[tuple[Sequence[str], WeightScheme]]
    """Targets as in compressed-tensors (a layer's name, `re:` and a pattern, or a class), and their scheme."""

    def scheme_of(self, layer: str) -> WeightScheme:
        """Return the scheme of a layer whose weights are quantised."""
        if len(self.rules) == 1:
            return self.rules[0][1]
        for targets, scheme in self.rules:
            if any(_matches(target, layer) for target in targets):
                return scheme
        for targets, scheme in self.rules:
            if any(target in _CLASS_TARGETS for target in targets):
                return scheme
        raise FailedPrecondition(
            f"config_groups of the model's quantization_config has no target for the quantised layer '{layer[:128]}': copy "
            "the model's config.json again"
        )

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(str(scheme) for _, scheme in self.rules))


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights of a folder are quantised, or None. Raises FailedPrecondition for what cannot be computed."""
    declared = config.get("quantization_config") or config.get("compression_config")
    text_config = config.get("text_config")
    if declared is None and isinstance(text_config, Mapping):
        declared = text_config.get("quantization_config")
    if declared is None and (folder / "hf_quant_config.json").is_file():
        declared = _modelopt_file(folder)
    if declared is None:
        return None
    if not isinstance(declared, Mapping):
        raise FailedPrecondition(f"quantization_config in '{folder.name}/config.json' is not an object: copy it again")
    return _Reader(folder.name, declared).read()


def refusal(folder: str, scheme: str, detail: str = "") -> FailedPrecondition:
    """Return the error for a scheme that cannot be computed."""
    return FailedPrecondition(
        f"the weights in '{folder}' are quantised with {scheme}{detail and f' ({detail})'}, which backend 'llm' cannot "
        f"compute: choose a checkpoint with {SERVED}, {_OTHER_ENGINES}"
    )


def _matches(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], layer) is not None
        except re.error:
            return False
    return target == layer


def _modelopt_file(folder: Path) -> Mapping[str, Any]:
    name = f"'{folder.name}/hf_quant_config.json'"
    content = read_json_object(folder / "hf_quant_config.json", name, f"{name} cannot be read: copy it again")
    quantization = content.get("quantization")
    if not isinstance(quantization, Mapping):
        raise FailedPrecondition(f"{name} has no object 'quantization': copy it again")
    return {"quant_method": "modelopt", **quantization}


class _Reader:
    """Reads one quantization_config."""

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._config = config
        self._method = str(config.get("quant_method") or "")[:64].lower()

    def read(self) -> Quantization:
        method, config = self._method, self._config
        if method in ("compressed-tensors", "compressed_tensors"):
            return self._compressed_tensors()
        if method.startswith("modelopt") or (not method and "quant_algo" in config):
            return _one(self._modelopt())
        if method == "fp8":
            block = config.get("weight_block_size")
            return _one(WeightScheme("Hugging Face", "fp8", block=None if block is None else self._block(block)))
        if method == "awq":
            return _one(self._awq())
        if method == "gptq":
            return _one(self._gptq())
        raise refusal(self._folder, f"'{method or 'no quant_method'}'", self._bitsandbytes_detail())

    def _bitsandbytes_detail(self) -> str:
        return next((key for key in ("load_in_4bit", "load_in_8bit") if self._config.get(key)), "")

    def _awq(self) -> WeightScheme:
        config = self._config
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise refusal(self._folder, "AWQ", f"version {version[:32]}")
        if not config.get("zero_point", True):
            raise refusal(self._folder, "AWQ", "without zero points")
        bits = self._bits(config, "AWQ", (4,), "w_bit" if "w_bit" in config else "bits")
        group = self._group_size(config, "q_group_size" if "q_group_size" in config else "group_size")
        return WeightScheme("AWQ", "awq", bits, group)

    def _gptq(self) -> WeightScheme:
        config = self._config
        layout = str(config.get("checkpoint_format") or "gptq").lower()
        if config.get("is_marlin_format"):
            layout = "marlin"
        if layout not in ("gptq", "gptq_v2"):
            raise refusal(self._folder, "GPTQ", f"checkpoint_format {layout[:32]}")
        overrides = config.get("dynamic") or {}
        if not isinstance(overrides, Mapping) or any(not str(name).startswith("-:") for name in overrides):
            raise refusal(self._folder, "GPTQ", "with other settings for some layers, 'dynamic'")
        bits = self._bits(config, "GPTQ", (4, 8))
        # The first format stored zero points minus one, for its kernels.
        offset = 1 if layout == "gptq" else 0
        act_order = bool(config.get("desc_act"))
        return WeightScheme("GPTQ", "gptq", bits, self._group_size(config), zero_offset=offset, act_order=act_order)

    def _modelopt(self) -> WeightScheme:
        algorithm = str(self._config.get("quant_algo") or "")[:64].upper()
        if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            return WeightScheme("ModelOpt", "fp8")
        if algorithm == "FP8_PB_WO":
            return WeightScheme("ModelOpt", "fp8", block=(128, 128))
        raise refusal(self._folder, f"ModelOpt {algorithm or 'without quant_algo'}")

    def _compressed_tensors(self) -> Quantization:
        config = self._config
        for key in ("sparsity_config", "transform_config"):
            value = config.get(key)
            if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
                raise refusal(self._folder, "compressed-tensors", key)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise self._damaged("config_groups")
        rules = []
        for group in groups.values():
            if not isinstance(group, Mapping):
                raise self._damaged("config_groups")
            if group.get("weights"):
                targets = group.get("targets")
                if not isinstance(targets, list):
                    raise self._damaged("targets")
                rules.append((tuple(map(str, targets)), self._compressed_group(group)))
        if not rules:
            raise refusal(self._folder, "compressed-tensors", "without quantised weights")
        return Quantization(tuple(rules))

    def _compressed_group(self, group: Mapping[str, Any]) -> WeightScheme:
        layout = str(group.get("format") or self._config.get("format") or "")[:64].lower()
        weights, name = group["weights"], f"compressed-tensors {layout}"
        if not isinstance(weights, Mapping):
            raise self._damaged("weights")
        activations = group.get("input_activations") or {}
        if not isinstance(activations, Mapping):
            raise self._damaged("input_activations")
        kind, strategy = weights.get("type", "int"), str(weights.get("strategy") or "")
        if activations and (activations.get("type", "int") != "float" or activations.get("num_bits", 8) != 8):
            raise refusal(
                self._folder, name, f"{activations.get('type', 'int')}{activations.get('num_bits', 8)} activations"[:64]
            )
        if kind == "float" and layout in ("float-quantized", "naive-quantized", "naive"):
            self._bits(weights, name, (8,), "num_bits")
            if strategy == "block":
                return WeightScheme("compressed-tensors", "fp8", block=self._block(weights.get("block_structure")))
            if strategy in ("tensor", "channel"):
                return WeightScheme("compressed-tensors", "fp8")
            raise refusal(self._folder, name, f"strategy {strategy[:32]}")
        if kind == "int" and layout == "pack-quantized":
            bits = self._bits(weights, name, (4, 8), "num_bits")
            if strategy not in ("group", "channel"):
                raise refusal(self._folder, name, f"strategy {strategy[:32]}")
            return WeightScheme(
                "compressed-tensors",
                "packed",
                bits,
                self._group_size(weights) if strategy == "group" else 0,
                has_zeros=not weights.get("symmetric", True),
                act_order=weights.get("actorder") in (True, "group", "dynamic"),
            )
        raise refusal(self._folder, name, f"{str(kind)[:16]}{str(weights.get('num_bits', ''))[:8]} weights")

    def _bits(self, config: Mapping[str, Any], name: str, served: Sequence[int], key: str = "bits") -> int:
        bits = config.get(key)
        if type(bits) is not int:
            raise self._damaged(key)
        if bits not in served:
            raise refusal(self._folder, name, f"{bits} bits")
        return bits

    def _group_size(self, config: Mapping[str, Any], key: str = "group_size") -> int:
        """Return the size of a group, or 0 if each output has one group."""
        size = config.get(key)
        if type(size) is not int or not (size == -1 or 0 < size <= _MAX_GROUP):
            raise self._damaged(key)
        return max(size, 0)

    def _block(self, value: Any) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != 2:
            raise self._damaged("block")
        rows, columns = value
        if not all(type(size) is int and 0 < size <= _MAX_GROUP for size in (rows, columns)):
            raise self._damaged("block")
        return rows, columns

    def _damaged(self, key: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"the quantization_config of '{self._folder}' ({self._method}) has no usable {key}: copy the model's "
            "config.json again"
        )


def _one(scheme: WeightScheme) -> Quantization:
    return Quantization((((), scheme),))
