# SPDX-License-Identifier: Apache-2.0
"""Computes with a loaded model: arrays to tensors of the device, forward(), tensors of the device to arrays.

Made by `backends.pytorch.backend`, called by the engine through `backends.contract`. The three steps are methods of their
own, so that a tensor can stay on the device between two models. `cuda_instance` is the same on a GPU.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace.backends.contract import Array
from headrace.backends.pytorch.calls import Call
from headrace.backends.pytorch.device_array import DeviceArray
from headrace.backends.pytorch.dtypes import DTYPES, TORCH_TYPES
from headrace.backends.pytorch.naming import Plan
from headrace.backends.pytorch.settings import Settings
from headrace.core.dtypes import BF16, BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, ResourceExhausted
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

# How PyTorch says that sizes or values do not fit; it has one exception for everything.
_REFUSED = re.compile(
    r"shape|size|dimension|out of range|out of bounds|number of elements|must match|Sizes of tensors|"
    r"Expected .* (?:but got|got)|ValueError|AssertionError|IndexError|Runtime assertion failed"
)


class TorchInstance:
    """One execution context on the CPU, with a number of threads of its own."""

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
        self._inputs = tuple(plan.inputs.items())
        # One for all batches, which come one at a time: making one costs as much as using it.
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

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch."""
        try:
            return self.to_host(self.run(self.to_device(inputs)), wanted)
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._explained(error, inputs) from None

    def to_device(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Arrays as tensors of the device. On the CPU they are the same memory, unless the model would write to it."""
        tensors: dict[str, Any] = {}
        for name, dtype in self._inputs:
            array: Any = inputs.get(name)
            if array is None:
                continue
            if dtype is BYTES:
                tensors[name] = _to_text(name, array)
            elif isinstance(array, DeviceArray):
                tensors[name] = self._taken_over(array.tensor)
            else:
                # Not `ascontiguousarray`, which gives a single number a dimension.
                tensor = torch.from_numpy(array if array.flags.c_contiguous else array.copy())
                tensors[name] = self._moved_in(tensor.view(torch.bfloat16) if dtype is BF16 else tensor)
        return tensors

    def run(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the outputs, on the device; on a GPU it returns before they are there."""
        call, plan = self._call, self._plan
        if call is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        if call.ranges:
            self._check_ranges(call, tensors)
        # The engine may call from several threads, and PyTorch keeps the number for each.
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

    def to_host(self, tensors: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Array]:
        """Tensors of the device as arrays, when they are computed."""
        arrays: dict[str, Array] = {}
        for name in wanted:
            value = tensors[name]
            if isinstance(value, torch.Tensor):
                arrays[name] = _array(self._moved_out(self._converted(name, value)))
            else:
                arrays[name] = to_bytes(self._name, name, value, self._text_rows.get(name, False))
        return arrays

    def close(self) -> None:
        """Let the model go, and free its weights if no other instance has them."""
        call, self._call = self._call, None
        if self._owned and call is not None and call.release is not None:
            call.release()

    def _taken_over(self, tensor: Any) -> Any:
        """A tensor of another model, which may be needed there once more."""
        moved = tensor.to(self._device, non_blocking=True)
        return TorchInstance._moved_in(self, moved) if moved is tensor else self._rounded(moved)

    def _moved_in(self, tensor: Any) -> Any:
        call = self._call
        return self._rounded(tensor.clone() if call is not None and call.writes_inputs else tensor)

    def _rounded(self, tensor: Any) -> Any:
        precision = self._settings.precision
        return tensor if precision is None or tensor.dtype is not torch.float32 else tensor.to(precision)

    def _moved_out(self, tensor: Any) -> Any:
        call = self._call
        # It may be a buffer that the next batch writes to.
        return tensor.clone() if call is not None and call.writes_itself else tensor

    def _without_optional(self, call: Call, tensors: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments of a request that leaves out inputs: those behind the first gap go by name."""
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
        for each in call.ranges:
            name = self._plan.positional[each.argument]
            size = tensors[name].shape[each.axis]
            if size < each.lowest or (each.highest is not None and size > each.highest):
                limits = f"at least {each.lowest}" if each.highest is None else f"from {each.lowest} to {each.highest}"
                raise InvalidArgument(
                    f"dimension {each.axis} of input '{name}' has size {size}, and model '{self._name}' was exported for "
                    f"{limits}"
                )
            if sizes.setdefault(each.symbol, size) != size:
                raise InvalidArgument(
                    f"dimension {each.axis} of input '{name}' has size {size}, and model '{self._name}' was exported for "
                    f"the size that another input has there, {sizes[each.symbol]}"
                )

    def _explained(self, error: Exception, inputs: Mapping[str, Array]) -> HeadraceError:
        """What a caller may know of it. The text of PyTorch tells of the model's inside, and is for the log."""
        text = str(error)
        # TorchScript wraps the exception, and keeps its words.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
            return ResourceExhausted(
                f"model '{self._name}' has not enough memory on {self._device} for this batch: send fewer rows, or lower "
                "max_batch_size"
            )
        # TorchScript says where it was first, with the model's source, and what was wrong last; the rest of PyTorch first.
        lines = str(error).strip().splitlines() or [""]
        text = lines[-1] if "TorchScript interpreter" in str(error) else lines[0]
        if "CUDA error" in str(error) or _REFUSED.search(text) is None:
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
    """List[str] is the only text that TorchScript takes."""
    if array.ndim != 1 and array.size != array.shape[0]:
        raise InvalidArgument(f"input '{name}' has shape {list(array.shape)}: text for PyTorch has one dimension")
    try:
        return [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel()]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"input '{name}' has an element that is not UTF-8, which PyTorch models cannot take"
        ) from None


def to_bytes(model: str, name: str, value: Any, as_rows: bool) -> Array:
    """List[str], which is the only text that TorchScript gives."""
    if not _is_text(value) and value != []:
        raise FailedPrecondition(
            f"model '{model}' gives output '{name}' as something that is neither a tensor nor List[str]: have forward() "
            "return tensors"
        )
    raw = np.empty(len(value), dtype=object)
    raw[:] = [item.encode() for item in value]
    return raw.reshape(-1, 1) if as_rows else raw
