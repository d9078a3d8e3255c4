# SPDX-License-Identifier: Apache-2.0
"""The fake of the package `tensorrt`: what Headrace uses of TensorRT 10's Python API, as documented.

An engine's weights and a context's memory are taken from CUDA and given back when nothing refers to them, as the real
objects do. Its plans are JSON behind a first line; see `fake_tensorrt.plans`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

from cuda.bindings import runtime as cuda

from tensorrt.context import IExecutionContext
from tensorrt.types import DataType, Dims, TensorFormat, TensorIOMode, TensorLocation

__version__ = "10.13.0"
FIRST_LINE = b"a plan for the fake TensorRT\n"
WEIGHT_BYTES = 4096
CONTEXT_BYTES = 2048

__all__ = ["DataType", "Dims", "IExecutionContext", "TensorFormat", "TensorIOMode", "TensorLocation"]


class ExecutionContextAllocationStrategy(Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ILogger:
    class Severity(Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def __init__(self) -> None:
        self._made = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    def __init__(self) -> None:
        self._made = True


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    return True


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        if not getattr(logger, "_made", False):
            raise TypeError("ILogger.__init__() must be called when overriding __init__")
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        content = bytes(memoryview(serialized_engine))
        if not content.startswith(FIRST_LINE):
            return self._refused("magicTagRead == kMAGIC_TAG failed. Magic tag does not match")
        try:
            described = json.loads(content[len(FIRST_LINE) :])
        except ValueError:
            return self._refused("Serialization assertion reader.remaining() failed.")
        if described["tensorrt"] != __version__ and not (
            described.get("version_compatible") and self.engine_host_code_allowed
        ):
            return self._refused(
                "Version tag does not match. Note: Current Version: 239, Serialized Engine Version: 232"
            )
        _, gpu = cuda.cudaGetDevice()
        if described["capability"] not in ("any", _capability(gpu)):
            return self._refused("Target GPU SM is not the same as the SM this engine was built for")
        status, weights = cuda.cudaMalloc(WEIGHT_BYTES)
        if int(status):
            return self._refused("Requested amount of GPU memory could not be allocated")
        return ICudaEngine(self, described, gpu, weights)

    def _refused(self, why: str) -> None:
        self.logger.log(ILogger.Severity.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 1: {why}")


class ICudaEngine:
    """Made by a runtime; keeps it."""

    def __init__(self, runtime: Runtime, described: Any, gpu: int, weights: int) -> None:
        self._runtime = runtime
        self._tensors = {tensor["name"]: tensor for tensor in described["tensors"]}
        self._profiles = described["profiles"]
        self._network = described["network"]
        self._gpu = gpu
        weakref.finalize(self, cuda.cudaFree, weights)

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self._tensors[name]["mode"]] if name in self._tensors else TensorIOMode.NONE

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._tensors[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self._tensors[name]["shape"]) if name in self._tensors else Dims(None)

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation[self._tensors[name]["location"]]

    def get_tensor_format(self, name: str, profile_index: int = 0) -> TensorFormat:
        return TensorFormat[self._tensors[name]["format"][profile_index]]

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self._tensors[name]["shape_tensor"])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        given = self._profiles[profile_index]["shapes"].get(name)
        if self.get_tensor_mode(name) is not TensorIOMode.INPUT or given is None:
            return [Dims(None)] * 3
        return [Dims(shape) for shape in given]

    def get_tensor_profile_values(self, profile_index: int, name: str) -> Sequence[Sequence[int]]:
        # The documented names are the wrong way round, and its arguments are taken by place.
        if not isinstance(profile_index, int) or not isinstance(name, str):
            raise TypeError("get_tensor_profile_values(): incompatible function arguments")
        if not self.is_shape_inference_io(name) or self.get_tensor_mode(name) is not TensorIOMode.INPUT:
            raise RuntimeError("Binding index does not correspond to an input shape tensor.")
        values: Sequence[Sequence[int]] = self._profiles[profile_index]["values"].get(name, [])
        return values

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext | None:
        if not isinstance(strategy, ExecutionContextAllocationStrategy):
            raise TypeError("create_execution_context(): incompatible function arguments")
        status, memory = cuda.cudaMalloc(CONTEXT_BYTES)
        if int(status):
            self._runtime.logger.log(ILogger.Severity.ERROR, "Error Code 2: OutOfMemory")
            return None
        return IExecutionContext(self, memory)


def _capability(gpu: int) -> str:
    attributes = cuda.cudaDeviceAttr
    _, major = cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMajor, gpu)
    _, minor = cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMinor, gpu)
    return f"{major}.{minor}"
