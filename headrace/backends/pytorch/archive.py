# SPDX-License-Identifier: Apache-2.0
"""Detect the kind of a PyTorch file without running any of it.

This check runs before anything else opens a file. PyTorch writes four kinds of zip archives, and an old format that is
none. Two of the five are pickles, which can run any code when they are read, and are rejected here:

    TorchScript            constants.pkl and code/...      (pickles too, but read by PyTorch's own reader in C++, which
                                                            creates numbers, lists and tensors and imports nothing)
    an exported program    archive_format, models/*.json
    AOTInductor's package  archive_format, data/aotinductor/*
    torch.save             data.pkl and no code: rejected
    torch.save before 1.6  a bare pickle: rejected

PyTorch's reader, which also loads the model, reads the archive, and Python's zipfile reads its directory. An archive
that the two read differently is rejected, as is one that unpacks to far more than its size.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

Kind = Literal["script", "program", "compiled"]

MAX_RECORDS = 200_000
MAX_UNPACKED_BYTES = 512 << 20
"""For compressed records: source text and its line numbers. Tensors are always stored uncompressed."""

_RESAVE = "save the model again by torch.jit.save or torch.export.save"


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive of one of the three kinds."""

    model: str
    """The model's name, for messages."""
    file: Path
    kind: Kind
    sizes: Mapping[str, int]
    """The size of each record, by its name inside the archive's folder."""
    reader: Any
    """PyTorch's reader, which keeps the file open: the data that is loaded is the data that was checked."""

    def read(self, name: str) -> bytes:
        """Return one record."""
        try:
            content: bytes = self.reader.get_record(name)
        except RuntimeError:
            log.exception("model %s: record %s of %s could not be read", self.model, name, self.file)
            raise _damaged(self.model, self.file) from None
        return content


def open_archive(config: ModelConfig, file: Path) -> Archive:
    """Open the file. Reject files that are not models, and every pickled one."""
    try:
        with file.open("rb") as opened:
            head = opened.read(4)
    except OSError:
        log.exception("model %s: %s could not be opened", config.name, file)
        raise InvalidArgument(f"model '{config.name}': '{file.name}' cannot be read: it must be a file") from None
    if head[:1] == b"\x80":
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is a pickle, which would run the code inside it: {_RESAVE}"
        )
    if head != b"PK\x03\x04":
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is neither TorchScript nor an exported program: {_RESAVE}"
        )
    try:
        sizes = _directory(config, file)
        kind = _kind(config, file, sizes)
        reader = torch._C.PyTorchFileReader(str(file))
        records = reader.get_all_records()
    except (RuntimeError, zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        log.exception("model %s: %s could not be opened", config.name, file)
        raise _damaged(config.name, file) from None
    if sorted(records) != sorted(sizes):
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is an archive that can be read in two ways: {_RESAVE}"
        )
    return Archive(config.name, file, kind, sizes, reader)


def _directory(config: ModelConfig, file: Path) -> dict[str, int]:
    """Return the records and their sizes from the archive's directory. Reads nothing else."""
    with zipfile.ZipFile(file) as opened:
        entries = opened.infolist()
    stored = sum(entry.compress_size for entry in entries)
    unpacked = sum(entry.file_size for entry in entries if entry.compress_type != zipfile.ZIP_STORED)
    is_plausible = all(
        entry.file_size == entry.compress_size for entry in entries if entry.compress_type == zipfile.ZIP_STORED
    )
    if len(entries) > MAX_RECORDS or stored > file.stat().st_size or unpacked > MAX_UNPACKED_BYTES or not is_plausible:
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' says that it unpacks to far more than it holds, which no model of "
            f"PyTorch does: {_RESAVE}"
        )
    root = entries[0].filename.partition("/")[0] + "/" if entries else ""
    names = [entry.filename.removeprefix(root) for entry in entries]
    # PyTorch's reader finds records by name, ignoring case; it would take two such records for one.
    if len({name.casefold() for name in names}) != len(names) or any("\0" in name or "\\" in name for name in names):
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is an archive that can be read in two ways: {_RESAVE}"
        )
    return {name: entry.file_size for name, entry in zip(names, entries, strict=True)}


def _kind(config: ModelConfig, file: Path, sizes: Mapping[str, int]) -> Kind:
    folded = {name.casefold() for name in sizes}
    if any(name.startswith("data/aotinductor/") or name.endswith((".so", ".o")) for name in folded):
        return "compiled"
    if "archive_format" in folded:
        if any(name.startswith("models/") for name in folded):
            return "program"
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is an archive of torch.export without a model in it: {_RESAVE}"
        )
    if "serialized_exported_program.json" in folded:
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' was exported by PyTorch 2.8 or older, which kept weights as pickles: "
            "load it there and save it by torch.export.save of a newer PyTorch"
        )
    if "constants.pkl" in folded and any(name.startswith("code/") for name in folded):
        return "script"
    if any(name.endswith(".pkl") for name in folded):
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' was written by torch.save: it is a pickle, which would run the code "
            f"inside it. {_RESAVE[0].upper()}{_RESAVE[1:]}"
        )
    raise InvalidArgument(
        f"model '{config.name}': '{file.name}' is a zip archive, but neither TorchScript nor an exported program: "
        f"{_RESAVE}"
    )


def _damaged(model: str, file: Path) -> InvalidArgument:
    return InvalidArgument(f"model '{model}': '{file.name}' is damaged or cut short: copy it again, or {_RESAVE}")
