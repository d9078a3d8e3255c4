# SPDX-License-Identifier: Apache-2.0
"""Shared-memory regions that clients on this machine registered, so that tensors do not pass through a socket.

`SharedMemory` is the table of regions; `SystemRegion` is POSIX shared memory (a file in /dev/shm that the client
created) and `CudaRegion` is GPU memory (an IPC handle, cudaIpcMemHandle_t). The codecs of `v1` and `v2` read and write
here in the event loop; every access is checked against the bounds of its region. System regions are read and written by
system calls and never mapped: a client may shrink the file at any time, and touching a mapping behind its end kills the
process.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import stat
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from headrace.core.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TooLarge,
    Unavailable,
    Unimplemented,
)
from headrace.core.tensors import Buffer

DISABLED = "Client shared memory is disabled"  # Triton's
FOLDER = Path("/dev/shm")  # noqa: S108  # where shm_open creates files
MOST_REGIONS = 1024
"""Each keeps a file open."""
NAME_LENGTH = 255
READ_BYTES = 1 << 30
"""Maximum bytes that one request may read, all its inputs together. A sparse file may be larger than the memory."""


RESERVED_PREFIX = "triton_python_backend_shm_region_"
_KEY_BYTES = 255
_MOST = (1 << 63) - 1
log = logging.getLogger("headrace.api")
HANDLE_BYTES = 64
"""Size of a cudaIpcMemHandle_t."""


class Region(Protocol):
    """A registered region."""

    name: str
    byte_size: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes at `offset`; raise if the memory is gone."""

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes at `offset`; raise if the memory is gone."""


class Placement:
    """The part of a region that a request chose for an output."""

    __slots__ = ("_region", "byte_size", "offset")

    def __init__(self, region: Region, offset: int, byte_size: int) -> None:
        # The region itself, not its name: a request in flight keeps its region, even if it is unregistered meanwhile.
        self._region = region
        self.offset = offset
        self.byte_size = byte_size

    @property
    def region_name(self) -> str:
        """The name that the client registered."""
        return self._region.name

    def write(self, output: str, data: Buffer) -> None:
        """Write an output."""
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
        """Return a copy: a client must not change bytes that were checked, nor remove memory that a model reads."""
        region = self._memory.find(name, offset, byte_size)
        if byte_size > self._left:
            raise TooLarge(f"a request may read at most {READ_BYTES} bytes of shared memory, all its inputs together")
        self._left -= byte_size
        copy = np.empty(byte_size, np.uint8).view(_InputCopy)
        copy.region = region
        target = copy.data
        region.read_into(offset, target)
        return target


class _InputCopy(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of an input, which keep their region registered as long as a request uses them."""

    region: Region


