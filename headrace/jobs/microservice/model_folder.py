# SPDX-License-Identifier: Apache-2.0
"""A model's path as a place that can be brought here, and what was brought as a repository that the engine opens.

Called by `steps`. Knows Hugging Face folders by their config.json; every other file or folder is for
`configuration.staging`, which serves whatever `headrace serve` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.jobs.microservice.vision.files import read_json
from headrace.models.staging import LATEST, SingleModel, Staging, name_of
from headrace.models.storage.locations import (
    CLOUD_SCHEMES,
    HubPlace,
    LocalPlace,
    Place,
    parse_location,
    public_text,
    scheme_of,
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_CLOUD = {*CLOUD_SCHEMES, "cs"}
ADAPTER = "adapter"
"""What the LoRA adapter of a job is called in the engine."""

CLOUD_REFUSED = "Cloud-storage URIs are not supported by the inference service: "
_PASSED_ON = (
    "max_model_len",
    "page_size",
    "kv_cache_bytes",
    "max_running",
    "max_step_tokens",
    "prefix_cache",
    "chat_template",
)
_LLM, _VISION = "llm", "huggingface_vision"


@dataclass(frozen=True, slots=True)
class Staged:
    """A model in a repository of its own."""

    name: str
    """In the engine."""
    folder: Path
    """Where its files lie."""
    kind: str
    """What its files say it is: language, vision_language, ...; "" when its inputs and outputs have to tell."""
    adapter: str = ""


def place_of(text: str, settings: MicroserviceSettings) -> Place:
    """Where a model is; refuses what a service of this sort does not fetch."""
    scheme = scheme_of(text)
    if scheme in _CLOUD and settings.credentials is None:
        raise InvalidArgument(
            f"{CLOUD_REFUSED}{public_text(text)}. Give hf_model://ORG/NAME or an absolute path, or a job with cloud_metadata"
        )
    if scheme == "hf" and settings.credentials is None:
        # The services of launchers have never known it; a job with cloud_metadata is of the REST API, which has.
        raise InvalidArgument(f"{public_text(text)}: models of the Hugging Face Hub are written hf_model://ORG/NAME")
    place = parse_location(text)
    if isinstance(place, LocalPlace) and not place.path.exists():
        if _HUB_NAME.fullmatch(text):
            return HubPlace(text)
        raise FailedPrecondition(
            f"the model {text[:200]!a} does not exist here: give a path that does, or hf_model://ORG/NAME"
        )
    return place


def shown_name(text: str) -> str:
    """What answers call the model."""
    scheme = scheme_of(text)
    if scheme in ("hf_model", "hf"):
        return text.partition("://")[2].partition("@")[0].strip("/")
    return text if _HUB_NAME.fullmatch(text) else (Path(public_text(text)).name or "model")


def stage(path: Path, base: Path | None, settings: MicroserviceSettings, repository: Path) -> Staged:
    """Make a repository of one model. Raises what is wrong with it."""
    name = name_of(Path(shown_name(settings.model_path)))
    if base is not None:
        return _stage_hub_folder(base, name, settings, repository, adapter=path)
    if _is_hub_folder(path):
        return _stage_hub_folder(path, name, settings, repository)
    if path.is_dir() and (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise InvalidArgument(
            f"{path.name} is a LoRA adapter without its model: say enable_lora: true and base_model_path in the job's specs"
        )
    Staging(_single(path, name, settings.specs), repository).build()
    return Staged(name, path if path.is_dir() else path.parent, settings.task)


def kind_of_folder(folder: Path) -> str:
    """What a Hugging Face folder holds, by its config.json."""
    said = read_json(folder / "config.json")
    given = said.get("architectures")
    architectures = [str(each) for each in given] if isinstance(given, list) else []
    for architecture in architectures:
        if "ForImageClassification" in architecture:
            return "classifier"
        if architecture.endswith("ForObjectDetection"):
            return "detector"
        if architecture.endswith("ForConditionalGeneration") and "vision_config" in said:
            return "vision_language"
        if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            return "language"
    return "embedding"


def has_chat_template(folder: Path) -> bool:
    """Whether messages can be put to a language model."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))


def _is_hub_folder(path: Path) -> bool:
    if not path.is_dir():
        return False
    if (path / "modules.json").is_file():
        return True
    said = read_json(path / "config.json")
    if not (said.get("architectures") or said.get("model_type")):
        return False
    return not any(path.glob("*.onnx")) or any(path.glob("*.safetensors"))


def _stage_hub_folder(
    folder: Path, name: str, settings: MicroserviceSettings, repository: Path, adapter: Path | None = None
) -> Staged:
    kind = settings.task or kind_of_folder(folder)
    parameters = _parameters(settings.specs)
    parameters["model_path"] = str(folder.resolve())
    if adapter is not None:
        if kind not in ("language", "vision_language"):
            raise InvalidArgument(f"enable_lora is for language models, and {folder.name} is of the kind {kind}")
        parameters["adapters"] = f"{ADAPTER}={adapter.resolve()}"
    if kind == "embedding":
        parameters["task"] = "embed"
    backend = _VISION if kind in ("classifier", "detector") else _LLM
    written = {"name": name, "backend": backend, "parameters": _as_message(parameters)}
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.json").write_text(json.dumps(written))
    return Staged(name, folder, kind, ADAPTER if adapter is not None else "")


def _parameters(specs: Mapping[str, Any]) -> dict[str, str]:
    """The job's words for the model's configuration, apart from what is none."""
    made = {name: _text(specs[name]) for name in _PASSED_ON if specs.get(name) is not None}
    dtype = str(specs.get("torch_dtype") or specs.get("dtype") or "auto").removeprefix("torch.")
    if dtype != "auto":
        made["dtype"] = dtype
    if specs.get("trust_remote_code") is True:
        made["trust_remote_code"] = "true"
    more = specs.get("parameters") or {}
    if not isinstance(more, Mapping):
        raise InvalidArgument('specs.parameters is no object: write {"name": "value"}')
    return made | {str(name): _text(value) for name, value in more.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_message(parameters: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"string_value": value} for name, value in parameters.items()}


def _single(path: Path, name: str, specs: Mapping[str, Any]) -> SingleModel:
    return SingleModel(
        path,
        name,
        LATEST,
        all_versions=False,
        gpu=None,
        auto_device=True,
        instances=_whole(specs, "instances"),
        precision="fp32",
        max_batch_size=_whole(specs, "max_batch_size"),
        batch_timeout_ms=None,
        queue_timeout_ms=0,
        max_queue_size=0,
        cached=False,
        inputs=_rows(specs, "inputs"),
        outputs=_rows(specs, "outputs"),
        parameters=_parameters(specs),
    )


def _whole(specs: Mapping[str, Any], name: str) -> int | None:
    value = specs.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"specs.{name} is no whole number of 0 or more")
    return value


def _rows(specs: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    rows = specs.get(name) or []
    if not isinstance(rows, list) or not all(
        isinstance(row, Mapping) and {"name", "dtype", "shape"} <= row.keys() for row in rows
    ):
        raise InvalidArgument(
            f'specs.{name} is no list of tensors: write [{{"name": "x", "dtype": "FP32", "shape": [3, 224, 224]}}]'
        )
    return tuple(rows)
