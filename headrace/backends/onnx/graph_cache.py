# SPDX-License-Identifier: Apache-2.0
"""Keeps the graph that ONNX Runtime made of a model, so that the next load need not make it again.

Called by `backends.onnx.backend` for models whose configuration asks for it. A kept graph is one file in the model's own
folder, with a hidden name, which neither a look for changes nor a listing takes for a part of the model:

    .model.onnx.<made with>.<made from>.<its seal>.optimized

`made with` stands for everything but the model that decides what the graph becomes: ONNX Runtime's version, the options,
the providers, and this machine's processor, for which layouts are chosen. `made from` is told by size, inode and times of
the model's files, the one that cannot be set (`ctime`) among them, and the seal by size, beginning and end: reading all of
a file takes as long as optimising most graphs does, so a repository that was copied makes its graphs anew instead. A file
is written under another name and then given this one, so it is there whole or not at all. Whatever is wrong with it is a
line in the log, and costs the time that it would have saved. Knows files, and no sessions.

Opening a session with one thread, milliseconds, plain and kept (medians of 4; ONNX Runtime 1.31, Neoverse-N1):

    53 convolutions, 74 MB            62    29
    12 layers of attention, 340 MB   603   501
    25 layers, 105 MB                101   101
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

_CPU_LINES = re.compile(r"^(model name|flags|Features|CPU (?:implementer|variant|part))\s*:.*$", re.MULTILINE)
_DIGITS = 16
_SEALED_BYTES = 1 << 16


class GraphCache:
    """The kept graph of one model file, opened in one way."""

    def __init__(self, config: ModelConfig, file: Path, weights: Sequence[Path], made_with: Mapping[str, Any]) -> None:
        self._model = config.name
        self._folder = file.parent
        told = json.dumps({**made_with, "processor": _processor()}, sort_keys=True)
        self._any = f".{file.name}.{hashlib.sha256(told.encode()).hexdigest()[:_DIGITS]}."
        self._this = f"{self._any}{_identity(file, *weights)}."

    def find(self) -> Path | None:
        """The kept graph, if there is one and it is as it was written."""
        for path in sorted(self._folder.glob(f"{_literal(self._this)}*.optimized")):
            try:
                if path.name == f"{self._this}{_seal(path)}.optimized":
                    return path
            except OSError as error:
                log.warning("model %s: the kept graph %s cannot be read: %s", self._model, path, error.strerror)
                continue
            self.discard(path, "it is damaged")
        return None

    def discard(self, path: Path, why: str) -> None:
        """Let go of a kept graph that is of no use."""
        log.warning("model %s: the kept graph %s is not used: %s; it is made again", self._model, path, why)
        _remove(path)

    def write(self, make: Callable[[Path], Any]) -> Any | None:
        """Let `make` write the graph into a file, keep the file, and give back what `make` did; None if it could not."""
        try:
            handle, name = tempfile.mkstemp(prefix=f"{self._any}new.", dir=self._folder)
        except OSError as error:
            log.warning("model %s: no graph is kept in %s: %s", self._model, self._folder, error.strerror)
            return None
        os.close(handle)
        path = Path(name)
        try:
            made = make(path)
            self._keep(path)
        except Exception as error:  # a full disk, or a graph that cannot be written: see ONNX Runtime's text
            log.warning("model %s: its graph cannot be kept: %s", self._model, first_line(error))
            return None
        finally:
            _remove(path)
        return made

    def _keep(self, path: Path) -> None:
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        kept = self._folder / f"{self._this}{_seal(path)}.optimized"
        path.replace(kept)
        log.info("model %s: its graph is kept in %s", self._model, kept)
        for old in self._folder.glob(f"{_literal(self._any)}*.optimized"):
            if not old.name.startswith(self._this):
                log.info("model %s: removed %s, which was made from another model file", self._model, old)
                _remove(old)


def first_line(error: Exception) -> str:
    """What an exception says, for one line of a log."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _identity(*paths: Path) -> str:
    stats = [path.stat() for path in paths]
    told = [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev) for stat in stats]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:_DIGITS]


def _seal(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        seal = hashlib.sha256(str(size).encode() + file.read(_SEALED_BYTES))
        file.seek(max(0, size - _SEALED_BYTES))
        seal.update(file.read(_SEALED_BYTES))
    return seal.hexdigest()[:_DIGITS]


@cache
def _processor() -> str:
    try:
        lines = {match.group() for match in _CPU_LINES.finditer(Path("/proc/cpuinfo").read_text())}
    except OSError:
        lines = {platform.processor()}
    return " ".join([platform.machine(), *sorted(lines)])


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # a folder that is read-only: what could not be removed is looked at again next time, and no harm
