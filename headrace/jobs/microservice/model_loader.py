# SPDX-License-Identifier: Apache-2.0
"""Resolve a model path, stage the model as a repository, load it and choose its model kind.

Hugging Face folders are recognised by their config.json; any other file or folder is staged by `models.staging`, which
accepts what `headrace serve` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.backends.devices import visible_gpus
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.generation import EMBEDDING
from headrace.core.telemetry.progress import Progress, silent
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.jobs.microservice.lifecycle import prepare_folder
from headrace.jobs.microservice.model_kinds.contract import ModelKind
from headrace.jobs.microservice.model_kinds.image_models import (
    BOXES,
    LOGITS,
    ClassifierKind,
    DetectorKind,
    ImageModel,
    image_input,
    output_dims,
)
from headrace.jobs.microservice.model_kinds.image_transforms import preprocessing_of
from headrace.jobs.microservice.model_kinds.language import Generator, LanguageKind
from headrace.jobs.microservice.model_kinds.media import Reader
from headrace.jobs.microservice.model_kinds.tensors import EmbeddingKind, TensorsKind
from headrace.jobs.microservice.model_kinds.video import VideoKind
from headrace.jobs.microservice.pipelines import PipelineSettings, find_pipeline
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.models.config.types import ModelConfig
from headrace.models.staging import LATEST, SingleModel, Staging, model_name
from headrace.models.storage.fetch import fetch_location
from headrace.models.storage.locations import (
    CLOUD_SCHEMES,
    HubLocation,
    LocalLocation,
    Location,
    is_hub_name,
    parse_location,
    public_text,
    scheme_of,
)

if TYPE_CHECKING:
    from headrace.backends.llm.tensor_parallel.node_pool import NodePool

_CLOUD_SCHEMES = {*CLOUD_SCHEMES, "cs"}
ADAPTER = "adapter"
"""Name of a job's LoRA adapter in the engine."""

CLOUD_UNSUPPORTED = "Cloud-storage URIs are not supported by the inference service: "
_ENGINE_PARAMETERS = (
    "max_model_len",
    "page_size",
    "kv_cache_bytes",
    "max_running",
    "max_step_tokens",
    "prefix_cache",
    "chat_template",
)
_LLM, _VISION = "llm", "huggingface_vision"

_LANGUAGE_KINDS = ("language", "vision_language")
OpenReader = Callable[[], Reader]
_MAX_BYTES = 16 * 1024 * 1024
LABEL_FILES = ("labels.txt", "classes.txt", "label_map.txt", "imagenet_classes.txt")


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A model in its own repository."""

    name: str
    """Its name in the engine."""
    folder: Path
    """The folder of its files."""
    kind: str
    """The model kind from its files: language, vision_language, ...; "" if it must be derived from its tensors."""
    adapter: str = ""


def locate_model(text: str, settings: MicroserviceSettings) -> Location:
    """Return the location of a model; raise for a location that this service does not fetch."""
    scheme = scheme_of(text)
    if scheme in _CLOUD_SCHEMES and settings.credentials is None:
        raise InvalidArgument(
            f"{CLOUD_UNSUPPORTED}{public_text(text)}. Give hf_model://ORG/NAME or an absolute path, or a job with "
            "cloud_metadata"
        )
    if scheme == "hf" and settings.credentials is None:
        # Services of the launcher do not know hf://; a job with cloud_metadata comes from the REST API, which does.
        raise InvalidArgument(f"{public_text(text)}: write models of the Hugging Face Hub as hf_model://ORG/NAME")
    location = parse_location(text)
    if isinstance(location, LocalLocation) and not location.path.exists():
        if is_hub_name(text):
            return HubLocation(text)
        raise FailedPrecondition(
            f"the model {text[:200]!a} does not exist: use an existing path, or hf_model://ORG/NAME"
        )
    return location


def display_name(text: str) -> str:
    """Return the model's name in responses."""
    scheme = scheme_of(text)
    if scheme in ("hf_model", "hf"):
        return text.partition("://")[2].partition("@")[0].strip("/")
    return text if is_hub_name(text) else (Path(public_text(text)).name or "model")


