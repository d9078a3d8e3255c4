# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face folder says of itself: which kind of model, which inputs and outputs. Reads config.json, no weights.

Called by `backend`. Every folder that cannot be served is refused here, with what to do: without config.json, of another
kind, with code of its own, without safetensors.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_OBJECT_DETECTION_MAPPING,
)

from headrace.backends.signature import Port, Signature
from headrace.core.dtypes import FP32
from headrace.core.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger("headrace.backends")

PIXELS, LOGITS, BOXES = "pixel_values", "logits", "pred_boxes"
CONFIG_FILE = "config.json"

_MOST_BYTES = 16 * 1024 * 1024
_INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ONE_SIZE = frozenset({"clip", "metaclip_2", "levit"})
"""Models with a learned place for each patch that cannot be stretched; others of the sort have an argument for it."""

Kind = Literal["classifier", "detector"]


@dataclass(frozen=True, slots=True)
class VisionFolder:
    """A folder that can be served."""

    path: Path
    kind: Kind
    config: Any
    """As transformers reads it."""
    model_class: Any
    signature: Signature
    labels: Mapping[int, str]
    """The names of the classes. Empty where the folder has none but LABEL_0, LABEL_1, ..."""


def read_folder(name: str, path: Path) -> VisionFolder:
    """Look at the folder of a model."""
    said = _config_json(name, path)
    kind = _kind_of(name, said)
    config = _read_config(name, path)
    model_class = _class_of(name, kind, said, config)
    _check_weights(name, path)
    return VisionFolder(path, kind, config, model_class, _signature(kind, config, model_class), _labels_of(said))


def _config_json(name: str, path: Path) -> Mapping[str, Any]:
    file = path / CONFIG_FILE
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise InvalidArgument(
                f"model '{name}': its {CONFIG_FILE} has over {_MOST_BYTES} bytes; no model needs that"
            )
        said = json.loads(file.read_bytes())
    except OSError:
        raise FailedPrecondition(
            f"model '{name}': its folder has no {CONFIG_FILE} that can be read: put the files of the Hugging Face model "
            "into the version's folder, or name their folder in the parameter model_path"
        ) from None
    except (ValueError, RecursionError):
        raise InvalidArgument(f"model '{name}': its {CONFIG_FILE} is not JSON: copy the file again") from None
    if not isinstance(said, dict):
        raise InvalidArgument(f"model '{name}': its {CONFIG_FILE} is not a JSON object: copy the file again")
    return said


def _kind_of(name: str, said: Mapping[str, Any]) -> Kind:
    given = said.get("architectures")
    architectures = [each for each in given if isinstance(each, str)] if isinstance(given, list) else []
    for architecture in architectures:
        if "ForImageClassification" in architecture:
            return "classifier"
        if architecture.endswith("ForObjectDetection"):
            return "detector"
    shown = ", ".join(architectures)[:128] or "nothing"
    raise InvalidArgument(
        f"model '{name}': its {CONFIG_FILE} has {shown} as architectures, and this backend serves those that end in "
        "ForImageClassification or ForObjectDetection. Language models are for the backend llm"
    )


def _read_config(name: str, path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception:
        log.exception("model %s: transformers cannot read its %s", name, CONFIG_FILE)
        raise InvalidArgument(
            f"model '{name}': transformers does not take its {CONFIG_FILE}: the model is of a type that this version does "
            "not know, comes with code of its own (which is never run), or the file is damaged. The server's log says more"
        ) from None


def _class_of(name: str, kind: Kind, said: Mapping[str, Any], config: Any) -> Any:
    known = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING if kind == "classifier" else MODEL_FOR_OBJECT_DETECTION_MAPPING
    if type(config) not in known:
        raise InvalidArgument(
            f"model '{name}': transformers has no {kind} of type '{str(config.model_type)[:64]}': correct model_type or "
            f"architectures in its {CONFIG_FILE}"
        )
    classes = known[type(config)]
    if not isinstance(classes, tuple | list):
        classes = (classes,)
    found = next((each for each in classes if each.__name__ in said["architectures"]), classes[0])
    takes = list(inspect.signature(found.forward).parameters.values())[1:]
    needed = [each.name for each in takes if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if takes[0].name != PIXELS or set(needed) - {PIXELS}:
        raise InvalidArgument(
            f"model '{name}' ({found.__name__}) takes more or other than {PIXELS}: write a model.py for the backend python, "
            "which can call it with what it needs"
        )
    return found


def _check_weights(name: str, path: Path) -> None:
    if (path / _INDEX_FILE).is_file() or any(path.glob("*.safetensors")):
        return
    if any(next(path.glob(pattern), None) for pattern in _PICKLES):
        raise InvalidArgument(
            f"model '{name}' has its weights in files of pickle (.bin, .pt), which can run any code when they are read: "
            "convert them where you trust them, by from_pretrained(...) and save_pretrained(...) of transformers, which "
            "writes model.safetensors, or fetch the .safetensors of the same model"
        )
    raise FailedPrecondition(f"model '{name}' has no weights: put model.safetensors beside its {CONFIG_FILE}")


def _signature(kind: Kind, config: Any, model_class: Any) -> Signature:
    channels = _number(config, "num_channels") or _number(getattr(config, "backbone_config", None), "num_channels") or 3
    pixels = Port(PIXELS, "tensor", FP32, (-1, channels, *_size_of(config, model_class)))
    if kind == "classifier":
        outputs = {LOGITS: Port(LOGITS, "tensor", FP32, (-1, int(config.num_labels)))}
    else:
        queries = _number(config, "num_queries") or _number(config, "num_detection_tokens") or -1
        # Those like DETR count "no object" as one more class.
        outputs = {
            LOGITS: Port(LOGITS, "tensor", FP32, (-1, queries, -1)),
            BOXES: Port(BOXES, "tensor", FP32, (-1, queries, 4)),
        }
    return Signature({PIXELS: pixels}, outputs, {})


def _size_of(config: Any, model_class: Any) -> tuple[int, int]:
    """Height and width, where the model takes no other; -1 for any."""
    size: Any = None
    if (
        "interpolate_pos_encoding" in inspect.signature(model_class.forward).parameters
        or config.model_type in _ONE_SIZE
    ):
        size = getattr(config, "image_size", None) or getattr(
            getattr(config, "vision_config", None), "image_size", None
        )
    elif getattr(config, "anchor_image_size", None):
        size = config.anchor_image_size
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return -1, -1


def _number(config: Any, field: str) -> int | None:
    value = getattr(config, field, None)
    return value if isinstance(value, int) and value > 0 else None


def _labels_of(said: Mapping[str, Any]) -> Mapping[int, str]:
    given = said.get("id2label")
    if not isinstance(given, dict):
        return {}
    labels = {int(key): str(label) for key, label in given.items() if str(key).isascii() and str(key).isdigit()}
    return {} if all(label == f"LABEL_{number}" for number, label in labels.items()) else labels
