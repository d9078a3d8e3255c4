# SPDX-License-Identifier: Apache-2.0
"""The regions that clients have registered, by name, and the only way to their bytes.

Called by the protocols' shared-memory methods and by their codecs, in the loop's thread. Every read and write is held
against the bounds of its region here, and against the memory's real size by the region itself. The texts marked so are
Triton's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from headrace.api.shared_memory.cuda import CudaDevice, CudaRegion, open_cuda
from headrace.api.shared_memory.system import SystemRegion
from headrace.core.buffers import uninitialised
from headrace.core.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, TooLarge, Unimplemented
from headrace.core.tensors import Buffer

DISABLED = "Client shared memory is disabled"  # Triton's
FOLDER = Path("/dev/shm")  # noqa: S108  # where shm_open makes its files
MOST_REGIONS = 1024
"""Each holds a file open."""
NAME_LENGTH = 255
READ_BYTES = 1 << 30
"""What one request may read from shared memory, all its inputs together. A file there may be larger than the machine."""


class Region(Protocol):
    """One kind of memory."""

    name: str
    byte_size: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the bytes that begin at `offset`; raises where the memory is not there any more."""

    def write(self, offset: int, data: Buffer) -> None:
        """Put bytes at `offset`; raises where the memory is not there any more."""


class Placement:
    """A part of a region that a request has set aside for an output."""

    __slots__ = ("_region", "byte_size", "offset")

    def __init__(self, region: Region, offset: int, byte_size: int) -> None:
        # The region itself, not its name: a request in flight keeps what it was given, whatever is unregistered meanwhile.
        self._region = region
        self.offset = offset
        self.byte_size = byte_size

    @property
    def region_name(self) -> str:
        """As registered."""
        return self._region.name

    def write(self, output: str, data: Buffer) -> None:
        """Put an output there."""
        if len(data) > self.byte_size:
            raise InvalidArgument(
                f"shared memory size specified with the request for output '{output}' ({self.byte_size} bytes) should be "
                f"at least {len(data)} bytes to hold the results"
            )
        self._region.write(self.offset, data)


class RegionReader:
    """Reads the inputs of one request."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._left = READ_BYTES

    def read(self, name: str, offset: int, byte_size: int) -> Buffer:
        """A copy: a client that writes on must not change what was checked, nor take memory away under a model."""
        region = self._memory.found(name, offset, byte_size)
        if byte_size > self._left:
            raise TooLarge(f"a request may read {READ_BYTES} bytes of shared memory, all its inputs together")
        self._left -= byte_size
        target = uninitialised(byte_size)
        region.read_into(offset, target)
        return target


class SharedMemory:
    """Everything registered with one server."""

    def __init__(self, *, allowed: bool = False, folder: Path = FOLDER, device: CudaDevice | None = None) -> None:
        self.allowed = allowed
        self._folder = folder
        self._device = device
        self._system: dict[str, SystemRegion] = {}
        self._cuda: dict[str, CudaRegion] = {}

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Take a region of POSIX shared memory, which the client has made, into the table."""
        self._check_new(name)
        self._system[name] = SystemRegion(name, key, offset, byte_size, self._folder)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Take a region of a GPU's memory into the table, by its handle for other processes."""
        self._check_new(name)
        if self._device is None:
            self._device = open_cuda()
        self._cuda[name] = CudaRegion(name, raw_handle, device_id, byte_size, self._device)

    def unregister_system(self, name: str = "") -> None:
        """Forget a region, or all of them; one that is not there is forgotten already."""
        self._check_allowed()
        _forget(self._system, name)

    def unregister_cuda(self, name: str = "") -> None:
        """See `unregister_system`."""
        self._check_allowed()
        _forget(self._cuda, name)

    def system_regions(self, name: str = "") -> list[SystemRegion]:
        """One region, or all."""
        self._check_allowed()
        if not name:
            return list(self._system.values())
        if name in self._system:
            return [self._system[name]]
        if name in self._cuda:
            raise NotFound(f"The region named '{name}' is registered as CUDA shared memory, not system shared memory")
        raise NotFound(f"Unable to find system shared memory region: '{name[:NAME_LENGTH]}'")  # Triton's

    def cuda_regions(self, name: str = "") -> list[CudaRegion]:
        """One region, or all."""
        self._check_allowed()
        if not name:
            return list(self._cuda.values())
        if name in self._cuda:
            return [self._cuda[name]]
        if name in self._system:
            raise NotFound(f"The region named '{name}' is registered as system shared memory, not CUDA shared memory")
        raise NotFound(f"Unable to find cuda shared memory region: '{name[:NAME_LENGTH]}'")  # Triton's

    def reader(self) -> RegionReader:
        """For the inputs of one request."""
        return RegionReader(self)

    def placement(self, name: str, offset: int, byte_size: int) -> Placement:
        """Set a part of a region aside for an output."""
        return Placement(self.found(name, offset, byte_size), offset, byte_size)

    def found(self, name: str, offset: int, byte_size: int) -> Region:
        """The region of this name, if these bytes are inside it."""
        self._check_allowed()
        region: Region | None = self._system.get(name) or self._cuda.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name[:NAME_LENGTH]}'")  # Triton's
        if offset < 0 or offset > region.byte_size or (offset == region.byte_size and byte_size):
            raise InvalidArgument(
                f"Invalid offset for shared memory region: '{name}': {offset}, and it has {region.byte_size} bytes"
            )
        if byte_size < 0 or byte_size > region.byte_size - offset:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{name}': {offset} + {byte_size}, and it has "
                f"{region.byte_size} bytes"
            )
        return region

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise Unimplemented(f"{DISABLED}: start the server with --allow-client-shm=true to use it")

    def _check_new(self, name: str) -> None:
        self._check_allowed()
        if not 0 < len(name) <= NAME_LENGTH:
            raise InvalidArgument(f"a shared memory region needs a name of 1 to {NAME_LENGTH} characters")
        if name in self._system or name in self._cuda:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")  # Triton's
        if len(self._system) + len(self._cuda) >= MOST_REGIONS:
            raise ResourceExhausted(f"{MOST_REGIONS} shared memory regions are registered: unregister some first")


def _forget(table: dict[str, SystemRegion] | dict[str, CudaRegion], name: str) -> None:
    if name:
        table.pop(name, None)
    else:
        table.clear()
