# SPDX-License-Identifier: Apache-2.0
"""Build a model repository for one model that is served from a path.

`SingleModel` has the settings; `Staging` links the model's files into a temporary folder.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.dtypes import BY_CONFIG_NAME, DTYPES
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.files import FileLock, write_atomically
from headrace.core.names import is_name
from headrace.models.config.detection import Detected, Part, detect
from headrace.models.config.drafts import CONFIG_FILES, draft_from_json, read_draft
from headrace.models.config.formats import FORMATS, find_format, is_hub_folder, version_folders
from headrace.models.config.messages import new_config, to_json

LATEST = "latest"

_VERSION = re.compile(r"[vV]?[0-9][A-Za-z0-9_.+-]{0,63}")
_VERSION_PART = re.compile(r"[0-9]+|[A-Za-z]+")
_MAX_DIGITS = 18

SortKey = tuple[tuple[int, int, str], ...]


def is_version(name: str) -> bool:
    """Return whether a folder's name looks like a version: `1`, `v1.2.0`, `2024-05-01`."""
    return _VERSION.fullmatch(name) is not None


def sort_key(name: str) -> tuple[SortKey, str]:
    """Return a key that sorts versions from old to new: 1.10 after 1.9, and 1.2.0-rc1 before 1.2.0."""
    # Letters sort before the end mark, so that a release is newer than its candidates; numbers sort after it.
    pieces = _VERSION_PART.findall(name.removeprefix("v").removeprefix("V"))
    key = [(2, int(piece), "") if piece.isdigit() else (0, 0, piece.lower()) for piece in pieces]
    return (*key, (1, 0, "")), name


def is_numbered(names: Iterable[str]) -> bool:
    """Return whether all names are plain numbers, which the engine then uses."""
    return all(name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS for name in names)


def number_versions(names: Iterable[str], before: Mapping[str, int]) -> dict[str, int]:
    """Return a number for each name, in the order of the versions.

    A version keeps its number as long as the order allows; otherwise all versions get new numbers. A number is never
    reused for another version.
    """
    ordered = sorted(names, key=sort_key)
    if is_numbered(ordered):
        return {name: int(name) for name in ordered}
    highest = max(before.values(), default=0)
    numbers: dict[str, int] = {}
    for name in ordered:
        number = before.get(name)
        if number is None:
            highest += 1
            number = highest
        numbers[name] = number
    if list(numbers.values()) == sorted(numbers.values()):
        return numbers
    first = max(before.values(), default=0) + 1
    return {name: first + index for index, name in enumerate(ordered)}


_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_LABEL = re.compile(r"[A-Za-z0-9_.+-]{1,64}")


@dataclass(frozen=True, slots=True)
class SingleModel:
    """Settings of a model that is served from a path. None: not set."""

    path: Path
    name: str
    version: str
    all_versions: bool
    gpu: int | None
    """The GPU; -1: all GPUs; None: the CPU."""
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
    fetched: bool = False
    """Whether the files come from elsewhere."""


@dataclass(frozen=True, slots=True)
class ModelVersions:
    """The versions at the path."""

    versions: Mapping[str, Path]
    """Folders or files by version name; "" for a model without versions."""
    chosen: str


def find_versions(single: SingleModel) -> ModelVersions:
    """Find the versions and choose the requested one. Raises if there is none."""
    path = single.path
    folders = _version_folders(path)
    if not folders:
        # The version is then only a label.
        label = "" if single.version == LATEST else single.version
        if label and not _LABEL.fullmatch(label):
            raise InvalidArgument(f"model.version {label[:64]!a} is not a version name: use letters, digits and '.'")
        return ModelVersions({label: path}, label)
    if single.version == LATEST:
        return ModelVersions(folders, max(folders, key=sort_key))
    chosen = single.version if single.version in folders else f"v{single.version}"
    if chosen in folders:
        return ModelVersions(folders, chosen)
    named = path / single.version
    if _LABEL.fullmatch(single.version) and is_name(single.version) and named.is_dir():
        return ModelVersions({single.version: named}, single.version)
    names = ", ".join(sorted(folders, key=sort_key, reverse=True)[:10])
    raise InvalidArgument(
        f"model.version {single.version[:64]!a} is not in {path}: there are {names}. Name one of them, or latest"
    )


