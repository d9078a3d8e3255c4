# SPDX-License-Identifier: Apache-2.0
"""A repository of one model that is served straight from a path: links to its files, in a folder that goes with the server.

Opened by `headrace serve` before workers are forked, so that all have the same one; `refresh` is called before each look at
the folders (`RepositorySettings.refresh`), by every worker, and takes in versions that have come. What is known of earlier
looks lies in the folder itself.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.configuration.model_config import config_json
from headrace.configuration.single_model import Present, SingleModel, find_model, look, own_config
from headrace.configuration.versions import LATEST, is_numbered, is_version, numbers_of
from headrace.core.errors import HeadraceError
from headrace.modelconfig.detect import Detected, Part
from headrace.modelconfig.drafts import CONFIG_FILES

log = logging.getLogger("headrace.configuration")

_NUMBERS = ".versions.json"
_LOCK = ".lock"


class Staging:
    """The folder of one model, kept like what lies under its path."""

    def __init__(self, single: SingleModel, repository: Path) -> None:
        self.single = single
        self.repository = repository
        self._folder = repository / single.name
        self._said = ""

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.single.name

    @property
    def preferred(self) -> str:
        """The version for requests that name none, where the newest of those that are served is not meant; else ""."""
        wanted = self.single.version
        return look(self.single).chosen if self.single.all_versions and wanted != LATEST else ""

    def refresh(self) -> None:
        """Take in what has changed. What is wrong is told once in the log; what serves goes on serving."""
        try:
            self.build()
            self._said = ""
        except HeadraceError as error:
            self._say(error.message)
        except OSError as error:
            self._say(f"{self.single.path} cannot be looked at: {error.strerror}")

    def build(self) -> None:
        """Make the folder what it should be; raises what is wrong with the model."""
        descriptor = os.open(self.repository / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._build(look(self.single))
        finally:
            os.close(descriptor)

    def _build(self, present: Present) -> None:
        numbers = numbers_of(present.versions, self._numbers()) if list(present.versions) != [""] else {"": 1}
        chosen = find_model(present.versions[present.chosen])
        served = {present.chosen: chosen}
        if self.single.all_versions:
            served |= self._others(present, chosen)
        own = own_config(self.single.path)
        numbered = is_numbered(name for name in served if name)
        labels = {} if numbered else {numbers[name]: name for name in served if name}
        text = config_json(self.single, chosen, labels, own=own is not None)
        self._folder.mkdir(exist_ok=True)
        for name, detected in served.items():
            self._link(self._folder / str(numbers[name]), detected.parts)
        if own is not None:
            self._link_beside(own.parent)
        _write(self.repository / _NUMBERS, json.dumps(numbers))
        # Before old versions go, so that none is missed that the configuration speaks of.
        _write(self._folder / "config.json", text)
        wanted = {str(numbers[name]) for name in served}
        for each in list(self._folder.iterdir()):
            if each.name.isdigit() and each.name not in wanted:
                shutil.rmtree(each, ignore_errors=True)

    def _others(self, present: Present, chosen: Detected) -> dict[str, Detected]:
        found = {}
        for name, path in present.versions.items():
            if name == present.chosen:
                continue
            try:
                detected = find_model(path)
            except HeadraceError as error:
                self._say(f"version {name} is left out: {error.message}")
                continue
            if (detected.backend, detected.parts[0].name) != (chosen.backend, chosen.parts[0].name):
                self._say(f"version {name} is left out: it is {detected.what}, and {present.chosen} is {chosen.what}")
                continue
            found[name] = detected
        return found

    def _numbers(self) -> dict[str, int]:
        try:
            known = json.loads((self.repository / _NUMBERS).read_bytes())
        except (OSError, ValueError):
            return {}
        return {str(name): int(number) for name, number in known.items()}

    def _link(self, folder: Path, parts: tuple[Part, ...]) -> None:
        folder.mkdir(exist_ok=True)
        for part in parts:
            place = folder / part.name
            place.parent.mkdir(parents=True, exist_ok=True)
            _point(place, part.source)
        top = {Path(part.name).parts[0] for part in parts}
        for each in list(folder.iterdir()):
            if each.name not in top and each.is_symlink():
                each.unlink()

    def _link_beside(self, path: Path) -> None:
        """Labels, warm-up data and the like, which a configuration of the model's own may name."""
        for each in path.iterdir():
            if not (is_version(each.name) or each.name in CONFIG_FILES or each.name.startswith((".", "model."))):
                _point(self._folder / each.name, each)

    def _say(self, text: str) -> None:
        if text != self._said:
            log.warning("model %s: %s", self.name, text)
        self._said = text


@contextmanager
def staged(single: SingleModel) -> Iterator[Staging]:
    """A folder for the model, which is removed in the end. Raises what is wrong with the model."""
    repository = Path(tempfile.mkdtemp(prefix="headrace-model-"))
    try:
        staging = Staging(single, repository)
        staging.build()
        yield staging
    finally:
        shutil.rmtree(repository, ignore_errors=True)


def _point(place: Path, target: Path) -> None:
    """A link to the target, also where there is another one."""
    wanted = os.path.abspath(target)
    if place.is_symlink():
        if os.readlink(place) == wanted:
            return
        fresh = place.with_name(f".{place.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(wanted)
        fresh.replace(place)
    else:
        place.symlink_to(wanted)


def _write(path: Path, text: str) -> None:
    """A whole file, or none; left alone if it says so already, since a server watches it."""
    try:
        if path.read_text() == text:
            return
    except OSError:
        pass
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)
