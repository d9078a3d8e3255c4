# SPDX-License-Identifier: Apache-2.0
"""What this protocol asks of shared memory, and its requests to register regions and to list them.

`http_control` and `grpc` bring the requests, `decoding` the places of tensors. The regions themselves are kept by an
object with the methods of `SharedMemory`, which the composition root passes in (that of `api.shared_memory` has them);
without one, everything is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.api.v1.schema import message_class
from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.core.tensors import Buffer


class SystemRegion(Protocol):
    """Part of a shared memory object of the system."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(Protocol):
    """Memory of a GPU."""

    name: str
    device_id: int
    byte_size: int


class Reader(Protocol):
    """Reads the inputs of one request."""

    def read(self, name: str, offset: int, byte_size: int) -> Buffer:
        """The bytes of a part of a region."""


class Placement(Protocol):
    """A part of a region that is set aside for an output."""

    def write(self, output: str, data: Buffer) -> None:
        """Put the output there; raises if it does not fit."""


class SharedMemory(Protocol):
    """Regions that clients have registered. Raises errors of `core.errors` with Triton's texts."""

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map part of a shared memory object."""

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Map memory of a GPU."""

    def unregister_system(self, name: str = "") -> None:
        """Let go of a region, or of all; one that is not there is as it should be."""

    def unregister_cuda(self, name: str = "") -> None:
        """The same for those of GPUs."""

    def system_regions(self, name: str = "") -> Sequence[SystemRegion]:
        """All there are."""

    def cuda_regions(self, name: str = "") -> Sequence[CudaRegion]:
        """All there are."""

    def reader(self) -> Reader:
        """For the inputs of one request."""

    def placement(self, name: str, offset: int, byte_size: int) -> Placement:
        """Set a part of a region aside for an output."""


def granted(memory: SharedMemory | None) -> SharedMemory:
    """The regions, where the server has any."""
    if memory is None:
        # The first words are Triton's.
        raise Unimplemented("Client shared memory is disabled: start the server with --allow-client-shm=true to use it")
    return memory


def control(memory: SharedMemory | None, request: Any) -> Any | None:
    """Do what a SharedMemoryControlRequest says; returns the status that it asks for, if it does."""
    regions = granted(memory)
    kind = request.WhichOneof("shared_memory_control")
    if kind == "register":
        _register(regions, request.register)
    elif kind == "unregister":
        _unregister(regions, request.unregister.name)
    elif kind == "unregister_all":
        regions.unregister_system()
        regions.unregister_cuda()
    elif kind == "status":
        return message_class("SharedMemoryControlResponse.Status")(shared_memory_region=described(regions))
    else:
        raise InvalidArgument("unknown control type: use register, unregister, unregister_all or status")
    return None


def described(regions: SharedMemory) -> list[Any]:
    """All regions as messages."""
    region_class = message_class("SharedMemoryRegion")
    made = []
    for region in regions.system_regions():
        place = {"shared_memory_key": region.key, "offset": region.offset}
        made.append(region_class(name=region.name, byte_size=region.byte_size, system_shared_memory=place))
    for device in regions.cuda_regions():
        place = {"device_id": device.device_id}
        made.append(region_class(name=device.name, byte_size=device.byte_size, cuda_shared_memory=place))
    return made


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
    # One table of names for both kinds, which this protocol does not tell apart.
    regions.unregister_system(name)
    regions.unregister_cuda(name)
