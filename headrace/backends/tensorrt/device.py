# SPDX-License-Identifier: Apache-2.0
"""Every call of TensorRT and CUDA. What calls it decides nothing here; what it says of failures is for the log.

Written against the documented Python API of TensorRT 10 and 11 and `cuda.bindings.runtime` of the package cuda-python.
That should be 12.9.1 or newer: older ones hold the interpreter's lock while they wait for the GPU, and the server with it.

A thread has one current GPU, and an instance is not always called by the same thread: whoever calls in here says
`activate` first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tensorrt as trt
from cuda.bindings import runtime as cuda

try:
    from cuda.bindings.utils import get_cuda_native_handle as native_handle
except ImportError:  # before 12.9.1
    native_handle = int

from headrace.backends.tensorrt.buffers import Buffer
from headrace.backends.tensorrt.plan import LINEAR, Binding, Plan, Profile, Range
from headrace.models.config.types import Dims

log = logging.getLogger("headrace.backends")

OLDEST = 10
"""The first TensorRT whose calls are those used here."""


class DeviceFailure(Exception):
    """CUDA or TensorRT refused. The text is theirs, and for the log."""


class CudaMemory:
    """One kind of CUDA's memory, by the names of the two calls."""

    def __init__(self, allocate: Callable[[int], Any], free: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._free = free

    def allocate(self, size: int) -> int:
        """Of the current GPU, or pinned."""
        return int(_checked(self._allocate(size)))

    def free(self, address: int) -> None:
        """Waits for the GPU, if it still uses it."""
        _checked(self._free(address))


def gpu_memory() -> CudaMemory:
    """On the current GPU."""
    return CudaMemory(cuda.cudaMalloc, cuda.cudaFree)


def pinned_memory() -> CudaMemory:
    """On the host, where the GPU copies from and to by itself."""
    return CudaMemory(cuda.cudaMallocHost, cuda.cudaFreeHost)


class Stream:
    """Work for one GPU, one piece after the other.

    Waiting for it is done asleep. Microseconds until a copy to the GPU and back is there, asleep and awake (median of
    2,000; H200, cuda-python 13.3.1), and the share of a core that a long wait takes:

        4 KB       28     10
        600 KB     65     39
        of a core  0.1 %  100 %
    """

    def __init__(self) -> None:
        # Not in step with the default stream, which others in this process may use.
        self._stream = _checked(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
        # Without the flag a thread that waits would spin, and take a core from whoever has work.
        flags = cuda.cudaEventBlockingSync | cuda.cudaEventDisableTiming
        self._event = _checked(cuda.cudaEventCreateWithFlags(flags))
        self.handle = int(native_handle(self._stream))

    def to_gpu(self, target: int, source: int, size: int) -> None:
        """Copy, some time; the source must stay as it is until then."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        _checked(cuda.cudaMemcpyAsync(target, source, size, kind, self._stream))

    def to_host(self, target: int, source: int, size: int) -> None:
        """Copy, some time."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _checked(cuda.cudaMemcpyAsync(target, source, size, kind, self._stream))

    def wait(self) -> None:
        """Until all of it is done. What failed on the way is raised here."""
        _checked(cuda.cudaEventRecord(self._event, self._stream))
        _checked(cuda.cudaEventSynchronize(self._event))

    def close(self) -> None:
        """Give it back."""
        _checked(cuda.cudaEventDestroy(self._event))
        _checked(cuda.cudaStreamDestroy(self._stream))


class GrowingOutput(trt.IOutputAllocator):  # type: ignore[misc]
    """Takes an output whose shape depends on data, and is known only while it is computed."""

    def __init__(self, buffer: Buffer) -> None:
        # The base must be made by name, says TensorRT.
        trt.IOutputAllocator.__init__(self)
        self._buffer = buffer
        self.shape: Dims | None = None

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int | None:
        """Room for the output. Called by TensorRT; no exception may leave it."""
        try:
            return self._buffer.reserve(size)
        except DeviceFailure:
            log.exception("no room for %d bytes of output %s", size, tensor_name)
            return None

    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int | None:
        """The same; the batch before this one is done, so nothing of the stream needs the old room."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        """Note it."""
        self.shape = tuple(int(size) for size in shape)


class _Log(trt.ILogger):  # type: ignore[misc]
    """TensorRT's own words go to the server's log."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, severity: Any, msg: str) -> None:
        """Called by TensorRT from any thread."""
        levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}
        log.log(levels.get(severity.name, logging.DEBUG), "TensorRT: %s", msg)


def version() -> str:
    """TensorRT's, such as "10.13.0"."""
    return str(trt.__version__)


def count_gpus() -> int:
    """Those that CUDA sees; 0 where there is no driver."""
    try:
        return int(_checked(cuda.cudaGetDeviceCount()))
    except (DeviceFailure, RuntimeError):
        # cuda-python raises by itself where it finds no driver library at all.
        return 0


def activate(gpu: int) -> None:
    """Make it the calling thread's."""
    _checked(cuda.cudaSetDevice(gpu))


def capability(gpu: int) -> str:
    """Its compute capability, such as "8.6"."""
    attributes = cuda.cudaDeviceAttr
    major = _checked(cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMajor, gpu))
    minor = _checked(cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMinor, gpu))
    return f"{major}.{minor}"


