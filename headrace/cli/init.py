# SPDX-License-Identifier: Apache-2.0
"""`headrace models init`: a model's file becomes a model's folder, with the version folder and the configuration.

Called by `models`. `modelconfig.detect` says what the file is, the backend what is in it. Everything is made in a hidden
folder of the repository and takes its place by one rename, so a server that watches sees all of it or nothing.
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
from headrace.core.names import check_name, is_name, parse_version
from headrace.models.config.detect import Detected, Part, detect
from headrace.models.config.drafts import CONFIG_FILES, Draft, read_draft
from headrace.models.config.finishing import finish, merge_under
from headrace.models.config.formats import FORMATS, version_folders
from headrace.models.config.problems import ConfigError
from headrace.models.config.schema import new_config
from headrace.models.config.showing import to_text

CONFIG = "config.pbtxt"
_FROM_THE_FILE = "# Inputs and outputs are those that model.py tells.\n"
_TO_FILL_IN = """\
# The file does not tell its inputs and outputs. Write them here, and take the '#' away. With max_batch_size over 0, the
# dims are those of one row.
# max_batch_size: 8
# input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
# output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]
"""
_NAMES_OF_ANY_MODEL = frozenset({"model", "predict_net", "init_net", "init_model", "saved_model", "savedmodel"})


@dataclass(frozen=True, slots=True)
class Made:
    """What was found, and what was made of it."""

    detected: Detected
    folder: Path
    """The model's folder."""
    version: int
    config: Any
    """A ModelConfig message, as it was written, or as it was there before."""
    wrote: tuple[Path, ...]
    notes: tuple[str, ...]
    """What the reader still has to do before it can be served."""
    remarks: tuple[str, ...]
    """What the model itself says."""


@dataclass(frozen=True, slots=True)
class _Completed:
    config: Any
    notes: Sequence[str]
    remarks: Sequence[str] = ()


def init_model(path: Path, repository: Path, name: str, version: str, *, move: bool) -> Made:
    """Make a model of a file or folder; or, in a folder that is laid out as a model already, the configuration alone."""
    try:
        return _init(path, repository, name, version, move=move)
    except OSError as error:
        where = error.filename or repository
        raise InvalidArgument(f"{where} cannot be written or read: {error.strerror}; nothing was made") from None


def _init(path: Path, repository: Path, name: str, version: str, *, move: bool) -> Made:
    if path.is_dir() and not (path / "saved_model.pb").is_file():
        versions = version_folders(path)
        if versions:
            return _configure(path, versions[0])
        if any(version_folders(child) for child in path.iterdir() if child.is_dir()):
            raise InvalidArgument(
                f"{path} is a folder of models already: `headrace models check {path}` looks at all, "
                f"`headrace models init {path}/MODEL` writes the configuration of one"
            )
    detected = detect(path)
    name = check_name(name or _name_of(path))
    number = parse_version(version)
    there = repository / name / str(number)
    if path.resolve().is_relative_to(there.resolve()):
        return _configure(repository / name, there)
    if there.exists():
        raise InvalidArgument(
            f"{repository / name} has a version {number} already: give another number with --version, or another name "
            "with --name"
        )
    return _place(detected, repository, name, number, move=move)


def _name_of(path: Path) -> str:
    """The file's name without its endings; that of its folder, if the file's says nothing."""
    absolute = path.resolve()
    for candidate in (absolute, *absolute.parents):
        stem = candidate.name if candidate.is_dir() and candidate.suffix != ".savedmodel" else candidate.stem
        name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "_" for letter in stem)
        if name.lower() not in _NAMES_OF_ANY_MODEL and not name.isdigit() and is_name(name):
            return name
    return "model"


def _configure(folder: Path, version_folder: Path) -> Made:
    if not is_name(folder.name):  # "." and the like
        folder, version_folder = folder.resolve(), version_folder.resolve()
    present = [name for name in CONFIG_FILES if (folder / name).is_file()]
    if present:
        raise InvalidArgument(
            f"{folder} is a model with a {present[0]} already: `headrace models check` says whether it is right"
        )
    detected = detect(_model_in(version_folder))
    if detected.parts[0].source == version_folder:
        # As TensorFlow Serving has it.
        raise InvalidArgument(
            f"{version_folder} is {detected.what} itself, where a model has it in a folder of its own: "
            f"`headrace models init {version_folder} --repository DIR --name {folder.name}` copies it to where it belongs"
        )
    usual = {known.filename for known in FORMATS}
    source = detected.parts[0].source.name
    message = _minimal(detected, folder.name)
    if source not in usual:
        message.default_model_filename = source
    target = folder / CONFIG
    # Where `read_draft` would find it; taken away again if the model turns out not to be one.
    target.write_text(to_text(message))
    try:
        completed = _completed(read_draft(folder), version_folder, detected)
        _write_config(target, completed.config, detected)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return _made(detected, folder, int(version_folder.name), completed, [target])


