# SPDX-License-Identifier: Apache-2.0
"""One execution context with a CUDA stream of its own: a batch of arrays to the GPU, through the engine, and back.

Called by the engine through `backends.contract`. Inputs go from numpy to pinned memory and from there to the GPU, outputs
the other way, all in one stream that is waited for once. Buffers are kept from batch to batch and grow with the largest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.tensorrt import device
from headrace.backends.tensorrt.buffers import Buffer, Staging
from headrace.backends.tensorrt.plan import Binding, Plan, Profile
from headrace.backends.tensorrt.profiles import chosen_profile, described
from headrace.backends.tensorrt.shaping import Batch, shape_values_for_rows, shaped_batch
from headrace.core.errors import HeadraceError, Internal, InvalidArgument
from headrace.models.config.types import Dims, ModelConfig

log = logging.getLogger("headrace.backends")


class TensorRTInstance:
    """Computes batches on one GPU."""

    def __init__(self, config: ModelConfig, gpu: int, context: Any, plan: Plan, profiles: Sequence[Profile]) -> None:
        self._name = config.name
        self._batched = config.max_batch_size > 0
        self._gpu = gpu
        self._context = context
        self._plan = plan
        self._inputs = plan.inputs
        self._outputs = plan.outputs
        self._profiles = profiles
        self._active = 0  # what a new context has
        self._stream = device.Stream()
        pinned, on_gpu = device.pinned_memory(), device.gpu_memory()
        self._staging = {binding.name: Staging(pinned) for binding in plan.bindings}
        self._memory = {binding.name: Buffer(on_gpu) for binding in plan.bindings if not binding.on_host}
        self._growing: dict[str, device.GrowingOutput] = {}

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch."""
        batch = shaped_batch(self._name, self._inputs, inputs, self._batched)
        profile = chosen_profile(self._profiles, batch.shapes, batch.values, self._active)
        if profile is None:
            raise self._no_profile(batch)
        try:
            device.activate(self._gpu)
            return self._run(batch, profile, wanted)
        except HeadraceError:
            self._settle()
            raise
        except Exception:
            log.exception("model %s could not compute a batch", self._name)
            self._settle()
            raise Internal(
                f"model '{self._name}' failed to compute this request; the server's log has the details"
            ) from None

    def close(self) -> None:
        """Free the context, and what it and the stream had of the GPU's memory and of the host's."""
        try:
            device.activate(self._gpu)
            self._settle()
            # The context first: it may still name the buffers.
            self._context = None
            self._growing.clear()
            for buffer in (*self._memory.values(), *self._staging.values()):
                buffer.close()
            self._stream.close()
        except device.DeviceFailure:
            # A GPU that has failed gives nothing back until the process ends, and nobody can do anything about it here.
            log.exception("model %s could not free all memory of an instance", self._name)

    def _run(self, batch: Batch, profile: Profile, wanted: Collection[str]) -> dict[str, Array]:
        context, stream = self._context, self._stream
        if profile.index != self._active:
            context.set_optimization_profile_async(profile.index, stream.handle)
            self._active = profile.index
        for binding in self._inputs:
            self._feed(binding, batch.arrays[binding.name], batch)
        self._infer_shapes(batch)
        shapes = {binding.name: self._prepare(binding) for binding in self._outputs}
        if not context.execute_async_v3(stream.handle):
            raise device.DeviceFailure("TensorRT could not run the engine; its own words are above")
        asked = [binding for binding in self._outputs if binding.name in wanted]
        staged = {binding.name: self._fetch(binding, shapes[binding.name]) for binding in asked}
        stream.wait()
        # Copies: the next batch writes over the staging memory.
        results = {name: array.copy() for name, array in staged.items()}
        if self._batched:
            for binding in asked:
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
        # Shape tensors have fixed shapes; TensorRT takes them all the same.
        if not self._context.set_input_shape(binding.name, array.shape):
            raise self._refused(batch)
        self._bind(binding, address)

    def _infer_shapes(self, batch: Batch) -> None:
        for binding in self._outputs:
            if binding.is_shape_tensor and binding.on_host and -1 not in binding.shape:
                # `infer_shapes` writes their values, if it knows where to.
                size = int(np.prod(binding.shape, dtype=np.int64)) * _numpy(binding).itemsize
                self._bind(binding, self._staging[binding.name].reserve(size))
        try:
            unknown = self._context.infer_shapes()
        except RuntimeError:
            log.exception("model %s cannot take a batch of these shapes", self._name)
            raise self._refused(batch) from None
        if unknown:
            raise device.DeviceFailure(f"TensorRT does not know the shapes of {', '.join(unknown)}")

    def _prepare(self, binding: Binding) -> Dims | None:
        """Give the engine room for an output. None: only the engine will know its shape."""
        shape = device.dims(self._context.get_tensor_shape(binding.name))
        if -1 in shape:
            growing = self._growing.get(binding.name)
            if growing is None:
                growing = device.GrowingOutput(self._memory[binding.name])
                if not self._context.set_output_allocator(binding.name, growing):
                    raise device.DeviceFailure(f"TensorRT takes no allocator for output {binding.name}")
                self._growing[binding.name] = growing
            growing.shape = None
            return None
        size = int(np.prod(shape, dtype=np.int64)) * _numpy(binding).itemsize
        room = self._staging[binding.name] if binding.on_host else self._memory[binding.name]
        self._bind(binding, room.reserve(size))
        return shape

    def _fetch(self, binding: Binding, shape: Dims | None) -> Array:
        if shape is None:
            shape = self._growing[binding.name].shape
            if shape is None:
                raise device.DeviceFailure(f"TensorRT did not tell the shape of output {binding.name}")
        staging = self._staging[binding.name]
        staged = staging.array(_numpy(binding), shape)
        if not binding.on_host and staged.nbytes:
            self._stream.to_host(staging.address, self._memory[binding.name].address, staged.nbytes)
        return staged

    def _bind(self, binding: Binding, address: int) -> None:
        if not self._context.set_tensor_address(binding.name, address):
            raise device.DeviceFailure(f"TensorRT refuses the address of {binding.name}")

    def _settle(self) -> None:
        # Copies of a batch that failed half-way may still be under way, and the next one uses the same memory.
        with suppress(device.DeviceFailure):
            self._stream.wait()

    def _no_profile(self, batch: Batch) -> InvalidArgument:
        given = [f"'{name}' {list(shape)}" for name, shape in batch.shapes.items()]
        given += [f"values of '{name}' {list(values)}" for name, values in batch.values.items()]
        ranges = described(self._profiles, [binding.name for binding in self._inputs])
        return InvalidArgument(
            f"model '{self._name}' does not accept inputs of these shapes: {', '.join(given)}. {ranges}"
        )

    def _refused(self, batch: Batch) -> InvalidArgument:
        shapes = ", ".join(f"'{name}' {list(shape)}" for name, shape in batch.shapes.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept inputs of these shapes: {shapes}. Compare them with the model's "
            "metadata; the server's log says where it stopped"
        )


def _numpy(binding: Binding) -> np.dtype[Any]:
    dtype = binding.dtype
    if dtype is None:  # refused when the model was loaded
        raise device.DeviceFailure(f"{binding.name} is {binding.kind}")
    return dtype.numpy
