# SPDX-License-Identifier: Apache-2.0
"""Open the model of a batch job: fetch it, load it and describe its inputs.

A path or URL is staged as in the microservice; a name is looked up in a repository.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.backends.devices import visible_gpus
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import NotFound
from headrace.core.limits import MIB
from headrace.core.names import check_name
from headrace.core.telemetry.progress import Progress
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.jobs.batch.inference import InferenceClient, KindClient, TensorClient
from headrace.jobs.batch.settings import BatchSettings
from headrace.jobs.batch.sources import RequestShape
from headrace.jobs.concurrency import run_in_thread
from headrace.jobs.microservice.model_kinds.contract import ModelKind
from headrace.jobs.microservice.model_loader import (
    StagedModel,
    engine_for,
    kind_for,
    load_model,
    locate_model,
    stage_model,
)
from headrace.jobs.microservice.profiles import profile_named
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.models.media.reader import MediaReader
from headrace.models.media.settings import MediaSettings
from headrace.models.staging import find_config
from headrace.models.storage.cache import CacheUse
from headrace.models.storage.fetch import FetchSettings, fetch_location
from headrace.models.storage.locations import CLOUD_SCHEMES, LocalLocation, Location, parse_location, scheme_of
from headrace.net.sockets import Address

_WAITING = 4096
_SINGLE_THREADED = "onnxruntime"
_MAX_INSTANCES = 4
_MAX_INSTANCE_BYTES = 1024 * MIB
"""Maximum size of the files of all instances: each instance loads its own copy."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A loaded model."""

    client: InferenceClient
    shape: RequestShape
    fingerprint: str
    """A fingerprint, which changes with the model's files."""
    outputs: Mapping[str, DType | None] | None = None
    """Outputs of a tensor model with their types; None for any other model."""


@asynccontextmanager
async def open_model(
    settings: BatchSettings,
    folders: tuple[Path, ...],
    progress: Progress,
    cancelled: Callable[[], bool],
    use: CacheUse,
) -> AsyncIterator[OpenModel]:
    """Load the model; close it at the end. `folders`: folders with media. `use`: keeps downloads in the cache."""
    model_settings = _microservice_settings(settings)
    temporary = Path(tempfile.mkdtemp(prefix="headrace-batch-"))
    engine: Engine | None = None
    kind: ModelKind | None = None
    try:
        if settings.repository:
            engine, staged = await _from_repository(settings, progress)
            fingerprint = f"{staged.name}:{_files_digest(staged.folder, is_copy=False)}"
        else:
            location = await run_in_thread(lambda: _locate(settings, model_settings), "headrace-place")
            path = await run_in_thread(
                lambda: fetch_to_path(settings, location, progress, cancelled, use), "headrace-download"
            )
            fingerprint = _files_digest(path, is_copy=not isinstance(location, LocalLocation))
            staged = await run_in_thread(lambda: _stage(path, model_settings, temporary), "headrace-stage")
            engine = engine_for(temporary, progress)
            await load_model(engine, staged.name)
        kind = kind_for(staged, engine.plane, model_settings, lambda: _reader(settings, folders))
        yield _describe(settings, engine, staged.name, kind, fingerprint)
    finally:
        if kind is not None:
            await kind.close()
        if engine is not None:
            await engine.close(settings.grace_seconds)
        shutil.rmtree(temporary, ignore_errors=True)


def fetch_to_path(
    settings: BatchSettings, location: Location, progress: Progress, cancelled: Callable[[], bool], use: CacheUse
) -> Path:
    """Return a location as a local path; download it if needed. Blocks."""
    if isinstance(location, LocalLocation):
        return location.path.absolute()
    fetch_settings = FetchSettings(private_hosts=settings.private_hosts)
    return fetch_location(
        location, settings.folder / "brought", settings.credentials, progress, cancelled, fetch_settings, use
    )


