# SPDX-License-Identifier: Apache-2.0
"""Image classifiers and object detectors of Hugging Face folders, run by transformers on the CPU or a GPU."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.signature import check_signature, completion, is_declared
from headrace.backends.torch_import import device_of, gpu_count
from headrace.backends.vision.model_folder import (
    CONFIG_FILE,
    LOGITS,
    PIXELS,
    Settings,
    VisionFolder,
    load_weights,
    read_folder,
    settings_of,
)
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, ResourceExhausted
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

# Messages of PyTorch and transformers for sizes that do not fit.
_BAD_INPUT = re.compile(
    r"shape|size|dimension|out of range|out of bounds|number of elements|must match|doesn't match|channel|divisible|"
    r"Expected .* (?:but got|got)",
    re.IGNORECASE,
)


class VisionInstance:
    """One execution context on the CPU, with its own thread count."""

    def __init__(self, name: str, model: Any, device: torch.device, settings: Settings) -> None:
        self._name = name
        self._model = model
        self._device = device
        self._dtype = settings.dtype
        self._threads = settings.threads

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch of images."""
        model = self._model
        if model is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        pixels = inputs[PIXELS]
        if pixels.ndim != 4:
            raise InvalidArgument(
                f"input '{PIXELS}' of model '{self._name}' has shape {list(pixels.shape)}: send batch, channels, height and "
                "width"
            )
        # The engine may call from several threads, and PyTorch has a thread count per thread.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                outputs = model(self._to_device(pixels))
                return {name: self._to_host(self._present(outputs, name)) for name in requested}
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._client_error(error, pixels) from None

    def close(self) -> None:
        """Release the model."""
        self._model = None

    def _to_device(self, pixels: Array) -> Any:
        # Copy: models may write to their inputs, and PyTorch warns of read-only arrays.
        return torch.from_numpy(np.array(pixels, np.float32, order="C")).to(self._device, self._dtype)

    def _to_host(self, tensor: Any) -> Array:
        array: Array = tensor.to("cpu", torch.float32).contiguous().numpy()
        return array

    def _present(self, outputs: Any, name: str) -> Any:
        tensor = outputs.get(name)
        if tensor is None:
            raise FailedPrecondition(
                f"model '{self._name}' does not give output '{name}': it gives {', '.join(outputs.keys())}. Correct the "
                "outputs of its configuration"
            )
        return tensor

    def _client_error(self, error: Exception, pixels: Array) -> HeadraceError:
        """Return the error for the client. The exception's text reveals the model's internals and goes to the log only."""
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
            return ResourceExhausted(
                f"model '{self._name}' has not enough memory on {self._device} for this batch: send fewer or smaller "
                "images, or lower max_batch_size"
            )
        if "CUDA error" in text or _BAD_INPUT.search(text) is None:
            return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")
        return InvalidArgument(
            f"model '{self._name}' does not accept images of shape {list(pixels.shape[1:])}: send the size that its "
            "preprocessor_config.json has; the server's log says where it stopped"
        )


class CudaVisionInstance(VisionInstance):
    """One execution context on a GPU, with its own stream."""

    def __init__(self, name: str, model: Any, device: torch.device, settings: Settings) -> None:
        super().__init__(name, model, device, settings)
        # Another stream copied the weights.
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch; the copies of the outputs wait for this stream only."""
        with torch.cuda.stream(self._stream):
            return super().compute(inputs, requested)

    def close(self) -> None:
        """Release the model, and PyTorch's cached GPU memory."""
        self._stream.synchronize()
        super().close()
        torch.cuda.empty_cache()


MAX_BATCH_SIZE = 8
"""The default; small, because images are large."""


class HuggingFaceVisionBackend:
    """`backend: "huggingface_vision"`."""

    def __init__(self) -> None:
        transformers_logging.disable_progress_bar()

    def usable_gpus(self, present: int) -> int:
        """Return the number of GPUs that this build of PyTorch sees."""
        return min(present, gpu_count())

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs, batch size, and the labels of a classifier."""
        if is_declared(config):
            return None
        folder = read_folder(config.name, settings_of(config, files).folder)
        message = completion(config, folder.signature)
        if message.max_batch_size:
            message.max_batch_size = MAX_BATCH_SIZE
        if folder.kind == "classifier" and folder.labels:
            _name_labels(message, config, files)
        return message

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> VisionModel:
        """Read the folder and check the configuration against it. Opening an instance reads the weights."""
        settings = settings_of(config, files)
        folder = read_folder(config.name, settings.folder)
        check_signature(config, folder.signature)
        return VisionModel(config, folder, settings)


class VisionModel:
    """One version: a folder, and its weights on each device."""

    def __init__(self, config: ModelConfig, folder: VisionFolder, settings: Settings) -> None:
        self._config = config
        self._folder = folder
        self._settings = settings
        self._loaded: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def open(self, placement: Placement) -> VisionInstance:
        """Create an instance; load the weights, or use those already on the device."""
        device = device_of(self._config.name, placement)
        with self._lock:
            model = self._loaded.get(device)
            if model is None:
                model = load_weights(self._config.name, self._folder, self._settings, device)
                self._loaded[device] = model
        kind = CudaVisionInstance if device.type == "cuda" else VisionInstance
        return kind(self._config.name, model, device, self._settings)

    def close(self) -> None:
        """Release the weights."""
        self._loaded.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _name_labels(message: Any, config: ModelConfig, files: ModelFiles) -> None:
    """Let the engine read the class names from config.json, if that file is inside the model's folder."""
    inside = PurePosixPath(config.parameters.get("model_path", "."))
    if inside.is_absolute() or ".." in inside.parts:
        return
    for output in message.output:
        if output.name == LOGITS:
            output.label_filename = str(PurePosixPath(str(files.version)) / inside / CONFIG_FILE)
