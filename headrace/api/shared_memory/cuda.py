# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that a client shares by a handle for other processes (cudaIpcMemHandle_t).

Made by `regions`. The calls of CUDA are behind `CudaDevice`, so that the rest can be tried without a GPU; the real ones
are those of the package cuda-python, imported when the first region is registered.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from headrace.core.errors import Internal, InvalidArgument, Unimplemented
from headrace.core.tensors import Buffer

log = logging.getLogger("headrace.api")

HANDLE_BYTES = 64
"""Of a cudaIpcMemHandle_t."""


class CudaFailure(Exception):
    """CUDA refused. The text is its own, and for the log."""


class CudaDevice(Protocol):
    """The calls of CUDA that regions need. All raise `CudaFailure`."""

    def open(self, handle: bytes, device_id: int) -> int:
        """Map another process's memory; its address."""

    def size(self, address: int) -> int:
        """How many bytes lie at an address that `open` gave."""

    def read(self, device_id: int, address: int, target: memoryview) -> None:
        """Copy from the GPU."""

    def write(self, device_id: int, address: int, data: memoryview) -> None:
        """Copy to the GPU."""

    def close(self, device_id: int, address: int) -> None:
        """Unmap."""


class CudaRegion:
    """A mapped region, unmapped when nobody refers to it any more."""

    def __init__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int, device: CudaDevice) -> None:
        self._address: int | None = None
        self.name = name
        self.device_id = device_id
        self.byte_size = byte_size
        self._device = device
        if len(raw_handle) != HANDLE_BYTES:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': a CUDA handle has {HANDLE_BYTES} bytes, not "
                f"{len(raw_handle)}"
            )
        if byte_size <= 0 or device_id < 0:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': 'byte_size' must be over 0 and 'device_id' 0 or more"
            )
        try:
            self._address = device.open(raw_handle, device_id)
            size = device.size(self._address)
        except CudaFailure as error:
            log.warning("a CUDA shared memory region could not be opened: %s", error)
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': GPU {device_id} cannot open this handle"
            ) from None
        if byte_size > size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': {byte_size} bytes are over the {size} that it has"
            )

    def __del__(self) -> None:
        if self._address is not None:
            try:
                self._device.close(self.device_id, self._address)
            except CudaFailure as error:
                log.warning("a CUDA shared memory region could not be closed: %s", error)

    def read_into(self, offset: int, target: memoryview) -> None:
        """See `Region.read_into`."""
        self._copy(self._device.read, offset, target)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Region.write`."""
        self._copy(self._device.write, offset, memoryview(data))

    def _copy(self, copy: Any, offset: int, host: memoryview) -> None:
        if self._address is None:
            raise TypeError("a region that was not opened has no bytes")
        if not len(host):
            return
        try:
            copy(self.device_id, self._address + offset, host)
        except CudaFailure as error:
            log.warning("a CUDA shared memory region could not be copied: %s", error)
            raise Internal(f"CUDA shared memory region '{self.name}' could not be copied") from None


def open_cuda() -> CudaDevice:
    """The real calls; raises `Unimplemented` where there are none."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError:
        raise Unimplemented(
            "CUDA shared memory needs a GPU and the package cuda-python on the server: pip install cuda-python"
        ) from None
    return _RealDevice(driver, runtime)


class _RealDevice:
    """By cuda-python."""

    def __init__(self, driver: Any, runtime: Any) -> None:
        self._driver = driver
        self._runtime = runtime

    def open(self, handle: bytes, device_id: int) -> int:
        self._done(self._runtime.cudaSetDevice(device_id))
        given = self._runtime.cudaIpcMemHandle_t()
        given.reserved = handle
        return int(self._done(self._runtime.cudaIpcOpenMemHandle(given, self._runtime.cudaIpcMemLazyEnablePeerAccess)))

    def size(self, address: int) -> int:
        error, base, size = self._driver.cuMemGetAddressRange(address)
        if int(error):
            raise CudaFailure(str(error))
        return int(base) + int(size) - address

    def read(self, device_id: int, address: int, target: memoryview) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._done(self._runtime.cudaSetDevice(device_id))
        self._done(self._runtime.cudaMemcpy(_address(target), address, len(target), kind))

    def write(self, device_id: int, address: int, data: memoryview) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._done(self._runtime.cudaSetDevice(device_id))
        self._done(self._runtime.cudaMemcpy(address, _address(data), len(data), kind))

    def close(self, device_id: int, address: int) -> None:
        self._done(self._runtime.cudaSetDevice(device_id))
        self._done(self._runtime.cudaIpcCloseMemHandle(address))

    def _done(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error):
            raise CudaFailure(str(error))
        return values[0] if values else None


def _address(host: memoryview) -> int:
    return int(np.frombuffer(host, np.uint8).ctypes.data)
