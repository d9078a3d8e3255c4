# SPDX-License-Identifier: Apache-2.0
"""Where the checks put what they find, and the questions about files that several of them ask."""

from __future__ import annotations

from pathlib import PurePosixPath

from headrace.models.config.drafts import Draft
from headrace.models.config.problems import Problem

_MOST = 600
"""How long a problem may be: texts quote names, and a name may be as long as the file."""


class Report:
    """The problems of one configuration, in the order they were found."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.problems: list[Problem] = []

    def add(self, place: str, text: str) -> None:
        """Note a problem with the field at `place` (`input[0].dims`)."""
        self.problems.append(self._draft.problem(place, text if len(text) <= _MOST else f"{text[:_MOST]}..."))

    def check_inside(self, place: str, name: str, folder: str) -> bool:
        """Whether a file's name stays in its folder; noted if not. By its letters: links are the operator's own."""
        if not name:
            return True
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            self.add(place, f"'{name[:64]}' is outside of {folder}; name a file in it, without '/' in front and '..'")
            return False
        return True

    def check_file(self, place: str, folder: str, name: str) -> None:
        """Note a file of the model's folder that is not there."""
        where = f"{folder}/ of the model's folder" if folder else "the model's folder"
        if not self.check_inside(place, name, where):
            return
        try:
            there = (self._draft.model_folder / folder / name).is_file()
        except OSError:
            # A name too long for the file system.
            there = False
        if not there:
            self.add(place, f"'{name[:64]}' is not a file in {where}; put it there, or correct the name")
