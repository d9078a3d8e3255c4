# SPDX-License-Identifier: Apache-2.0
"""Computes with a loaded model on a GPU. Made by `backends.pytorch.backend` where `instance` is for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from headrace.backends.contract import Array
from headrace.backends.pytorch.calls import Call
from headrace.backends.pytorch.device_array import DeviceArray
from headrace.backends.pytorch.instance import TorchInstance, to_bytes
from headrace.backends.pytorch.naming import Plan
from headrace.backends.pytorch.settings import Settings
from headrace.core.errors import HeadraceError
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")


class CudaInstance(TorchInstance):
    """One execution context on a GPU, with a stream of its own.

    Inputs are copied from where they are: with the one thread that an instance has, pinned memory in between took longer
    at every size. Outputs come back through pinned memory, which PyTorch keeps for the next batch. Microseconds for a
    copy, pinned and not (H200, PyTorch 2.11; the copies into pinned memory with many threads):

                     in            out
        64 B         32     23     28       38
        600 KB       95     71     40       94
        38 MB      1478   2740    740   28,400

    What cuBLAS needs to compute on a stream, 32 MiB on large GPUs, stays with the process; there are 32 streams at most.
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

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch, and wait for this stream alone."""
        # Once for all steps: to enter a stream takes 10 us.
        with torch.cuda.stream(self._stream):
            return super().compute(inputs, wanted)

    def compute_on_device(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """As `compute`; what it returns stays on the GPU."""
        try:
            with torch.cuda.stream(self._stream):
                tensors = self.run(self.to_device(inputs))
                left: dict[str, Any] = {name: self._left(name, tensors[name]) for name in wanted}
                self._stream.synchronize()
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._explained(error, inputs) from None
        return left

    def to_host(self, tensors: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Array]:
        """Copy. The arrays are views of pinned memory, which is filled when the stream has come this far."""
        arrays = super().to_host(tensors, wanted)
        self._stream.synchronize()
        if self._settings.clean_cache:
            torch.cuda.empty_cache()
        return arrays

    def close(self) -> None:
        """Let the model go, and give back what PyTorch keeps for later tensors, that of other models too."""
        self._stream.synchronize()
        super().close()
        torch.cuda.empty_cache()

    def _left(self, name: str, value: Any) -> DeviceArray | Array:
        if not isinstance(value, torch.Tensor):
            return to_bytes(self._name, name, value, self._text_rows.get(name, False))
        # What the next batch writes to is copied, as `_moved_out` of the CPU does.
        return DeviceArray(super()._moved_out(self._converted(name, value)))

    def _moved_in(self, tensor: Any) -> Any:
        return self._rounded(tensor.to(self._device, non_blocking=True, copy=True))

    def _moved_out(self, tensor: Any) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