def _model_in(version_folder: Path) -> Path:
    for known in FORMATS:
        if known.filename and (version_folder / known.filename).exists():
            return version_folder / known.filename
    return version_folder


def _place(detected: Detected, repository: Path, name: str, version: int, *, move: bool) -> Made:
    folder = repository / name
    is_new = not folder.exists()
    made_repository = not repository.exists()
    repository.mkdir(parents=True, exist_ok=True)
    # A name with a dot is no model to a server that watches.
    workshop = Path(tempfile.mkdtemp(prefix=".init-", dir=repository))
    try:
        built = workshop / name
        version_folder = built / str(version)
        version_folder.mkdir(parents=True)
        _bring(detected.parts, version_folder, move=move)
        configured = _copy_config(folder, built)
        if not configured:
            (built / CONFIG).write_text(to_text(_minimal(detected, name)))
        draft = read_draft(built)
        _check_backend(draft, detected, folder)
        completed = _completed(draft, version_folder, detected)
        wrote = [folder / str(version) / part.name for part in detected.parts]
        if not configured:
            _write_config(built / CONFIG, completed.config, detected)
            wrote.insert(0, folder / CONFIG)
        if is_new:
            built.rename(folder)
        else:
            # The configuration first: a version is looked at with it.
            if not configured:
                (built / CONFIG).rename(folder / CONFIG)
            version_folder.rename(folder / str(version))
    except BaseException:
        shutil.rmtree(workshop, ignore_errors=True)
        if made_repository:
            with suppress(OSError):
                repository.rmdir()
        raise
    shutil.rmtree(workshop, ignore_errors=True)
    if move:
        _remove(detected.parts)
    return _made(detected, folder, version, completed, wrote)


def _made(detected: Detected, folder: Path, version: int, completed: _Completed, wrote: Sequence[Path]) -> Made:
    return Made(
        detected, folder, version, completed.config, tuple(wrote), tuple(completed.notes), tuple(completed.remarks)
    )


def _bring(parts: Sequence[Part], version_folder: Path, *, move: bool) -> None:
    # What is to be moved is linked, which takes no time, and removed at its old place when all is well.
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


def _copy_config(folder: Path, built: Path) -> bool:
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            shutil.copy2(folder / name, built / name)
            return True
    return False


def _check_backend(draft: Draft, detected: Detected, folder: Path) -> None:
    if draft.backend != detected.backend:
        raise InvalidArgument(
            f"{folder} is a model of backend '{draft.backend}', and {detected.parts[0].source} is {detected.what}: give "
            "it another name with --name"
        )


def _minimal(detected: Detected, name: str) -> Any:
    message = new_config(name=name, backend=detected.backend)
    message.platform = detected.platform
    return message


def _completed(draft: Draft, version_folder: Path, detected: Detected) -> _Completed:
    """The configuration with what the backend tells, and what is still missing."""
    remarks: list[str] = []
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    try:
        backend = backend_named(draft.backend)
    except HeadraceError as error:
        return _Completed(message, [f"{error.message}; until then the model's inputs and outputs are not known"])
    except ImportError as error:
        note = f"backend '{draft.backend}' cannot be used here ({error.name}); the model was not looked at"
        return _Completed(message, [note])
    files = ModelFiles(draft.model_folder, int(version_folder.name), version_folder)
    try:
        with _heard(draft.message.name, remarks):
            told = backend.complete(draft.typed(), files)
    except HeadraceError as error:
        # Of a format that tells everything, nothing is missing in the configuration: the file is wrong.
        if detected.tells:
            raise
        return _Completed(message, [error.message])
    if told is not None:
        merge_under(message, told, keep_batch_size=draft.wrote("max_batch_size"))
    try:
        finish(draft, told)
    except ConfigError as error:
        return _Completed(message, [f"{CONFIG}: {problem.text}" for problem in error.problems], remarks)
    return _Completed(message, [], remarks)


@contextmanager
def _heard(name: str, remarks: list[str]) -> Iterator[None]:
    """Note what a model says in the log while it is asked: a Python model tells what it assumes."""

    class Ears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            remarks.append(record.getMessage())

    log = logging.getLogger(f"headrace.model.{name}")
    ears, level = Ears(logging.INFO), log.level
    log.addHandler(ears)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(ears)
        log.setLevel(level)


def _write_config(path: Path, message: Any, detected: Detected) -> None:
    text = "# Made by `headrace models init`.\n"
    if detected.backend == "python" and message.input and message.output:
        # Its hints are read whenever it is loaded; written twice, they would have to be changed twice.
        text += to_text(_minimal(detected, message.name)) + _FROM_THE_FILE
    else:
        text += to_text(message)
        if not message.input and (detected.backend == "python" or not detected.tells):
            text += _TO_FILL_IN
    # At once: a server may read it at any time.
    written = path.with_name(f".{path.name}")
    written.write_text(text)
    written.replace(path)