def read_engine(content: bytes, *, version_compatible: bool) -> tuple[Any, Any]:
    """A runtime and the engine it read, on the current GPU. The runtime must be kept as long as the engine."""
    runtime = trt.Runtime(_shared_log())
    if version_compatible:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise DeviceFailure("TensorRT could not read the plan; its own words are above")
    return runtime, engine


def open_context(engine: Any, strategy: str) -> Any:
    """An execution context, with memory of its own for what lies between inputs and outputs."""
    context = engine.create_execution_context(getattr(trt.ExecutionContextAllocationStrategy, strategy))
    if context is None:
        raise DeviceFailure("TensorRT could not make an execution context; its own words are above")
    return context


def described(engine: Any) -> Plan:
    """What the engine says of itself."""
    count = engine.num_optimization_profiles
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    bindings = tuple(_binding(engine, name, count) for name in names)
    inputs = [binding for binding in bindings if binding.is_input]
    profiles = tuple(
        Profile(
            index,
            {each.name: _shapes(engine, each, index) for each in inputs},
            {each.name: values for each in inputs if (values := _values(engine, each, index)) is not None},
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
    given = [dims(each) for each in engine.get_tensor_profile_shape(binding.name, profile)]
    # For an input of fixed shape a profile need not say anything.
    lowest, optimum, highest = (each if len(each) == len(binding.shape) else binding.shape for each in given)
    return Range(lowest, optimum, highest)


def _values(engine: Any, binding: Binding, profile: int) -> Range | None:
    if not binding.is_shape_tensor:
        return None
    try:
        # The index first, unlike in `get_tensor_profile_shape`, and by place: the documented names are the wrong way round.
        given: Sequence[Sequence[int]] = engine.get_tensor_profile_values(profile, binding.name)
    except TypeError:
        given = engine.get_tensor_profile_values(binding.name, profile)
    if not given:
        return None
    lowest, optimum, highest = (tuple(int(value) for value in each) for each in given)
    return Range(lowest, optimum, highest)


def dims(shape: Any) -> Dims:
    """TensorRT's `Dims` as numbers; () for the invalid one, whose length is -1."""
    try:
        return tuple(int(size) for size in shape)
    except ValueError:
        return ()


@cache
def _shared_log() -> _Log:
    # TensorRT keeps one for the whole process, and warns of others.
    shared = _Log()
    # Plans may use the layers that come with TensorRT as plugins.
    initialise = getattr(trt, "init_libnvinfer_plugins", None)
    if initialise is not None:
        initialise(shared, "")
    return shared


def _checked(result: Any) -> Any:
    """CUDA's calls give their status first, then what they are asked for."""
    status, *values = result
    if int(status) != 0:
        raise DeviceFailure(f"CUDA: {getattr(status, 'name', status)}")
    return values[0] if values else None
