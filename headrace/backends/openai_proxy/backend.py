# SPDX-License-Identifier: Apache-2.0
"""The backend `openai_proxy`: models that another engine serves, started by a command or reached by an URL.

Called by the engine room through `backends.contract`. A model's configuration has a command or an URL among its parameters;
there need be nothing in its version's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.openai_proxy.instance import ProxyInstance
from headrace.backends.openai_proxy.requests import SAMPLING, STREAM
from headrace.backends.openai_proxy.settings import ProxySettings, settings_of
from headrace.core.errors import InvalidArgument
from headrace.core.generation import TEXT_INPUT, TEXT_OUTPUT
from headrace.models.config.types import ModelConfig

_INPUTS = {TEXT_INPUT: "TYPE_STRING", STREAM: "TYPE_BOOL", SAMPLING: "TYPE_STRING"}


class OpenAiProxyBackend:
    """`backend: "openai_proxy"`."""

    def __init__(self) -> None:
        self._starting = _Starting()

    def usable_gpus(self, present: int) -> int:
        """None by itself: one engine uses all that its command gives it. A group of KIND_GPU starts one for each GPU."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """The tensors of a model that generates, all of them optional: requests for text have none."""
        if config.proto is None:
            return None
        message = type(config.proto)()
        message.model_transaction_policy.decoupled = True
        for name, kind in _INPUTS.items():
            _describe(message.input.add(), name, kind, 1).optional = True
        _describe(message.output.add(), TEXT_OUTPUT, "TYPE_STRING", -1)
        return message

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> ProxyModel:
        """Read the parameters; `open` starts the engine."""
        if not config.decoupled or config.max_batch_size:
            raise InvalidArgument(
                f"model '{config.name}' answers several times and takes no batches: write max_batch_size: 0 and "
                "model_transaction_policy { decoupled: true }, or leave both out"
            )
        if not any(output.name == TEXT_OUTPUT for output in config.outputs):
            raise InvalidArgument(
                f"model '{config.name}' has no output '{TEXT_OUTPUT}': add it, or leave out its outputs"
            )
        return ProxyModel(settings_of(config, files), files, services, self._starting)

    def abandon(self, model_folder: Path) -> None:
        """End the engines of a model that are being started. From the loop's thread."""
        self._starting.end(model_folder.absolute())


class ProxyModel:
    """See `contract.Model`."""

    def __init__(
        self, settings: ProxySettings, files: ModelFiles, services: EngineServices, starting: _Starting
    ) -> None:
        self._settings = settings
        self._folder = files.model_folder.absolute()
        self._services = services
        self._starting = starting

    def open(self, placement: Placement) -> ProxyInstance:
        """Start an engine, or look for it, and wait until it is healthy."""
        instance = ProxyInstance(self._settings, placement, self._services)
        with self._starting.noted(self._folder, instance):
            instance.open()
        return instance

    def close(self) -> None:
        """The instances share nothing that would have to be freed."""


class _Starting:
    """The instances that are being opened, so that a server that is closing need not wait for them. From any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._instances: list[tuple[Path, ProxyInstance]] = []

    @contextmanager
    def noted(self, model_folder: Path, instance: ProxyInstance) -> Iterator[None]:
        entry = (model_folder, instance)
        with self._lock:
            self._instances.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._instances.remove(entry)

    def end(self, model_folder: Path) -> None:
        with self._lock:
            instances = [instance for folder, instance in self._instances if folder == model_folder]
        for instance in instances:
            instance.abandon()


def _describe(message: Any, name: str, kind: str, size: int) -> Any:
    message.name = name
    types = message.DESCRIPTOR.fields_by_name["data_type"].enum_type
    message.data_type = types.values_by_name[kind].number
    message.dims.append(size)
    return message
