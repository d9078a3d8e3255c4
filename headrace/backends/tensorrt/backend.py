# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans, on NVIDIA GPUs only.

Called by the engine through `backends.contract`. A GPU has one runtime and one engine for all instances of a model, so that
its weights are there once; each instance has an execution context and a stream of its own (`instance`). All calls of
TensorRT and CUDA are in `device`; importing this module imports both.

A plan is native code for one kind of GPU and one version of TensorRT: see the package's docstring on trust.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.signature import is_declared
from headrace.backends.tensorrt import device
from headrace.backends.tensorrt.checking import check_plan, completed
from headrace.backends.tensorrt.instance import TensorRTInstance
from headrace.backends.tensorrt.plan import Plan
from headrace.backends.tensorrt.profiles import usable_profiles
from headrace.backends.tensorrt.settings import Settings, plan_file, settings_of
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")


class TensorRTBackend:
    """`backend: "tensorrt"`, `platform: "tensorrt_plan"`."""

    def usable_gpus(self, present: int) -> int:
        """Those that CUDA sees."""
        return min(present, device.count_gpus())

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Inputs, outputs and batch size, as the plan for the model's first GPU has them."""
        if is_declared(config):
            return None
        gpu = next((gpu for group in config.instance_groups for gpu in group.gpus), 0)
        # The engine is read again for the instances: a plan cannot be looked at without its GPU.
        engine = _Engine(config, files, gpu, settings_of(config))
        try:
            return completed(config, engine.plan, engine.plan.profiles)
        finally:
            engine.close()

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> TensorRTModel:
        """Check the settings. The plan is read when an instance says which GPU it is for."""
        return TensorRTModel(config, files, settings_of(config))


class TensorRTModel:
    """One version: an engine for each GPU that has instances."""

    def __init__(self, config: ModelConfig, files: ModelFiles, settings: Settings) -> None:
        self._config = config
        self._files = files
        self._settings = settings
        self._engines: dict[int, _Engine] = {}
        self._lock = Lock()

    def open(self, placement: Placement) -> TensorRTInstance:
        """Make an execution context. The first one on a GPU reads the plan, and refuses one that does not fit."""
        if placement.kind != "gpu":
            raise InvalidArgument(
                f"model '{self._config.name}' is a TensorRT plan, which only a GPU can compute, and instance "
                f"'{placement.name}' is to run on the CPU: say KIND_GPU in instance_group, on a machine with a GPU"
            )
        with self._lock:
            engine = self._engines.get(placement.device)
            if engine is None:
                engine = _Engine(self._config, self._files, placement.device, self._settings)
                self._engines[placement.device] = engine
        profiles = usable_profiles(self._config, placement, engine.plan)
        check_plan(self._config, engine.plan, profiles)
        try:
            device.activate(placement.device)
            context = device.open_context(engine.engine, self._settings.strategy)
            return TensorRTInstance(self._config, placement.device, context, engine.plan, profiles)
        except device.DeviceFailure:
            log.exception("model %s: no execution context for %s", self._config.name, placement.name)
            raise FailedPrecondition(
                f"model '{self._config.name}': TensorRT {device.version()} could not make an instance on GPU "
                f"{placement.device}. Its memory is used up, or it does not work; the server's log says which"
            ) from None

    def close(self) -> None:
        """Free the engines, and with them the weights. TensorRT frees what nothing refers to."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()


class _Engine:
    """A plan on one GPU."""

    def __init__(self, config: ModelConfig, files: ModelFiles, gpu: int, settings: Settings) -> None:
        _check_machine(config, gpu)
        try:
            device.activate(gpu)
            self.file = plan_file(config, files, device.capability(gpu))
            content = _content(config, self.file)
            self._runtime, self.engine = device.read_engine(content, version_compatible=settings.version_compatible)
            self.plan: Plan = device.described(self.engine)
        except device.DeviceFailure:
            log.exception("model %s: %s could not be read on GPU %d", config.name, files.version_folder, gpu)
            raise FailedPrecondition(
                f"model '{config.name}': TensorRT {device.version()} cannot read its plan for GPU {gpu}. It was built for "
                "another GPU or TensorRT version, or is damaged: build it again with trtexec on this machine. The "
                "server's log has TensorRT's own words"
            ) from None

    def close(self) -> None:
        """The engine first: it lives in its runtime."""
        self.engine = None
        self._runtime = None


def _check_machine(config: ModelConfig, gpu: int) -> None:
    if int(device.version().split(".")[0]) < device.OLDEST:
        raise FailedPrecondition(
            f"model '{config.name}' is a TensorRT plan, and TensorRT {device.version()} is too old for this server: install "
            f"TensorRT {device.OLDEST} or newer and build the plan again with it"
        )
    seen = device.count_gpus()
    if gpu >= seen:
        raise FailedPrecondition(
            f"model '{config.name}' is a TensorRT plan for GPU {gpu}, and CUDA sees {seen} GPUs here: check the driver with "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or correct gpus in instance_group"
        )


def _content(config: ModelConfig, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        log.exception("model %s: %s could not be read", config.name, file)
        raise FailedPrecondition(
            f"model '{config.name}': '{file.name}' cannot be read. It must be a file that the server's user may read"
        ) from None
