# SPDX-License-Identifier: Apache-2.0
"""Read a model's metadata from its files: transformers' `config.json`, diffusers' `model_index.json`, safetensors headers.

The result has the field names of a BaseModel's spec, and only known values. Files may come from anyone: every read is
bounded, and no content makes this raise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

_MAX_CONFIG_BYTES = 16 * 1024 * 1024
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_SHARDS = 10_000
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal models have the configuration of their language model."""
_EMBEDDING_TYPES = ("bert", "xlm-roberta", "nomic", "new", "gte", "e5")
_PIPELINE_COMPONENTS = {
    "scheduler": "scheduler",
    "text_encoder": "textEncoder",
    "tokenizer": "tokenizer",
    "transformer": "transformer",
    "vae": "vae",
}


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of the model in a folder; empty if it is of neither library."""
    index = _json(folder / "model_index.json")
    if index:
        return _diffusion(index)
    config = _json(folder / "config.json")
    if not config or not (config.get("architectures") or config.get("model_type")):
        return {}
    metadata: dict[str, Any] = {
        "modelType": _string(config.get("model_type")),
        "modelArchitecture": _architecture(config),
        "modelFramework": _versioned("transformers", config.get("transformers_version")),
        "quantization": _quantization(config),
        "maxTokens": _context_length(config),
        "modelCapabilities": _capabilities(config, folder),
    }
    if any(folder.glob("*.safetensors")):
        metadata["modelFormat"] = _versioned("safetensors", "1.0.0")
        metadata["modelParameterSize"] = parameter_size(_parameters(folder, config))
    return {name: value for name, value in metadata.items() if value}


def parameter_size(count: int) -> str:
    """Format a number of parameters: 7.62B, 494.03M; "" for 0."""
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        # 999.995M and more would be rounded to 1000M: write 1B.
        if count >= factor * 0.999995 or letter == "M":
            value = f"{count / factor:.2f}".rstrip("0").rstrip(".")
            return f"{value}{letter}" if value != "0" else ""
    return ""


def _diffusion(index: Mapping[str, Any]) -> dict[str, Any]:
    pipeline: dict[str, Any] = {"className": _string(index.get("_class_name"))}
    others: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        library, kind = _string(value[0]), _string(value[1])
        if library and kind:
            into = pipeline if name in _PIPELINE_COMPONENTS else others
            into[_PIPELINE_COMPONENTS.get(name, name)] = {"library": library, "type": kind}
    if others:
        pipeline["additionalComponents"] = others
    metadata: dict[str, Any] = {
        "modelFramework": _versioned("diffusers", index.get("_diffusers_version")),
        "modelFormat": _versioned("safetensors", "1.0.0"),
        "modelArchitecture": pipeline["className"],
        "modelCapabilities": ["TEXT_TO_IMAGE"],
        "diffusionPipeline": {name: value for name, value in pipeline.items() if value},
    }
    return {name: value for name, value in metadata.items() if value}


def _architecture(config: Mapping[str, Any]) -> str:
    given = config.get("architectures")
    return _string(given[0]) if isinstance(given, list) and given else ""


def _context_length(config: Mapping[str, Any]) -> int:
    for level in _text_configs(config):
        for name in _CONTEXT_FIELDS:
            value = level.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return value
    return 0


def _text_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the configuration and those of its language models."""
    yield config
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            yield from _text_configs(inner) if name == "thinker_config" else (inner,)


def _capabilities(config: Mapping[str, Any], folder: Path) -> list[str]:
    architecture, kind = _architecture(config), _string(config.get("model_type")).lower()
    if "ForSequenceClassification" in architecture:
        return ["RERANK"]
    if "vision_config" in config or "vision_tower" in config or "ImageTextToText" in architecture:
        return ["IMAGE_TEXT_TO_TEXT"]
    if "whisper" in kind or "SpeechSeq2Seq" in architecture:
        return ["SPEECH_TO_TEXT"]
    sentences = (folder / "modules.json").is_file() or (folder / "1_Pooling").is_dir()
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if sentences or bare or "Embedding" in architecture or (not architecture and kind in _EMBEDDING_TYPES):
        return ["EMBEDDING"]
    if re.search(r"ForCausalLM|LMHeadModel|ForConditionalGeneration", architecture):
        return ["TEXT_TO_TEXT"]
    return []


def _quantization(config: Mapping[str, Any]) -> str:
    value = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(value, Mapping):
        return ""
    method = _string(value.get("quant_method")).lower()
    if method in ("fp8", "fbgemm_fp8"):
        return method
    bits, kind = _bits(value)
    if bits == 4:
        return "int4" if kind != "float" else "fp4"
    if bits == 8:
        return "fp8" if kind == "float" else "int8"
    return ""


def _bits(value: Mapping[str, Any]) -> tuple[int, str]:
    """Return the bits per weight and their type, from the fields that each quantization library writes."""
    if value.get("load_in_4bit") is True:
        return 4, "int"
    if value.get("load_in_8bit") is True:
        return 8, "int"
    groups = value.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return weights["num_bits"], _string(weights.get("type"))
    for name in ("bits", "w_bit", "wbits"):
        if isinstance(value.get(name), int):
            return value[name], "int"
    algorithm = _string(value.get("quant_algo")).upper()
    return (8, "float") if algorithm == "FP8" else (4, "float") if algorithm == "NVFP4" else (0, "")


def _parameters(folder: Path, config: Mapping[str, Any]) -> int:
    """Count the parameters of all tensors; packed values count as many as they hold."""
    quantization = config.get("quantization_config")
    bits = _bits(quantization)[0] if isinstance(quantization, Mapping) else 0
    total = 0
    for path in sorted(folder.glob("*.safetensors"))[:_MAX_SHARDS]:
        for name, tensor in _header(path).items():
            if name == "__metadata__" or not isinstance(tensor, Mapping):
                continue
            shape = tensor.get("shape")
            if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
                continue
            total += math.prod(shape) * _parameters_per_value(name, tensor.get("dtype"), bits)
    return total


def _parameters_per_value(name: str, dtype: Any, bits: int) -> int:
    """Return how many parameters one tensor value holds; 0 for scales and zero points of a quantized layer."""
    if not bits:
        return 1
    if name.endswith((".scales", ".qzeros", ".g_idx", "_scale", "_scale_inv", "_zero_point", "_shape")):
        return 0
    widths = {"I32": 32, "U32": 32, "I64": 64, "U8": 8, "I8": 8}
    return max(1, widths.get(str(dtype), 0) // bits)


def _header(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= _MAX_HEADER_BYTES:
                return {}
            metadata = msgspec.json.decode(file.read(size))
    except (OSError, ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, Mapping) else {}


def _json(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
        metadata = msgspec.json.decode(content) if len(content) <= _MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, Mapping) else {}


def _versioned(name: str, version: Any) -> dict[str, str]:
    value = _string(version)
    return {"name": name, **({"version": value} if value else {})}


def _string(value: Any) -> str:
    """Return a string of a file if it may go into a Kubernetes object, else ""."""
    return value if isinstance(value, str) and len(value) <= 200 and value.isprintable() else ""
