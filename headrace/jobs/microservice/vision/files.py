# SPDX-License-Identifier: Apache-2.0
"""Small files that lie beside a model: JSON that may not be there, and lists of labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument

_MOST_BYTES = 16 * 1024 * 1024
LABEL_FILES = ("labels.txt", "classes.txt", "label_map.txt", "imagenet_classes.txt")


def read_json(path: Path) -> Mapping[str, Any]:
    """An object; empty where there is no file. Raises `InvalidArgument` for a file that is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidArgument(f"{path.name} has more than {_MOST_BYTES} bytes: no model needs that")
        value = json.loads(path.read_bytes())
    except OSError:
        return {}
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{path.name} of the model is not JSON: copy the file again") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path.name} of the model is not a JSON object: copy the file again")
    return value


def labels_of(folder: Path, specs: Mapping[str, Any], engine: Sequence[str] = ()) -> dict[int, str]:
    """The words for the classes: from the job, config.json, a label file, or the model's configuration (`engine`)."""
    told = specs.get("labels")
    if isinstance(told, list):
        return {index: str(label) for index, label in enumerate(told)}
    named = specs.get("labels_file") or (told if isinstance(told, str) else "")
    if named:
        return _lines(folder / str(named), required=True)
    words = read_json(folder / "config.json").get("id2label")
    if isinstance(words, Mapping) and words:
        return {int(key): str(label) for key, label in words.items() if str(key).isascii() and str(key).isdigit()}
    for name in LABEL_FILES:
        if found := _lines(folder / name):
            return found
    return dict(enumerate(engine))


def _lines(path: Path, *, required: bool = False) -> dict[int, str]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidArgument(f"{path.name} has more than {_MOST_BYTES} bytes: it is no list of labels")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        if required:
            raise InvalidArgument(f"labels: {path.name!a} cannot be read in the model's folder: put it there") from None
        return {}
    return {index: line.strip() for index, line in enumerate(lines) if line.strip()}
