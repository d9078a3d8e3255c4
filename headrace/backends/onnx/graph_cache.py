# SPDX-License-Identifier: Apache-2.0
"""A cache of the graphs that ONNX Runtime has optimised, so that the next load skips the optimisation.

Used for models whose configuration asks for it. A cached graph is one hidden file in the model's folder, which neither
repository polling nor a listing takes for a part of the model:

    .model.onnx.<settings>.<source>.<checksum>.optimized

`settings` is a hash of everything but the model that affects the graph: ONNX Runtime's version, the options, the
providers, and this machine's processor, which decides the memory layouts. `source` is a hash of size, inode and times
of the model's files, `ctime` included, which cannot be set. The checksum covers size, beginning and end: reading a
whole file takes as long as optimising most graphs, so a copied repository makes its graphs again instead. A file is
written under a temporary name and renamed, so it is never incomplete. Any error with it is logged, and costs only the
time that the cache would have saved.

Opening a session with one thread, milliseconds, without and with the cache (medians of 4; ONNX Runtime 1.31,
Neoverse-N1):

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
_CHECKSUM_BYTES = 1 << 16


class GraphCache:
    """The cached graph of one model file with given settings."""

    def __init__(self, config: ModelConfig, file: Path, weights: Sequence[Path], settings: Mapping[str, Any]) -> None:
        self._model = config.name
        self._folder = file.parent
        identity = json.dumps({**settings, "processor": _processor()}, sort_keys=True)
        self._prefix = f".{file.name}.{hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]}."
        self._key_prefix = f"{self._prefix}{_identity(file, *weights)}."

    def find(self) -> Path | None:
        """Return the cached graph, if there is an intact one."""
        for path in sorted(self._folder.glob(f"{_literal(self._key_prefix)}*.optimized")):
            try:
                if path.name == f"{self._key_prefix}{_checksum(path)}.optimized":
                    return path
            except OSError as error:
                log.warning("model %s: cannot read the cached graph %s: %s", self._model, path, error.strerror)
                continue
            self.discard(path, "it is damaged")
        return None

    def discard(self, path: Path, reason: str) -> None:
        """Remove a cached graph that cannot be used."""
        log.warning("model %s: cannot use the cached graph %s: %s; optimising again", self._model, path, reason)
        _remove(path)

    def write(self, make: Callable[[Path], Any]) -> Any | None:
        """Let `make` write the graph to a file, cache that file and return the result of `make`; None if this fails."""
        try:
            handle, name = tempfile.mkstemp(prefix=f"{self._prefix}new.", dir=self._folder)
        except OSError as error:
            log.warning("model %s: cannot cache its graph in %s: %s", self._model, self._folder, error.strerror)
            return None
        os.close(handle)
        path = Path(name)
        try:
            result = make(path)
            self._store(path)
        except Exception as error:  # The disk is full, or ONNX Runtime cannot write this graph; its message says which.
            log.warning("model %s: cannot cache its graph: %s", self._model, first_line(error))
            return None
        finally:
            _remove(path)
        return result

    def _store(self, path: Path) -> None:
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        kept = self._folder / f"{self._key_prefix}{_checksum(path)}.optimized"
        path.replace(kept)
        log.info("model %s: cached its graph in %s", self._model, kept)
        for old in self._folder.glob(f"{_literal(self._prefix)}*.optimized"):
            if not old.name.startswith(self._key_prefix):
                log.info("model %s: removed %s, the cached graph of another model file", self._model, old)
                _remove(old)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, for the log."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _identity(*paths: Path) -> str:
    stats = [path.stat() for path in paths]
    identity = [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev) for stat in stats]
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:_DIGITS]


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        checksum = hashlib.sha256(str(size).encode() + file.read(_CHECKSUM_BYTES))
        file.seek(max(0, size - _CHECKSUM_BYTES))
        checksum.update(file.read(_CHECKSUM_BYTES))
    return checksum.hexdigest()[:_DIGITS]


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
        pass  # A read-only folder. The next load tries to remove the file again.
