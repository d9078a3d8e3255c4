# SPDX-License-Identifier: Apache-2.0
"""The words of a configuration for each format of models: its backend, its old platform name, its file.

Read by the drafts, to tell a backend from a platform or from the files that are there. Whether a backend can run here
is for `backends.table` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.config.hugging_face import backend_of, is_hub_folder


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    backend: str
    platform: str
    """What configurations wrote before there was `backend`; "" when there never was one."""
    filename: str
    """The file or folder in the version folder, unless the configuration names another; "" when there is none."""


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

CPU_UNLESS_TOLD = frozenset({"python", "identity"})
"""Backends whose instances of KIND_AUTO run on the CPU even where there are GPUs: most of their models use none."""


def resolve_backend(message: Any, model_folder: Path) -> str:
    """The backend that a ModelConfig message means; "" when neither it nor the model's files tell."""
    if message.backend:
        return str(message.backend)
    if message.platform:
        return next((known.backend for known in FORMATS if known.platform == message.platform), str(message.platform))
    if message.HasField("ensemble_scheduling"):
        return "ensemble"
    found = find_format(FORMATS, model_folder, message.default_model_filename)
    if found is not None:
        return found.backend
    newest = next(iter(version_folders(model_folder)), None)
    return backend_of(newest) if newest is not None and is_hub_folder(newest) else ""


def find_format(formats: Sequence[Format], model_folder: Path, filename: str = "") -> Format | None:
    """The first of `formats` whose file is in a version folder. `filename` is what the configuration calls the file."""
    if filename:
        return next((known for known in formats if known.filename and filename.endswith(_suffix(known))), None)
    for folder in version_folders(model_folder):
        for known in formats:
            if known.filename and (folder / known.filename).exists():
                return known
    return None


def version_folders(model_folder: Path) -> list[Path]:
    """The folders of a model's versions, newest first."""
    try:
        names = [child.name for child in model_folder.iterdir() if child.is_dir()]
    except OSError:
        return []
    # Python refuses to read numbers of thousands of digits; file systems allow 255.
    numbered = [(int(name), name) for name in names if name.isascii() and name.isdigit()]
    return [model_folder / name for _, name in sorted(numbered, reverse=True)]


def _suffix(known: Format) -> str:
    return "." + known.filename.rpartition(".")[2]
