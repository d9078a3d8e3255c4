# SPDX-License-Identifier: Apache-2.0
"""Computes with a loaded model: pixels to tensors of the device, forward(), tensors of the device to arrays.

Made by `backend`, called by the engine through `backends.contract`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from headrace.backends.contract import Array
from headrace.backends.vision.folder import PIXELS
from headrace.backends.vision.settings import Settings
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, ResourceExhausted

log = logging.getLogger("headrace.backends")

# How PyTorch and transformers say that sizes do not fit.
_REFUSED = re.compile(
    r"shape|size|dimension|out of range|out of bounds|number of elements|must match|doesn't match|channel|divisible|"
    r"Expected .* (?:but got|got)",
    re.IGNORECASE,
)


class VisionInstance:
    """One execution context on the CPU, with a number of threads of its own."""

    def __init__(self, name: str, model: Any, device: torch.device, settings: Settings) -> None:
        self._name = name
        self._model = model
        self._device = device
        self._dtype = settings.dtype
        self._threads = settings.threads

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch of images."""
        model = self._model
        if model is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        pixels = inputs[PIXELS]
        if pixels.ndim != 4:
            raise InvalidArgument(
                f"input '{PIXELS}' of model '{self._name}' has shape {list(pixels.shape)}: send batch, channels, height and "
                "width"
            )
        # The engine may call from several threads, and PyTorch keeps the number for each.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                told = model(self._moved_in(pixels))
                return {name: self._moved_out(self._present(told, name)) for name in wanted}
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._explained(error, pixels) from None

    def close(self) -> None:
        """Let the model go."""
        self._model = None

    def _moved_in(self, pixels: Array) -> Any:
        # A copy: models may write to their inputs, and PyTorch warns of arrays that are read-only.
        return torch.from_numpy(np.array(pixels, np.float32, order="C")).to(self._device, self._dtype)

    def _moved_out(self, tensor: Any) -> Array:
        array: Array = tensor.to("cpu", torch.float32).contiguous().numpy()
        return array

    def _present(self, told: Any, name: str) -> Any:
        tensor = told.get(name)
        if tensor is None:
            raise FailedPrecondition(
                f"model '{self._name}' does not give output '{name}': it gives {', '.join(told.keys())}. Correct the "
                "outputs of its configuration"
            )
        return tensor

    def _explained(self, error: Exception, pixels: Array) -> HeadraceError:
        """What a caller may know of it. The text of the exception tells of the model's inside, and is for the log."""
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
            return ResourceExhausted(
                f"model '{self._name}' has not enough memory on {self._device} for this batch: send fewer or smaller "
                "images, or lower max_batch_size"
            )
        if "CUDA error" in text or _REFUSED.search(text) is None:
            return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")
        return InvalidArgument(
            f"model '{self._name}' does not accept images of shape {list(pixels.shape[1:])}: send the size that its "
            "preprocessor_config.json has; the server's log says where it stopped"
        )


class CudaVisionInstance(VisionInstance):
    """One execution context on a GPU, with a stream of its own."""

    def __init__(self, name: str, model: Any, device: torch.device, settings: Settings) -> None:
        super().__init__(name, model, device, settings)
        # The weights were copied on another stream.
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch; the copies of the outputs wait for this stream alone."""
        with torch.cuda.stream(self._stream):
            return super().compute(inputs, wanted)

    def close(self) -> None:
        """Let the model go, and give back what PyTorch keeps for later tensors."""
        self._stream.synchronize()
        super().close()
        torch.cuda.empty_cache()
