# SPDX-License-Identifier: Apache-2.0
"""Run a loaded PyTorch model on the CPU or a GPU: arrays to tensors, forward(), tensors to arrays."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch

from headrace.backends.contract import Array
from headrace.backends.device_array import DTYPES, TORCH_TYPES, DeviceArray
from headrace.backends.pytorch.model_function import Call, Plan
from headrace.backends.pytorch.settings import Settings
from headrace.backends.signature import decode_text
from headrace.core.dtypes import BF16, BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, ResourceExhausted
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

# PyTorch's messages for sizes or values that do not fit; it has one exception for everything.
_BAD_INPUT = re.compile(
    r"shape|size|dimension|out of range|out of bounds|number of elements|must match|Sizes of tensors|"
    r"Expected .* (?:but got|got)|ValueError|AssertionError|IndexError|Runtime assertion failed"
)


class TorchInstance:
    """One execution context on the CPU, with its own thread count."""

    def __init__(
        self,
        config: ModelConfig,
        call: Call,
        plan: Plan,
        device: torch.device,
        settings: Settings,
        *,
        owned: bool = False,
    ) -> None:
        self._name = config.name
        self._call: Call | None = call
        self._owned = owned
        self._plan = plan
        self._device = device
        self._settings = settings
        self._threads = settings.threads
        self.computing = Lock()
        """Held while a batch is computed, so that the weights are not moved or dropped meanwhile."""
        self._inputs = tuple(plan.inputs.items())
        # Reused by all batches, which come one at a time: creating it costs as much as using it.
        self._mode = torch.inference_mode() if settings.inference_mode else torch.no_grad()
        self._text_rows = {
            spec.name: config.max_batch_size > 0 and len(spec.dims or ()) == 1
            for spec in config.outputs
            if spec.dtype is BYTES
        }
        self._expected = {
            name: None if dtype is None or dtype is BYTES else TORCH_TYPES[dtype]
            for name, dtype in plan.outputs.items()
        }

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch."""
        try:
            with self.computing:
                return self.to_host(self.run(self.to_device(inputs)), requested)
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._client_error(error, inputs) from None

    def to_device(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Convert arrays to tensors on the device. On the CPU they share memory, unless the model writes to its inputs."""
        tensors: dict[str, Any] = {}
        for name, dtype in self._inputs:
            array: Any = inputs.get(name)
            if array is None:
                continue
            if dtype is BYTES:
                tensors[name] = _to_text(name, array)
            elif isinstance(array, DeviceArray):
                tensors[name] = self._borrowed(array.tensor)
            else:
                # `ascontiguousarray` would add a dimension to a scalar.
                tensor = torch.from_numpy(array if array.flags.c_contiguous else array.copy())
                tensors[name] = self._input_tensor(tensor.view(torch.bfloat16) if dtype is BF16 else tensor)
        return tensors

    def run(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the outputs on the device; on a GPU it returns before they are ready."""
        call, plan = self._call, self._plan
        if call is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        if call.ranges:
            self._check_ranges(call, tensors)
        # The engine may call from several threads, and PyTorch has a thread count per thread.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if len(tensors) == len(plan.inputs):
            given: Sequence[Any] = [tensors[name] for name in plan.positional]
            keywords = {argument: tensors[name] for argument, name in plan.keywords} if plan.keywords else {}
        else:
            given, keywords = self._without_optional(call, tensors)
        if plan.packed:
            given = ([*given],) if plan.packed == "list" else (dict(tensors),)
        with self._mode:
            if call.scripted and not self._settings.optimized:
                with torch.jit.optimized_execution(False):
                    results = call.function(*given, **keywords)
            else:
                results = call.function(*given, **keywords)
        return self._named(results)

    def to_host(self, tensors: Mapping[str, Any], requested: Collection[str]) -> dict[str, Array]:
        """Convert computed tensors to arrays."""
        arrays: dict[str, Array] = {}
        for name in requested:
            value = tensors[name]
            if isinstance(value, torch.Tensor):
                arrays[name] = _array(self._output_tensor(self._converted(name, value)))
            else:
                arrays[name] = to_bytes(self._name, name, value, self._text_rows.get(name, False))
        return arrays

    def close(self) -> None:
        """Release the model; its weights are freed with the last instance that shares them."""
        call, self._call = self._call, None
        if self._owned and call is not None and call.release is not None:
            call.release()

    def _borrowed(self, tensor: Any) -> Any:
        """Use a tensor of another model, which that model may still need."""
        moved = tensor.to(self._device, non_blocking=True)
        return TorchInstance._input_tensor(self, moved) if moved is tensor else self._rounded(moved)

    def _input_tensor(self, tensor: Any) -> Any:
        call = self._call
        return self._rounded(tensor.clone() if call is not None and call.writes_inputs else tensor)

    def _rounded(self, tensor: Any) -> Any:
        precision = self._settings.precision
        return tensor if precision is None or tensor.dtype is not torch.float32 else tensor.to(precision)

    def _output_tensor(self, tensor: Any) -> Any:
        call = self._call
        # It may be a buffer that the next batch overwrites.
        return tensor.clone() if call is not None and call.writes_itself else tensor

    def _without_optional(self, call: Call, tensors: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments if inputs are omitted: arguments after the first gap are passed by name."""
        plan = self._plan
        if plan.packed == "mapping":
            return (), {}
        given: list[Any] = []
        keywords = {argument: tensors[name] for argument, name in plan.keywords if name in tensors}
        for argument, name in zip(call.arguments, plan.positional, strict=False):
            if name not in tensors:
                if not argument.optional:
                    raise InvalidArgument(
                        f"model '{self._name}' needs input '{name}', for which forward() has no default: send it"
                    )
            elif len(given) == plan.positional.index(name):
                given.append(tensors[name])
            else:
                keywords[argument.name] = tensors[name]
        return given, keywords

    def _named(self, results: Any) -> dict[str, Any]:
        positions = self._plan.positions
        if isinstance(results, dict):
            if positions is None or all(name in results for name in positions):
                return {name: _present(self._name, results, name, name) for name in self._plan.outputs}
            results = tuple(results.values())
        elif isinstance(results, torch.Tensor) or _is_text(results):
            results = (results,)
        if positions is None or not isinstance(results, (tuple, list)):
            raise FailedPrecondition(
                f"model '{self._name}' returns neither tensors nor a mapping from names to tensors: have forward() return "
                "one of these"
            )
        return {name: _present(self._name, results, position, name) for name, position in positions.items()}

    def _converted(self, name: str, tensor: Any) -> Any:
        expected = self._expected[name]
        given = tensor.dtype
        if given is not expected and expected is not None:
            if given is not self._settings.precision or expected is not torch.float32:
                known = DTYPES.get(given)
                raise FailedPrecondition(
                    f"model '{self._name}' gives output '{name}' as {given if known is None else known.name}, and its "
                    f"configuration says {DTYPES[expected].name}: correct its data_type"
                )
            tensor = tensor.to(expected)
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def _check_ranges(self, call: Call, tensors: Mapping[str, Any]) -> None:
        sizes: dict[str, int] = {}
        for limit in call.ranges:
            name = self._plan.positional[limit.argument]
            size = tensors[name].shape[limit.axis]
            if size < limit.lowest or (limit.highest is not None and size > limit.highest):
                limits = (
                    f"at least {limit.lowest}" if limit.highest is None else f"from {limit.lowest} to {limit.highest}"
                )
                raise InvalidArgument(
                    f"dimension {limit.axis} of input '{name}' has size {size}, and model '{self._name}' was exported for "
                    f"{limits}"
                )
            if sizes.setdefault(limit.symbol, size) != size:
                raise InvalidArgument(
                    f"dimension {limit.axis} of input '{name}' has size {size}, and model '{self._name}' was exported for "
                    f"the size that another input has there, {sizes[limit.symbol]}"
                )

    def _client_error(self, error: Exception, inputs: Mapping[str, Array]) -> HeadraceError:
        """Return the error for the client. PyTorch's text reveals the model's internals and goes to the log only."""
        text = str(error)
        # TorchScript wraps the exception and keeps its text.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
            return ResourceExhausted(
                f"model '{self._name}' has not enough memory on {self._device} for this batch: send fewer rows, or lower "
                "max_batch_size"
            )
        # TorchScript writes the position first, with the model's source, and the error last; the rest of PyTorch first.
        lines = str(error).strip().splitlines() or [""]
        text = lines[-1] if "TorchScript interpreter" in str(error) else lines[0]
        if "CUDA error" in str(error) or _BAD_INPUT.search(text) is None:
            return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept these inputs: {shapes}. Compare their shapes and values with what the "
            "model was made for; the server's log says where it stopped"
        )


def _array(tensor: Any) -> Array:
    array: Array = tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return array


def _is_text(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _present(model: str, results: Any, key: Any, name: str) -> Any:
    try:
        return results[key]
    except (KeyError, IndexError):
        raise FailedPrecondition(
            f"model '{model}' does not give output '{name}': it gives "
            f"{', '.join(map(str, results)) if isinstance(results, dict) else f'{len(results)} outputs'}. Correct the "
            "outputs of its configuration"
        ) from None


def _to_text(name: str, array: Array) -> list[str]:
    """Convert BYTES to List[str], the only text that TorchScript takes."""
    if array.ndim != 1 and array.size != array.shape[0]:
        raise InvalidArgument(f"input '{name}' has shape {list(array.shape)}: text for PyTorch has one dimension")
    return decode_text(name, array)


def to_bytes(model: str, name: str, value: Any, as_rows: bool) -> Array:
    """Convert List[str], the only text that TorchScript returns, to BYTES."""
    if not _is_text(value) and value != []:
        raise FailedPrecondition(
            f"model '{model}' gives output '{name}' as something that is neither a tensor nor List[str]: have forward() "
            "return tensors"
        )
    raw = np.array([item.encode() for item in value], object)
    return raw.reshape(-1, 1) if as_rows else raw


class CudaInstance(TorchInstance):
    """One execution context on a GPU, with its own stream.

    Inputs are copied from pageable memory: with the one thread of an instance, staging in pinned memory took longer at
    every size. Outputs are copied through pinned memory, which PyTorch keeps for the next batch. Microseconds for a
    copy, pinned and not (H200, PyTorch 2.11; the copies into pinned memory with many threads):

                     in            out
        64 B         32     23     28       38
        600 KB       95     71     40       94
        38 MB      1478   2740    740   28,400

    cuBLAS keeps a workspace per stream, 32 MiB on large GPUs, until the process ends; there are at most 32 streams.
    """

    def __init__(
        self,
        config: ModelConfig,
        call: Call,
        plan: Plan,
        device: torch.device,
        settings: Settings,
        *,
        owned: bool = False,
    ) -> None:
        super().__init__(config, call, plan, device, settings, owned=owned)
        self._stream = torch.cuda.Stream(device)

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch and wait for this stream only."""
        # Once for all steps: entering a stream takes 10 us.
        with torch.cuda.stream(self._stream):
            return super().compute(inputs, requested)

    def compute_on_device(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch and return its outputs in GPU memory."""
        try:
            with self.computing, torch.cuda.stream(self._stream):
                tensors = self.run(self.to_device(inputs))
                kept: dict[str, Any] = {name: self._device_array(name, tensors[name]) for name in requested}
                self._stream.synchronize()
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._client_error(error, inputs) from None
        return kept

    def to_host(self, tensors: Mapping[str, Any], requested: Collection[str]) -> dict[str, Array]:
        """Copy the outputs. The arrays are views of pinned memory, which is filled once the stream has finished."""
        arrays = super().to_host(tensors, requested)
        self._stream.synchronize()
        if self._settings.clean_cache:
            torch.cuda.empty_cache()
        return arrays

    def close(self) -> None:
        """Release the model, and PyTorch's cached GPU memory, also that of other models."""
        self._stream.synchronize()
        super().close()
        torch.cuda.empty_cache()

    def _device_array(self, name: str, value: Any) -> DeviceArray | Array:
        if not isinstance(value, torch.Tensor):
            return to_bytes(self._name, name, value, self._text_rows.get(name, False))
        # Copy what the next batch overwrites, as `_output_tensor` does on the CPU.
        return DeviceArray(super()._output_tensor(self._converted(name, value)))

    def _input_tensor(self, tensor: Any) -> Any:
        return self._rounded(tensor.to(self._device, non_blocking=True, copy=True))

    def _output_tensor(self, tensor: Any) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