def find_model(path: Path) -> Detected:
    """Detect the model at a path. In a folder, files with a usual name take precedence."""
    if path.is_dir() and not (path / "model.py").is_file():
        usual = (path / model_format.filename for model_format in FORMATS if model_format.filename)
        return detect(next((file for file in usual if file.exists()), path))
    return detect(path)


def is_single_model(path: Path) -> bool:
    """Return whether a path is one model rather than a repository: a file, or the folder of a model or of its versions."""
    if not path.is_dir():
        return path.is_file()
    if is_hub_folder(path) or (path / "saved_model.pb").is_file() or find_config(path) is not None:
        return True
    if any(model_format.filename and (path / model_format.filename).exists() for model_format in FORMATS):
        return True
    versions = version_folders(path)
    return bool(versions) and (find_format(FORMATS, path) is not None or is_hub_folder(versions[0]))


def model_name(path: Path) -> str:
    """Return a model name derived from the file or folder name."""
    stem = path.stem if path.is_file() or path.suffix == ".savedmodel" else path.name
    name = _INVALID_CHARACTERS.sub("_", stem).lstrip(".-").replace("..", "_")[:255]
    return name if is_name(name) else "model"


def find_config(path: Path) -> Path | None:
    """Return the configuration file beside the versions, if there is one."""
    if not path.is_dir():
        return None
    # The config.json of a Hugging Face folder is not a model configuration.
    excluded = {"config.json"} if is_hub_folder(path) else set()
    return next((path / name for name in CONFIG_FILES if name not in excluded and (path / name).is_file()), None)


def _version_folders(path: Path) -> dict[str, Path]:
    if not path.is_dir() or (path / "saved_model.pb").is_file() or (path / "model.py").is_file():
        return {}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    versions = {
        entry.name: entry for entry in entries if is_version(entry.name) and entry.is_dir() and any(entry.iterdir())
    }
    numbers = [name for name in versions if name.isdigit()]
    if numbers and len(numbers) != len(versions):
        other = next(name for name in versions if not name.isdigit())
        raise InvalidArgument(f"{path} has versions named {numbers[0]} and {other}: name all by numbers, or none")
    return versions


DEFAULT_BATCH = 32
"""Maximum batch size for formats that do not say whether they batch."""

LABELS = "version_labels"


def config_json(single: SingleModel, detected: Detected, labels: Mapping[int, str], *, own: bool) -> str:
    """Return the complete configuration. `own`: the configuration beside the model, if there is one."""
    message = read_draft(single.path).message if own else new_config(backend=detected.backend)
    message.name = single.name
    if not own:
        message.platform = detected.platform
    if not message.backend and not message.platform:
        message.backend = detected.backend
    # Only the versions to serve are in the folder.
    message.version_policy.Clear()
    message.version_policy.all.SetInParent()
    _add_device(message, single)
    _add_tensors(message, single, detected)
    unbatched = _add_batching(message, single, detected)
    if single.cached:
        message.response_cache.enable = True
    _add_parameters(message, single, detected, labels)
    values = to_json(message)
    if not (message.max_batch_size or unbatched):
        del values["max_batch_size"]  # 0 is a value, not "unset"
    text = json.dumps(values, indent=2)
    draft_from_json(single.path, text)  # Raises the problems of the file.
    return text


def _add_device(message: Any, single: SingleModel) -> None:
    if message.instance_group and single.auto_device and single.instances is None:
        return
    del message.instance_group[:]
    group = message.instance_group.add()
    group.count = single.instances or 1
    if single.parameters.get("tensor_parallel", "1") != "1" and (single.auto_device or single.gpu == -1):
        group.kind = group.KIND_MODEL  # one instance, on all GPUs
    elif not single.auto_device:
        group.kind = group.KIND_CPU if single.gpu is None else group.KIND_GPU
        if single.gpu is not None and single.gpu >= 0:
            group.gpus.append(single.gpu)