def _describe(settings: BatchSettings, engine: Engine, name: str, kind: ModelKind, fingerprint: str) -> OpenModel:
    if kind.model_type != "tensors":
        return OpenModel(KindClient(kind), RequestShape(kind.model_type, parameters=settings.parameters), fingerprint)
    config = engine.plane.config(name)
    needed = [spec for spec in config.inputs if not spec.optional]
    shape = RequestShape(
        kind.model_type,
        tuple(spec.name for spec in needed),
        takes_text=len(needed) == 1 and needed[0].dtype is BYTES,
    )
    outputs = {spec.name: spec.dtype for spec in config.outputs}
    return OpenModel(TensorClient(engine.plane, config, settings.batch_size), shape, fingerprint, outputs)


async def _from_repository(settings: BatchSettings, progress: Progress) -> tuple[Engine, StagedModel]:
    name = check_name(settings.model)
    is_local = _is_folder_here(settings.repository)
    repository_settings = RepositorySettings(mode="explicit", load_models=(name,), model_load_thread_count=1)
    engine = open_engine(EngineSettings((settings.repository,), repository_settings, cache_bytes=0), progress)
    try:
        await load_model(engine, name)
    except BaseException:
        await engine.close(0)
        raise
    folder = Path(settings.repository, name) if is_local else Path()
    return engine, StagedModel(name, folder, settings.task)


def _stage(path: Path, model_settings: MicroserviceSettings, repository: Path) -> StagedModel:
    staged = stage_model(path, None, model_settings, repository)
    if find_config(path) is None:
        config_file = repository / staged.name / "config.json"
        config = json.loads(config_file.read_bytes())
        if config.get("backend") == _SINGLE_THREADED and model_settings.specs.get("instances") is None:
            for group in config.get("instance_group") or ():
                group["count"] = _instances(path)
        config_file.write_text(json.dumps(config))
    return staged


def _instances(path: Path) -> int:
    """Return the number of instances of a single-threaded model: as many as cores and memory allow."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    size = max(1, sum(file.stat().st_size for file in files))
    if visible_gpus():
        return 1
    return max(1, min(_MAX_INSTANCES, os.cpu_count() or 1, _MAX_INSTANCE_BYTES // size))


def _is_folder_here(repository: str) -> bool:
    """Return whether the repository is a local folder; raise if a local folder does not exist."""
    if scheme_of(repository):
        return False
    if not Path(repository).is_dir():
        raise NotFound(f"the repository {repository} is not a folder: use a folder with models")
    return True


def _microservice_settings(settings: BatchSettings) -> MicroserviceSettings:
    """Return the settings that the model loading of the microservice needs."""
    return MicroserviceSettings(
        "batch",
        settings.model,
        Address.parse("127.0.0.1:0"),
        network_arch=settings.network_arch,
        profile=profile_named(settings.network_arch),
        specs=settings.specs,
        folder=settings.folder,
        task=settings.task,
        credentials=settings.credentials,
    )


def _locate(settings: BatchSettings, model_settings: MicroserviceSettings) -> Location:
    # Unlike a microservice, a batch job may use cloud URLs and hf:// with the environment's credentials.
    return (
        parse_location(settings.model)
        if scheme_of(settings.model) in (*CLOUD_SCHEMES, "hf")
        else locate_model(settings.model, model_settings)
    )


def _reader(settings: BatchSettings, folders: tuple[Path, ...]) -> MediaReader:
    media = MediaSettings(
        folders=(*folders, *settings.media_folders),
        private_hosts=settings.private_hosts,
        decoders=max(2, os.cpu_count() or 1),
        waiting=_WAITING,
    )
    return MediaReader(media, settings.credentials)


def _files_digest(path: Path, *, is_copy: bool) -> str:
    """Hash names, sizes and modification times of a model's files; the times of a download are left out."""
    if path == Path():
        return "elsewhere"
    digest = hashlib.sha256()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        info = file.stat()
        name = file.relative_to(path) if path.is_dir() else file.name
        digest.update(f"{name}\0{info.st_size}\0{0 if is_copy else info.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()
