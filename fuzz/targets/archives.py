# SPDX-License-Identifier: Apache-2.0
"""Target `archives`: an archive is unpacked within the limits or refused; nothing is written outside its folder."""

from __future__ import annotations

import shutil
import stat
import tempfile
from pathlib import Path

from fuzz.target import Check, Target, require
from headrace.core.errors import HeadraceError
from headrace.models.storage.archives import UnpackLimits, unpack

_LIMITS = UnpackLimits(max_bytes=1 << 20, max_files=50)


def _open() -> Check:
    world = Path(tempfile.mkdtemp(prefix="headrace-fuzz-"))
    archive, target = world / "archive", world / "inside" / "folder"

    def check(data: bytes) -> None:
        target.mkdir(parents=True)
        archive.write_bytes(data)
        try:
            unpack(archive, target, _LIMITS)
        except HeadraceError as error:
            require(bool(str(error)), "a refusal without a word")
        finally:
            paths = list(world.rglob("*"))
            size = sum(path.lstat().st_size for path in paths if path != archive and path.is_file())
            strange = [path for path in paths if not _plain(path, target, archive)]
            shutil.rmtree(world / "inside")
        require(not strange, f"unpacked {strange}")
        require(size <= _LIMITS.max_bytes + (1 << 20), f"{size} bytes came out")

    return check


def _plain(path: Path, target: Path, archive: Path) -> bool:
    mode = path.lstat().st_mode
    if path in (archive, target, target.parent):
        return True
    return target in path.parents and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


TARGET = Target(
    "tar, tar.gz and zip: plain files below the folder, or a refusal",
    _open,
    (
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"ustar\x0000",
        b"../",
        b"/etc/",
        b"\x1f\x8b\x08\x00",
        b"L",
        b"2",
        b"x",
    ),
    8192,
)