def stage_model(path: Path, base: Path | None, settings: MicroserviceSettings, repository: Path) -> StagedModel:
    """Stage a model as a repository; raise what is wrong with it."""
    name = model_name(Path(display_name(settings.model_path)))
    if settings.nodes.count > 1 and not _is_hub_folder(path if base is None else base):
        raise InvalidArgument(_one_node(path.name, settings))
    if base is not None:
        return _stage_hub_folder(base, name, settings, repository, adapter=path)
    if _is_hub_folder(path):
        return _stage_hub_folder(path, name, settings, repository)
    if path.is_dir() and (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise InvalidArgument(
            f"{path.name} is a LoRA adapter without its base model: set enable_lora: true and base_model_path in the "
            "job's specs"
        )
    Staging(_single(path, name, settings.specs), repository).build()
    return StagedModel(name, path if path.is_dir() else path.parent, settings.task)


def kind_from_config(folder: Path) -> str:
    """Return the model kind of a Hugging Face folder, from its config.json."""
    config = read_json(folder / "config.json")
    names = config.get("architectures")
    architectures = [str(name) for name in names] if isinstance(names, list) else []
    for architecture in architectures:
        if "ForImageClassification" in architecture:
            return "classifier"
        if architecture.endswith("ForObjectDetection"):
            return "detector"
        if architecture.endswith("ForConditionalGeneration") and "vision_config" in config:
            return "vision_language"
        if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            return "language"
    return "embedding"


def has_chat_template(folder: Path) -> bool:
    """Return whether a language model has a chat template."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))


def _is_hub_folder(path: Path) -> bool:
    if not path.is_dir():
        return False
    if (path / "modules.json").is_file():
        return True
    config = read_json(path / "config.json")
    if not (config.get("architectures") or config.get("model_type")):
        return False
    return not any(path.glob("*.onnx")) or any(path.glob("*.safetensors"))


def _stage_hub_folder(
    folder: Path, name: str, settings: MicroserviceSettings, repository: Path, adapter: Path | None = None
) -> StagedModel:
    kind = settings.task or kind_from_config(folder)
    parameters = _parameters(settings.specs)
    parameters["model_path"] = str(folder.resolve())
    if settings.nodes.count > 1:
        if kind != "language":
            raise InvalidArgument(_one_node(f"{folder.name}, a {kind} model,", settings))
        parameters.setdefault("tensor_parallel", str(settings.nodes.count * max(1, visible_gpus())))
    if adapter is not None:
        if kind not in ("language", "vision_language"):
            raise InvalidArgument(f"enable_lora is for language models, but {folder.name} is a {kind} model")
        parameters["adapters"] = f"{ADAPTER}={adapter.resolve()}"
    if kind == "embedding":
        parameters["task"] = "embed"
    backend = _VISION if kind in ("classifier", "detector") else _LLM
    config = {"name": name, "backend": backend, "parameters": _string_values(parameters)}
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.json").write_text(json.dumps(config))
    return StagedModel(name, folder, kind, ADAPTER if adapter is not None else "")


def _one_node(model_text: str, settings: MicroserviceSettings) -> str:
    return (
        f"{model_text} cannot be shared by {settings.nodes.count} nodes, which is for language models in Hugging Face's "
        "format: start it on one node"
    )


def fetch_model(
    text: str,
    settings: MicroserviceSettings,
    progress: Progress = silent,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Return the model's path on this machine; download it if it is elsewhere. Blocks."""
    location = locate_model(text, settings)
    if isinstance(location, LocalLocation):
        return location.path.absolute()
    return fetch_location(location, prepare_folder(settings.folder), settings.credentials, progress, is_cancelled)


def _parameters(specs: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of the model configuration from the job's specs."""
    parameters = {name: _text(specs[name]) for name in _ENGINE_PARAMETERS if specs.get(name) is not None}
    dtype = str(specs.get("torch_dtype") or specs.get("dtype") or "auto").removeprefix("torch.")
    if dtype != "auto":
        parameters["dtype"] = dtype
    if specs.get("trust_remote_code") is True:
        parameters["trust_remote_code"] = "true"
    extra = specs.get("parameters") or {}
    if not isinstance(extra, Mapping):
        raise InvalidArgument('specs.parameters is not an object: write {"name": "value"}')
    return parameters | {str(name): _text(value) for name, value in extra.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _string_values(parameters: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"string_value": value} for name, value in parameters.items()}


def _single(path: Path, name: str, specs: Mapping[str, Any]) -> SingleModel:
    return SingleModel(
        path,
        name,
        LATEST,
        all_versions=False,
        gpu=None,
        auto_device=True,
        instances=_integer(specs, "instances"),
        precision="fp32",
        max_batch_size=_integer(specs, "max_batch_size"),
        batch_timeout_ms=None,
        queue_timeout_ms=0,
        max_queue_size=0,
        cached=False,
        inputs=_tensor_specs(specs, "inputs"),
        outputs=_tensor_specs(specs, "outputs"),
        parameters=_parameters(specs),
    )


def _integer(specs: Mapping[str, Any], name: str) -> int | None:
    value = specs.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"specs.{name} must be an integer of 0 or more")
    return value


def _tensor_specs(specs: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    rows = specs.get(name) or []
    if not isinstance(rows, list) or not all(
        isinstance(row, Mapping) and {"name", "dtype", "shape"} <= row.keys() for row in rows
    ):
        raise InvalidArgument(
            f'specs.{name} is not a list of tensors: write [{{"name": "x", "dtype": "FP32", "shape": [3, 224, 224]}}]'
        )
    return tuple(rows)


def engine_for(repository: Path, progress: Progress = silent, nodes: NodePool | None = None) -> Engine:
    """Return an engine for a staged repository; `load_model` starts it. `nodes` compute the model together with it."""
    settings = EngineSettings((repository,), RepositorySettings(model_load_thread_count=1), cache_bytes=0, nodes=nodes)
    return open_engine(settings, progress)


async def load_model(engine: Engine, name: str) -> None:
    """Load the model; the error has the cause without the repository's prefix."""
    try:
        await engine.start()
    except FailedPrecondition as error:
        cause = error.message.partition(f" failed to load: {name}: ")[2]
        raise FailedPrecondition(cause or error.message) from None
    if name not in engine.plane.model_names():
        raise FailedPrecondition("the download contains no model: use the file or folder of a model")


def kind_for(
    staged: StagedModel, plane: DataPlane, settings: MicroserviceSettings, open_reader: OpenReader
) -> ModelKind:
    """Return the model kind of the loaded model; raise if the architecture does not serve it."""
    config = plane.config(staged.name)
    kind = staged.kind or _kind_from_tensors(config)
    profile = settings.profile
    if profile.kinds and kind not in profile.kinds:
        raise FailedPrecondition(
            f"{profile.name} serves {' or '.join(profile.kinds)} models, but this is a {kind} model: "
            "omit --network-arch (neural_network_name), or use another model"
        )
    if kind in _LANGUAGE_KINDS:
        generator = Generator(plane, staged.name, staged.adapter, has_chat_template(staged.folder))
        return LanguageKind(generator, profile, open_reader() if kind == "vision_language" else None)
    if kind in ("classifier", "detector"):
        return _image_kind(kind, staged, plane, settings, open_reader)
    if kind == "embedding":
        return EmbeddingKind(plane, staged.name, batched=config.max_batch_size > 0)
    return TensorsKind(plane, config)


def open_video(path: Path | None, settings: MicroserviceSettings, open_reader: OpenReader) -> ModelKind:
    """Open the pipeline of a plug-in. Blocks while it loads its weights."""
    options = settings.pipeline
    open_pipeline = find_pipeline(settings.network_arch, options.name)
    if options.output_dir is not None:
        try:
            options.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"--output-dir {options.output_dir} cannot be created: {error.strerror}") from None
    pipeline = open_pipeline(
        PipelineSettings(path, options.model_key, options.output_dir, options.context_parallel_size, options.options)
    )
    return VideoKind(pipeline, settings.profile, open_reader())


def _kind_from_tensors(config: ModelConfig) -> str:
    """Guess the model kind from the inputs and outputs."""
    if config.decoupled and any(spec.name == "text_output" for spec in config.outputs):
        return "language"
    outputs = output_dims(config)
    if any(spec.name == EMBEDDING for spec in config.outputs):
        return "embedding"
    if image_input(config) is not None and outputs:
        if {LOGITS, BOXES} <= outputs.keys():
            return "detector"
        if len(outputs) == 1:
            return {1: "classifier", 2: "detector"}.get(len(next(iter(outputs.values()))), "tensors")
    return "tensors"


def _image_kind(
    kind: str, staged: StagedModel, plane: DataPlane, settings: MicroserviceSettings, open_reader: OpenReader
) -> ModelKind:
    config = plane.config(staged.name)
    target = image_input(config)
    outputs = output_dims(config)
    if target is None or not outputs:
        raise FailedPrecondition(
            f"a {kind} needs one RGB image input (FP32 or UINT8), which this model does not have: check its configuration, "
            "or omit --task"
        )
    is_detector = kind == "detector"
    processor_config = read_json(staged.folder / "preprocessor_config.json")
    version = plane.find(staged.name)
    engine_labels = next(iter(getattr(version, "labels", {}).values()), ())
    model = ImageModel(
        plane,
        staged.name,
        config.max_batch_size,
        target,
        preprocessing_of(processor_config, settings.specs, target, is_detector=is_detector),
        labels_of(staged.folder, settings.specs, engine_labels),
        open_reader(),
        settings.profile.media,
    )
    if not is_detector:
        return ClassifierKind(model, LOGITS if LOGITS in outputs else next(iter(outputs)))
    return DetectorKind(model, "" if {LOGITS, BOXES} <= outputs.keys() else next(iter(outputs)))


def failure_text(error: BaseException, doing: str) -> str:
    """Return what a client may see of a failure: Headrace's own message, or the class of another exception."""
    if isinstance(error, HeadraceError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} while {doing}; the service's log has the details"
    return f"{type(error).__name__} while {doing}; the service's log has the details"


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; {} if there is no file, `InvalidArgument` if the file is invalid."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidArgument(f"{path.name} has more than {_MAX_BYTES} bytes, which is too large")
        value = json.loads(path.read_bytes())
    except OSError:
        return {}
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{path.name} of the model is not JSON: copy the file again") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path.name} of the model is not a JSON object: copy the file again")
    return value


def labels_of(folder: Path, specs: Mapping[str, Any], engine: Sequence[str] = ()) -> dict[int, str]:
    """Return class labels: from the specs, config.json, a label file, or the model configuration (`engine`)."""
    given = specs.get("labels")
    if isinstance(given, list):
        return {index: str(label) for index, label in enumerate(given)}
    file_name = specs.get("labels_file") or (given if isinstance(given, str) else "")
    if file_name:
        return _read_labels(folder / str(file_name), required=True)
    id2label = read_json(folder / "config.json").get("id2label")
    if isinstance(id2label, Mapping) and id2label:
        return {int(key): str(label) for key, label in id2label.items() if str(key).isascii() and str(key).isdigit()}
    for name in LABEL_FILES:
        if labels := _read_labels(folder / name):
            return labels
    return dict(enumerate(engine))


def _read_labels(path: Path, *, required: bool = False) -> dict[int, str]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidArgument(f"{path.name} has more than {_MAX_BYTES} bytes, which is too large for labels")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        if required:
            raise InvalidArgument(f"labels: {path.name!a} cannot be read in the model's folder: put it there") from None
        return {}
    return {index: line.strip() for index, line in enumerate(lines) if line.strip()}
