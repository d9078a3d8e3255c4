# SPDX-License-Identifier: Apache-2.0
"""One TensorRT execution context with a CUDA stream: arrays to the GPU, through the engine, and back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tensorrt import device
from headrace.backends.tensorrt.buffers import Buffer, Staging
from headrace.backends.tensorrt.plan import Binding, Plan, Profile, chosen_profile, described
from headrace.core.errors import HeadraceError, Internal, InvalidArgument
from headrace.models.config.types import Dims, ModelConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one run of the engine."""

    arrays: Mapping[str, Array]
    shapes: Mapping[str, Dims]
    values: Mapping[str, Dims]
    """The values of the shape tensors."""
    rows: int
    """0: the model does not batch."""


def make_batch(name: str, inputs: Sequence[Binding], given: Mapping[str, Array], batched: bool) -> Batch:
    """Create a batch from arrays; `name` is the model's, for error messages."""
    missing = [binding.name for binding in inputs if binding.name not in given]
    if missing:
        raise InvalidArgument(
            f"model '{name}' needs its input{'s' if len(missing) > 1 else ''} "
            f"{', '.join(repr(input_name) for input_name in missing)}: a TensorRT plan has no optional inputs"
        )
    rows = next((len(given[binding.name]) for binding in inputs if not binding.is_shape_tensor), 1) if batched else 0
    arrays: dict[str, Array] = {}
    values: dict[str, Dims] = {}
    for binding in inputs:
        array = given[binding.name]
        if binding.is_shape_tensor:
            if batched:
                array = _with_rows(name, binding, array, rows)
            values[binding.name] = tuple(int(value) for value in array.ravel())
        arrays[binding.name] = array
    return Batch(arrays, {input_name: array.shape for input_name, array in arrays.items()}, values, rows)


def shape_values_for_rows(array: Array, rows: int) -> Array:
    """Return a shape tensor of the engine as the outputs of `rows` requests: each gets the values after the first."""
    return np.repeat(array.reshape(1, -1)[:, 1:], rows, axis=0)


def _with_rows(name: str, binding: Binding, array: Array, rows: int) -> Array:
    lines = array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), -1)
    if not (lines == lines[:1]).all():
        raise InvalidArgument(
            f"input '{binding.name}' of model '{name}' is a shape tensor and must have the same values in all rows of a "
            "batch: send requests with other values apart, or give the model no dynamic_batching"
        )
    return np.concatenate([np.array([rows], lines.dtype), lines[0]])


log = logging.getLogger("headrace.backends")