class SharedMemory:
    """All regions that are registered with one server."""

    def __init__(self, *, allowed: bool = False, folder: Path = FOLDER, device: CudaDevice | None = None) -> None:
        self.allowed = allowed
        self._folder = folder
        self._device = device
        self._system: dict[str, SystemRegion] = {}
        self._cuda: dict[str, CudaRegion] = {}
        self._in_use: WeakValueDictionary[str, SystemRegion | CudaRegion] = WeakValueDictionary()
        """Unregistered regions that requests in flight still use, as in Triton: they go with the last of these requests."""

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register POSIX shared memory that the client created."""
        self._check_new(name)
        self._system[name] = SystemRegion(name, key, offset, byte_size, self._folder)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Register GPU memory by its IPC handle."""
        self._check_new(name)
        if self._device is None:
            self._device = open_cuda()
        self._cuda[name] = CudaRegion(name, raw_handle, device_id, byte_size, self._device)

    def unregister_system(self, name: str = "") -> None:
        """Unregister a region, or all of them; an unknown region is not an error."""
        self._check_allowed()
        self._remove(self._system, name)

    def unregister_cuda(self, name: str = "") -> None:
        """Unregister a region, or all of them; an unknown region is not an error."""
        self._check_allowed()
        self._remove(self._cuda, name)

    def system_regions(self, name: str = "") -> list[SystemRegion]:
        """Return one region, or all."""
        self._check_allowed()
        regions = self._system | {region.name: region for region in self._used() if isinstance(region, SystemRegion)}
        if not name:
            return list(regions.values())
        if name in regions:
            return [regions[name]]
        if name in self._cuda:
            raise NotFound(f"The region named '{name}' is registered as CUDA shared memory, not system shared memory")
        raise NotFound(f"Unable to find system shared memory region: '{name[:NAME_LENGTH]}'")  # Triton's

    def cuda_regions(self, name: str = "") -> list[CudaRegion]:
        """Return one region, or all."""
        self._check_allowed()
        regions = self._cuda | {region.name: region for region in self._used() if isinstance(region, CudaRegion)}
        if not name:
            return list(regions.values())
        if name in regions:
            return [regions[name]]
        if name in self._system:
            raise NotFound(f"The region named '{name}' is registered as system shared memory, not CUDA shared memory")
        raise NotFound(f"Unable to find cuda shared memory region: '{name[:NAME_LENGTH]}'")  # Triton's

    def reader(self) -> RegionReader:
        """Return a reader for the inputs of one request."""
        return RegionReader(self)

    def placement(self, name: str, offset: int, byte_size: int) -> Placement:
        """Choose a part of a region for an output."""
        return Placement(self.find(name, offset, byte_size), offset, byte_size)

    def find(self, name: str, offset: int, byte_size: int) -> Region:
        """Return the region of this name, if these bytes are inside it."""
        self._check_allowed()
        region: Region | None = self._system.get(name) or self._cuda.get(name) or self._in_use.get(name)
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
        if name in self._system or name in self._cuda or any(region.name == name for region in self._used()):
            raise AlreadyExists(f"shared memory region '{name}' already in manager")  # Triton's
        if len(self._system) + len(self._cuda) >= MOST_REGIONS:
            raise ResourceExhausted(f"{MOST_REGIONS} shared memory regions are registered: unregister some first")

    def _remove(self, table: dict[str, SystemRegion] | dict[str, CudaRegion], name: str) -> None:
        for each in [name] if name else list(table):
            region = table.pop(each, None)
            if region is not None:
                self._in_use[each] = region

    def _used(self) -> list[SystemRegion | CudaRegion]:
        """Return the unregistered regions that requests in flight still use."""
        if self._in_use:
            gc.collect()  # an answered request may be in a cycle of references
        return list(self._in_use.values())


class SystemRegion:
    """A part of one file, which is open as long as the object is referenced."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int, folder: Path) -> None:
        self._file = -1
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        if offset < 0 or byte_size <= 0 or offset + byte_size > _MOST:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: 'byte_size' must be over 0 and 'offset' "
                "0 or more"
            )
        self._file = _open(name, key, folder)
        size = os.fstat(self._file).st_size
        if offset + byte_size > size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: offset {offset} and {byte_size} bytes are "
                f"over the {size} bytes that '{key}' has"
            )

    def __del__(self) -> None:
        # Not when it is unregistered: a request in flight may still write its response here, and the number of a closed
        # file descriptor may belong to another file by then.
        if self._file >= 0:
            os.close(self._file)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes at `offset`."""
        position, size = 0, len(target)
        while position < size:
            got = os.preadv(self._file, [target[position:]], self.offset + offset + position)
            if not got:
                raise self._shrunk()
            position += got

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes at `offset`."""
        view = memoryview(data)
        start = self.offset + offset
        # Writing beyond the end would make the client's file longer.
        if os.fstat(self._file).st_size < start + len(view):
            raise self._shrunk()
        position = 0
        while position < len(view):
            try:
                position += os.pwrite(self._file, view[position:], start + position)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise Unavailable(f"no space in {FOLDER} for shared memory region '{self.name}'") from None
                raise

    def _shrunk(self) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}' is shorter than it was when it was registered: register it again"
        )


def _open(name: str, key: str, folder: Path) -> int:
    file_name = _file_name(name, key)
    try:
        # Do not follow a link, which could lead out of the folder, and do not wait for the other end of a pipe.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(folder / file_name, flags)
    except OSError as error:
        raise InvalidArgument(
            f"Unable to open shared memory region: '{key}' ({os.strerror(error.errno or 0)}): create it before you "
            "register it, with permissions for the server's user"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InvalidArgument(f"Unable to open shared memory region: '{key}': it is not shared memory")
    return file


def _file_name(name: str, key: str) -> str:
    """Return the file that shm_open would open for this key: without leading slashes and folders."""
    shown = key[:_KEY_BYTES]
    file_name = key.lstrip("/")
    if file_name.startswith(RESERVED_PREFIX):
        raise InvalidArgument(
            f"cannot register shared memory region '{name}' with key '{shown}' as the key contains the reserved prefix "
            f"'{RESERVED_PREFIX}'"
        )
    try:
        length = len(file_name.encode())
    except UnicodeEncodeError:
        length = 0
    if not 0 < length <= _KEY_BYTES or file_name in (".", "..") or "/" in file_name or "\0" in file_name:
        raise InvalidArgument(
            f"cannot register shared memory region '{name}' - invalid shm key {shown!a}: use the name that was given to "
            "shm_open, such as '/my_region'"
        )
    return file_name


class CudaFailure(Exception):
    """CUDA reported an error. Its message is for the log."""


class CudaDevice(Protocol):
    """The calls of CUDA that regions need. All raise `CudaFailure`."""

    def open(self, handle: bytes, device_id: int) -> int:
        """Map another process's memory; return its address."""

    def size(self, address: int) -> int:
        """Return the size of the memory at an address that `open` returned."""

    def read(self, device_id: int, address: int, target: memoryview) -> None:
        """Copy from the GPU."""

    def write(self, device_id: int, address: int, data: memoryview) -> None:
        """Copy to the GPU."""

    def close(self, device_id: int, address: int) -> None:
        """Unmap memory."""