def _add_tensors(message: Any, single: SingleModel, detected: Detected) -> None:
    for name, rows in (("input", single.inputs), ("output", single.outputs)):
        tensors = getattr(message, name)
        if rows:
            del tensors[:]
            for row in rows:
                _add_tensor(tensors, str(row["name"]), str(row["dtype"]), row["shape"] or (-1,))
        elif not tensors and not detected.has_signature:
            _add_tensor(tensors, f"{name.upper()}__0", "FP32", (-1,))


def _add_tensor(tensors: Any, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = tensors.add()
    tensor.name = name
    tensor.dims.extend(shape)
    type_name = dtype.upper().removeprefix("TYPE_")
    known = DTYPES.get(type_name) or BY_CONFIG_NAME.get(f"TYPE_{type_name}")
    if known is None:
        names = ", ".join(config_name.removeprefix("TYPE_") for config_name in BY_CONFIG_NAME)
        raise InvalidArgument(f"model: the dtype of {name[:64]!a} is {dtype[:32]!a}: use {names}")
    tensor.data_type = known.config_number


def _add_batching(message: Any, single: SingleModel, detected: Detected) -> bool:
    """Return whether batching is switched off."""
    if single.max_batch_size is not None:
        message.max_batch_size = single.max_batch_size
    elif not message.max_batch_size and not detected.has_signature:
        message.max_batch_size = DEFAULT_BATCH
    if single.max_batch_size == 0:
        if message.HasField("dynamic_batching"):
            message.ClearField("dynamic_batching")
        return True
    if message.WhichOneof("scheduling_choice") in (None, "dynamic_batching"):
        batching = message.dynamic_batching
        if message.max_batch_size or single.batch_timeout_ms is not None:
            batching.SetInParent()
        if single.batch_timeout_ms is not None:
            batching.max_queue_delay_microseconds = round(single.batch_timeout_ms * 1000)
        if single.queue_timeout_ms:
            batching.default_queue_policy.default_timeout_microseconds = round(single.queue_timeout_ms * 1000)
        if single.max_queue_size:
            batching.default_queue_policy.max_queue_size = single.max_queue_size
    return False


def _add_parameters(message: Any, single: SingleModel, detected: Detected, labels: Mapping[int, str]) -> None:
    if single.precision != "fp32":
        if detected.backend != "pytorch":
            raise InvalidArgument(
                f"model.precision: {single.precision} converts PyTorch models, and {single.path} is {detected.what}: "
                "convert the file itself, and write precision: fp32"
            )
        message.parameters["precision"].string_value = single.precision
    for name, value in single.parameters.items():
        message.parameters[name].string_value = value
    if labels:
        pairs = sorted(labels.items())
        message.parameters[LABELS].string_value = ",".join(f"{number}={label}" for number, label in pairs)


log = logging.getLogger("headrace.configuration")

_NUMBERS_FILE = ".versions.json"
_LOCK_FILE = ".lock"


class Staging:
    """The temporary repository of one model, kept in sync with its path."""

    def __init__(self, single: SingleModel, repository: Path) -> None:
        self.single = single
        self.repository = repository
        self._folder = repository / single.name
        self._last_warning = ""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.single.name

    @property
    def preferred(self) -> str:
        """The version for requests without a version, if it is not the newest one that is served; else ""."""
        explicit = self.single.all_versions and self.single.version != LATEST
        return find_versions(self.single).chosen if explicit else ""

    def refresh(self) -> None:
        """Apply changes at the path. A problem is logged once; the current versions stay in service."""
        try:
            self.build()
            self._last_warning = ""
        except HeadraceError as error:
            self._warn_once(error.message)
        except OSError as error:
            self._warn_once(f"{self.single.path} cannot be read: {error.strerror}")

    def build(self) -> None:
        """Update the folder. Raises if the model cannot be served."""
        with FileLock(self.repository / _LOCK_FILE):
            self._build(find_versions(self.single))

    def _build(self, present: ModelVersions) -> None:
        own = find_config(self.single.path)
        try:
            chosen = find_model(present.versions[present.chosen])
        except InvalidArgument:
            if own is None or (self._folder.is_dir() and not self._folder.is_symlink()):
                raise
            # A model without files, such as an ensemble, or of another backend: its configuration says everything.
            _symlink(self._folder, self.single.path.absolute())
            return
        numbers = number_versions(present.versions, self._numbers()) if list(present.versions) != [""] else {"": 1}
        served = {present.chosen: chosen}
        if self.single.all_versions:
            served |= self._others(present, chosen)
        numbered = is_numbered(name for name in served if name)
        labels = {} if numbered else {numbers[name]: name for name in served if name}
        text = config_json(self.single, chosen, labels, own=own is not None)
        if self._folder.is_symlink():
            self._folder.unlink()  # it was a model without files
        self._folder.mkdir(exist_ok=True)
        for name, detected in served.items():
            self._link(self._folder / str(numbers[name]), detected.parts)
        if own is not None:
            self._link_beside(own.parent)
        _write(self.repository / _NUMBERS_FILE, json.dumps(numbers))
        # Before old versions are removed: every version that the configuration names must exist.
        _write(self._folder / "config.json", text)
        served_numbers = {str(numbers[name]) for name in served}
        for path in list(self._folder.iterdir()):
            if path.name.isdigit() and path.name not in served_numbers:
                shutil.rmtree(path, ignore_errors=True)

    def _others(self, present: ModelVersions, chosen: Detected) -> dict[str, Detected]:
        versions = {}
        for name, path in present.versions.items():
            if name == present.chosen:
                continue
            try:
                detected = find_model(path)
            except HeadraceError as error:
                self._warn_once(f"version {name} is left out: {error.message}")
                continue
            if (detected.backend, detected.parts[0].name) != (chosen.backend, chosen.parts[0].name):
                self._warn_once(
                    f"version {name} is left out: it is {detected.what}, and {present.chosen} is {chosen.what}"
                )
                continue
            versions[name] = detected
        return versions

    def _numbers(self) -> dict[str, int]:
        try:
            known = json.loads((self.repository / _NUMBERS_FILE).read_bytes())
        except (OSError, ValueError):
            return {}
        return {str(name): int(number) for name, number in known.items()}

    def _link(self, folder: Path, parts: tuple[Part, ...]) -> None:
        folder.mkdir(exist_ok=True)
        for part in parts:
            link = folder / part.name
            link.parent.mkdir(parents=True, exist_ok=True)
            _symlink(link, part.source)
        top = {Path(part.name).parts[0] for part in parts}
        for path in list(folder.iterdir()):
            if path.name not in top and path.is_symlink():
                path.unlink()

    def _link_beside(self, folder: Path) -> None:
        """Link labels, warm-up data and other files that the model's own configuration may name."""
        for path in folder.iterdir():
            if not (is_version(path.name) or path.name in CONFIG_FILES or path.name.startswith((".", "model."))):
                _symlink(self._folder / path.name, path)

    def _warn_once(self, text: str) -> None:
        if text != self._last_warning:
            log.warning("model %s: %s", self.name, text)
        self._last_warning = text


@contextmanager
def staged(single: SingleModel) -> Iterator[Staging]:
    """Create a temporary repository, removed at the end. Raises if the model cannot be served."""
    repository = Path(tempfile.mkdtemp(prefix="headrace-model-"))
    try:
        staging = Staging(single, repository)
        staging.build()
        yield staging
    finally:
        shutil.rmtree(repository, ignore_errors=True)


def _symlink(link: Path, target: Path) -> None:
    """Create or replace a symbolic link."""
    absolute = os.path.abspath(target)
    if link.is_symlink():
        if os.readlink(link) == absolute:
            return
        temporary = link.with_name(f".{link.name}.new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(absolute)
        temporary.replace(link)
    else:
        link.symlink_to(absolute)


def _write(path: Path, text: str) -> None:
    """Write a file atomically if its content differs: a server watches it."""
    try:
        if path.read_text() == text:
            return
    except OSError:
        pass
    write_atomically(path, text.encode(), mode=None, durable=False)
