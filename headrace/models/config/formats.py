# SPDX-License-Identifier: Apache-2.0
"""The model formats, each with its backend, old platform name and file name; Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Format:
    """One model format."""

    backend: str
    platform: str
    """The name of the old field `platform`; "" if it has none."""
    filename: str
    """The file or folder in the version folder, unless the configuration names another; "" if there is none."""


FORMATS = (
    Format("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    Format("python", "", "model.py"),
    Format("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    Format("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    Format("pytorch", "pytorch_libtorch", "model.pt"),
    Format("pytorch", "", "model.pt2"),
    Format("tensorrt", "tensorrt_plan", "model.plan"),
    Format("netdef", "caffe2_netdef", "model.netdef"),
    Format("openvino", "", "model.xml"),
    Format("xgboost", "", "model.ubj"),
    Format("xgboost", "", "model.json"),
    Format("lightgbm", "", "model.txt"),
    Format("sklearn", "", "model.skops"),
    Format("llm", "", ""),
    Format("openai_proxy", "", ""),
    Format("huggingface_vision", "", ""),
    Format("ensemble", "ensemble", ""),
    Format("identity", "", ""),
)

CPU_BY_DEFAULT = frozenset({"python", "identity"})
"""Backends whose KIND_AUTO instances run on the CPU even with GPUs: most of their models use none."""


def resolve_backend(message: Any, model_folder: Path) -> str:
    """Return the backend of a ModelConfig message; "" if neither it nor the model's files determine one."""
    if message.backend:
        return str(message.backend)
    if message.platform:
        return next(
            (model_format.backend for model_format in FORMATS if model_format.platform == message.platform),
            str(message.platform),
        )
    if message.HasField("ensemble_scheduling"):
        return "ensemble"
    model_format = find_format(FORMATS, model_folder, message.default_model_filename)
    if model_format is not None:
        return model_format.backend
    newest = next(iter(version_folders(model_folder)), None)
    return hub_backend(newest) if newest is not None and is_hub_folder(newest) else ""


def find_format(formats: Sequence[Format], model_folder: Path, filename: str = "") -> Format | None:
    """Return the first of `formats` whose file is in a version folder. `filename` is from the configuration."""
    if filename:
        return next(
            (
                model_format
                for model_format in formats
                if model_format.filename and filename.endswith(_suffix(model_format))
            ),
            None,
        )
    for folder in version_folders(model_folder):
        for model_format in formats:
            if model_format.filename and (folder / model_format.filename).exists():
                return model_format
    return None


def version_folders(model_folder: Path) -> list[Path]:
    """Return the version folders of a model, newest first."""
    try:
        names = [child.name for child in model_folder.iterdir() if child.is_dir()]
    except OSError:
        return []
    # Python refuses to parse numbers of thousands of digits; file systems allow 255.
    numbered = [(int(name), name) for name in names if name.isascii() and name.isdigit()]
    return [model_folder / name for _, name in sorted(numbered, reverse=True)]


def misnamed_file(folder: Path, expected: Sequence[str]) -> str:
    """Return what to do about a model's file that has another name than the expected ones; "" if there is none like it."""
    suffixes = {Path(name).suffix for name in expected}
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    except OSError:
        return ""
    if not names:
        return ""
    found = ", ".join(names[:3])
    likely = [name for name in expected if Path(name).suffix == Path(names[0]).suffix]
    return f"found {found}, expected {likely[0]}; rename it or set default_model_filename"


def _suffix(model_format: Format) -> str:
    return "." + model_format.filename.rpartition(".")[2]


_MAX_BYTES = 16 * 1024 * 1024
_EXCLUDED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".py", ".pbtxt")
"""Pickled weights, weights for other libraries, code, and configurations of Headrace."""


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder has config.json and safetensors. Folders with only pickles do not count."""
    return bool(_read_hub_config(folder)) and any(folder.glob("*.safetensors"))


def hub_backend(folder: Path) -> str:
    """Return the backend for a Hugging Face folder."""
    architectures = _read_hub_config(folder).get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if any("ForImageClassification" in name or name.endswith("ForObjectDetection") for name in names):
        return "huggingface_vision"
    return "llm"


def hub_files(folder: Path) -> list[Path]:
    """Return the files and folders that a Hugging Face model needs."""
    return sorted(
        path
        for path in folder.iterdir()
        if not path.name.startswith(".") and path.suffix.lower() not in _EXCLUDED_SUFFIXES
    )


def _read_hub_config(folder: Path) -> dict[str, Any]:
    """Read config.json; return an empty mapping if it is not from Hugging Face."""
    file = folder / "config.json"
    try:
        if file.stat().st_size > _MAX_BYTES:
            return {}
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict) or not (config.get("architectures") or config.get("model_type")):
        return {}
    return config
