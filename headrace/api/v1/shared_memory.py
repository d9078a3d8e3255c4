# SPDX-License-Identifier: Apache-2.0
"""Shared memory in this protocol: control requests, and the interface of the table of regions.

`api.shared_memory` implements the interface `SharedMemory`; without it, every request is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.api.v1.messages import message_class
from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.core.tensors import Buffer


class SystemRegion(Protocol):
    """A region of POSIX shared memory."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(Protocol):
    """A region of GPU memory."""

    name: str
    device_id: int
    byte_size: int


class Reader(Protocol):
    """Reads the inputs of one request."""

    def read(self, name: str, offset: int, byte_size: int) -> Buffer:
        """Return the bytes of a part of a region."""


class Placement(Protocol):
    """The part of a region that a request chose for an output."""

    def write(self, output: str, data: Buffer) -> None:
        """Write the output; raise if it does not fit."""


class SharedMemory(Protocol):
    """The regions that clients registered. Errors have Triton's messages."""

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register POSIX shared memory."""

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Register GPU memory."""

    def unregister_system(self, name: str = "") -> None:
        """Unregister a region, or all of them; an unknown region is not an error."""

    def unregister_cuda(self, name: str = "") -> None:
        """Unregister a region of GPU memory, or all of them."""

    def system_regions(self, name: str = "") -> Sequence[SystemRegion]:
        """Return all regions."""

    def cuda_regions(self, name: str = "") -> Sequence[CudaRegion]:
        """Return all regions."""

    def reader(self) -> Reader:
        """Return a reader for the inputs of one request."""

    def placement(self, name: str, offset: int, byte_size: int) -> Placement:
        """Choose a part of a region for an output."""


def require_shared_memory(memory: SharedMemory | None) -> SharedMemory:
    """Return the table of regions; raise if the server has none."""
    if memory is None:
        # The message starts like Triton's.
        raise Unimplemented("Client shared memory is disabled: start the server with --allow-client-shm=true to use it")
    return memory


def control_shared_memory(memory: SharedMemory | None, request: Any) -> Any | None:
    """Execute a SharedMemoryControlRequest; return the status if it asks for one."""
    regions = require_shared_memory(memory)
    kind = request.WhichOneof("shared_memory_control")
    if kind == "register":
        _register(regions, request.register)
    elif kind == "unregister":
        _unregister(regions, request.unregister.name)
    elif kind == "unregister_all":
        regions.unregister_system()
        regions.unregister_cuda()
    elif kind == "status":
        return message_class("SharedMemoryControlResponse.Status")(shared_memory_region=region_messages(regions))
    else:
        raise InvalidArgument("unknown control type: use register, unregister, unregister_all or status")
    return None


def region_messages(regions: SharedMemory) -> list[Any]:
    """Return all regions as messages."""
    region_class = message_class("SharedMemoryRegion")
    messages = []
    for region in regions.system_regions():
        place = {"shared_memory_key": region.key, "offset": region.offset}
        messages.append(region_class(name=region.name, byte_size=region.byte_size, system_shared_memory=place))
    for device in regions.cuda_regions():
        place = {"device_id": device.device_id}
        messages.append(region_class(name=device.name, byte_size=device.byte_size, cuda_shared_memory=place))
    return messages


def _register(regions: SharedMemory, request: Any) -> None:
    kind = request.WhichOneof("shared_memory_types")
    if kind == "system_shared_memory":
        place = request.system_shared_memory
        regions.register_system(request.name, place.shared_memory_key, place.offset, request.byte_size)
    elif kind == "cuda_shared_memory":
        device = request.cuda_shared_memory
        regions.register_cuda(request.name, device.raw_handle, device.device_id, request.byte_size)
    else:
        raise InvalidArgument("give system_shared_memory or cuda_shared_memory to register a region")


def _unregister(regions: SharedMemory, name: str) -> None:
    if not name:
        raise InvalidArgument("give the name of the region to unregister, or use unregister_all")
    # The protocol does not distinguish the two kinds of regions.
    regions.unregister_system(name)
    regions.unregister_cuda(name)
