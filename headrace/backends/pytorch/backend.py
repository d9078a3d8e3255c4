# SPDX-License-Identifier: Apache-2.0
"""The PyTorch backend, on the CPU or a GPU.

`archive` detects the kind of a file, which decides how it is loaded; the result is the same for all three kinds
(`model_function`). Weights are read once per device and shared by its instances if the model does not write to itself:
TorchScript and graphs are safe to run from several threads at once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.backends.contract import EngineServices, ModelFiles, Placement, SleepLevel
from headrace.backends.model_config import model_path
from headrace.backends.pytorch.aot_inductor import check_allowed, load_compiled
from headrace.backends.pytorch.archive import Archive, open_archive
from headrace.backends.pytorch.exported_program import load_program, read_ports
from headrace.backends.pytorch.instance import CudaInstance, TorchInstance
from headrace.backends.pytorch.model_function import Call, most_rows, plan_of, signature_of
from headrace.backends.pytorch.settings import Settings, apply_to_process, settings_of
from headrace.backends.pytorch.torchscript import load_script
from headrace.backends.signature import check_signature, completion, is_declared
from headrace.backends.sleeping_weights import FileStamps, SleepingWeights, add_bytes, difference, free_unused
from headrace.backends.torch_import import device_of, gpu_count
from headrace.core.dtypes import BYTES
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.telemetry.load_stages import READ_WEIGHTS, stage
from headrace.models.config.types import ModelConfig

FILENAMES = ("model.pt", "model.pt2")

_LOADERS = {"script": load_script, "program": load_program, "compiled": load_compiled}


class PyTorchBackend:
    """`backend: "pytorch"`."""

    def __init__(self) -> None:
        # PyTorch warns once per process of the first read-only array, as those of requests are. Models that write to
        # their inputs get a copy.
        array = np.zeros(1, np.uint8)
        array.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.from_numpy(array)

    def usable_gpus(self, present: int) -> int:
        """Return the number of GPUs that this build of PyTorch sees."""
        return min(present, gpu_count())

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size of an exported program; the other kinds do not contain them."""
        if is_declared(config):
            return None
        archive = open_archive(config, _model_file(config, files))
        if archive.kind == "program":
            ports, ranges = read_ports(config, archive)
            message = completion(config, signature_of(ports))
            most = most_rows(ranges)
            if most is not None and message.max_batch_size > most:
                message.max_batch_size = most
            return message
        if archive.kind == "compiled":
            check_allowed(config, archive, settings_of(config))
        what = "TorchScript" if archive.kind == "script" else "a compiled package"
        raise InvalidArgument(
            f"model '{config.name}': '{archive.file.name}' is {what}, which does not declare types and shapes: write input "
            "and output with data_type and dims into its configuration, or save the model by torch.export.save, which does"
        )

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> TorchModel:
        """Read the archive and check the settings. The first instance on a device reads the weights."""
        settings = settings_of(config)
        archive = open_archive(config, _model_file(config, files))
        if archive.kind == "compiled":
            check_allowed(config, archive, settings)
        apply_to_process(config, settings)
        return TorchModel(config, archive, settings)


class TorchModel:
    """One version: an archive, and its weights on each device."""

    def __init__(self, config: ModelConfig, archive: Archive, settings: Settings) -> None:
        self._config = config
        self._archive = archive
        self._settings = settings
        self._calls: dict[torch.device, Call] = {}
        self._lock = threading.Lock()
        self._files = FileStamps([archive.file])
        self._weights: list[tuple[torch.device, SleepingWeights | None]] = []
        """Of each loaded copy; None if they cannot be reached."""
        self._instances: list[TorchInstance] = []
        self._keeps_state = False

    def open(self, placement: Placement) -> TorchInstance:
        """Create an instance; load or share the weights. Reject a configuration that does not fit the file."""
        device = device_of(self._config.name, placement)
        with self._lock:
            call = self._calls.get(device)
            shared = call is not None
            if call is None:
                call = self._load(device)
                self._weights.append((device, None if call.weights is None else SleepingWeights(call.weights)))
                self._keeps_state = self._keeps_state or call.writes_itself
                shared = self._settings.share_weights and not call.writes_itself
                if shared:
                    self._calls[device] = call
        plan = plan_of(self._config, call)
        if call.signature is not None:
            check_signature(self._config, signature_of(call.signature, plan))
        self._check_rows(call)
        self._check_text(call)
        if device.type == "cuda":
            # The weights were copied on another stream than the instance's.
            torch.cuda.synchronize(device)
        kind = CudaInstance if device.type == "cuda" else TorchInstance
        instance = kind(self._config, call, plan, device, self._settings, owned=not shared)
        self._instances.append(instance)
        return instance

    def _load(self, device: torch.device) -> Call:
        with stage(READ_WEIGHTS):
            return _LOADERS[self._archive.kind](self._config, self._archive, device, self._settings)

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        """Move the weights to host memory (level 1; those of a CPU are there), or drop them (level 2)."""
        name = self._config.name
        copies = [weights for _, weights in self._weights if weights is not None]
        if len(copies) < len(self._weights):
            raise FailedPrecondition(
                f"model '{name}' cannot sleep: '{self._archive.file.name}' is a compiled package, whose weights are inside "
                "its library; unload the model instead"
            )
        if level == 2 and self._keeps_state:
            raise FailedPrecondition(
                f"model '{name}' keeps state between its requests, which level 2 would lose: put it to sleep at level 1"
            )
        freed: dict[str, int] = {}
        with ExitStack() as held:
            for instance in self._instances:
                held.enter_context(instance.computing)
            for weights in copies:
                before = weights.bytes
                if level == 1:
                    weights.move_to_host()
                else:
                    weights.drop()
                add_bytes(freed, difference(before, weights.bytes))
        free_unused()
        return freed

    def wake(self) -> None:
        """Move the weights back, or read them again."""
        for device, weights in self._weights:
            if weights is None:
                continue
            if weights.dropped:
                self._files.check(f"model '{self._config.name}'")
                weights.put_back(self._load(device).weights or (), f"model '{self._config.name}'")
            else:
                weights.move_back()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Free the shared weights."""
        for call in self._calls.values():
            if call.release is not None:
                call.release()
        self._calls.clear()
        self._weights.clear()
        self._instances.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _check_rows(self, call: Call) -> None:
        most = most_rows(call.ranges)
        if most is not None and self._config.max_batch_size > most:
            raise InvalidArgument(
                f"model '{self._config.name}' was exported for at most {most} rows, and its configuration has "
                f"max_batch_size: {self._config.max_batch_size}: lower it, or export the model for more"
            )

    def _check_text(self, call: Call) -> None:
        takes_text = any(argument.kind == "strings" for argument in call.arguments)
        for spec in self._config.inputs:
            if spec.dtype is BYTES and not takes_text:
                raise InvalidArgument(
                    f"input '{spec.name}' of model '{self._config.name}' is TYPE_STRING, and PyTorch has no tensors of "
                    "text: have forward() take List[str] (TorchScript), or encode the text before it"
                )


def _model_file(config: ModelConfig, files: ModelFiles) -> Path:
    return model_path(config, files, *FILENAMES)
