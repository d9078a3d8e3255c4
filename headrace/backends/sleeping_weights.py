# SPDX-License-Identifier: Apache-2.0
"""The weights of a PyTorch model that sleeps: moved to pinned host memory, or dropped, and put back into the same tensors.

The tensors themselves stay, so that whatever refers to them (modules, compiled functions, TorchScript) finds the weights
again. With `SleepingWeights` their storage is another one afterwards: what was captured with its address, as CUDA graphs
are, is captured again. With `PlacedWeights` the addresses stay, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headrace.backends.cuda_memory import (
    MemoryBlock,
    StableMemory,
    across_chunks,
    copy_tensors,
    place_tensors,
)
from headrace.backends.torch_import import torch
from headrace.core.errors import FailedPrecondition

HOST = "host"


class SleepingWeights:
    """Tensors of one model on one device."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._tensors: list[Any] = list({id(tensor): tensor for tensor in tensors}.values())
        self._devices = [tensor.device for tensor in self._tensors]
        self._layouts = [_layout(tensor) for tensor in self._tensors]
        self.dropped = False

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes that the weights take now, by place. Tensors that share memory count once."""
        sizes: dict[str, dict[int, int]] = {}
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                sizes.setdefault(place_of(tensor.device), {})[storage.data_ptr()] = storage.nbytes()
        return {place: sum(by_address.values()) for place, by_address in sizes.items()}

    def move_to_host(self) -> None:
        """Move what is on a GPU to pinned host memory. Weights that are in host memory stay where they are."""
        _move(self._tensors, [torch.device("cpu")] * len(self._tensors))

    def drop(self) -> None:
        """Free the memory, wherever it is."""
        for tensor in self._tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.dropped = True

    def move_back(self) -> None:
        """Move the weights from host memory back to their devices."""
        _move(self._tensors, self._devices)

    def put_back(self, fresh: Sequence[Any], what: str) -> None:
        """Take over weights that were read again: the same tensors in the same order. `what`: for the error."""
        found = _same_layouts(fresh, self._layouts, what)
        for tensor, new in zip(self._tensors, found, strict=True):
            tensor.data = new.data
        self.dropped = False


class PlacedWeights:
    """Tensors of one model in a block of memory whose addresses stay while it sleeps."""

    def __init__(self, tensors: Iterable[Any], memory: StableMemory) -> None:
        """Move the tensors into a block of their device. Raises torch.OutOfMemoryError; some may have moved then."""
        self._tensors: list[Any] = list({id(tensor): tensor for tensor in tensors}.values())
        self._driver = memory.driver
        self._device = memory.driver.device
        self._layouts = [_layout(tensor) for tensor in self._tensors]
        storages: dict[int, list[Any]] = {}
        for tensor in self._tensors:
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [sharing[0].untyped_storage().nbytes() for sharing in storages.values()]
        offsets, self._size = place_tensors(sizes)
        self._block = MemoryBlock(self._driver, self._size)
        self._pinned = memory.pinned
        self._host: list[Any] = []
        """The chunks that hold the weights while they are in host memory."""
        self.dropped = False
        for sharing, offset, size in zip(storages.values(), offsets, sizes, strict=True):
            self._block.map(offset + size)
            place = self._block.tensor(offset, size)
            place.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(sharing[0].untyped_storage()))
            for tensor in sharing:  # the memory of the old storage makes room for the next
                view = torch.empty(0, dtype=tensor.dtype, device=self._device)
                tensor.data = view.set_(place.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        self._block.map()

    @property
    def tensors(self) -> Sequence[Any]:
        """The tensors. They may be written to while the weights are in the block."""
        return self._tensors

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes that the weights take now, by place."""
        sizes = {place_of(self._device): self._block.held_bytes}
        add_bytes(sizes, {HOST: len(self._host) * self._pinned.chunk_bytes})
        return {place: size for place, size in sizes.items() if size}

    def move_to_host(self) -> None:
        """Move the weights to pinned host memory."""
        if self._host or self.dropped:
            return
        self._driver.wait()  # the copy runs beside its default stream
        chunks = self._pinned.take(self._size)
        try:
            copy_tensors(self._swapped(chunks), self._device)
        except BaseException:
            self._pinned.give_back(chunks)
            raise
        self._host = chunks
        self._block.unmap()

    def drop(self) -> None:
        """Free the memory, wherever it is."""
        self._pinned.give_back(self._host)
        self._block.unmap()
        self.dropped = True

    def move_back(self) -> None:
        """Move the weights from host memory back. Raises torch.OutOfMemoryError, and then they are still there."""
        self._block.map()
        try:
            copy_tensors(self._parts(self._host), self._device)
        except BaseException:
            self._block.unmap()
            raise
        self._pinned.give_back(self._host)

    def take_memory(self) -> None:
        """Take the memory of dropped weights, for a caller that writes all of them."""
        self._block.map()
        self.dropped = False

    def put_back(self, fresh: Sequence[Any], what: str) -> None:
        """Copy weights that were read again, and free those: the same tensors in the same order. `what`: for the error."""
        found = _same_layouts(fresh, self._layouts, what)
        try:
            for tensor, new in zip(self._tensors, found, strict=True):
                self._block.map(tensor.data_ptr() + _reach(tensor) - self._block.address)
                with torch.no_grad():
                    tensor.copy_(new)
                new.data = torch.empty(0, dtype=new.dtype, device=new.device)
            self._block.map()
        except BaseException:
            self._block.unmap()
            raise
        self.dropped = False

    def close(self) -> None:
        """Free all memory. The tensors are invalid then."""
        self._pinned.give_back(self._host)
        self._block.close()

    def _parts(self, chunks: list[Any]) -> list[tuple[Any, Any]]:
        return across_chunks(self._block.tensor(0, self._size), chunks, self._pinned.chunk_bytes)

    def _swapped(self, chunks: list[Any]) -> list[tuple[Any, Any]]:
        return [(host, device) for device, host in self._parts(chunks)]


