# SPDX-License-Identifier: Apache-2.0
"""Read safetensors files straight into the weights of a model that is there already, by several threads.

For models whose tensors are in the files as they are in memory: `direct_weights` says which are, after a load by
transformers, and compares some bytes of each tensor. On a GPU each thread reads into pinned host memory, and the
device copies from there while it reads on.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.backends.cuda_memory import StableMemory
from headrace.backends.llm.model_runner.fused_projections import named_weights
from headrace.backends.weight_files import TensorHeader, read_headers
from headrace.core.errors import FailedPrecondition

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_READ_BYTES = 16 << 20
"""Of one read, and of one copy to the device."""
_THREADS = 8
_SAMPLE_BYTES = 64

Weights = Mapping[str, torch.Tensor]
"""The weights of a model by the names of the tensors in its files."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some bytes of a file, and where they belong."""

    file: Path
    start: int
    target: torch.Tensor


def direct_weights(model: Any, folder: Path) -> Weights | None:
    """Return the weights of a model, if its files have the same tensors; None if they have to be converted."""
    weights = named_weights(model)
    files = {name: (path, header) for path, header, name in _tensors(folder)}
    if files.keys() != weights.keys():
        return None
    samples = []
    for name, (path, header) in files.items():
        weight = weights[name]
        alike = _DTYPES.get(header.dtype) == weight.dtype and header.shape == tuple(weight.shape) and header.start >= 0
        if not alike or not weight.is_contiguous() or not weight.numel():
            return None
        flat = _as_bytes(weight)
        samples.append((path, header.start, flat[:_SAMPLE_BYTES]))
        samples.append((path, header.start + len(flat[:-_SAMPLE_BYTES]), flat[-_SAMPLE_BYTES:]))
    found = torch.cat([sample for _, _, sample in samples]).cpu().numpy().tobytes()
    at = 0
    for path, start, sample in samples:
        with path.open("rb") as file:
            file.seek(start)
            if file.read(len(sample)) != found[at : at + len(sample)]:
                return None
        at += len(sample)
    return weights


def read_weights(folder: Path, weights: Weights, memory: StableMemory) -> None:
    """Overwrite the weights of a model with those of another folder. Raises FailedPrecondition if they do not fit."""
    parts: deque[_Part] = deque()
    missing = set(weights)
    for path, header, name in _tensors(folder):
        weight = weights.get(name)
        if weight is None or _DTYPES.get(header.dtype) != weight.dtype or header.shape != tuple(weight.shape):
            raise FailedPrecondition(
                f"'{path.name}' has other tensors than its header had before: load the model again"
            )
        missing.discard(name)
        flat = _as_bytes(weight)
        for first in range(0, len(flat), _READ_BYTES):
            parts.append(_Part(path, header.start + first, flat[first : first + _READ_BYTES]))
    if missing:
        raise FailedPrecondition(
            f"the weights in '{folder.name}' lack tensors, such as '{min(missing)}': copy the whole model"
        )
    threads = min(_THREADS, len(parts), os.cpu_count() or 1)
    stop = threading.Event()
    with ThreadPoolExecutor(threads, thread_name_prefix="headrace-weights") as executor:
        read = _read_to_device if memory.driver.device.type == "cuda" else _read_to_host
        futures = [executor.submit(read, parts, memory, stop) for _ in range(threads)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]


def _tensors(folder: Path) -> Iterator[tuple[Path, TensorHeader, str]]:
    for path in sorted(folder.glob("*.safetensors")):
        for name, header in read_headers(path).items():
            yield path, header, name


def _as_bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().view(-1).view(torch.uint8)


def _take(parts: deque[_Part], stop: threading.Event) -> Iterator[_Part]:
    try:
        while not stop.is_set():
            try:
                yield parts.popleft()
            except IndexError:
                return
    except BaseException:
        stop.set()
        raise


def _read_to_host(parts: deque[_Part], _memory: StableMemory, stop: threading.Event) -> None:
    for part in _take(parts, stop):
        _read(part, part.target, stop)


def _read_to_device(parts: deque[_Part], memory: StableMemory, stop: threading.Event) -> None:
    device = memory.driver.device
    chunks = memory.pinned.take(1)
    stream = torch.cuda.Stream(device)
    try:
        buffers = chunks[0].split(_READ_BYTES)
        copied: deque[Any] = deque()
        with torch.cuda.stream(stream):
            for number, part in enumerate(_take(parts, stop)):
                if len(copied) == len(buffers):
                    copied.popleft().synchronize()
                buffer = buffers[number % len(buffers)][: len(part.target)]
                _read(part, buffer, stop)
                part.target.copy_(buffer, non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
                copied.append(event)
    finally:
        stream.synchronize()  # copies may still read the memory that is given back
        memory.pinned.give_back(chunks)


def _read(part: _Part, target: torch.Tensor, stop: threading.Event) -> None:
    """Read the bytes of a part into a tensor of the host."""
    try:
        left, at = memoryview(target.numpy()), part.start
        file = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while left:
                count = os.preadv(file, [left], at)
                if not count:
                    raise FailedPrecondition(f"'{part.file.name}' ends too early: copy the whole model")
                left, at = left[count:], at + count
        finally:
            os.close(file)
    except BaseException:
        stop.set()
        raise
