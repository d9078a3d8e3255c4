# SPDX-License-Identifier: Apache-2.0
"""The backend `openai_proxy`: models that another engine serves, started by a command or reached at a URL.

The server's engine calls it through `backends.contract`. The command or the URL is a parameter of the model configuration;
the version's folder may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.openai_proxy.instance import ProxyInstance
from headrace.backends.openai_proxy.protocol import SAMPLING, STREAM
from headrace.backends.openai_proxy.settings import ProxySettings, read_settings
from headrace.core.errors import InvalidArgument
from headrace.core.generation import TEXT_INPUT, TEXT_OUTPUT
from headrace.models.config.types import ModelConfig

_INPUTS = {TEXT_INPUT: "TYPE_STRING", STREAM: "TYPE_BOOL", SAMPLING: "TYPE_STRING"}


class OpenAiProxyBackend:
    """Implements `contract.Backend`."""

    def __init__(self) -> None:
        self._opening = _OpeningInstances()

    def usable_gpus(self, present: int) -> int:
        """Return 0: one engine uses the GPUs that its command names. A group of KIND_GPU starts one engine per GPU."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Add the tensors of a generating model to its configuration; all optional, because OpenAI requests have none."""
        if config.proto is None:
            return None
        message = type(config.proto)()
        message.model_transaction_policy.decoupled = True
        for name, kind in _INPUTS.items():
            _set_tensor(message.input.add(), name, kind, 1).optional = True
        _set_tensor(message.output.add(), TEXT_OUTPUT, "TYPE_STRING", -1)
        return message

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> ProxyModel:
        """Read the parameters. `ProxyModel.open` starts the engine."""
        if not config.decoupled or config.max_batch_size:
            raise InvalidArgument(
                f"model '{config.name}' streams several responses and does not batch: write max_batch_size: 0 and "
                "model_transaction_policy { decoupled: true }, or leave both out"
            )
        if not any(output.name == TEXT_OUTPUT for output in config.outputs):
            raise InvalidArgument(
                f"model '{config.name}' has no output '{TEXT_OUTPUT}': add it, or leave out its outputs"
            )
        return ProxyModel(read_settings(config, files), files, services, self._opening)

    def abandon(self, model_folder: Path) -> None:
        """Stop the engines of a model that are starting. From the loop's thread."""
        self._opening.abandon(model_folder.absolute())


class ProxyModel:
    """Implements `contract.Model`."""

    def __init__(
        self, settings: ProxySettings, files: ModelFiles, services: EngineServices, opening: _OpeningInstances
    ) -> None:
        self._settings = settings
        self._folder = files.model_folder.absolute()
        self._services = services
        self._opening = opening

    def open(self, placement: Placement) -> ProxyInstance:
        """Start an engine, or connect to it, and wait until it is healthy."""
        instance = ProxyInstance(self._settings, placement, self._services)
        with self._opening.track(self._folder, instance):
            instance.open()
        return instance

    def close(self) -> None:
        """Do nothing: the instances share no resources."""


class _OpeningInstances:
    """Instances that are opening, so that a server that shuts down need not wait for them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._instances: list[tuple[Path, ProxyInstance]] = []

    @contextmanager
    def track(self, model_folder: Path, instance: ProxyInstance) -> Iterator[None]:
        entry = (model_folder, instance)
        with self._lock:
            self._instances.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._instances.remove(entry)

    def abandon(self, model_folder: Path) -> None:
        with self._lock:
            instances = [instance for folder, instance in self._instances if folder == model_folder]
        for instance in instances:
            instance.abandon()


def _set_tensor(message: Any, name: str, kind: str, size: int) -> Any:
    message.name = name
    types = message.DESCRIPTOR.fields_by_name["data_type"].enum_type
    message.data_type = types.values_by_name[kind].number
    message.dims.append(size)
    return message
