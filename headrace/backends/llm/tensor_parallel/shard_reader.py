# SPDX-License-Identifier: Apache-2.0
"""Read parts of tensors from the safetensors files of a folder, through a buffer of a few MiB.

The files are read and not mapped, so that a rank never has more of the model in its memory than its shard.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from headrace.backends.llm.tensor_parallel.sharding import Part
from headrace.backends.weight_files import TensorHeader, read_headers
from headrace.core.errors import FailedPrecondition

_BUFFER_BYTES = 8 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 64
"""Blocks of each file that a fingerprint reads."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class ShardReader:
    """The safetensors files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[int, TensorHeader]] = {}
        """By tensor: the descriptor of its file, and its header."""
        self._descriptors: list[int] = []
        self._buffer = bytearray()
        try:
            for path in sorted(folder.glob("*.safetensors")):
                headers = read_headers(path)
                descriptor = os.open(path, os.O_RDONLY)
                self._descriptors.append(descriptor)
                self._files.update((name, (descriptor, header)) for name, header in headers.items())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """The headers of all tensors."""
        return {name: header for name, (_, header) in self._files.items()}

    def read(self, part: Part, parameter: torch.Tensor) -> None:
        """Fill the rows of a parameter that a part describes."""
        descriptor, header = self._files[part.stored]
        dtype = _DTYPES.get(header.dtype)
        if dtype is None:
            raise FailedPrecondition(
                f"'{part.stored[:128]}' is stored as {header.dtype[:16]}, which parameter tensor_parallel does not support: "
                "use a model in 32 or 16 bits"
            )
        if header.start < 0:
            raise self._damaged()
        if header.shape != part.shape:
            raise FailedPrecondition(
                f"'{part.stored[:128]}' has shape {list(header.shape)} in the weights, and the model's config.json needs "
                f"{list(part.shape)}: copy both again"
            )
        target = parameter if part.target_index is None else parameter[part.target_index]
        rows, width = header.shape[-2:] if len(header.shape) > 1 else (header.shape[0], 1)
        row_bytes = width * dtype.itemsize
        start = header.start + (part.stored_index or 0) * rows * row_bytes
        step = max(1, _BUFFER_BYTES // max(1, row_bytes))
        for first in range(part.rows[0], part.rows[1], step):
            end = min(first + step, part.rows[1])
            block = self._read(descriptor, start + first * row_bytes, (end - first) * row_bytes)
            values = torch.frombuffer(block, dtype=dtype).view(end - first, *((width,) if target.ndim > 1 else ()))
            if part.columns is not None:
                values = values[:, slice(*part.columns)]
            at = part.target_row + first - part.rows[0]
            target[at : at + end - first].copy_(values)

    def _read(self, descriptor: int, offset: int, count: int) -> memoryview:
        if len(self._buffer) < count:
            self._buffer = bytearray(count)
        block = memoryview(self._buffer)[:count]
        done = 0
        while done < count:
            read = os.preadv(descriptor, [block[done:]], offset + done)
            if not read:
                raise FailedPrecondition(
                    f"a safetensors file in '{self._folder.name}' is damaged: copy the model again"
                )
            done += read
        return block

    def _damaged(self) -> FailedPrecondition:
        return FailedPrecondition(f"a safetensors file in '{self._folder.name}' is damaged: copy the model again")

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._files.clear()


def folder_fingerprint(folder: Path, adapters: Mapping[str, Path]) -> str:
    """Return a fingerprint of a model folder and its adapters.

    It covers the configuration and the headers, and samples of each file of weights: reading every byte would take as
    long as loading them.
    """
    fingerprint = hashlib.blake2b(digest_size=16)
    fingerprint.update((folder / "config.json").read_bytes())
    for name, place, pattern in (
        ("", folder, "*.safetensors"),
        *((*item, "adapter_*") for item in sorted(adapters.items())),
    ):
        for path in sorted(place.glob(pattern)):
            size = path.stat().st_size
            fingerprint.update(f"{name}/{path.name} {size}\n".encode())
            with path.open("rb") as stream:
                header = int.from_bytes(stream.read(8), "little") if path.suffix == ".safetensors" else size
                fingerprint.update(stream.read(min(header, size)))
                for sample in range(_SAMPLES):
                    stream.seek(math.floor(sample * max(0, size - _SAMPLE_BYTES) / (_SAMPLES - 1)))
                    fingerprint.update(stream.read(_SAMPLE_BYTES))
    return fingerprint.hexdigest()
