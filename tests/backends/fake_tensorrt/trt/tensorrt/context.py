# SPDX-License-Identifier: Apache-2.0
"""The execution context of the fake TensorRT."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from cuda.bindings import runtime as cuda

from tensorrt.networks import NETWORKS
from tensorrt.types import NUMPY, Dims, TensorIOMode, TensorLocation

_DRIVER = getattr(cuda, "FAKE", None)
"""None where CUDA is real."""


class IExecutionContext:
    """Made by an engine; keeps it."""

    def __init__(self, engine: Any, memory: int) -> None:
        self.engine = engine
        self.active_optimization_profile = 0
        self._inputs = [name for name in engine._tensors if engine.get_tensor_mode(name) is TensorIOMode.INPUT]
        self._outputs = [name for name in engine._tensors if engine.get_tensor_mode(name) is TensorIOMode.OUTPUT]
        self._network = NETWORKS[engine._network]
        self._addresses = dict.fromkeys(engine._tensors, 0)
        self._allocators: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        weakref.finalize(self, cuda.cudaFree, memory)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            raise RuntimeError("Error in set optimization profile async.")
        self.active_optimization_profile = profile_index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: Any) -> bool:
        if name not in self._inputs:
            return self._error(f"setInputShape: {name} is no input")
        sizes = tuple(int(size) for size in shape)
        fixed = tuple(self.engine.get_tensor_shape(name))
        if len(sizes) != len(fixed) or any(ours not in (-1, size) for ours, size in zip(fixed, sizes, strict=True)):
            return self._error(f"setInputShape: Static dimension mismatch while setting input shape for {name}")
        low, _, high = self.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        if -1 in fixed and not all(a <= size <= b for a, size, b in zip(low, sizes, high, strict=True)):
            return self._error("setInputShape: Supplied dimension exceeds min ~ max range of the profile")
        self._shapes[name] = sizes
        return True

    def get_tensor_shape(self, name: str) -> Dims:
        if name in self._inputs:
            return Dims(self._shapes.get(name, tuple(self.engine.get_tensor_shape(name))))
        if name not in self._outputs:
            return Dims(None)
        if self._missing():
            return self.engine.get_tensor_shape(name)
        return Dims(self._network.shapes(self._input_shapes(), self._values())[name])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._addresses:
            return self._error(f"setTensorAddress: {name} is no input or output")
        if memory % 256:
            return self._error("setTensorAddress: the address has no alignment of 256 bytes")
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        if name not in self._outputs:
            return False
        if output_allocator is not None and not getattr(output_allocator, "_made", False):
            raise TypeError("IOutputAllocator.__init__() must be called when overriding __init__")
        self._allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        missing = self._missing()
        if missing:
            return missing
        values = self._values()
        try:
            self._network.shapes(self._input_shapes(), values)
        except ValueError as error:
            self._error(f"inferShapes: {error}")
            raise RuntimeError("infer_shapes error code: -1") from None
        for name in self._outputs:
            if self.engine.is_shape_inference_io(name) and self._addresses[name]:
                self._write(name, self._network.compute({**self._dummies(), **values})[name])
        return []

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self._missing():
            return self._error("enqueueV3: not all inputs are specified")
        if int(cuda.cudaGetDevice()[1]) != self.engine._gpu:
            return self._error("enqueueV3: the current device is not the one of the engine")
        shapes = self._network.shapes(self._input_shapes(), self._values())
        for name in self._outputs:
            if not self._addresses[name] and self._allocators.get(name) is None:
                return self._error(f"enqueueV3: Neither address or allocator is set for output tensor {name}")
        depends = [name for name in self._outputs if -1 in shapes[name]]
        if depends:
            # The host must know how large these are, so everything before is waited for.
            self._finish(stream_handle)
            computed = self._compute()
            for name in depends:
                if not self._allocated(name, computed[name], stream_handle):
                    return self._error(f"enqueueV3: no memory for output {name}")
            self._later(stream_handle, computed)
            return True
        self._later(stream_handle, None)
        return True

    def _allocated(self, name: str, array: Any, stream: int) -> bool:
        allocator = self._allocators.get(name)
        if allocator is None:
            return False
        current = self._addresses[name]
        address = allocator.reallocate_output_async(name, current, array.nbytes, 256, stream)
        if not address:
            return False
        self._addresses[name] = address
        allocator.notify_shape(name, Dims(array.shape))
        return True

    def _later(self, stream: int, computed: Any | None) -> None:
        # Shapes and addresses are those of now; the contents are those of when it runs.
        shapes, addresses = dict(self._input_shapes()), dict(self._addresses)

        def work() -> None:
            results = computed if computed is not None else self._network.compute(self._read_all(shapes, addresses))
            for name in self._outputs:
                self._write(name, results[name], addresses[name])

        if _DRIVER is not None:
            _DRIVER.enqueue(stream, work)
        else:
            self._finish(stream)
            work()

    def _finish(self, stream: int) -> None:
        if _DRIVER is not None:
            created = _DRIVER.streams[stream]
            _DRIVER.run(created, len(created.work))
        else:
            cuda.cudaStreamSynchronize(stream)

    def _compute(self) -> Any:
        return self._network.compute(self._read_all(self._input_shapes(), self._addresses))

    def _missing(self) -> list[str]:
        return [
            name
            for name in self._inputs
            if (-1 in tuple(self.engine.get_tensor_shape(name)) and name not in self._shapes)
            or not self._addresses[name]
        ]

    def _input_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shapes.get(name, tuple(self.engine.get_tensor_shape(name))) for name in self._inputs}

    def _values(self) -> dict[str, Any]:
        shapes = self._input_shapes()
        return {
            name: self._read(name, shapes[name], self._addresses[name])
            for name in self._inputs
            if self.engine.is_shape_inference_io(name)
        }

    def _dummies(self) -> dict[str, Any]:
        return {name: np.zeros(shape, self._numpy(name)) for name, shape in self._input_shapes().items()}

    def _read_all(self, shapes: Any, addresses: Any) -> dict[str, Any]:
        return {name: self._read(name, shapes[name], addresses[name]) for name in self._inputs}

    def _read(self, name: str, shape: tuple[int, ...], address: int) -> Any:
        array = np.empty(shape, self._numpy(name))
        if array.nbytes:
            self._copy(name, array.ctypes.data, address, array.nbytes, to_host=True)
        return array

    def _write(self, name: str, array: Any, address: int = 0) -> None:
        laid = np.ascontiguousarray(array, self._numpy(name))
        if laid.nbytes:
            target = address or self._addresses[name]
            self._copy(name, target, laid.ctypes.data, laid.nbytes, to_host=False)

    def _copy(self, name: str, target: int, source: int, size: int, *, to_host: bool) -> None:
        if self.engine.get_tensor_location(name) is TensorLocation.HOST:
            ctypes.memmove(target, source, size)
            return
        kinds = cuda.cudaMemcpyKind
        kind = kinds.cudaMemcpyDeviceToHost if to_host else kinds.cudaMemcpyHostToDevice
        (status,) = cuda.cudaMemcpy(target, source, size, kind)
        if int(status):
            raise RuntimeError(f"the fake TensorRT could not copy: {status}")

    def _numpy(self, name: str) -> Any:
        return np.dtype(NUMPY[self.engine.get_tensor_dtype(name)])

    def _error(self, text: str) -> bool:
        logger = self.engine._runtime.logger
        logger.log(type(logger).Severity.ERROR, f"IExecutionContext::{text}")
        return False
