# SPDX-License-Identifier: Apache-2.0
"""The model of a job: brought, loaded, and asked what it takes. Called by `app`.

A path or URL is staged as the microservice stages its own; a name is looked up in a repository.
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
from headrace.jobs.batch.asking import Asker, KindAsker, RowsAsker
from headrace.jobs.batch.settings import BatchSettings
from headrace.jobs.batch.shaping import Shape
from headrace.jobs.microservice.kinds.contract import Kind
from headrace.jobs.microservice.model_folder import Staged, place_of, stage
from headrace.jobs.microservice.opening import engine_for, kind_for, load
from headrace.jobs.microservice.profiles import profile_named
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.jobs.microservice.threads import in_thread
from headrace.models.media.reader import MediaReader
from headrace.models.media.settings import MediaSettings
from headrace.models.staging import own_config
from headrace.models.storage.bringing import BringSettings, bring
from headrace.models.storage.cache import CacheUse
from headrace.models.storage.locations import CLOUD_SCHEMES, LocalPlace, Place, parse_location, scheme_of
from headrace.net.sockets import Address

_WAITING = 4096
_ONE_THREADED = "onnxruntime"
_MOST_INSTANCES = 4
_ALL_INSTANCES_BYTES = 1024 * MIB
"""Of the files of all instances: each reads them for itself."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that answers."""

    asker: Asker
    shape: Shape
    fingerprint: str
    """Another one when any of the model's files has changed."""
    outputs: Mapping[str, DType | None] | None = None
    """Of a model of tensors, with their types where they are known."""


@asynccontextmanager
async def open_model(
    settings: BatchSettings,
    folders: tuple[Path, ...],
    progress: Progress,
    cancelled: Callable[[], bool],
    use: CacheUse,
) -> AsyncIterator[OpenModel]:
    """Load the model; it is gone at the end. `folders`: whose media it may read. `use`: holds what was downloaded."""
    as_service = _as_service(settings)
    temporary = Path(tempfile.mkdtemp(prefix="headrace-batch-"))
    engine: Engine | None = None
    kind: Kind | None = None
    try:
        if settings.repository:
            engine, staged = await _from_repository(settings, progress)
            fingerprint = f"{staged.name}:{_files_digest(staged.folder, brought=False)}"
        else:
            place = await in_thread(lambda: _place(settings, as_service), "headrace-place")
            path = await in_thread(lambda: bring_to(settings, place, progress, cancelled, use), "headrace-download")
            fingerprint = _files_digest(path, brought=not isinstance(place, LocalPlace))
            staged = await in_thread(lambda: _staged(path, as_service, temporary), "headrace-stage")
            engine = engine_for(temporary, progress)
            await load(engine, staged.name)
        kind = kind_for(staged, engine.plane, as_service, lambda: _reader(settings, folders))
        yield _described(settings, engine, staged.name, kind, fingerprint)
    finally:
        if kind is not None:
            await kind.close()
        if engine is not None:
            await engine.close(settings.grace_seconds)
        shutil.rmtree(temporary, ignore_errors=True)


def bring_to(
    settings: BatchSettings, place: Place, progress: Progress, cancelled: Callable[[], bool], use: CacheUse
) -> Path:
    """What lies at a place, as a path here. Blocks."""
    if isinstance(place, LocalPlace):
        return place.path.absolute()
    wanted = BringSettings(private_hosts=settings.private_hosts)
    return bring(place, settings.folder / "brought", settings.credentials, progress, cancelled, wanted, use)


def _described(settings: BatchSettings, engine: Engine, name: str, kind: Kind, fingerprint: str) -> OpenModel:
    if kind.model_type != "tensors":
        return OpenModel(KindAsker(kind), Shape(kind.model_type, parameters=settings.parameters), fingerprint)
    config = engine.plane.config(name)
    needed = [spec for spec in config.inputs if not spec.optional]
    shape = Shape(
        kind.model_type,
        tuple(spec.name for spec in needed),
        takes_text=len(needed) == 1 and needed[0].dtype is BYTES,
    )
    outputs = {spec.name: spec.dtype for spec in config.outputs}
    return OpenModel(RowsAsker(engine.plane, config, settings.batch_size), shape, fingerprint, outputs)


async def _from_repository(settings: BatchSettings, progress: Progress) -> tuple[Engine, Staged]:
    name = check_name(settings.model)
    here = _is_folder_here(settings.repository)
    wanted = RepositorySettings(mode="explicit", load_models=(name,), model_load_thread_count=1)
    engine = open_engine(EngineSettings((settings.repository,), wanted, cache_bytes=0), progress)
    try:
        await load(engine, name)
    except BaseException:
        await engine.close(0)
        raise
    folder = Path(settings.repository, name) if here else Path()
    return engine, Staged(name, folder, settings.task)


def _staged(path: Path, as_service: MicroserviceSettings, repository: Path) -> Staged:
    staged = stage(path, None, as_service, repository)
    if own_config(path) is None:
        written = repository / staged.name / "config.json"
        said = json.loads(written.read_bytes())
        if said.get("backend") == _ONE_THREADED and as_service.specs.get("instances") is None:
            for group in said.get("instance_group") or ():
                group["count"] = _instances(path)
        written.write_text(json.dumps(said))
    return staged


def _instances(path: Path) -> int:
    """How many of a model that computes in one thread: the cores are there, and one computes while another waits."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    size = max(1, sum(each.stat().st_size for each in files))
    if visible_gpus():
        return 1
    return max(1, min(_MOST_INSTANCES, os.cpu_count() or 1, _ALL_INSTANCES_BYTES // size))


def _is_folder_here(repository: str) -> bool:
    """Whether it is; raises if it should be and is not."""
    if scheme_of(repository):
        return False
    if not Path(repository).is_dir():
        raise NotFound(f"the repository {repository} is not a folder: name one that holds models")
    return True


def _as_service(settings: BatchSettings) -> MicroserviceSettings:
    """What the microservice's rooms want to know of a model."""
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


def _place(settings: BatchSettings, as_service: MicroserviceSettings) -> Place:
    # The microservice of a launcher has no cloud and no hf://; who runs a job may use the environment's credentials.
    return (
        parse_location(settings.model)
        if scheme_of(settings.model) in (*CLOUD_SCHEMES, "hf")
        else place_of(settings.model, as_service)
    )


def _reader(settings: BatchSettings, folders: tuple[Path, ...]) -> MediaReader:
    media = MediaSettings(
        folders=(*folders, *settings.media_folders),
        private_hosts=settings.private_hosts,
        decoders=max(2, os.cpu_count() or 1),
        waiting=_WAITING,
    )
    return MediaReader(media, settings.credentials)


def _files_digest(path: Path, *, brought: bool) -> str:
    """Names, sizes and (of what is not a copy) times of a model's files."""
    if path == Path():
        return "elsewhere"
    digest = hashlib.sha256()
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    for each in files:
        found = each.stat()
        name = each.relative_to(path) if path.is_dir() else each.name
        digest.update(f"{name}\0{found.st_size}\0{0 if brought else found.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()
