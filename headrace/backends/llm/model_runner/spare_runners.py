# SPDX-License-Identifier: Apache-2.0
"""Runners of unloaded models, kept for the next model of the same shape: it has to read its weights, and nothing else.

A spare runner has its captured graphs and compiled layers, and the addresses of its weights and KV cache, without memory
behind them. `shape_key` says which models are of one shape. Used by servers whose models load on demand.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.backends.cuda_memory import StableMemory
from headrace.backends.llm.model_runner.model_loader import ModelFolder
from headrace.backends.llm.model_runner.runner import ModelRunner
from headrace.backends.llm.model_runner.weight_reader import direct_weights, read_weights
from headrace.backends.llm.settings import EngineSizes, LlmSettings
from headrace.backends.llm.vision.processors import has_vision
from headrace.backends.model_config import read_json_object
from headrace.backends.sleeping_weights import place_of
from headrace.backends.weight_files import read_headers
from headrace.core.kept_memory import Kept, KeptMemory
from headrace.core.telemetry.load_stages import READ_WEIGHTS, stage

log = logging.getLogger("headrace.backends.llm")

MOST_SPARES = 8
"""More than are evicted at a time are of no use."""
_OWN_SETTINGS = {"model_path": Path(), "chat_template": None, "default_max_tokens": None, "max_queue": 1}
"""Settings in which models of one shape may differ: the runner does not know them."""


class SpareRunner:
    """A runner without a model, and what it was opened with."""

    def __init__(self, key: str, runner: ModelRunner, sizes: EngineSizes, memory: StableMemory) -> None:
        self.key = key
        self.runner = runner
        self.sizes = sizes
        self._memory = memory

    def read(self, folder: Path) -> None:
        """Take memory for a model and read its weights. Raises torch.OutOfMemoryError, or an error of the files."""
        weights = self.runner.direct_weights
        if weights is None:
            raise RuntimeError("the weights of a spare runner can always be read directly")
        with stage(READ_WEIGHTS):
            self.runner.refill(lambda: read_weights(folder, weights, self._memory))

    def close(self) -> None:
        """Free everything."""
        self.runner.close()


class SpareRunners:
    """The spare runners of one server."""

    def __init__(self) -> None:
        self._spares: list[tuple[SpareRunner, Kept]] = []
        self._lock = threading.Lock()

    def put(self, spare: SpareRunner, memory: KeptMemory) -> bool:
        """Keep a runner that sleeps at level 2. False if it cannot be kept: then the caller closes it."""
        kept = Kept(place_of(spare.runner.device), spare.runner.graph_bytes, spare.close)
        with self._lock:
            if len(self._spares) >= MOST_SPARES:
                self._drop_freed(memory)
            if len(self._spares) >= MOST_SPARES or not memory.put(kept):
                return False
            self._spares.append((spare, kept))
            return True

    def take(self, key: str, memory: KeptMemory) -> SpareRunner | None:
        """Return a runner for a model of this shape; None if there is none."""
        with self._lock:
            for entry in reversed(tuple(self._spares)):
                if entry[0].key == key:
                    self._spares.remove(entry)
                    if memory.take(entry[1]):
                        return entry[0]
        return None

    def _drop_freed(self, memory: KeptMemory) -> None:
        self._spares = [entry for entry in self._spares if memory.has(entry[1])]


class RunnerShelf:
    """The spare runners for models of one shape."""

    def __init__(self, spares: SpareRunners, kept: KeptMemory, key: str, folder: Path, memory: StableMemory) -> None:
        """`folder`: of the model that is being loaded."""
        self._spares = spares
        self._kept = kept
        self._key = key
        self._folder = folder
        self._memory = memory

    def take(self) -> SpareRunner | None:
        """Return a runner of an unloaded model; None if there is none."""
        return self._spares.take(self._key, self._kept)

    def opened(self, runner: ModelRunner, sizes: EngineSizes, spare: SpareRunner | None) -> Callable[[], bool]:
        """Return the function that keeps a runner when its model is unloaded; it returns False if that cannot be.

        `spare`: where the runner came from, if it was not opened for this model.
        """
        if spare is None:
            if runner.placed is None or has_vision(runner.model.config):
                return lambda: False
            runner.direct_weights = direct_weights(runner.model, self._folder)
            if runner.direct_weights is None:
                return lambda: False
            spare = SpareRunner(self._key, runner, sizes, self._memory)
        return partial(self._keep, spare)

    def _keep(self, spare: SpareRunner) -> bool:
        try:
            spare.runner.sleep(2)
            spare.runner.forget()
        except Exception:
            log.exception("A runner cannot be kept for the next model of its shape.")
            return False
        return self._spares.put(spare, self._kept)


def shape_key(checked: ModelFolder, settings: LlmSettings, device: torch.device) -> str | None:
    """Return what models have in common that can use the same runner; None for a model that has to be loaded as usual.

    These are excluded: quantised weights, code of the folder, adapters, draft models, several processes and KV pages outside
    the GPU. Models with images or with tensors that are converted when they are read are found out after their first load.
    """
    if (
        checked.quantized is not None
        or settings.quantization
        or settings.trust_remote_code
        or settings.takes_adapters
        or settings.draft_model is not None
        or settings.tensor_parallel > 1
        or settings.kv_host_bytes
    ):
        return None
    config = dict(read_json_object(checked.path / "config.json", "config.json", "the model has no config.json"))
    config.pop("_name_or_path", None)
    tensors = sorted(
        (name, header.dtype, header.shape)
        for path in checked.path.glob("*.safetensors")
        for name, header in read_headers(path).items()
    )
    settings_text = repr(replace(settings, **_OWN_SETTINGS))  # type: ignore[arg-type]
    document: Any = [config, tensors, settings_text, str(device)]
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()
