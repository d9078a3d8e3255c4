# SPDX-License-Identifier: Apache-2.0
"""`headrace models init`: turn a model file into a model folder with a version folder and a configuration.

`headrace.models.config` detects the format, and the backend reads the inputs and outputs. Everything is created in a
hidden folder of the repository and renamed into place, so that a polling server sees all of it or nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.backends.contract import ModelFiles
from headrace.backends.table import backend_named
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.files import write_atomically
from headrace.core.names import check_name, is_name, parse_version
from headrace.models.config.completion import complete, fill_missing
from headrace.models.config.detection import Detected, Part, detect
from headrace.models.config.drafts import CONFIG_FILES, Draft, read_draft
from headrace.models.config.formats import FORMATS, version_folders
from headrace.models.config.messages import new_config, to_text
from headrace.models.config.problems import ConfigError

CONFIG = "config.pbtxt"
_FROM_THE_FILE = "# model.py declares the inputs and outputs.\n"
_TO_FILL_IN = """\
# The file does not declare its inputs and outputs. Fill them in and remove the '#'. With max_batch_size over 0, dims are
# those of one row.
# max_batch_size: 8
# input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
# output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]
"""
_NAMES_OF_ANY_MODEL = frozenset({"model", "predict_net", "init_net", "init_model", "saved_model", "savedmodel"})


@dataclass(frozen=True, slots=True)
class InitResult:
    """The result of `init_model`."""

    detected: Detected
    folder: Path
    """The model's folder."""
    version: int
    config: Any
    """A ModelConfig message, as written, or as it existed before."""
    wrote: tuple[Path, ...]
    notes: tuple[str, ...]
    """What the user must do before the model can be served."""
    remarks: tuple[str, ...]
    """Log messages of the model."""


@dataclass(frozen=True, slots=True)
class _Completed:
    config: Any
    notes: Sequence[str]
    remarks: Sequence[str] = ()


def init_model(path: Path, repository: Path, name: str, version: str, *, move: bool) -> InitResult:
    """Create a model from a file or folder; for an existing model folder, only write its configuration."""
    try:
        return _init(path, repository, name, version, move=move)
    except OSError as error:
        location = error.filename or repository
        raise InvalidArgument(f"{location} cannot be written or read: {error.strerror}; nothing was created") from None


def _init(path: Path, repository: Path, name: str, version: str, *, move: bool) -> InitResult:
    if path.is_dir() and not (path / "saved_model.pb").is_file():
        versions = version_folders(path)
        if versions:
            return _configure(path, versions[0])
        if any(version_folders(child) for child in path.iterdir() if child.is_dir()):
            raise InvalidArgument(
                f"{path} is a model repository already: `headrace models check {path}` checks all models, "
                f"`headrace models init {path}/MODEL` writes the configuration of one"
            )
    detected = detect(path)
    name = check_name(name or _name_of(path))
    number = parse_version(version)
    version_folder = repository / name / str(number)
    if path.resolve().is_relative_to(version_folder.resolve()):
        return _configure(repository / name, version_folder)
    if version_folder.exists():
        raise InvalidArgument(
            f"{repository / name} has a version {number} already: choose another --version or another --name"
        )
    return _place(detected, repository, name, number, move=move)


def _name_of(path: Path) -> str:
    """Return the file's stem; the name of its folder if the stem is generic."""
    absolute = path.resolve()
    for candidate in (absolute, *absolute.parents):
        stem = candidate.name if candidate.is_dir() and candidate.suffix != ".savedmodel" else candidate.stem
        name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "_" for letter in stem)
        if name.lower() not in _NAMES_OF_ANY_MODEL and not name.isdigit() and is_name(name):
            return name
    return "model"


def _configure(folder: Path, version_folder: Path) -> InitResult:
    if not is_name(folder.name):  # "." and the like
        folder, version_folder = folder.resolve(), version_folder.resolve()
    present = [name for name in CONFIG_FILES if (folder / name).is_file()]
    if present:
        raise InvalidArgument(f"{folder} has a {present[0]} already: check it with `headrace models check`")
    detected = detect(_model_in(version_folder))
    if detected.parts[0].source == version_folder:
        # The layout of TensorFlow Serving.
        raise InvalidArgument(
            f"{version_folder} itself is {detected.what}, but the model must be in a sub-folder: "
            f"`headrace models init {version_folder} --repository DIR --name {folder.name}` copies it to the right place"
        )
    usual = {known.filename for known in FORMATS}
    source = detected.parts[0].source.name
    message = _minimal(detected, folder.name)
    if source not in usual:
        message.default_model_filename = source
    target = folder / CONFIG
    # Where `read_draft` finds it; removed again if the model is invalid.
    target.write_text(to_text(message))
    try:
        completed = _completed(read_draft(folder), version_folder, detected)
        _write_config(target, completed.config, detected)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return _result(detected, folder, int(version_folder.name), completed, [target])


def _model_in(version_folder: Path) -> Path:
    for known in FORMATS:
        if known.filename and (version_folder / known.filename).exists():
            return version_folder / known.filename
    return version_folder


