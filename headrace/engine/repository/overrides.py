# SPDX-License-Identifier: Apache-2.0
"""Model files that came with a request to load, in a private temporary folder for as long as a copy may read them.

Called by `control` in a thread. Turns `file:1/model.onnx` and its bytes into a model folder like any other; must not
trust a single character of those names.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from headrace.core.errors import InvalidArgument

PREFIX = "file:"
_PART_BYTES = 255
_PARTS = 16


class Override:
    """One such folder. Counts its users; the last one to leave is told to remove it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self.folder = folder
        self._users = 0

    def acquire(self) -> None:
        """One more reads it."""
        self._users += 1

    def release(self) -> bool:
        """One fewer; True if nobody is left and it should be removed."""
        self._users -= 1
        return self._users == 0

    def remove(self) -> None:
        """Delete the folder. May block."""
        shutil.rmtree(self._root, ignore_errors=True)


def relative_path(key: str) -> PurePosixPath:
    """Where the file of a parameter `file:<path>` goes inside the model's folder; refuses to leave it."""
    path = key.removeprefix(PREFIX)
    parts = path.split("/")
    bad = (
        not key.startswith(PREFIX)
        or len(parts) > _PARTS
        or "\\" in path
        or not path.isprintable()
        or any(part in {"", ".", ".."} or len(os.fsencode(part)) > _PART_BYTES for part in parts)
    )
    if bad:
        raise InvalidArgument(
            f"file parameter {key[:128]!a} is not allowed: use 'file:<version>/<name>', such as file:1/model.onnx, "
            "without '..' and empty parts"
        )
    return PurePosixPath(*parts)


def write_override(scratch: Path, name: str, files: Mapping[str, bytes]) -> Override:
    """Put the files into a new folder below `scratch`, named like the model. May block. `name` has been checked."""
    placed = {relative_path(key): content for key, content in files.items()}
    root = Path(tempfile.mkdtemp(dir=scratch))
    try:
        folder = root / name
        folder.mkdir()
        for path, content in placed.items():
            target = folder / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise InvalidArgument(f"file parameter {str(path)[:128]!a} is a file and a folder at once") from None
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Override(root, folder)
