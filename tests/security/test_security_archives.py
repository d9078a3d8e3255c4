# SPDX-License-Identifier: Apache-2.0
"""Archives of models that were prepared to write elsewhere (test 2), the whole way from a URL.

Each trick alone is refused by `tests/models/storage/test_archives.py`. Here several are put one after the other, as they are
used: a member opens the way, and a later one takes it.
"""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from web_stub import WebStub, serve

from headrace.core.errors import InvalidArgument
from headrace.models.storage.fetch import FetchSettings, fetch_location

ROOT = Path(__file__).parents[2]
LOCAL = FetchSettings(private_hosts=("127.0.0.1",))
Member = tuple[str, bytes, bytes]
"""Name, type, and content or where a link leads."""

FILE, SYMLINK, HARDLINK, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def tar(*members: Member) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == FILE:
                info.size = len(content)
            else:
                info.linkname = content.decode()
            archive.addfile(info, io.BytesIO(content) if kind == FILE else None)
    return buffer.getvalue()


def zipped(*members: Member) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, kind, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = ((stat.S_IFLNK if kind == SYMLINK else stat.S_IFREG) | 0o644) << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def tricks(outside: Path) -> dict[str, bytes]:
    there, canary = str(outside).encode(), str(outside / "canary").encode()
    return {
        "a link to a folder, then a file in it.tgz": tar(("a", SYMLINK, there), ("a/canary", FILE, b"poison")),
        "a relative link.tgz": tar(("a", SYMLINK, b"../../outside"), ("a/canary", FILE, b"poison")),
        "a link, then a file of its name.tgz": tar(("a", SYMLINK, canary), ("a", FILE, b"poison")),
        "a hard link, then a file of its name.tgz": tar(("a", HARDLINK, canary), ("a", FILE, b"poison")),
        "a folder that becomes a link.tgz": tar(
            ("a", FOLDER, b""), ("a", SYMLINK, there), ("a/canary", FILE, b"poison")
        ),
        "a link to a link.tgz": tar(("a", SYMLINK, there), ("b", SYMLINK, b"a/canary"), ("b", FILE, b"poison")),
        "something good first.tgz": tar(("config.json", FILE, b"{}"), ("../../outside/canary", FILE, b"poison")),
        "a link.zip": zipped(("a", SYMLINK, there), ("a/canary", FILE, b"poison")),
        "something good first.zip": zipped(("config.json", FILE, b"{}"), ("../../outside/canary", FILE, b"poison")),
    }


@pytest.mark.parametrize("trick", list(tricks(Path("/x"))))
def test_nothing_is_written_elsewhere_and_nothing_is_left(trick: str, tmp_path: Path) -> None:
    outside, cache = tmp_path / "outside", tmp_path / "cache"
    outside.mkdir()
    cache.mkdir()
    (outside / "canary").write_text("untouched")
    with (
        WebStub({"/model" + Path(trick).suffix: serve(tricks(outside)[trick])}) as web,
        pytest.raises(InvalidArgument) as caught,
    ):
        fetch_location(web.url("/model" + Path(trick).suffix), cache, settings=LOCAL)
    assert str(tmp_path) not in caught.value.message
    assert [path.name for path in outside.iterdir()] == ["canary"]
    assert (outside / "canary").read_text() == "untouched"
    left = [
        path for path in cache.rglob("*") if path.is_symlink() or (path.is_file() and path.read_bytes() == b"poison")
    ]
    assert left == []
    assert not list(cache.rglob("config.json"))


def test_no_other_module_opens_archives() -> None:
    """Who does is looked at before: some read members in memory, and two write what they themselves have made."""
    results = {
        str(path.relative_to(ROOT / "headrace"))
        for path in (ROOT / "headrace").rglob("*.py")
        if any(
            word in path.read_text() for word in ("import tarfile", "import zipfile", "from tarfile", "from zipfile")
        )
    }
    unpacking = {"models/storage/archives.py"}
    in_memory = {"models/config/detection.py", "backends/tabular/sklearn.py", "backends/pytorch/archive.py"}
    made_by_us = {"platforms/brev/remote_docker.py", "platforms/docker/containers.py"}
    assert results == unpacking | in_memory | made_by_us
