# SPDX-License-Identifier: Apache-2.0
"""Every call of TensorRT and CUDA. Its error messages are for the log.

Written for the documented Python API of TensorRT 10 and 11 and `cuda.bindings.runtime` of the package cuda-python. That
should be 12.9.1 or newer: older ones hold the interpreter lock, and so the server, while they wait for the GPU.

The current GPU is per thread, and different threads may call an instance: callers must call `activate` first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tensorrt as trt
from cuda.bindings import runtime as cuda

from headrace.backends.tensorrt.buffers import Buffer
from headrace.backends.tensorrt.plan import Binding, Plan, Profile
from headrace.models.config.types import Dims

try:
    from cuda.bindings.utils import get_cuda_native_handle as native_handle
except ImportError:  # before 12.9.1
    native_handle = int

from headrace.backends.tensorrt.plan import LINEAR, Range

log = logging.getLogger("headrace.backends")

OLDEST_VERSION = 10
"""The oldest supported major version of TensorRT."""


class DeviceError(Exception):
    """An error of CUDA or TensorRT, with its text for the log."""


class CudaMemory:
    """A CUDA allocator, by the names of its two calls."""

    def __init__(self, allocate: Callable[[int], Any], free: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._free = free

    def allocate(self, size: int) -> int:
        """Allocate memory on the current GPU, or pinned memory."""
        return int(_checked(self._allocate(size)))

    def free(self, address: int) -> None:
        """Free memory, after the GPU has finished with it."""
        _checked(self._free(address))


def gpu_memory() -> CudaMemory:
    """Return the allocator of the current GPU's memory."""
    return CudaMemory(cuda.cudaMalloc, cuda.cudaFree)


def pinned_memory() -> CudaMemory:
    """Return the allocator of pinned host memory, which the GPU copies from and to by itself."""
    return CudaMemory(cuda.cudaMallocHost, cuda.cudaFreeHost)


class Stream:
    """A CUDA stream.

    `wait` blocks without spinning. Microseconds until a copy to the GPU and back is complete, blocking and spinning
    (median of 2,000; H200, cuda-python 13.3.1), and the CPU use of a long wait:

        4 KB       28     10
        600 KB     65     39
        of a core  0.1 %  100 %
    """

    def __init__(self) -> None:
        # Does not synchronise with the default stream, which others in this process may use.
        self._stream = _checked(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
        # Without the flag a waiting thread would spin and take a core from threads with work.
        flags = cuda.cudaEventBlockingSync | cuda.cudaEventDisableTiming
        self._event = _checked(cuda.cudaEventCreateWithFlags(flags))
        self.handle = int(native_handle(self._stream))

    def to_gpu(self, target: int, source: int, size: int) -> None:
        """Start a copy to the GPU; the source must not change until it is complete."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        _checked(cuda.cudaMemcpyAsync(target, source, size, kind, self._stream))

    def to_host(self, target: int, source: int, size: int) -> None:
        """Start a copy to the host."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _checked(cuda.cudaMemcpyAsync(target, source, size, kind, self._stream))

    def wait(self) -> None:
        """Wait for all work on the stream; raise its errors."""
        _checked(cuda.cudaEventRecord(self._event, self._stream))
        _checked(cuda.cudaEventSynchronize(self._event))

    def close(self) -> None:
        """Destroy the stream."""
        _checked(cuda.cudaEventDestroy(self._event))
        _checked(cuda.cudaStreamDestroy(self._stream))


class GrowingOutput(trt.IOutputAllocator):  # type: ignore[misc]
    """Allocates an output whose shape depends on data and is known only during the run."""

    def __init__(self, buffer: Buffer) -> None:
        # TensorRT requires this form of the base-class call.
        trt.IOutputAllocator.__init__(self)
        self._buffer = buffer
        self.shape: Dims | None = None

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int | None:
        """Allocate memory for the output. TensorRT calls it; no exception may leave it."""
        try:
            return self._buffer.reserve(size)
        except DeviceError:
            log.exception("no room for %d bytes of output %s", size, tensor_name)
            return None

    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int | None:
        """Allocate as `reallocate_output`; the previous batch is complete, so the stream does not use the old memory."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        """Record the shape."""
        self.shape = tuple(int(size) for size in shape)


class _Logger(trt.ILogger):  # type: ignore[misc]
    """Writes TensorRT's log lines to the server's log."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, severity: Any, msg: str) -> None:
        """Log a line; TensorRT calls it from any thread."""
        levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}
        log.log(levels.get(severity.name, logging.DEBUG), "TensorRT: %s", msg)