class FileStamps:
    """The sizes and times of the files that a model was read from."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stamps = {file: _stamp(file) for file in files}

    def check(self, what: str) -> None:
        """Raise if a file has changed: the model would not be the one that was loaded."""
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                raise FailedPrecondition(
                    f"'{file.name}' of {what} has changed since it was loaded: load the model again"
                )


def place_of(device: Any) -> str:
    """Return the place of a device's memory, as memory limits name it."""
    return HOST if device.type == "cpu" else f"gpu{device.index or 0}"


def free_unused() -> None:
    """Give freed memory back to the device and to the operating system."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def add_bytes(total: dict[str, int], more: dict[str, int]) -> None:
    """Add bytes by place."""
    for place, size in more.items():
        total[place] = total.get(place, 0) + size


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return what was given back, by place; without places where nothing was."""
    left = {place: size - after.get(place, 0) for place, size in before.items()}
    return {place: size for place, size in left.items() if size > 0}


def _same_layouts(fresh: Sequence[Any], layouts: list[tuple[Any, ...]], what: str) -> list[Any]:
    found = list({id(tensor): tensor for tensor in fresh}.values())
    if [_layout(tensor) for tensor in found] != layouts:
        raise FailedPrecondition(f"the weights of {what} have other shapes than before it slept: load the model again")
    return found


def _reach(tensor: Any) -> int:
    """Return how many bytes behind its first a tensor's last element ends."""
    steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * int(tensor.element_size()) if tensor.numel() else 0


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _move(tensors: Sequence[Any], devices: Sequence[Any]) -> None:
    """Move storages as a whole, so that tensors that share memory still do. Changes no tensor if it fails."""
    moved: dict[tuple[Any, int], Any] = {}
    views: list[tuple[Any, Any]] = []
    gpus: set[Any] = set()
    for tensor, device in zip(tensors, devices, strict=True):
        if tensor.device == device:
            continue
        storage = tensor.untyped_storage()
        key = device, storage.data_ptr()
        gpus.update(used for used in (device, tensor.device) if used.type == "cuda")
        if key not in moved:
            pinned = device.type == "cpu" and tensor.is_cuda
            raw = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device, pin_memory=pinned)
            raw.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage), non_blocking=True)
            moved[key] = raw.untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        views.append((tensor, view.set_(moved[key], tensor.storage_offset(), tensor.shape, tensor.stride())))
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    for tensor, view in views:
        tensor.data = view
