# SPDX-License-Identifier: Apache-2.0
"""Folders as the library transformers saves them: which backend they are for.

Asked by `detect` and `formats`. Reads config.json and names of files; what is in them is for the backends to say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 16 * 1024 * 1024
_LEFT_OUT = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".py", ".pbtxt")
"""Weights that are pickles, or for other libraries; code; and configurations of ours."""


def is_hub_folder(folder: Path) -> bool:
    """Whether it has config.json and weights that are data. Those with pickles alone are not meant."""
    return bool(_said(folder)) and any(folder.glob("*.safetensors"))


def backend_of(folder: Path) -> str:
    """The backend for such a folder."""
    architectures = _said(folder).get("architectures")
    names = [str(each) for each in architectures] if isinstance(architectures, list) else []
    if any("ForImageClassification" in name or name.endswith("ForObjectDetection") for name in names):
        return "huggingface_vision"
    return "llm"


def files_of(folder: Path) -> list[Path]:
    """What a model of such a folder needs: files, and the folders of its modules."""
    return sorted(
        each for each in folder.iterdir() if not each.name.startswith(".") and each.suffix.lower() not in _LEFT_OUT
    )


def _said(folder: Path) -> dict[str, Any]:
    """What config.json says; nothing where it is none of theirs."""
    file = folder / "config.json"
    try:
        if file.stat().st_size > _MOST_BYTES:
            return {}
        said = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(said, dict) or not (said.get("architectures") or said.get("model_type")):
        return {}
    return said
