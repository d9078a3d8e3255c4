# SPDX-License-Identifier: Apache-2.0
"""One model straight from a path: what the configuration says of it, and which versions are there.

Called by `staging`, which makes a repository of it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.backends.devices import visible_gpus
from headrace.configuration.merging import Configuration
from headrace.configuration.versions import LATEST, is_version, sort_key
from headrace.core.errors import InvalidArgument
from headrace.core.names import is_name
from headrace.modelconfig.detect import Detected, detect
from headrace.modelconfig.drafts import CONFIG_FILES
from headrace.modelconfig.formats import FORMATS
from headrace.modelconfig.hugging_face import is_hub_folder

log = logging.getLogger("headrace.configuration")

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_OF_THE_MODEL = frozenset(
    {
        *(f"performance.{name}" for name in ("max_batch_size", "batch_timeout_ms", "instances")),
        *("performance.queue_timeout_ms", "performance.max_queue_size", "cache.enabled"),
    }
)
_LABEL = re.compile(r"[A-Za-z0-9_.+-]{1,64}")


@dataclass(frozen=True, slots=True)
class SingleModel:
    """What was asked for. None: nobody said."""

    path: Path
    name: str
    version: str
    all_versions: bool
    gpu: int | None
    """The GPU; -1 for all of them; None for none."""
    auto_device: bool
    instances: int | None
    precision: str
    max_batch_size: int | None
    batch_timeout_ms: float | None
    queue_timeout_ms: float
    max_queue_size: int
    cached: bool
    inputs: tuple[Mapping[str, Any], ...]
    outputs: tuple[Mapping[str, Any], ...]
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Present:
    """What lies under the path."""

    versions: Mapping[str, Path]
    """Folders or files by the version's name; "" for the only one of a model without versions."""
    chosen: str


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


def look(single: SingleModel) -> Present:
    """Which versions are there, and which one is asked for. Raises if there is none."""
    path = single.path
    folders = _version_folders(path)
    if not folders:
        # The version is then a name for what is there.
        label = "" if single.version == LATEST else single.version
        if label and not _LABEL.fullmatch(label):
            raise InvalidArgument(f"model.version {label[:64]!a} is no name of a version: use letters, digits and '.'")
        return Present({label: path}, label)
    if single.version == LATEST:
        return Present(folders, max(folders, key=sort_key))
    chosen = single.version if single.version in folders else f"v{single.version}"
    if chosen in folders:
        return Present(folders, chosen)
    named = path / single.version
    if _LABEL.fullmatch(single.version) and is_name(single.version) and named.is_dir():
        return Present({single.version: named}, single.version)
    there = ", ".join(sorted(folders, key=sort_key, reverse=True)[:10])
    raise InvalidArgument(
        f"model.version {single.version[:64]!a} is not in {path}: there are {there}. Name one of them, or latest"
    )


def find_model(path: Path) -> Detected:
    """The model at a path. In a folder, one with a usual name is meant before others that lie beside it."""
    if path.is_dir() and not (path / "model.py").is_file():
        usual = (path / known.filename for known in FORMATS if known.filename)
        return detect(next((each for each in usual if each.exists()), path))
    return detect(path)


def name_of(path: Path) -> str:
    """A model's name, made of that of its file or folder."""
    stem = path.stem if path.is_file() or path.suffix == ".savedmodel" else path.name
    name = _NOT_IN_A_NAME.sub("_", stem).lstrip(".-").replace("..", "_")[:255]
    return name if is_name(name) else "model"


def own_config(path: Path) -> Path | None:
    """The configuration that lies beside the versions, if there is one."""
    if not path.is_dir():
        return None
    # The config.json of a Hugging Face folder is not one of ours.
    theirs = {"config.json"} if is_hub_folder(path) else set()
    return next((path / name for name in CONFIG_FILES if name not in theirs and (path / name).is_file()), None)


def _version_folders(path: Path) -> dict[str, Path]:
    if not path.is_dir() or (path / "saved_model.pb").is_file() or (path / "model.py").is_file():
        return {}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    found = {each.name: each for each in entries if is_version(each.name) and each.is_dir() and any(each.iterdir())}
    numbers = [name for name in found if name.isdigit()]
    if numbers and len(numbers) != len(found):
        other = next(name for name in found if not name.isdigit())
        raise InvalidArgument(f"{path} has versions named {numbers[0]} and {other}: name all by numbers, or none")
    return found


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