def _place(detected: Detected, repository: Path, name: str, version: int, *, move: bool) -> InitResult:
    folder = repository / name
    is_new = not folder.exists()
    made_repository = not repository.exists()
    repository.mkdir(parents=True, exist_ok=True)
    # Servers ignore folders whose names start with a dot.
    staging = Path(tempfile.mkdtemp(prefix=".init-", dir=repository))
    try:
        staged_model = staging / name
        version_folder = staged_model / str(version)
        version_folder.mkdir(parents=True)
        _copy_parts(detected.parts, version_folder, move=move)
        configured = _copy_config(folder, staged_model)
        if not configured:
            (staged_model / CONFIG).write_text(to_text(_minimal(detected, name)))
        draft = read_draft(staged_model)
        _check_backend(draft, detected, folder)
        completed = _completed(draft, version_folder, detected)
        wrote = [folder / str(version) / part.name for part in detected.parts]
        if not configured:
            _write_config(staged_model / CONFIG, completed.config, detected)
            wrote.insert(0, folder / CONFIG)
        if is_new:
            staged_model.rename(folder)
        else:
            # The configuration first: a version is loaded with it.
            if not configured:
                (staged_model / CONFIG).rename(folder / CONFIG)
            version_folder.rename(folder / str(version))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if made_repository:
            with suppress(OSError):
                repository.rmdir()
        raise
    shutil.rmtree(staging, ignore_errors=True)
    if move:
        _remove(detected.parts)
    return _result(detected, folder, version, completed, wrote)


def _result(detected: Detected, folder: Path, version: int, completed: _Completed, wrote: Sequence[Path]) -> InitResult:
    return InitResult(
        detected, folder, version, completed.config, tuple(wrote), tuple(completed.notes), tuple(completed.remarks)
    )


def _copy_parts(parts: Sequence[Part], version_folder: Path, *, move: bool) -> None:
    # Moved files are hard-linked first, and removed from their old place at the end.
    copy = _link_or_copy if move else shutil.copy2
    for part in parts:
        target = version_folder / part.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if part.source.is_dir():
            shutil.copytree(part.source, target, copy_function=copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy(str(part.source), str(target))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _remove(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.source.is_dir() and not part.source.is_symlink():
            shutil.rmtree(part.source, ignore_errors=True)
        else:
            part.source.unlink(missing_ok=True)


def _copy_config(folder: Path, staged_model: Path) -> bool:
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            shutil.copy2(folder / name, staged_model / name)
            return True
    return False


def _check_backend(draft: Draft, detected: Detected, folder: Path) -> None:
    if draft.backend != detected.backend:
        raise InvalidArgument(
            f"{folder} is a model of backend '{draft.backend}', but {detected.parts[0].source} is {detected.what}: choose "
            "another --name"
        )


def _minimal(detected: Detected, name: str) -> Any:
    message = new_config(name=name, backend=detected.backend)
    message.platform = detected.platform
    return message


def _completed(draft: Draft, version_folder: Path, detected: Detected) -> _Completed:
    """Return the configuration completed by the backend, and what is still missing."""
    remarks: list[str] = []
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    try:
        backend = backend_named(draft.backend)
    except HeadraceError as error:
        return _Completed(message, [f"{error.message}; until then the model's inputs and outputs are unknown"])
    except ImportError as error:
        note = f"backend '{draft.backend}' cannot be imported ({error.name}); the model was not checked"
        return _Completed(message, [note])
    files = ModelFiles(draft.model_folder, int(version_folder.name), version_folder)
    try:
        with _collect_log(draft.message.name, remarks):
            declared = backend.complete(draft.typed(), files)
    except HeadraceError as error:
        # If the format declares everything, the file is wrong, not the configuration.
        if detected.has_signature:
            raise
        return _Completed(message, [error.message])
    if declared is not None:
        fill_missing(message, declared, keep_batch_size=draft.has_field("max_batch_size"))
    try:
        complete(draft, declared)
    except ConfigError as error:
        return _Completed(message, [f"{CONFIG}: {problem.text}" for problem in error.problems], remarks)
    return _Completed(message, [], remarks)


@contextmanager
def _collect_log(name: str, remarks: list[str]) -> Iterator[None]:
    """Collect the log messages of a model, such as the defaults that a Python model assumes."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            remarks.append(record.getMessage())

    log = logging.getLogger(f"headrace.model.{name}")
    collector, level = Collector(logging.INFO), log.level
    log.addHandler(collector)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(collector)
        log.setLevel(level)


def _write_config(path: Path, message: Any, detected: Detected) -> None:
    text = "# Created by `headrace models init`.\n"
    if detected.backend == "python" and message.input and message.output:
        # The hints in model.py are read at every load: a copy would have to be kept in sync.
        text += to_text(_minimal(detected, message.name)) + _FROM_THE_FILE
    else:
        text += to_text(message)
        if not message.input and (detected.backend == "python" or not detected.has_signature):
            text += _TO_FILL_IN
    # Atomically: a server may read it at any time.
    write_atomically(path, text.encode(), mode=None, durable=False)
