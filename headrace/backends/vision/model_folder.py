# SPDX-License-Identifier: Apache-2.0
"""A reader of Hugging Face vision models: task, inputs and outputs from config.json, and weights from safetensors."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_OBJECT_DETECTION_MAPPING,
)

from headrace.backends.contract import ModelFiles
from headrace.backends.model_config import parse_choice, parse_int, read_json_object
from headrace.backends.signature import Port, Signature
from headrace.backends.torch_import import TRANSFORMERS
from headrace.backends.weight_files import WeightFiles, check_memory, check_sizes
from headrace.core.dtypes import FP32
from headrace.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from headrace.models.config.types import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Settings:
    """The parsed and checked parameters of a configuration."""

    folder: Path
    dtype: Any = torch.float32
    """A `torch.dtype`."""
    threads: int = 1
    max_weight_bytes: int | None = None
    """On a CPU: refuse larger weights. None: what memory is free."""


def settings_of(config: ModelConfig, files: ModelFiles) -> Settings:
    """Parse the parameters."""
    given = config.parameters
    return Settings(
        # An absolute path stays as it is.
        folder=files.version_folder / given.get("model_path", "."),
        dtype=_DTYPES[parse_choice(given, "dtype", "float32", _DTYPES)],
        threads=parse_int(given, "INTRA_OP_THREAD_COUNT", 1, 1024) or (os.cpu_count() or 1),
        max_weight_bytes=parse_int(given, "max_weight_bytes", None, 2**50),
    )


log = logging.getLogger("headrace.backends")

PIXELS, LOGITS, BOXES = "pixel_values", "logits", "pred_boxes"
CONFIG_FILE = "config.json"

_INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ONE_SIZE = frozenset({"clip", "metaclip_2", "levit"})
"""Model types whose position embeddings cannot be interpolated; others of the kind have an argument for it."""

Kind = Literal["classifier", "detector"]


@dataclass(frozen=True, slots=True)
class VisionFolder:
    """A model folder that can be served."""

    path: Path
    kind: Kind
    config: Any
    """The configuration as transformers reads it."""
    model_class: Any
    signature: Signature
    labels: Mapping[int, str]
    """The class names; empty if the folder has only LABEL_0, LABEL_1, ..."""
    weights: WeightFiles


def read_folder(name: str, path: Path) -> VisionFolder:
    """Read and check a model folder."""
    config_json = read_json_object(
        path / CONFIG_FILE,
        f"model '{name}': its {CONFIG_FILE}",
        f"model '{name}': its folder has no {CONFIG_FILE} that can be read: put the files of the Hugging Face model into "
        "the version's folder, or name their folder in the parameter model_path",
        InvalidArgument,
    )
    kind = _kind_of(name, config_json)
    weights = check_sizes(path, config_json)
    config = _read_config(name, path)
    model_class = _class_of(name, kind, config_json, config)
    _check_weights(name, path)
    signature = _signature(kind, config, model_class)
    return VisionFolder(path, kind, config, model_class, signature, _labels_of(config_json), weights)


def _kind_of(name: str, config_json: Mapping[str, Any]) -> Kind:
    given = config_json.get("architectures")
    architectures = [item for item in given if isinstance(item, str)] if isinstance(given, list) else []
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


def _class_of(name: str, kind: Kind, config_json: Mapping[str, Any], config: Any) -> Any:
    known = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING if kind == "classifier" else MODEL_FOR_OBJECT_DETECTION_MAPPING
    if type(config) not in known:
        raise InvalidArgument(
            f"model '{name}': transformers has no {kind} of type '{str(config.model_type)[:64]}': correct model_type or "
            f"architectures in its {CONFIG_FILE}"
        )
    classes = known[type(config)]
    if not isinstance(classes, tuple | list):
        classes = (classes,)
    chosen = next(
        (candidate for candidate in classes if candidate.__name__ in config_json["architectures"]), classes[0]
    )
    forward_parameters = list(inspect.signature(chosen.forward).parameters.values())[1:]
    needed = [
        parameter.name
        for parameter in forward_parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if forward_parameters[0].name != PIXELS or set(needed) - {PIXELS}:
        raise InvalidArgument(
            f"model '{name}' ({chosen.__name__}) takes other inputs than {PIXELS}: write a model.py for the backend python, "
            "which can call it with what it needs"
        )
    return chosen


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
        # Models like DETR count "no object" as one more class.
        outputs = {
            LOGITS: Port(LOGITS, "tensor", FP32, (-1, queries, -1)),
            BOXES: Port(BOXES, "tensor", FP32, (-1, queries, 4)),
        }
    return Signature({PIXELS: pixels}, outputs, {})


def _size_of(config: Any, model_class: Any) -> tuple[int, int]:
    """Return height and width if the model takes one size only; -1 for any size."""
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


def _labels_of(config_json: Mapping[str, Any]) -> Mapping[int, str]:
    given = config_json.get("id2label")
    if not isinstance(given, dict):
        return {}
    labels = {int(key): str(label) for key, label in given.items() if str(key).isascii() and str(key).isdigit()}
    return {} if all(label == f"LABEL_{number}" for number, label in labels.items()) else labels


_COUNTER = "num_batches_tracked"
"""A counter of batch normalisation in training. Old files lack it, and inference does not use it."""


def load_weights(name: str, folder: VisionFolder, settings: Settings, device: Any) -> Any:
    """Load the model onto the device."""
    config = folder.config
    if device.type == "cpu":
        check_memory(folder.path, folder.weights, settings.dtype.itemsize, settings.max_weight_bytes)
    if hasattr(config, "use_pretrained_backbone"):
        # The backbone's weights are in the folder; otherwise transformers would download them first.
        config.use_pretrained_backbone = False
    try:
        with (
            TRANSFORMERS,
            warnings.catch_warnings(action="ignore"),
        ):  # Silences messages about itself and about files of older versions.
            model, loading_info = folder.model_class.from_pretrained(
                folder.path,
                config=config,
                dtype=settings.dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except ImportError as error:
        log.exception("model %s cannot be created", name)
        needs = (error.name or "").partition(".")[0] or "timm"
        raise FailedPrecondition(
            f"model '{name}' needs a package that is not installed: pip install {needs}. The server's log says more"
        ) from None
    except torch.OutOfMemoryError:
        raise ResourceExhausted(f"model '{name}' does not fit into the memory of {device}") from None
    except Exception:
        log.exception("model %s cannot be loaded", name)
        raise InvalidArgument(
            f"model '{name}': its weights ({_shown(folder)}) cannot be loaded: the files are damaged, incomplete, or of "
            "another model than config.json says: replace them. The server's log says more"
        ) from None
    # transformers fills missing weights with random numbers and continues.
    missing = sorted(key for key in loading_info["missing_keys"] if not key.endswith(_COUNTER))
    if missing or loading_info.get("mismatched_keys"):
        log.error("model %s: weights that are missing: %s", name, missing[:100])
        count = len(missing) or len(loading_info["mismatched_keys"])
        raise InvalidArgument(
            f"model '{name}': {count} of its weights are not in its files, or have another shape there "
            f"({_shown(folder)}): config.json is of another model, or a file is missing: correct the folder. "
            "The server's log names them"
        )
    model.requires_grad_(False)
    try:
        return model.eval().to(device)
    except torch.OutOfMemoryError:
        raise ResourceExhausted(f"model '{name}' does not fit into the memory of {device}") from None


def _shown(folder: VisionFolder) -> str:
    names = sorted(path.name for path in folder.path.glob("*.safetensors"))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
