# SPDX-License-Identifier: Apache-2.0
"""Read the `model` section of a configuration: one model that is served straight from a path."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.backends.devices import visible_gpus
from headrace.core.names import is_name
from headrace.models.staging import LATEST, SingleModel, name_of
from headrace.programs.configuration.merging import Configuration

log = logging.getLogger("headrace.configuration")

_OF_THE_MODEL = frozenset(
    {
        *(f"performance.{name}" for name in ("max_batch_size", "batch_timeout_ms", "instances")),
        *("performance.queue_timeout_ms", "performance.max_queue_size", "cache.enabled"),
    }
)


def single_model(configuration: Configuration, split_models: Mapping[str, Any]) -> SingleModel | None:
    """What the configuration says of `model`; None without `model.path`."""
    given = configuration.text("model.path")
    if not given:
        _tell_of_what_is_lost(configuration)
        return None
    path = Path(os.path.abspath(os.path.expanduser(given)))  # links are followed anew at each look
    if not path.exists():
        raise configuration.wrong("model.path", f"{given!a} does not exist (looked for {str(path)!a}): name a model")
    name = configuration.text("model.name") or name_of(path)
    if not is_name(name):
        raise configuration.wrong("model.name", f"{name[:64]!a} is no model's name: use letters, digits, '_', '.', '-'")
    gpu, auto = _device(configuration)
    told = configuration.given
    return SingleModel(
        path,
        name,
        configuration.text("model.version") or LATEST,
        configuration.truth("model.serve_all_versions") or name in split_models,
        gpu,
        auto,
        configuration.whole("performance.instances") if told("performance.instances") else None,
        configuration.text("model.precision") or "fp32",
        configuration.get("performance.max_batch_size"),
        configuration.number("performance.batch_timeout_ms") if told("performance.batch_timeout_ms") else None,
        configuration.number("performance.queue_timeout_ms"),
        configuration.whole("performance.max_queue_size"),
        configuration.truth("cache.enabled"),
        configuration.get("model.inputs") or (),
        configuration.get("model.outputs") or (),
        _parameters(configuration),
    )


def _device(configuration: Configuration) -> tuple[int | None, bool]:
    """The GPU, and whether the server may choose."""
    device = configuration.text("model.device") or "auto"
    if device == "auto":
        return None, True
    if device == "cpu":
        return None, False
    number = device.partition(":")[2]
    gpus = visible_gpus()
    if not gpus:
        raise configuration.wrong(
            "model.device",
            f"{device} asks for a GPU, and this process sees none: write device: cpu, or device: auto to use a GPU only "
            "where there is one; in a container, give it the GPU (docker run --gpus all)",
        )
    if number and int(number) >= gpus:
        raise configuration.wrong("model.device", f"{device} is not there: the GPUs are cuda:0 to cuda:{gpus - 1}")
    return int(number) if number else -1, False


def _parameters(configuration: Configuration) -> dict[str, str]:
    made = {}
    for name, value in (configuration.get("model.parameters") or {}).items():
        if not isinstance(value, str | int | float):
            raise configuration.wrong("model.parameters", f"{name[:64]!a} takes a text or a number")
        made[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return made


def _tell_of_what_is_lost(configuration: Configuration) -> None:
    """Without a path, nobody hears what is said of its model. A variable may be there for another server."""
    for path, setting in configuration.settings.items():
        if not (path.startswith("model.") or path in _OF_THE_MODEL) or not configuration.given(path):
            continue
        said = "is for the model at model.path, which is not given: add it"
        if setting.origin.kind == "env":
            log.warning("%s %s", setting.origin.name, said)
        elif setting.value not in (None, (), {}, False):
            raise configuration.wrong(path, f"{said}, or say it in the configurations of the models")
