# SPDX-License-Identifier: Apache-2.0
"""The quantised layers of a checkpoint, found in the headers of its files and checked before a weight is read.

A layer is quantised if its tensors say so: lists of exceptions in configurations have many dialects. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.backends.llm.quantization.schemes import Quantization, Storage, WeightScheme, read_quantization, refusal
from headrace.backends.model_config import read_json_object
from headrace.backends.weight_files import TensorHeader, read_headers
from headrace.core.errors import FailedPrecondition, HeadraceError

MADE_FP8 = "FP8, made at load, per channel"
_INDEX = "model.safetensors.index.json"
_WEIGHTS: Mapping[str, tuple[Storage, ...]] = {"qweight": ("awq", "gptq"), "weight_packed": ("packed",)}
"""Last names of tensors that only quantised layers have, and how such layers are stored."""
_FLOATS = ("F32", "BF16", "F16")
_EXPERTS = re.compile(r"\.experts(\.|$)")
NOT_MADE_FP8 = re.compile(r"vis|image|audio|projector|merger|connector|router|gate$", re.IGNORECASE)
"""Layers that stay as they are with `quantization: fp8`: few weights, of which much depends."""
_NOT_LINEAR = re.compile(r"embed|head$|\bwte\b|\bwpe\b|norm|conv|\.experts\.")
"""Names of matrices that belong to no linear layer, or to the head."""


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A quantised linear layer as its file has it."""

    scheme: WeightScheme
    outputs: int
    inputs: int
    tensors: Mapping[str, TensorHeader]
    """By the last part of their names, without the bias."""

    @property
    def groups(self) -> int:
        """Scales of one output, if the weights are integers."""
        return self.inputs // self.scheme.group_size if self.scheme.group_size else 1

    @property
    def needed_bytes(self) -> int:
        """Memory that the loaded layer takes: packed weights, scales in float32, zero points in bytes."""
        weights = self.outputs * self.inputs * self.scheme.bits // 8
        if block := self.scheme.block:
            return weights + 4 * -(-self.outputs // block[0]) * -(-self.inputs // block[1])
        if self.scheme.storage == "fp8":
            return weights + 4 * self.outputs
        return weights + 5 * self.outputs * self.groups + (8 * self.inputs if self.scheme.act_order else 0)


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A checkpoint with quantised layers that can be computed."""

    quantization: Quantization
    layers: Mapping[str, StoredLayer]
    """By their names in the checkpoint."""
    other_tensors: tuple[TensorHeader, ...]

    def needed_bytes(self, bytes_per_element: int) -> int:
        """Return how much memory the loaded weights take; `bytes_per_element` is for weights that are not quantised."""
        needed = bytes_per_element * sum(header.elements for header in self.other_tensors)
        return needed + sum(layer.needed_bytes for layer in self.layers.values())


def check_quantization(folder: Path, config: Mapping[str, Any]) -> QuantizedCheckpoint | None:
    """Return the quantised layers of a folder, or None. Raises FailedPrecondition for what cannot be computed."""
    quantization, headers = read_quantization(folder, config), _read_all_headers(folder)
    stored = _quantized_names(folder, headers)
    if quantization is None:
        if stored:
            raise FailedPrecondition(
                f"'{folder.name}/config.json' has no quantization_config, and the weights of '{min(stored)[:128]}' are "
                "quantised: copy the model's own config.json, and hf_quant_config.json if it has one"
            )
        return None
    if not stored:
        raise FailedPrecondition(
            f"'{folder.name}/config.json' says {quantization}, and no weights beside it are quantised: copy both again"
        )
    layers: dict[str, StoredLayer] = {}
    taken: set[str] = set()
    for name, storages in sorted(stored.items()):
        scheme = quantization.scheme_of(name)
        if _EXPERTS.search(name):
            raise refusal(folder.name, str(scheme), f"the experts of a mixture of experts, '{name[:128]}'")
        if scheme.storage not in storages:
            raise FailedPrecondition(
                f"'{folder.name}/config.json' says {scheme}, and '{name[:128]}' is stored in another way: copy both again"
            )
        layer = _LayerReader(folder.name, name, scheme, headers).read()
        layers[name] = layer
        taken.update(f"{name}.{last}" for last in layer.tensors)
    return QuantizedCheckpoint(
        quantization, layers, tuple(header for name, header in headers.items() if name not in taken)
    )


def weight_scheme(folder: Path, made: str) -> str:
    """Return how the weights of a folder are quantised, for people; "" if they are not. `made`: parameter quantization."""
    if made.lower() == "fp8":
        return MADE_FP8
    try:
        config = read_json_object(folder / "config.json", "config.json", "no config.json")
        return str(read_quantization(folder, config) or "")
    except HeadraceError:
        return ""  # loading the model says what is wrong


def bytes_after_fp8(folder: Path, bytes_per_element: int) -> int:
    """Return roughly how much memory the weights of a folder take if linear layers are made FP8 when they are loaded."""
    needed = 0
    for name, header in _read_all_headers(folder).items():
        layer, _, last = name.rpartition(".")
        linear = last == "weight" and len(header.shape) == 2 and not _NOT_LINEAR.search(layer)
        made = linear and not NOT_MADE_FP8.search(layer)
        needed += header.elements * (1 if made else bytes_per_element)
    return needed


def _read_all_headers(folder: Path) -> dict[str, TensorHeader]:
    """Read the headers of the files that transformers reads."""
    paths: Iterable[Path] = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors").is_file():
        paths = [folder / "model.safetensors"]
    elif (folder / _INDEX).is_file():
        text = f"'{folder.name}/{_INDEX}'"
        names = read_json_object(folder / _INDEX, text, f"{text} cannot be read: copy it again").get("weight_map")
        if isinstance(names, Mapping):
            listed = {str(name) for name in names.values()}
            paths = [path for path in paths if path.name in listed]
    headers: dict[str, TensorHeader] = {}
    for path in paths:
        headers.update(read_headers(path))
    return headers


def _quantized_names(folder: Path, headers: Mapping[str, TensorHeader]) -> dict[str, tuple[Storage, ...]]:
    """Return the names of quantised layers, and how each may be stored."""
    found: dict[str, tuple[Storage, ...]] = {}
    for key, header in headers.items():
        layer, _, last = key.rpartition(".")
        if last in _WEIGHTS:
            found[layer] = _WEIGHTS[last]
        elif last == "weight" and header.dtype == "F8_E4M3":
            found[layer] = ("fp8",)
        elif last == "weight" and header.dtype not in (*_FLOATS, "F64"):
            raise refusal(folder.name, f"weights of type {header.dtype[:32]}", f"'{key[:128]}'")
    return found


class _LayerReader:
    """Checks the tensors of one quantised layer against its scheme."""

    def __init__(self, folder: str, name: str, scheme: WeightScheme, headers: Mapping[str, TensorHeader]) -> None:
        self._folder = folder
        self._name = name
        self._scheme = scheme
        self._headers = headers
        self._found: dict[str, TensorHeader] = {}

    def read(self) -> StoredLayer:
        storage = self._scheme.storage
        if storage == "fp8":
            return self._fp8()
        return self._packed() if storage == "packed" else self._columns()

    def _fp8(self) -> StoredLayer:
        outputs, inputs = self._matrix("weight", ("F8_E4M3",))
        last = "weight_scale_inv" if f"{self._name}.weight_scale_inv" in self._headers else "weight_scale"
        scale = self._tensor(last, _FLOATS)
        shape = tuple(size for size in scale.shape if size != 1)
        if block := self._scheme.block:
            wanted = -(-outputs // block[0]), -(-inputs // block[1])
            # ModelOpt writes [rows, 1, columns, 1].
            if shape != tuple(size for size in wanted if size != 1):
                raise self._wrong_shape(last, wanted)
        elif shape not in ((), (outputs,)):
            raise self._wrong_shape(last, (outputs,))
        return self._layer(outputs, inputs)

    def _packed(self) -> StoredLayer:
        """Weights of compressed-tensors: an output's weights are consecutive."""
        scheme, per_word = self._scheme, 32 // self._scheme.bits
        outputs, words = self._matrix("weight_packed", ("I32",))
        inputs = words * per_word
        groups = self._group_count(inputs)
        self._exact("weight_scale", _FLOATS, (outputs, groups))
        self._exact("weight_shape", ("I64", "I32"), (2,))
        if scheme.has_zeros:
            self._exact("weight_zero_point", ("I32",), (-(-outputs // per_word), groups))
        if scheme.act_order:
            self._exact("weight_g_idx", ("I32", "I64"), (inputs,))
        return self._layer(outputs, inputs)

    def _columns(self) -> StoredLayer:
        """Weights of AWQ and GPTQ: transposed."""
        scheme, per_word = self._scheme, 32 // self._scheme.bits
        rows, columns = self._matrix("qweight", ("I32",))
        outputs, inputs = (columns * per_word, rows) if scheme.storage == "awq" else (columns, rows * per_word)
        groups = self._group_count(inputs)
        if outputs % per_word:
            raise refusal(self._folder, str(scheme), f"'{self._name[:128]}' has {outputs} outputs")
        self._exact("scales", _FLOATS, (groups, outputs))
        self._exact("qzeros", ("I32",), (groups, outputs // per_word))
        if f"{self._name}.g_idx" in self._headers and scheme.storage == "gptq":
            self._exact("g_idx", ("I32", "I64"), (inputs,))
        elif scheme.act_order:
            raise self._missing("g_idx")
        return self._layer(outputs, inputs)

    def _layer(self, outputs: int, inputs: int) -> StoredLayer:
        return StoredLayer(self._scheme, outputs, inputs, self._found)

    def _group_count(self, inputs: int) -> int:
        size = self._scheme.group_size or inputs
        if inputs % size or size % 2:
            raise refusal(
                self._folder, str(self._scheme), f"'{self._name[:128]}' has {inputs} inputs, which are no whole groups"
            )
        return inputs // size

    def _tensor(self, last: str, dtypes: tuple[str, ...]) -> TensorHeader:
        header = self._headers.get(f"{self._name}.{last}")
        if header is None:
            raise self._missing(last)
        if header.dtype not in dtypes:
            raise refusal(self._folder, str(self._scheme), f"'{self._name[:128]}.{last}' has type {header.dtype[:32]}")
        self._found[last] = header
        return header

    def _matrix(self, last: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        shape = self._tensor(last, dtypes).shape
        if len(shape) != 2 or 0 in shape:
            raise refusal(self._folder, str(self._scheme), f"'{self._name[:128]}.{last}' has shape {list(shape)[:8]}")
        return shape[0], shape[1]

    def _exact(self, last: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        if self._tensor(last, dtypes).shape != shape:
            raise self._wrong_shape(last, shape)

    def _wrong_shape(self, last: str, wanted: tuple[int, ...]) -> FailedPrecondition:
        shape = list(self._headers[f"{self._name}.{last}"].shape)[:8]
        return FailedPrecondition(
            f"'{self._name[:128]}.{last}' in '{self._folder}' has shape {shape}, and {self._scheme} needs "
            f"{list(wanted)}: the weights are damaged or config.json is of another model; copy both again"
        )

    def _missing(self, last: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"the weights in '{self._folder}' have no '{self._name[:128]}.{last}', which {self._scheme} needs: copy the "
            "whole model folder"
        )