class TensorRTInstance:
    """Runs batches on one GPU."""

    def __init__(self, config: ModelConfig, gpu: int, context: Any, plan: Plan, profiles: Sequence[Profile]) -> None:
        self._name = config.name
        self._batched = config.max_batch_size > 0
        self._gpu = gpu
        self._context = context
        self._plan = plan
        self._inputs = plan.inputs
        self._outputs = plan.outputs
        self._profiles = profiles
        self._active = 0  # the state of a new context
        self._stream = device.Stream()
        pinned, on_gpu = device.pinned_memory(), device.gpu_memory()
        self._staging = {binding.name: Staging(pinned) for binding in plan.bindings}
        self._memory = {binding.name: Buffer(on_gpu) for binding in plan.bindings if not binding.on_host}
        self._growing: dict[str, device.GrowingOutput] = {}

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch."""
        batch = make_batch(self._name, self._inputs, inputs, self._batched)
        profile = chosen_profile(self._profiles, batch.shapes, batch.values, self._active)
        if profile is None:
            raise self._profile_error(batch)
        try:
            device.activate(self._gpu)
            return self._run(batch, profile, requested)
        except HeadraceError:
            self._wait_for_copies()
            raise
        except Exception:
            log.exception("model %s could not compute a batch", self._name)
            self._wait_for_copies()
            raise Internal(
                f"model '{self._name}' failed to compute this request; the server's log has the details"
            ) from None

    def close(self) -> None:
        """Free the context, the stream, and their memory on GPU and host."""
        try:
            device.activate(self._gpu)
            self._wait_for_copies()
            # The context first: it may still refer to the buffers.
            self._context = None
            self._growing.clear()
            for buffer in (*self._memory.values(), *self._staging.values()):
                buffer.close()
            self._stream.close()
        except device.DeviceError:
            # A failed GPU frees nothing until the process ends.
            log.exception("model %s could not free all memory of an instance", self._name)

    def _run(self, batch: Batch, profile: Profile, requested: Collection[str]) -> dict[str, Array]:
        context, stream = self._context, self._stream
        if profile.index != self._active:
            context.set_optimization_profile_async(profile.index, stream.handle)
            self._active = profile.index
        for binding in self._inputs:
            self._feed(binding, batch.arrays[binding.name], batch)
        self._infer_shapes(batch)
        shapes = {binding.name: self._prepare(binding) for binding in self._outputs}
        if not context.execute_async_v3(stream.handle):
            raise device.DeviceError("TensorRT could not run the engine; its messages are above")
        fetched = [binding for binding in self._outputs if binding.name in requested]
        staged = {binding.name: self._fetch(binding, shapes[binding.name]) for binding in fetched}
        stream.wait()
        # Copy: the next batch overwrites the staging memory.
        results = {name: array.copy() for name, array in staged.items()}
        if self._batched:
            for binding in fetched:
                if binding.is_shape_tensor:
                    results[binding.name] = shape_values_for_rows(results[binding.name], batch.rows)
        return results

    def _feed(self, binding: Binding, array: Array, batch: Batch) -> None:
        staging = self._staging[binding.name]
        staged = staging.array(_numpy(binding), array.shape)
        np.copyto(staged, array, casting="no")
        address = staging.address
        if not binding.on_host:
            address = self._memory[binding.name].reserve(staged.nbytes)
            if staged.nbytes:
                self._stream.to_gpu(address, staging.address, staged.nbytes)
        # Shape tensors have fixed shapes, but TensorRT accepts them here too.
        if not self._context.set_input_shape(binding.name, array.shape):
            raise self._shape_error(batch)
        self._bind(binding, address)

    def _infer_shapes(self, batch: Batch) -> None:
        for binding in self._outputs:
            if binding.is_shape_tensor and binding.on_host and -1 not in binding.shape:
                # `infer_shapes` writes their values, if it has an address.
                size = int(np.prod(binding.shape, dtype=np.int64)) * _numpy(binding).itemsize
                self._bind(binding, self._staging[binding.name].reserve(size))
        try:
            unknown = self._context.infer_shapes()
        except RuntimeError:
            log.exception("model %s cannot take a batch of these shapes", self._name)
            raise self._shape_error(batch) from None
        if unknown:
            raise device.DeviceError(f"TensorRT does not know the shapes of {', '.join(unknown)}")

    def _prepare(self, binding: Binding) -> Dims | None:
        """Allocate memory for an output. Return None if its shape is known only after the run."""
        shape = device.dims(self._context.get_tensor_shape(binding.name))
        if -1 in shape:
            growing = self._growing.get(binding.name)
            if growing is None:
                growing = device.GrowingOutput(self._memory[binding.name])
                if not self._context.set_output_allocator(binding.name, growing):
                    raise device.DeviceError(f"TensorRT takes no allocator for output {binding.name}")
                self._growing[binding.name] = growing
            growing.shape = None
            return None
        size = int(np.prod(shape, dtype=np.int64)) * _numpy(binding).itemsize
        target_buffer = self._staging[binding.name] if binding.on_host else self._memory[binding.name]
        self._bind(binding, target_buffer.reserve(size))
        return shape

    def _fetch(self, binding: Binding, shape: Dims | None) -> Array:
        if shape is None:
            shape = self._growing[binding.name].shape
            if shape is None:
                raise device.DeviceError(f"TensorRT did not report the shape of output {binding.name}")
        staging = self._staging[binding.name]
        staged = staging.array(_numpy(binding), shape)
        if not binding.on_host and staged.nbytes:
            self._stream.to_host(staging.address, self._memory[binding.name].address, staged.nbytes)
        return staged

    def _bind(self, binding: Binding, address: int) -> None:
        if not self._context.set_tensor_address(binding.name, address):
            raise device.DeviceError(f"TensorRT refuses the address of {binding.name}")

    def _wait_for_copies(self) -> None:
        # Copies of a failed batch may still run, and the next batch uses the same memory.
        with suppress(device.DeviceError):
            self._stream.wait()

    def _profile_error(self, batch: Batch) -> InvalidArgument:
        given = [f"'{name}' {list(shape)}" for name, shape in batch.shapes.items()]
        given += [f"values of '{name}' {list(values)}" for name, values in batch.values.items()]
        ranges = described(self._profiles, [binding.name for binding in self._inputs])
        return InvalidArgument(
            f"model '{self._name}' does not accept inputs of these shapes: {', '.join(given)}. {ranges}"
        )

    def _shape_error(self, batch: Batch) -> InvalidArgument:
        shapes = ", ".join(f"'{name}' {list(shape)}" for name, shape in batch.shapes.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept inputs of these shapes: {shapes}. Compare them with the model's "
            "metadata; the server's log says where it stopped"
        )


def _numpy(binding: Binding) -> np.dtype[Any]:
    dtype = binding.dtype
    if dtype is None:  # rejected when the model was loaded
        raise device.DeviceError(f"{binding.name} is {binding.kind}")
    return dtype.numpy
