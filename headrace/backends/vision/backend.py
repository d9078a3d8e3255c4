# SPDX-License-Identifier: Apache-2.0
"""Image classifiers and object detectors of Hugging Face folders, computed by transformers on the CPU or a GPU.

Called by the engine through `backends.contract`. Takes `pixel_values` that are resized and normalised already (the model's
preprocessor_config.json says how), and gives `logits`, and for detectors `pred_boxes`: centre x, centre y, width and height
as shares of the image. Weights are read once for each device and shared by its instances.
"""

from __future__ import annotations

import threading
from pathlib import PurePosixPath
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.signature import check_signature, completion, is_declared
from headrace.backends.vision.folder import CONFIG_FILE, LOGITS, VisionFolder, read_folder
from headrace.backends.vision.instance import CudaVisionInstance, VisionInstance
from headrace.backends.vision.settings import Settings, settings_of
from headrace.backends.vision.weights import load_weights
from headrace.core.errors import FailedPrecondition
from headrace.models.config.types import ModelConfig

MAX_BATCH_SIZE = 8
"""Unless the configuration says: images are large."""


class HuggingFaceVisionBackend:
    """`backend: "huggingface_vision"`."""

    def __init__(self) -> None:
        transformers_logging.disable_progress_bar()

    def usable_gpus(self, present: int) -> int:
        """Those that this build of PyTorch sees."""
        return min(present, torch.cuda.device_count()) if torch.cuda.is_available() else 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Inputs, outputs, batch size, and the labels of a classifier."""
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
        """Look at the folder and hold the configuration against it. Weights are read when an instance opens."""
        settings = settings_of(config, files)
        folder = read_folder(config.name, settings.folder)
        check_signature(config, folder.signature)
        return VisionModel(config, folder, settings)


class VisionModel:
    """One version: a folder, and the weights of each device."""

    def __init__(self, config: ModelConfig, folder: VisionFolder, settings: Settings) -> None:
        self._config = config
        self._folder = folder
        self._settings = settings
        self._loaded: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def open(self, placement: Placement) -> VisionInstance:
        """Read the weights, or take those that are there."""
        device = self._device(placement)
        with self._lock:
            model = self._loaded.get(device)
            if model is None:
                model = load_weights(self._config.name, self._folder, self._settings.dtype, device)
                self._loaded[device] = model
        kind = CudaVisionInstance if device.type == "cuda" else VisionInstance
        return kind(self._config.name, model, device, self._settings)

    def close(self) -> None:
        """Free the weights."""
        self._loaded.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _device(self, placement: Placement) -> torch.device:
        if placement.kind != "gpu":
            return torch.device("cpu")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if placement.device >= count:
            raise FailedPrecondition(
                f"model '{self._config.name}' asks for GPU {placement.device}, and PyTorch {torch.__version__} sees {count} "
                "here: install a PyTorch built for CUDA, check the driver, or say KIND_CPU in instance_group"
            )
        return torch.device("cuda", placement.device)


def _name_labels(message: Any, config: ModelConfig, files: ModelFiles) -> None:
    """Have the engine read the names of the classes from config.json, where that lies inside the model's folder."""
    inside = PurePosixPath(config.parameters.get("model_path", "."))
    if inside.is_absolute() or ".." in inside.parts:
        return
    for output in message.output:
        if output.name == LOGITS:
            output.label_filename = str(PurePosixPath(str(files.version)) / inside / CONFIG_FILE)
