# SPDX-License-Identifier: Apache-2.0
"""A staged model as a kind that answers: the engine loads it, its files or tensors say what it is. Called by `steps`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.generation import EMBEDDING
from headrace.core.telemetry.progress import Progress, silent
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.jobs.microservice.kinds.arrays import ArraysKind
from headrace.jobs.microservice.kinds.classifier import ClassifierKind
from headrace.jobs.microservice.kinds.contract import Kind
from headrace.jobs.microservice.kinds.detector import BOXES, LOGITS, DetectorKind
from headrace.jobs.microservice.kinds.embedding import EmbeddingKind
from headrace.jobs.microservice.kinds.gathering import Reader
from headrace.jobs.microservice.kinds.generating import Generator
from headrace.jobs.microservice.kinds.language import LanguageKind
from headrace.jobs.microservice.kinds.pictures import PictureModel, image_input, output_dims
from headrace.jobs.microservice.kinds.video import VideoKind
from headrace.jobs.microservice.model_folder import Staged, has_chat_template
from headrace.jobs.microservice.pipelines import PipelineSettings, find_pipeline
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.jobs.microservice.vision.files import labels_of, read_json
from headrace.jobs.microservice.vision.preprocessing import preprocessing_of
from headrace.models.config.types import ModelConfig

_GENERATING = ("language", "vision_language")
OpenReader = Callable[[], Reader]


def engine_for(repository: Path, progress: Progress = silent) -> Engine:
    """An engine with the one model of a staged repository; `load` starts it."""
    settings = EngineSettings((repository,), RepositorySettings(model_load_thread_count=1), cache_bytes=0)
    return open_engine(settings, progress)


async def load(engine: Engine, name: str) -> None:
    """Load the model; raises why it cannot be, without the repository's words around it."""
    try:
        await engine.start()
    except FailedPrecondition as error:
        cause = error.message.partition("\n")[2].strip().removeprefix(f"{name}: ")
        raise FailedPrecondition(cause or error.message) from None
    if name not in engine.plane.model_names():
        raise FailedPrecondition("there is no model in what was downloaded: give a model's file or folder")


def kind_for(staged: Staged, plane: DataPlane, settings: MicroserviceSettings, open_reader: OpenReader) -> Kind:
    """What the loaded model answers with; raises where it is not for this architecture."""
    config = plane.config(staged.name)
    kind = staged.kind or _by_tensors(config)
    profile = settings.profile
    if profile.kinds and kind not in profile.kinds:
        raise FailedPrecondition(
            f"{profile.name} serves models of the kind {' or '.join(profile.kinds)}, and this one is of the kind {kind}: "
            "leave --network-arch (neural_network_name) out, or give another model"
        )
    if kind in _GENERATING:
        generator = Generator(plane, staged.name, staged.adapter, has_chat_template(staged.folder))
        return LanguageKind(generator, profile, open_reader() if kind == "vision_language" else None)
    if kind in ("classifier", "detector"):
        return _seeing(kind, staged, plane, settings, open_reader)
    if kind == "embedding":
        return EmbeddingKind(plane, staged.name, batched=config.max_batch_size > 0)
    return ArraysKind(plane, config)


def open_video(path: Path | None, settings: MicroserviceSettings, open_reader: OpenReader) -> Kind:
    """A pipeline of a plug-in. Blocks while it loads its weights."""
    chosen = settings.pipeline
    open_pipeline = find_pipeline(settings.network_arch, chosen.named)
    if chosen.output_dir is not None:
        try:
            chosen.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"--output-dir {chosen.output_dir} cannot be made: {error.strerror}") from None
    pipeline = open_pipeline(
        PipelineSettings(path, chosen.model_key, chosen.output_dir, chosen.context_parallel_size, chosen.options)
    )
    return VideoKind(pipeline, settings.profile, open_reader())


def _by_tensors(config: ModelConfig) -> str:
    """What the inputs and outputs of a model look like."""
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


def _seeing(
    kind: str, staged: Staged, plane: DataPlane, settings: MicroserviceSettings, open_reader: OpenReader
) -> Kind:
    config = plane.config(staged.name)
    target = image_input(config)
    outputs = output_dims(config)
    if target is None or not outputs:
        raise FailedPrecondition(
            f"the model is to be a {kind}, and its inputs are not one picture of three colours (FP32 or UINT8): see its "
            "configuration, or leave --task out"
        )
    detects = kind == "detector"
    told = read_json(staged.folder / "preprocessor_config.json")
    version = plane.find(staged.name)
    engine_labels = next(iter(getattr(version, "labels", {}).values()), ())
    model = PictureModel(
        plane,
        staged.name,
        config.max_batch_size,
        target,
        preprocessing_of(told, settings.specs, target, detects=detects),
        labels_of(staged.folder, settings.specs, engine_labels),
        open_reader(),
        settings.profile.media,
    )
    if not detects:
        return ClassifierKind(model, LOGITS if LOGITS in outputs else next(iter(outputs)))
    return DetectorKind(model, "" if {LOGITS, BOXES} <= outputs.keys() else next(iter(outputs)))


def told(error: BaseException, doing: str) -> str:
    """What may be shown of a failure: our own words, or the class of an exception that is not ours."""
    if isinstance(error, HeadraceError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} while {doing}; the service's log has the details"
    return f"{type(error).__name__} while {doing}; the service's log has the details"
