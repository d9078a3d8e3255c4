# SPDX-License-Identifier: Apache-2.0
"""The backend `python`: models that are a `model.py` with a class TritonPythonModel, or with a function `predict`.

Called by the engine through `backends.contract`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.python.completion import check_has_execute, completed_config, may_complete
from headrace.backends.python.configs import config_message
from headrace.backends.python.instance import PythonInstance
from headrace.backends.python.launch import Launch, launch_of
from headrace.backends.python.measures import Families
from headrace.backends.python.self_calls import SelfCalls
from headrace.backends.python.starting import Starting
from headrace.core.telemetry.registry import Registry
from headrace.models.config.types import ModelConfig


class PythonBackend:
    """See `contract.Backend`."""

    def __init__(self) -> None:
        # The only thing models share: metrics that several of them name.
        self._families: WeakKeyDictionary[Registry, Families] = WeakKeyDictionary()
        self._starting = Starting()

    def usable_gpus(self, present: int) -> int:
        """All: the model does with them what it likes."""
        return present

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """What the model's `auto_complete_config` or the hints of its `predict` say; None where it has neither."""
        launch = launch_of(config, files)
        if config.proto is None:
            return None
        if not may_complete(launch.file):
            check_has_execute(launch.file)
            return None
        completed = completed_config(launch, self._starting)
        return None if completed is None else config_message(config, completed)

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> PythonModel:
        """Check what can be checked without a process; `open` starts them."""
        families = self._families.setdefault(services.metrics, Families(services.metrics))
        return PythonModel(launch_of(config, files), services, families, self._starting)

    def abandon(self, model_folder: Path) -> None:
        """End the processes of a model that are being started. From the loop's thread."""
        self._starting.end(model_folder.absolute())


class PythonModel:
    """See `contract.Model`."""

    def __init__(self, launch: Launch, services: EngineServices, families: Families, starting: Starting) -> None:
        self._launch = launch
        self._services = services
        self._families = families
        self._starting = starting
        self._self_calls = SelfCalls(launch.model_name, launch.version)

    def open(self, placement: Placement) -> PythonInstance:
        """Start a process and wait until the model in it is initialised."""
        instance = PythonInstance(self._launch, placement, self._services, self._families, self._self_calls)
        with self._starting.noted(self._launch.model_folder, instance.abandon):
            instance.open()
        return instance

    def close(self) -> None:
        """The instances share nothing that would have to be freed."""