def version() -> str:
    """Return TensorRT's version, such as "10.13.0"."""
    return str(trt.__version__)


def count_gpus() -> int:
    """Return the number of GPUs that CUDA sees; 0 without a driver."""
    try:
        return int(_checked(cuda.cudaGetDeviceCount()))
    except (DeviceError, RuntimeError):
        # cuda-python raises its own exception if there is no driver library.
        return 0


def activate(gpu: int) -> None:
    """Make a GPU the current one of the calling thread."""
    _checked(cuda.cudaSetDevice(gpu))


def capability(gpu: int) -> str:
    """Return a GPU's compute capability, such as "8.6"."""
    attributes = cuda.cudaDeviceAttr
    major = _checked(cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMajor, gpu))
    minor = _checked(cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMinor, gpu))
    return f"{major}.{minor}"


def read_engine(content: bytes, *, version_compatible: bool) -> tuple[Any, Any]:
    """Deserialize a plan on the current GPU; return its runtime and engine. Keep the runtime as long as the engine."""
    runtime = trt.Runtime(_shared_logger())
    if version_compatible:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise DeviceError("TensorRT could not read the plan; its messages are above")
    return runtime, engine


def open_context(engine: Any, strategy: str) -> Any:
    """Create an execution context with its own activation memory."""
    context = engine.create_execution_context(getattr(trt.ExecutionContextAllocationStrategy, strategy))
    if context is None:
        raise DeviceError("TensorRT could not create an execution context; its messages are above")
    return context


def described(engine: Any) -> Plan:
    """Return the engine's bindings and profiles."""
    count = engine.num_optimization_profiles
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    bindings = tuple(_binding(engine, name, count) for name in names)
    inputs = [binding for binding in bindings if binding.is_input]
    profiles = tuple(
        Profile(
            index,
            {binding.name: _shapes(engine, binding, index) for binding in inputs},
            {binding.name: values for binding in inputs if (values := _values(engine, binding, index)) is not None},
        )
        for index in range(count)
    )
    return Plan(bindings, profiles)


def _binding(engine: Any, name: str, profiles: int) -> Binding:
    layouts = [engine.get_tensor_format(name, index).name for index in range(profiles)]
    return Binding(
        name,
        is_input=engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
        kind=engine.get_tensor_dtype(name).name,
        shape=dims(engine.get_tensor_shape(name)),
        on_host=engine.get_tensor_location(name) == trt.TensorLocation.HOST,
        is_shape_tensor=bool(engine.is_shape_inference_io(name)),
        layout=next((layout for layout in layouts if layout != LINEAR), LINEAR),
    )


def _shapes(engine: Any, binding: Binding, profile: int) -> Range:
    given = [dims(sizes) for sizes in engine.get_tensor_profile_shape(binding.name, profile)]
    # A profile may omit inputs of fixed shape.
    lowest, optimum, highest = (sizes if len(sizes) == len(binding.shape) else binding.shape for sizes in given)
    return Range(lowest, optimum, highest)


def _values(engine: Any, binding: Binding, profile: int) -> Range | None:
    if not binding.is_shape_tensor:
        return None
    try:
        # The index comes first, unlike in `get_tensor_profile_shape`; positional, because the documented names are swapped.
        given: Sequence[Sequence[int]] = engine.get_tensor_profile_values(profile, binding.name)
    except TypeError:
        given = engine.get_tensor_profile_values(binding.name, profile)
    if not given:
        return None
    lowest, optimum, highest = (tuple(int(value) for value in limits) for limits in given)
    return Range(lowest, optimum, highest)


def dims(shape: Any) -> Dims:
    """Return TensorRT's `Dims` as integers; () for the invalid one, whose length is -1."""
    try:
        return tuple(int(size) for size in shape)
    except ValueError:
        return ()


@cache
def _shared_logger() -> _Logger:
    # TensorRT keeps one logger for the whole process, and warns of others.
    shared = _Logger()
    # Registers TensorRT's own plugins, which plans may use.
    initialise = getattr(trt, "init_libnvinfer_plugins", None)
    if initialise is not None:
        initialise(shared, "")
    return shared


def _checked(result: Any) -> Any:
    """Check the status of a CUDA call, its first result, and return the rest."""
    status, *values = result
    if int(status) != 0:
        raise DeviceError(f"CUDA: {getattr(status, 'name', status)}")
    return values[0] if values else None
