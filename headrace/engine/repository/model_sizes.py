# SPDX-License-Identifier: Apache-2.0
"""The memory that a model takes: measured when it is loaded, and remembered on disk by the content of its files.

`on_demand` uses it. A file of the store is written whole or not at all, and is named by the content it was measured with, so
that a changed model is measured again and servers can share a folder. All of it blocks: it is called in threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition
from headrace.core.files import read_json, write_json
from headrace.core.machine import available_memory, process_memory
from headrace.engine.repository.memory_budget import HOST, MemoryUse, gpu_place

log = logging.getLogger("headrace.engine.repository")

_SAMPLE_BYTES = 64 * 1024
_WHOLE_BYTES = 4 * _SAMPLE_BYTES
_MOST_FILES = 20_000
_MOST_SIZES = 4096
_LEFT_OVER_SECONDS = 60.0
_FREE_PART = 0.8
"""Part of the free memory that models may take if no limit is set: the rest is for requests and for others."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a load took."""

    use: MemoryUse
    load_seconds: float


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The files of a model, as far as its size depends on them."""

    key: str
    """A digest of names and contents. Of a large file, its size, time and three samples stand for the content."""
    version_bytes: int
    """The bytes of the files in the version folders."""


def read_content(folder: Path, versions: Iterable[int]) -> ModelContent:
    """Return the content of these versions of a model, and of the files beside them."""
    digest = hashlib.blake2b(digest_size=20)
    version_names = {str(version) for version in versions}
    total, files_left = 0, _MOST_FILES
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        first = relative.parts[0]
        if first.isdecimal() and first not in version_names:
            continue
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        files_left -= 1
        if files_left < 0:
            break
        try:
            if not path.is_file():
                continue
            size = _add_file(digest, path, str(relative))
        except OSError:
            continue  # removed meanwhile: loading says what is missing
        if first in version_names:
            total += size
    return ModelContent(digest.hexdigest(), total)


def _add_file(digest: Any, path: Path, name: str) -> int:
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest.update(f"{name}\0{stat.st_size}\0".encode(errors="surrogateescape"))
        if stat.st_size <= _WHOLE_BYTES:
            digest.update(file.read(_WHOLE_BYTES))
        else:
            digest.update(f"{stat.st_mtime_ns}\0".encode())
            for place in (0, stat.st_size // 2, stat.st_size - _SAMPLE_BYTES):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return stat.st_size


class SizeStore:
    """The folder of remembered sizes. Without a folder nothing is remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: str) -> ModelSize | None:
        """Return the size of a content; None if it was never measured."""
        if self._folder is None:
            return None
        document = read_json(self._folder / f"{key}.json")
        if document is None:
            return None
        memory, seconds = document.get("memory"), document.get("load_seconds")
        if not isinstance(memory, dict) or not isinstance(seconds, int | float):
            return None
        if not all(isinstance(size, int) and size >= 0 for size in memory.values()):
            return None
        return ModelSize({str(place): size for place, size in memory.items()}, float(seconds))

    def write(self, key: str, model: str, size: ModelSize) -> None:
        """Remember a size. A disk that cannot be written costs one measurement at the next start, nothing else."""
        if self._folder is None:
            return
        document = {"model": model, "memory": dict(size.use), "load_seconds": round(size.load_seconds, 4)}
        try:
            write_json(self._folder / f"{key}.json", document, durable=False)
        except FailedPrecondition as error:
            log.warning("The size of model '%s' is not remembered: %s", model, error.message)

    def clean(self) -> None:
        """Remove what killed processes left, and the oldest sizes of very many."""
        if self._folder is None or not self._folder.is_dir():
            return
        try:
            now = time.time()
            for path in self._folder.glob(".*.new"):
                if now - path.stat().st_mtime > _LEFT_OVER_SECONDS:
                    path.unlink(missing_ok=True)
            sizes = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in sizes[:-_MOST_SIZES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("The remembered sizes in %s cannot be cleaned up: %s", self._folder, error.strerror)


class MemoryProbe:
    """Reads how much memory this process and its children use now."""

    def __init__(self, gpus: int = 0, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._gpus = _GpuMemory(gpus) if gpus else None
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def read(self) -> MemoryUse:
        """Return the allocated host memory, and the used memory of each GPU, by all processes."""
        if self._trim is not None:
            self._trim(0)  # what an evicted model has left in the heap must not hide the size of the next
        use = {HOST: sum(process_memory(pid, self._proc) for pid in self._family())}
        return use if self._gpus is None else {**use, **self._gpus.read()}

    def free(self) -> MemoryUse:
        """Return the memory that models may take if no limit is set; without places that cannot be read."""
        free = available_memory(self._proc)
        limits = {} if free is None else {HOST: int(free * _FREE_PART)}
        if self._gpus is not None:
            limits |= {place: int(size * _FREE_PART) for place, size in self._gpus.read(free=True).items()}
        return limits

    def _family(self) -> set[int]:
        """Return this process and all processes that descend from it: a backend may compute in its own."""
        parents: dict[int, int] = {}
        for entry in os.listdir(self._proc):
            if entry.isdecimal():
                try:
                    after_name = (self._proc / entry / "stat").read_text().rpartition(")")[2].split()
                    parents[int(entry)] = int(after_name[1])
                except (OSError, ValueError, IndexError):
                    continue  # it has ended
        family, has_more = {os.getpid()}, True
        while has_more:
            children = {pid for pid, parent in parents.items() if parent in family} - family
            has_more = bool(children)
            family |= children
        return family


class _GpuMemory:
    """The memory of the visible GPUs, by NVML."""

    def __init__(self, gpus: int) -> None:
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            indexes = _visible_indexes(gpus)
            self._handles = {gpu_place(place): library.nvmlDeviceGetHandleByIndex(i) for place, i in enumerate(indexes)}
            self._library = library
        except Exception as error:  # no package, no driver, or a GPU that the driver does not list
            log.warning("GPU memory cannot be measured (%s): models count by the size of their files", error)

    def read(self, *, free: bool = False) -> dict[str, int]:
        """Return the used (or free) bytes of each GPU."""
        bytes_by_gpu = {}
        for place, handle in self._handles.items():
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
            bytes_by_gpu[place] = int(memory.free if free else memory.used)
        return bytes_by_gpu


def _visible_indexes(gpus: int) -> list[int]:
    """Return the driver's numbers of the GPUs that CUDA shows this process, in CUDA's order."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [int(text) for text in named.split(",") if text.strip().isdecimal()]
    return numbers[:gpus] if numbers else list(range(gpus))


def growth(before: MemoryUse, after: MemoryUse, floor: MemoryUse) -> MemoryUse:
    """Return what a load took: the growth of the memory, at least `floor`; without places where it took nothing."""
    use = {
        place: max(after.get(place, 0) - before.get(place, 0), floor.get(place, 0))
        for place in {*before, *after, *floor}
    }
    return {place: size for place, size in sorted(use.items()) if size > 0}
