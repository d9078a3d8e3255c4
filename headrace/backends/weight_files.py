# SPDX-License-Identifier: Apache-2.0
"""Compare what a Hugging Face config.json claims with the weights beside it, before anything is allocated.

A folder from elsewhere may claim a vocabulary of 2**40 tokens or a million layers. transformers would build such a model
for minutes, and other models would wait behind it. The headers of the safetensors files say what is really there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.core.machine import available_memory

_HEADER_BYTES = 100_000_000
"""The most that safetensors itself accepts."""
_PACKED = 16
"""Quantised weights are stored in up to this many per element."""
_COUNT = re.compile(r"(?:^|_)(?:layers?|blocks?|depths?|experts)$")
"""Names of settings that count parts, each with tensors of its own or a place in one."""
_DIMENSION = re.compile(r"(?:size|sizes|dim|dims|heads?|channels|labels|d_model|d_ff|d_kv|n_embd|n_inner|n_positions)$")
"""Names of settings that are a dimension of a tensor."""
_NO_DIMENSION = re.compile(r"image|patch|window|kernel|chunk|queue|batch|tile|crop")
"""Sizes of pictures and windows: no tensor needs to be as large."""
_PARTS = 1024
"""So many parts are never refused: models may use the same tensors for several layers."""
_SMALL = 65_536
"""A dimension up to this is never refused."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a header says of one tensor."""

    dtype: str
    """As safetensors writes it: F32, BF16, F8_E4M3, I32, ..."""
    shape: tuple[int, ...]
    start: int = -1
    """Offset of its data in the file; -1 if the header does not say."""

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What the headers of the safetensors files of a folder say."""

    tensors: int
    elements: int
    stored_bytes: int


def read_weight_files(folder: Path) -> WeightFiles:
    """Read the headers of all *.safetensors of a folder. Raises FailedPrecondition for an invalid file."""
    tensors = elements = stored = 0
    for path in sorted(folder.glob("*.safetensors")):
        for header in read_headers(path).values():
            tensors += 1
            elements += header.elements
        stored += path.stat().st_size
    return WeightFiles(tensors, elements, stored)


def check_sizes(folder: Path, config: Mapping[str, Any]) -> WeightFiles:
    """Raise FailedPrecondition if a configuration claims more than the weights beside it can be."""
    found = read_weight_files(folder)
    for name, value in _numbers(config):
        last = name.rpartition(".")[2]
        if _COUNT.search(last):
            most = max(found.tensors, _PARTS)
        elif _DIMENSION.search(last) and not _NO_DIMENSION.search(last):
            most = max(found.elements * _PACKED, _SMALL)
        else:
            continue
        if value > most:
            raise _too_large(folder, f"{name}: {value}", found)
    rows, columns = (max(values, default=0) for values in (_all(config, "vocab_size"), _all(config, "hidden_size")))
    if rows * columns > max(found.elements * _PACKED, _SMALL**2):
        raise _too_large(folder, f"vocab_size: {rows} and hidden_size: {columns}", found)
    return found


def check_memory(folder: Path, found: WeightFiles, bytes_per_element: float, limit: int | None) -> None:
    """Raise ResourceExhausted if the weights of a folder do not fit into memory. `limit`: instead of what is free now."""
    check_bytes(folder, max(found.stored_bytes, int(found.elements * bytes_per_element)), limit)


def check_bytes(folder: Path, needed: int, limit: int | None) -> None:
    """Raise ResourceExhausted if so many bytes of weights do not fit into memory."""
    free = available_memory() if limit is None else limit
    if free is not None and needed > free:
        raise ResourceExhausted(
            f"the weights in '{folder.name}' take {_gigabytes(needed)} of memory, and {_gigabytes(free)} "
            + ("are free" if limit is None else "are allowed")
            + ": load it in 16 bits (parameter dtype), free memory, or set parameter max_weight_bytes if you know better"
        )


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file, by tensor. Raises FailedPrecondition for an invalid file."""
    damaged = (
        f"'{path.parent.name}/{path.name}' is not a complete safetensors file: replace it with the one of the model"
    )
    headers: dict[str, TensorHeader] = {}
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(_HEADER_BYTES, path.stat().st_size):
            raise FailedPrecondition(damaged)
        try:
            for name, entry in json.loads(file.read(size)).items():
                if name == "__metadata__":
                    continue
                shape = entry["shape"]
                if not all(type(each) is int and each >= 0 for each in shape):
                    raise FailedPrecondition(damaged)
                offsets = entry.get("data_offsets")
                known = isinstance(offsets, list) and len(offsets) == 2 and type(offsets[0]) is int and offsets[0] >= 0
                start = 8 + size + offsets[0] if known else -1
                headers[name] = TensorHeader(str(entry["dtype"]), tuple(shape), start)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise FailedPrecondition(damaged) from None
    return headers


def _numbers(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a configuration with their names, those of parts and lists too."""
    for key, value in config.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}.")
        else:
            yield from ((name, each) for each in (value if isinstance(value, list) else [value]) if type(each) is int)


def _all(config: Mapping[str, Any], wanted: str) -> list[int]:
    return [value for name, value in _numbers(config) if name.rpartition(".")[2] == wanted]


def _too_large(folder: Path, claim: str, found: WeightFiles) -> FailedPrecondition:
    return FailedPrecondition(
        f"'{folder.name}/config.json' says {claim}, and the weights beside it are {found.tensors} tensors with "
        f"{found.elements} numbers in all: the configuration is damaged or of another model; copy both again"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
