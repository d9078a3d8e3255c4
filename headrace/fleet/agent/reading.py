# SPDX-License-Identifier: Apache-2.0
"""What the files of a model say it is: `config.json` of transformers, `model_index.json` of diffusers, safetensors' headers.

Called in threads by `fetching`. The result has the names of a BaseModel's spec, and only what is known. Files come from
anybody, so none is read without a bound, and nothing in them can make this raise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

_MOST_CONFIG = 16 * 1024 * 1024
_MOST_HEADER = 100_000_000  # the bound that the library safetensors has itself
_MOST_SHARDS = 10_000
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models of several kinds of data have what is said of their words."""
_EMBEDDING = ("bert", "xlm-roberta", "nomic", "new", "gte", "e5")
_PARTS = {
    "scheduler": "scheduler",
    "text_encoder": "textEncoder",
    "tokenizer": "tokenizer",
    "transformer": "transformer",
    "vae": "vae",
}


def read_model(folder: Path) -> dict[str, Any]:
    """What is known of the model in a folder; nothing of one that is of neither library."""
    index = _json(folder / "model_index.json")
    if index:
        return _diffusion(index)
    config = _json(folder / "config.json")
    if not config or not (config.get("architectures") or config.get("model_type")):
        return {}
    found: dict[str, Any] = {
        "modelType": _word(config.get("model_type")),
        "modelArchitecture": _architecture(config),
        "modelFramework": _versioned("transformers", config.get("transformers_version")),
        "quantization": _quantization(config),
        "maxTokens": _context(config),
        "modelCapabilities": _capabilities(config, folder),
    }
    if any(folder.glob("*.safetensors")):
        found["modelFormat"] = _versioned("safetensors", "1.0.0")
        found["modelParameterSize"] = parameter_size(_parameters(folder, config))
    return {name: value for name, value in found.items() if value}


def parameter_size(count: int) -> str:
    """A number of parameters as models' specs have it: 7.62B, 494.03M; "" for none."""
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        # So that what would be shown as 1000M is 1B.
        if count >= factor * 0.999995 or letter == "M":
            said = f"{count / factor:.2f}".rstrip("0").rstrip(".")
            return f"{said}{letter}" if said != "0" else ""
    return ""


def _diffusion(index: Mapping[str, Any]) -> dict[str, Any]:
    pipeline: dict[str, Any] = {"className": _word(index.get("_class_name"))}
    others: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        library, kind = _word(value[0]), _word(value[1])
        if library and kind:
            into = pipeline if name in _PARTS else others
            into[_PARTS.get(name, name)] = {"library": library, "type": kind}
    if others:
        pipeline["additionalComponents"] = others
    found: dict[str, Any] = {
        "modelFramework": _versioned("diffusers", index.get("_diffusers_version")),
        "modelFormat": _versioned("safetensors", "1.0.0"),
        "modelArchitecture": pipeline["className"],
        "modelCapabilities": ["TEXT_TO_IMAGE"],
        "diffusionPipeline": {name: value for name, value in pipeline.items() if value},
    }
    return {name: value for name, value in found.items() if value}


def _architecture(config: Mapping[str, Any]) -> str:
    given = config.get("architectures")
    return _word(given[0]) if isinstance(given, list) and given else ""


def _context(config: Mapping[str, Any]) -> int:
    for said in _levels(config):
        for name in _CONTEXT:
            value = said.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return value
    return 0


def _levels(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration, and those of its parts that tell of words."""
    yield config
    for name in _INNER:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            yield from _levels(inner) if name == "thinker_config" else (inner,)


def _capabilities(config: Mapping[str, Any], folder: Path) -> list[str]:
    architecture, kind = _architecture(config), _word(config.get("model_type")).lower()
    if "ForSequenceClassification" in architecture:
        return ["RERANK"]
    if "vision_config" in config or "vision_tower" in config or "ImageTextToText" in architecture:
        return ["IMAGE_TEXT_TO_TEXT"]
    if "whisper" in kind or "SpeechSeq2Seq" in architecture:
        return ["SPEECH_TO_TEXT"]
    sentences = (folder / "modules.json").is_file() or (folder / "1_Pooling").is_dir()
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if sentences or bare or "Embedding" in architecture or (not architecture and kind in _EMBEDDING):
        return ["EMBEDDING"]
    if re.search(r"ForCausalLM|LMHeadModel|ForConditionalGeneration", architecture):
        return ["TEXT_TO_TEXT"]
    return []


def _quantization(config: Mapping[str, Any]) -> str:
    said = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(said, Mapping):
        return ""
    method = _word(said.get("quant_method")).lower()
    if method in ("fp8", "fbgemm_fp8"):
        return method
    bits, kind = _bits(said)
    if bits == 4:
        return "int4" if kind != "float" else "fp4"
    if bits == 8:
        return "fp8" if kind == "float" else "int8"
    return ""


def _bits(said: Mapping[str, Any]) -> tuple[int, str]:
    """How many bits a weight has, and of which kind, in the words of each library."""
    if said.get("load_in_4bit") is True:
        return 4, "int"
    if said.get("load_in_8bit") is True:
        return 8, "int"
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return weights["num_bits"], _word(weights.get("type"))
    for name in ("bits", "w_bit", "wbits"):
        if isinstance(said.get(name), int):
            return said[name], "int"
    algorithm = _word(said.get("quant_algo")).upper()
    return (8, "float") if algorithm == "FP8" else (4, "float") if algorithm == "NVFP4" else (0, "")


def _parameters(folder: Path, config: Mapping[str, Any]) -> int:
    """All numbers of all tensors. Packed ones count as many as they hold."""
    quantization = config.get("quantization_config")
    bits = _bits(quantization)[0] if isinstance(quantization, Mapping) else 0
    total = 0
    for path in sorted(folder.glob("*.safetensors"))[:_MOST_SHARDS]:
        for name, tensor in _header(path).items():
            if name == "__metadata__" or not isinstance(tensor, Mapping):
                continue
            shape = tensor.get("shape")
            if not isinstance(shape, list) or not all(isinstance(each, int) and each >= 0 for each in shape):
                continue
            total += math.prod(shape) * _packed(name, tensor.get("dtype"), bits)
    return total


def _packed(name: str, dtype: Any, bits: int) -> int:
    """How many parameters one number of a tensor is. Zero points and scales of a quantized layer are none."""
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
            if not 0 < size <= _MOST_HEADER:
                return {}
            found = msgspec.json.decode(file.read(size))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _json(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_CONFIG + 1)
        found = msgspec.json.decode(content) if len(content) <= _MOST_CONFIG else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _versioned(name: str, version: Any) -> dict[str, str]:
    said = _word(version)
    return {"name": name, **({"version": said} if said else {})}


def _word(value: Any) -> str:
    """A text of a file, if it is one that can stand in an object of Kubernetes."""
    return value if isinstance(value, str) and len(value) <= 200 and value.isprintable() else ""