class CudaRegion:
    """A mapped region; unmapped when the object is no longer referenced."""

    def __init__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int, device: CudaDevice) -> None:
        self._address: int | None = None
        self.name = name
        self.device_id = device_id
        self.byte_size = byte_size
        self._device = device
        if len(raw_handle) != HANDLE_BYTES:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: a CUDA handle has {HANDLE_BYTES} "
                f"bytes, not {len(raw_handle)}"
            )
        if byte_size <= 0 or device_id < 0:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: 'byte_size' must be over 0 and "
                "'device_id' 0 or more"
            )
        try:
            self._address = device.open(raw_handle, device_id)
            size = device.size(self._address)
        except CudaFailure as error:
            log.warning("cannot open a CUDA shared memory region: %s", error)
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: GPU {device_id} cannot open this handle"
            ) from None
        if byte_size > size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: {byte_size} bytes are over the "
                f"{size} that it has"
            )

    def __del__(self) -> None:
        if self._address is not None:
            try:
                self._device.close(self.device_id, self._address)
            except CudaFailure as error:
                log.warning("cannot close a CUDA shared memory region: %s", error)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes at `offset`."""
        self._copy(self._device.read, offset, target)

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes at `offset`."""
        self._copy(self._device.write, offset, memoryview(data))

    def _copy(self, copy: Any, offset: int, host: memoryview) -> None:
        if self._address is None:
            raise TypeError("the region is not open")
        if not len(host):
            return
        try:
            copy(self.device_id, self._address + offset, host)
        except CudaFailure as error:
            log.warning("cannot copy a CUDA shared memory region: %s", error)
            raise Internal(f"cannot copy CUDA shared memory region '{self.name}'") from None


def open_cuda() -> CudaDevice:
    """Return the real CUDA calls; raise `Unimplemented` without a GPU or cuda-python."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError:
        raise Unimplemented(
            "CUDA shared memory needs a GPU and the package cuda-python on the server: pip install cuda-python"
        ) from None
    return _RealDevice(driver, runtime)


class _RealDevice:
    """CUDA calls through cuda-python."""

    def __init__(self, driver: Any, runtime: Any) -> None:
        self._driver = driver
        self._runtime = runtime

    def open(self, handle: bytes, device_id: int) -> int:
        self._check(self._runtime.cudaSetDevice(device_id))
        ipc_handle = self._runtime.cudaIpcMemHandle_t()
        ipc_handle.reserved = handle
        peer_access = self._runtime.cudaIpcMemLazyEnablePeerAccess
        return int(self._check(self._runtime.cudaIpcOpenMemHandle(ipc_handle, peer_access)))

    def size(self, address: int) -> int:
        error, base, size = self._driver.cuMemGetAddressRange(address)
        if int(error):
            raise CudaFailure(str(error))
        return int(base) + int(size) - address

    def read(self, device_id: int, address: int, target: memoryview) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check(self._runtime.cudaSetDevice(device_id))
        self._check(self._runtime.cudaMemcpy(_address(target), address, len(target), kind))

    def write(self, device_id: int, address: int, data: memoryview) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check(self._runtime.cudaSetDevice(device_id))
        self._check(self._runtime.cudaMemcpy(address, _address(data), len(data), kind))

    def close(self, device_id: int, address: int) -> None:
        self._check(self._runtime.cudaSetDevice(device_id))
        self._check(self._runtime.cudaIpcCloseMemHandle(address))

    def _check(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error):
            raise CudaFailure(str(error))
        return values[0] if values else None


def _address(host: memoryview) -> int:
    return int(np.frombuffer(host, np.uint8).ctypes.data)
