# SPDX-License-Identifier: Apache-2.0
"""Archives from elsewhere: plain files come out, and nothing else happens."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest

from headrace.core.errors import Cancelled, InvalidArgument
from headrace.models.storage.archives import UnpackLimits, is_archive, stem, unpack

LIMITS = UnpackLimits(max_bytes=1_000_000, max_files=50)


def packed(path: Path, *members: tuple[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return path


def special(path: Path, name: str, kind: bytes, link: str = "") -> Path:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        archive.addfile(info)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_files_and_folders_are_extracted(mode: str, tmp_path: Path, out: Path) -> None:
    archive = packed(tmp_path / "a", ("m/config.json", b"{}"), ("./m/1/model.bin", b"x" * 5000), ("e", b""), mode=mode)
    unpack(archive, out, LIMITS)
    files = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert files == {"m/config.json": 2, "m/1/model.bin": 5000, "e": 0}


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path, out: Path) -> None:
    with pytest.raises(InvalidArgument, match="leads out"):
        unpack(packed(tmp_path / "a", (name, b"x")), out, LIMITS)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE],
)
def test_special_files_are_refused(kind: bytes, tmp_path: Path, out: Path) -> None:
    with pytest.raises(InvalidArgument):
        unpack(special(tmp_path / "a", "x", kind, "/etc/passwd"), out, LIMITS)
    assert list(out.iterdir()) == []


def test_two_of_one_name_are_refused(tmp_path: Path, out: Path) -> None:
    with pytest.raises(InvalidArgument):
        unpack(packed(tmp_path / "a", ("x", b"1"), ("x", b"2")), out, LIMITS)


def test_bombs_are_refused(tmp_path: Path, out: Path) -> None:
    with pytest.raises(InvalidArgument, match="more than"):
        unpack(packed(tmp_path / "a", ("x", b"\0" * 1_000_001)), out, LIMITS)
    with pytest.raises(InvalidArgument, match="more than"):
        unpack(packed(tmp_path / "b", *((f"f{i}", b"") for i in range(51))), out, LIMITS)


def test_a_bomb_in_a_header_is_refused(tmp_path: Path, out: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    with gzip.open(tmp_path / "a", "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(8):
            file.write(b"\0" * (1 << 20))
    with pytest.raises(InvalidArgument, match="header"):
        unpack(tmp_path / "a", out, LIMITS)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x1f\x8bxxxx", b"x" * 2000])
def test_a_file_that_is_not_an_archive_is_reported(content: bytes, tmp_path: Path, out: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InvalidArgument, match="model.tar is not a whole"):
        unpack(tmp_path / "a", out, LIMITS, name="model.tar")


def test_a_truncated_archive_is_reported(tmp_path: Path, out: Path) -> None:
    whole = packed(tmp_path / "a", ("x", bytes(range(256)) * 400), mode="w").read_bytes()
    (tmp_path / "b").write_bytes(whole[:60_000])
    with pytest.raises(InvalidArgument, match="not a whole"):
        unpack(tmp_path / "b", out, LIMITS)


def test_it_can_be_cancelled(tmp_path: Path, out: Path) -> None:
    with pytest.raises(Cancelled):
        unpack(packed(tmp_path / "a", ("x", b"1")), out, LIMITS, cancelled=lambda: True)


def test_names_of_archives() -> None:
    assert [is_archive(name) for name in ("m.tar", "M.TAR.GZ", "m.tgz", "m.zip", "tar")] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert [stem(name) for name in ("m.tar.gz", "m.zip", "m.bin")] == ["m", "m", "m.bin"]


# Zip


def zipped(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members:
            archive.writestr(name, body)
    return path


def test_files_and_folders_are_extracted_from_a_zip(tmp_path: Path, out: Path) -> None:
    archive = zipped(tmp_path / "a", ("m/", b""), ("m/config.json", b"{}"), ("m/1/model.bin", b"x" * 5000), ("e", b""))
    unpack(archive, out, LIMITS)
    files = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert files == {"m/config.json": 2, "m/1/model.bin": 5000, "e": 0}


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"])
def test_names_in_a_zip_that_lead_out_are_refused(name: str, tmp_path: Path, out: Path) -> None:
    with pytest.raises(InvalidArgument, match="leads out"):
        unpack(zipped(tmp_path / "a", (name, b"x")), out, LIMITS)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_special_files_in_a_zip_are_refused(kind: int, tmp_path: Path, out: Path) -> None:
    info = zipfile.ZipInfo("a")
    info.external_attr = (kind | 0o777) << 16
    with pytest.raises(InvalidArgument, match="link, device"):
        unpack(zipped(tmp_path / "a", (info, b"/etc/passwd")), out, LIMITS)
    assert list(out.iterdir()) == []


def test_a_zip_has_the_same_limits(tmp_path: Path, out: Path) -> None:
    bomb = zipped(tmp_path / "bomb", ("x", b"\0" * 1_000_001))
    assert bomb.stat().st_size < 10_000
    with pytest.raises(InvalidArgument, match="unpacks to more than"):
        unpack(bomb, out, LIMITS)
    with pytest.raises(InvalidArgument, match="more than 50 files"):
        unpack(zipped(tmp_path / "many", *((str(i), b"") for i in range(51))), out, LIMITS)


def test_a_zip_with_false_sizes_is_refused(tmp_path: Path, out: Path) -> None:
    whole = zipped(tmp_path / "a", ("x", b"content of x" * 100), ("y", b"2")).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    damaged = bytearray(whole)
    damaged[40] ^= 0xFF
    (tmp_path / "damaged").write_bytes(damaged)
    for name in ("cut", "damaged"):
        with pytest.raises(InvalidArgument, match="not a whole"):
            unpack(tmp_path / name, out, LIMITS)
        for path in out.iterdir():
            path.unlink()
    encrypted = whole.replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00")
    assert encrypted != whole
    (tmp_path / "encrypted").write_bytes(encrypted)
    with pytest.raises(InvalidArgument, match="without a password"):
        unpack(tmp_path / "encrypted", out, LIMITS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of the name that is there twice
        twice = zipped(tmp_path / "twice", ("x", b"1"), ("x", b"2"))
    with pytest.raises(InvalidArgument, match="not a whole"):
        unpack(twice, out, LIMITS)


def test_a_zip_can_be_cancelled(tmp_path: Path, out: Path) -> None:
    with pytest.raises(Cancelled):
        unpack(zipped(tmp_path / "a", ("x", b"1")), out, LIMITS, cancelled=lambda: True)
